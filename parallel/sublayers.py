"""What a pre-norm transformer layer does row by row, around its attention.

Plain functions of explicit weights, for whole sequences or blocks of rows. The dense kinds of layer
leave their gradients to autograd; the blockwise kind takes those of `parallel.gradients`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


class Weights(NamedTuple):
    """The layer's parameters; linear weights are (out, in) as in `torch.nn.Linear`."""

    norm_attention_weight: Tensor
    norm_attention_bias: Tensor
    query_key_value_weight: Tensor
    query_key_value_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    norm_feed_forward_weight: Tensor
    norm_feed_forward_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor


class Dropout:
    """Masks that depend on the seed and a row's place alone, not on how rows are cut into blocks.

    Rows are drawn in tiles of a fixed height, each from a generator of its own, so that a backward
    pass draws the same masks again and none has to be kept.

    Args:
        rate: probability of a zero.
        seed: of this pass through this layer.
    """

    TILE = 512

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self.seed = seed

    def masks(self, rows: range, like_BRD: Tensor) -> Tensor:
        """(2, B, R, D) in the dtype of `like_BRD`: factors 0 or 1/(1-rate) of both branches."""
        B, _, D = like_BRD.shape
        tiles = range(rows.start // self.TILE, -(-rows.stop // self.TILE))
        drawn = torch.cat([self._tile(tile, (2, B, self.TILE, D), like_BRD) for tile in tiles], 2)
        first = rows.start - tiles.start * self.TILE
        return drawn[:, :, first : first + len(rows)]

    def _tile(self, tile: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        generator = torch.Generator(like.device).manual_seed((self.seed + tile) % 2**63)
        kept = torch.empty(shape, device=like.device).bernoulli_(1 - self.rate, generator=generator)
        return kept.div_(1 - self.rate).to(like.dtype)


def project(weights: Weights, size: LayerSize, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention norm and projection to queries, keys and values, each (B, H, S, K)."""
    parts = _project(weights, x_BSD, slice(None)).chunk(3, dim=2)
    q_BHSK, k_BHSK, v_BHSK = (_heads(part_BSD, size) for part_BSD in parts)
    return q_BHSK, k_BHSK, v_BHSK


def query(weights: Weights, size: LayerSize, x_BSD: Tensor) -> Tensor:
    """The queries alone: the first third of the projection."""
    return _heads(_project(weights, x_BSD, slice(0, size.width)), size)


def key_value(weights: Weights, size: LayerSize, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values alone."""
    both = _project(weights, x_BSD, slice(size.width, 3 * size.width))
    key_BSD, value_BSD = both.chunk(2, dim=2)
    return _heads(key_BSD, size), _heads(value_BSD, size)


def finish(
    weights: Weights, x_BSD: Tensor, attention_BHSK: Tensor, dropout: Dropout | None, rows: range
) -> Tensor:
    """All that follows attention: output projection, residuals, feed-forward with ReLU.

    Args:
        weights: the layer's.
        x_BSD: the layer's input at these rows.
        attention_BHSK: their attention output.
        dropout: None where nothing is dropped.
        rows: their places in the layer's output.
    """
    branch_BSD = F.linear(
        attention_BHSK.transpose(1, 2).flatten(2), weights.output_weight, weights.output_bias
    )
    masks = None if dropout is None else dropout.masks(rows, branch_BSD)
    x_BSD = x_BSD + (branch_BSD if masks is None else branch_BSD * masks[0])
    normed_BSD = _norm(x_BSD, weights.norm_feed_forward_weight, weights.norm_feed_forward_bias)
    hidden_BSF = F.relu(F.linear(normed_BSD, weights.up_weight, weights.up_bias))
    branch_BSD = F.linear(hidden_BSF, weights.down_weight, weights.down_bias)
    return x_BSD + (branch_BSD if masks is None else branch_BSD * masks[1])


def _project(weights: Weights, x_BSD: Tensor, part: slice) -> Tensor:
    normed_BSD = _norm(x_BSD, weights.norm_attention_weight, weights.norm_attention_bias)
    return F.linear(
        normed_BSD, weights.query_key_value_weight[part], weights.query_key_value_bias[part]
    )


def _norm(x_BSD: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return F.layer_norm(x_BSD, weight_D.shape, weight_D, bias_D)


def _heads(x_BSD: Tensor, size: LayerSize) -> Tensor:
    return x_BSD.unflatten(2, (size.heads, size.head_width)).transpose(1, 2)
