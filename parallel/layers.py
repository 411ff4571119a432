"""The pre-norm transformer layer, and the equivalent ways to compute it.

`LAYERS` maps a kind to a function `(layer, x_BSD) -> y_BSD`. All kinds are the same function of the
same parameters; they differ in what they keep in memory. Padding is on the right: attention is
causal, so no valid token can see it and no mask is needed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from parallel.cache import KVCache

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Width D, heads H, feed-forward width F, and the dropout rate of both residual branches."""

    width: int
    heads: int
    feed_forward: int
    dropout: float = 0.0

    @property
    def head_width(self) -> int:
        """K, the width of one head."""
        return self.width // self.heads


def materialised_attention(q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
    """Causal softmax attention that builds the S×S matrix; the queries are the last keys'."""
    queries, keys = q_BHSK.shape[2], k_BHSK.shape[2]
    score_BHQS = q_BHSK @ k_BHSK.transpose(2, 3) / math.sqrt(q_BHSK.shape[3])
    score_BHQS = score_BHQS.masked_fill(~_causal_mask(queries, keys, q_BHSK.device), -math.inf)
    return score_BHQS.softmax(dim=3) @ v_BHSK


def sdpa_attention(q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
    """The same by PyTorch's own kernels, which keep no S×S matrix."""
    queries, keys = q_BHSK.shape[2], k_BHSK.shape[2]
    if queries == keys:
        return F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
    # With fewer queries than keys, SDPA's own is_causal would align the wrong corner.
    mask = None if queries == 1 else _causal_mask(queries, keys, q_BHSK.device)
    return F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, attn_mask=mask)


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """(Q, S) True where query i, the (S - Q + i)-th token, may see key j."""
    all_keys = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return all_keys.tril(diagonal=keys - queries)


class TransformerLayer(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x)) with ReLU.

    Args:
        size: widths and dropout.
        kind: a key of `LAYERS`.
        recompute: keep only the input for the backward pass and compute the rest again.

    Raises:
        ValueError: an unknown kind.
    """

    def __init__(self, size: LayerSize, *, kind: str, recompute: bool) -> None:
        super().__init__()
        if kind not in LAYERS:
            raise ValueError(f"layer.kind: got {kind!r}, expected one of {list(LAYERS)}")
        self.size = size
        self.kind = kind
        self.recompute = recompute
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)
        self.norm_feed_forward = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.feed_forward)
        self.down = nn.Linear(size.feed_forward, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Whole sequences, (B, S, D) to (B, S, D)."""
        compute = LAYERS[self.kind]
        if self.recompute and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(compute, self, x_BSD, use_reentrant=False)
        return compute(self, x_BSD)

    @torch.no_grad()
    def decode(self, x_BSD: Tensor, cache: KVCache) -> Tensor:
        """The next S tokens after those in `cache`, which they join."""
        q_BHSK, k_BHSK, v_BHSK = self.project(x_BSD)
        out_BHSK = sdpa_attention(q_BHSK, *cache.append(k_BHSK, v_BHSK))
        return self.finish(x_BSD, out_BHSK)

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and projection to queries, keys and values, each (B, H, S, K)."""
        B, S, D = x_BSD.shape
        qkv = self.query_key_value(self.norm_attention(x_BSD))
        q_BHSK, k_BHSK, v_BHSK = (
            part.view(B, S, self.size.heads, self.size.head_width).transpose(1, 2)
            for part in qkv.split(D, dim=2)
        )
        return q_BHSK, k_BHSK, v_BHSK

    def finish(self, x_BSD: Tensor, attention_BHSK: Tensor) -> Tensor:
        """All that follows attention: output projection, residuals, feed-forward. Row by row."""
        x_BSD = x_BSD + self.dropout(self.output(attention_BHSK.transpose(1, 2).flatten(2)))
        hidden_BSF = F.relu(self.up(self.norm_feed_forward(x_BSD)))
        return x_BSD + self.dropout(self.down(hidden_BSF))


def vanilla(layer: TransformerLayer, x_BSD: Tensor) -> Tensor:
    """Materialised attention: the plain definition."""
    return layer.finish(x_BSD, materialised_attention(*layer.project(x_BSD)))


def memory_efficient(layer: TransformerLayer, x_BSD: Tensor) -> Tensor:
    """PyTorch's fused attention."""
    return layer.finish(x_BSD, sdpa_attention(*layer.project(x_BSD)))


LAYERS: dict[str, Callable[[TransformerLayer, Tensor], Tensor]] = {
    "vanilla": vanilla,
    "memory_efficient": memory_efficient,
}
