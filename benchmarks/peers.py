"""The same transformer layer as a PyTorch user writes it, in the ways that are in use.

Nothing here but the last entries of `VARIANTS` comes from `parallel`. Parameters have the same
names everywhere, so that all variants load one state dict and compute the same function.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel import LayerSize, TransformerLayer

TILE = 1024  # rows of a feed-forward tile: as fast as the whole, and little of a long sequence


class Layer(nn.Module):
    """Pre-norm, causal: x + attention(norm(x)), then x + feed-forward(norm(x)) with ReLU."""

    def __init__(self, width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.up = nn.Linear(width, feed_forward)
        self.down = nn.Linear(feed_forward, width)

    def forward(self, x_BSD: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: None is causal; else True where a query (row) sees a key (column)."""
        x_BSD = x_BSD + self.attention(self.norm_attention(x_BSD), mask)
        return x_BSD + self.feed_forward(self.norm_feed_forward(x_BSD))

    def attention(self, x_BSD: Tensor, mask: Tensor | None) -> Tensor:
        """All of the branch: projections and attention."""
        B, S, D = x_BSD.shape
        qkv_BSD = self.query_key_value(x_BSD).chunk(3, dim=2)
        q, k, v = (t.view(B, S, self.heads, -1).transpose(1, 2) for t in qkv_BSD)
        return self.output(self.attend(q, k, v, mask).transpose(1, 2).reshape(B, S, D))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """PyTorch's fused attention of (B, H, S, K)."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    def feed_forward(self, x_BSD: Tensor) -> Tensor:
        """All of the branch."""
        return self.down(F.relu(self.up(x_BSD)))


class Vanilla(Layer):
    """Builds the matrix of all scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        score_BHSS = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        return score_BHSS.masked_fill(~mask, -math.inf).softmax(dim=3) @ v


class Checkpointed(Layer):
    """Keeps its input alone; the whole layer is computed again in the backward pass."""

    def forward(self, x_BSD: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: D102
        return checkpoint(super().forward, x_BSD, mask, use_reentrant=False)


class TiledFeedForward(Layer):
    """The feed-forward in tiles of rows, each a checkpoint (DeepSpeed's Arctic sequence training).

    What attention needs for the backward pass is kept.
    """

    def feed_forward(self, x_BSD: Tensor) -> Tensor:  # noqa: D102
        whole = super().feed_forward
        tiles = [checkpoint(whole, tile, use_reentrant=False) for tile in x_BSD.split(TILE, dim=1)]
        return torch.cat(tiles, dim=1)


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD


def _blockwise(recompute: bool) -> Callable[[int, int, int], nn.Module]:
    def layer(width: int, heads: int, feed_forward: int) -> nn.Module:
        size = LayerSize(width=width, heads=heads, feed_forward=feed_forward)
        return TransformerLayer(size, kind="blockwise", recompute=recompute)

    return layer


OURS = "blockwise"

VARIANTS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "vanilla": Vanilla,
    "sdpa": Layer,
    "sdpa+checkpoint": Checkpointed,
    "sdpa+tiled ff": TiledFeedForward,
    OURS: _blockwise(recompute=False),
    "blockwise, input only": _blockwise(recompute=True),
}


def make(name: str, *, layers: int, width: int, heads: int, feed_forward: int) -> Stack:
    """A stack of layers of that variant."""
    return Stack([VARIANTS[name](width, heads, feed_forward) for _ in range(layers)])
