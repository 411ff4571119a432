"""What a pre-norm transformer layer does row by row, around its attention.

Plain functions of explicit weights, for whole sequences or blocks of rows. The dense kinds of layer
leave their gradients to autograd; the blockwise kind takes those of `parallel.gradients`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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

    @property
    def matrices(self) -> int:
        """Numbers in the weights of linear maps."""
        return 4 * self.width**2 + 2 * self.width * self.feed_forward

    @property
    def vectors(self) -> int:
        """Numbers in their biases and in the norms."""
        return 9 * self.width + self.feed_forward


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


class Masks(NamedTuple):
    """What is kept of some rows of the two branches, attention's and the feed-forward's."""

    kept_2BRD: Tensor  # bool
    scale: float  # keeps the mean

    def drop(self, branch: int, x_BRD: Tensor) -> Tensor:
        """Branch 0 or 1 without what is dropped; as well its gradient."""
        return x_BRD * self.kept_2BRD[branch] * self.scale


class Dropout:
    """Draws masks that do not depend on how rows are cut into blocks.

    Rows are drawn in tiles of a fixed height, each from a generator of its own, so that a backward
    pass draws the same masks again and none has to be kept.

    Args:
        rate: probability of a zero.
        seed: of this pass through this layer.
        rows: of the layer's output.
    """

    TILE = 256

    def __init__(self, rate: float, seed: int, rows: int) -> None:
        self.rate = rate
        self.seed = seed
        self.rows = rows

    def masks(self, rows: range, like_BRD: Tensor) -> Masks:
        """Those of these rows of the layer's output."""
        B, _, D = like_BRD.shape
        tiles = range(rows.start // self.TILE, -(-rows.stop // self.TILE))
        drawn = torch.cat([self._tile(tile, B, D, like_BRD.device) for tile in tiles], dim=2)
        first = rows.start - tiles.start * self.TILE
        return Masks(drawn[:, :, first : first + len(rows)], 1 / (1 - self.rate))

    def _tile(self, tile: int, B: int, D: int, device: torch.device) -> Tensor:
        seed = int(np.random.SeedSequence([self.seed, tile]).generate_state(1)[0])
        generator = torch.Generator(device).manual_seed(seed)
        height = min(self.TILE, self.rows - tile * self.TILE)
        drawn = torch.empty(2, B, height, D, dtype=torch.bool, device=device)
        return drawn.bernoulli_(1 - self.rate, generator=generator)


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
    weights: Weights,
    x_BSD: Tensor,
    attention_BHSK: Tensor,
    masks: Masks | None,
) -> Tensor:
    """All that follows attention: output projection, residuals, feed-forward with ReLU.

    Args:
        weights: the layer's.
        x_BSD: the layer's input at these rows.
        attention_BHSK: their attention output.
        masks: of dropout; None where nothing is dropped.
    """
    branch_BSD = F.linear(
        attention_BHSK.transpose(1, 2).flatten(2), weights.output_weight, weights.output_bias
    )
    if masks is not None:
        branch_BSD = masks.drop(0, branch_BSD)
    x_BSD = x_BSD + branch_BSD
    normed_BSD = _norm(x_BSD, weights.norm_feed_forward_weight, weights.norm_feed_forward_bias)
    hidden_BSF = F.relu(F.linear(normed_BSD, weights.up_weight, weights.up_bias))
    branch_BSD = F.linear(hidden_BSF, weights.down_weight, weights.down_bias)
    if masks is not None:
        branch_BSD = masks.drop(1, branch_BSD)
    return x_BSD + branch_BSD


def _project(weights: Weights, x_BSD: Tensor, part: slice) -> Tensor:
    normed_BSD = _norm(x_BSD, weights.norm_attention_weight, weights.norm_attention_bias)
    return F.linear(
        normed_BSD, weights.query_key_value_weight[part], weights.query_key_value_bias[part]
    )


def _norm(x_BSD: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return F.layer_norm(x_BSD, weight_D.shape, weight_D, bias_D)


def _heads(x_BSD: Tensor, size: LayerSize) -> Tensor:
    return x_BSD.unflatten(2, (size.heads, size.head_width)).transpose(1, 2)
