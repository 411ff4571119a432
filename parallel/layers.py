"""The pre-norm transformer layer, and the equivalent ways to compute it.

`LAYERS` maps a kind to a function `(job, weights, x_BSD) -> y_BRD`. All kinds are the same function
of the same parameters; they differ in what they keep in memory and how fast they are.
"""

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from parallel.attention import Scope, materialised_attention, sdpa_attention
from parallel.blocks import BlockSettings
from parallel.blockwise import Job, blockwise_layer
from parallel.cache import KVCache
from parallel.decode import attend_cached
from parallel.sublayers import Dropout, LayerSize, Weights, finish, project


def vanilla(job: Job, weights: Weights, x_BSD: Tensor) -> Tensor:
    """Materialised attention: the plain definition."""
    return _dense(materialised_attention, job, weights, x_BSD)


def memory_efficient(job: Job, weights: Weights, x_BSD: Tensor) -> Tensor:
    """PyTorch's fused attention."""
    return _dense(sdpa_attention, job, weights, x_BSD)


def _dense(
    attention: Callable[[Tensor, Tensor, Tensor, Scope], Tensor],
    job: Job,
    weights: Weights,
    x_BSD: Tensor,
) -> Tensor:
    q_BHSK, k_BHSK, v_BHSK = project(weights, job.size, x_BSD)
    out_BHSK = attention(q_BHSK, k_BHSK, v_BHSK, job.scope)
    read = slice(job.scope.start, None, job.scope.stride)
    x_BRD = x_BSD[:, read]
    masks = None if job.dropout is None else job.masks(range(x_BRD.shape[1]), x_BRD)
    return finish(weights, x_BRD, out_BHSK[:, :, read], masks)


LAYERS: dict[str, Callable[[Job, Weights, Tensor], Tensor]] = {
    "vanilla": vanilla,
    "memory_efficient": memory_efficient,
    "blockwise": blockwise_layer,
}


class TransformerLayer(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x)) with ReLU.

    Args:
        size: widths and dropout.
        kind: a key of `LAYERS`.
        recompute: keep only the input for the backward pass and compute the rest again.
        blocks: of the kind `blockwise`.

    Raises:
        ValueError: an unknown kind.
    """

    def __init__(
        self,
        size: LayerSize,
        *,
        kind: str,
        recompute: bool,
        blocks: BlockSettings = BlockSettings(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        if kind not in LAYERS:
            raise ValueError(f"layer.kind: got {kind!r}, expected one of {list(LAYERS)}")
        self.size = size
        self.kind = kind
        self.recompute = recompute
        self.blocks = blocks
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)
        self.norm_feed_forward = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.feed_forward)
        self.down = nn.Linear(size.feed_forward, size.width)

    def forward(self, x_BSD: Tensor, scope: Scope | None = None) -> Tensor:
        """Whole sequences (B, S, D) to the rows (B, R, D) that the scope asks for.

        Args:
            x_BSD: the input.
            scope: None: every position of a causal sequence without padding.

        Raises:
            ValueError: a scope that does not fit.
        """
        scope = scope or Scope()
        B, S, _ = x_BSD.shape
        scope.check(B, S)
        if self.training and self.size.dropout > 0:
            return self._forward_dropping(x_BSD, scope)
        return self._forward(x_BSD, scope, None)

    def _forward(self, x_BSD: Tensor, scope: Scope, dropout: Dropout | None) -> Tensor:
        job = Job(size=self.size, scope=scope, blocks=self.blocks, dropout=dropout)
        compute = LAYERS[self.kind]
        if self.recompute and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(
                compute, job, self.weights(), x_BSD, use_reentrant=False
            )
        return compute(job, self.weights(), x_BSD)

    @torch.compiler.disable  # a graph would be made for every seed
    def _forward_dropping(self, x_BSD: Tensor, scope: Scope) -> Tensor:
        """With masks of their own; the seed is the next number of PyTorch's global generator."""
        rows = len(scope.positions(x_BSD.shape[1]))
        dropout = Dropout(self.size.dropout, int(torch.randint(2**31, ())), rows)
        return self._forward(x_BSD, scope, dropout)

    @torch.no_grad()
    def decode(self, x_BSD: Tensor, cache: KVCache, last: int | None = None) -> Tensor:
        """The next S tokens after those in `cache`, which they join; outputs of the `last` ones."""
        weights = self.weights()
        q_BHSK, k_BHSK, v_BHSK = project(weights, self.size, x_BSD)
        cache.append(k_BHSK, v_BHSK)
        asked = slice(0 if last is None else -last, None)
        return finish(weights, x_BSD[:, asked], attend_cached(q_BHSK[:, :, asked], cache), None)

    def weights(self) -> Weights:
        """The parameters by name, so that they may be shared, parametrised or replaced."""
        return Weights(
            self.norm_attention.weight,
            self.norm_attention.bias,
            self.query_key_value.weight,
            self.query_key_value.bias,
            self.output.weight,
            self.output.bias,
            self.norm_feed_forward.weight,
            self.norm_feed_forward.bias,
            self.up.weight,
            self.up.bias,
            self.down.weight,
            self.down.bias,
        )
