"""One pass of a layer through a cube: what is gathered, and the maps of a block of rows.

Every linear map is the product C = A Bᵀ of `parallel.products`; between two of them the directions
y and z change places: rows are cut along y, columns along z, then the other way round. Axis
letters: R rows of a process (positions), B sequences, C own columns, N rows times sequences, K head
width, F feed-forward width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.attention import Scope
from parallel.cube_attention import SpreadAttention
from parallel.cube_norm import cube_norm
from parallel.mesh import CubeMesh
from parallel.products import product_abt
from parallel.rows import RowLayout
from parallel.sharding import Cut
from parallel.sublayers import Dropout, LayerSize

# Directions of a map's input and output, and the cut of its weight (out, in) that follows.
WIDENS = "y", "z"  # query_key_value, up: takes columns along z, gives columns along y
NARROWS = "z", "y"  # output, down
MATRICES = {
    "query_key_value.weight": Cut(y=1, z=2, x=1, stack=3),
    "output.weight": Cut(z=0, y=1, x=0),
    "up.weight": Cut(y=0, z=1, x=0),
    "down.weight": Cut(z=0, y=1, x=0),
}
VECTORS = {
    "norm_attention.weight": "z",  # the axis along which its columns are used
    "norm_attention.bias": "z",
    "query_key_value.bias": "y",
    "output.bias": "z",
    "norm_feed_forward.weight": "z",
    "norm_feed_forward.bias": "z",
    "up.bias": "y",
    "down.bias": "z",
}


class Columns(NamedTuple):
    """This process's columns of the layer's vectors, in the order of `VECTORS`."""

    norm_attention_weight: Tensor
    norm_attention_bias: Tensor
    query_key_value_bias: Tensor
    output_bias: Tensor
    norm_feed_forward_weight: Tensor
    norm_feed_forward_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor


class Matrices(NamedTuple):
    """The layer's weights, gathered along x, as (out, in); in the order of `MATRICES`."""

    query_key_value: Tensor
    output: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class CubeJob:
    """One pass through one layer: everything but the numbers."""

    mesh: CubeMesh
    layout: RowLayout
    size: LayerSize
    attention: SpreadAttention
    dtype: torch.dtype  # of products and attention
    scope: Scope
    dropout: Dropout | None

    def kept(self, block: range, x_RBC: Tensor) -> Tensor | None:
        """Dropout's masks (2, R, B, C) of this process's share of a block: the serial layer's."""
        if self.dropout is None:
            return None
        own = self.layout.part(block, "y")
        start, stride = self.scope.start, self.scope.stride
        rows = range(
            max(0, -(-(own.start - start) // stride)),
            min(self.dropout.rows, -(-(own.stop - start) // stride)),
        )
        B, D = self.sequences, self.size.width
        kept_2BRD = torch.ones(2, B, len(own), D, dtype=torch.bool, device=x_RBC.device)
        if rows:
            masks = self.dropout.masks(rows, x_RBC.new_empty(1).expand(B, 1, D))
            first = start + rows.start * stride - own.start
            kept_2BRD[:, :, first : first + len(rows) * stride : stride] = masks.kept_2BRD
        kept_2BRC = kept_2BRD.chunk(self.mesh.sizes["z"], 3)[self.mesh.place["z"]]
        return kept_2BRC[:, self.layout.sequences].transpose(1, 2)

    @property
    def sequences(self) -> int:
        """Of the whole batch."""
        own = self.layout.sequences
        return (own.stop - own.start) * (self.mesh.sizes["x"] if self.layout.kept_on_x else 1)

    def drop(self, branch: int, x_RBC: Tensor, kept_2RBC: Tensor | None) -> Tensor:
        """Branch 0 or 1 without what is dropped; as well its gradient."""
        if kept_2RBC is None:
            return x_RBC
        return x_RBC * kept_2RBC[branch] * (1 / (1 - self.size.dropout))

    def linear(
        self, x_RBC: Tensor, weight: Tensor, bias: Tensor, directions: tuple[str, str]
    ) -> Tensor:
        """A linear map of rows; its input's rows are cut along the first direction."""
        into, out = directions
        z_NC = product_abt(x_RBC.flatten(0, 1), weight, self.mesh, (into, None, out), keep=True)
        return z_NC.unflatten(0, (-1, x_RBC.shape[1])) + bias.to(z_NC.dtype)

    def normed(self, columns: Columns, x_RBC: Tensor) -> Tensor:
        """A block's input of the projection to queries, keys and values."""
        weight_C, bias_C = columns.norm_attention_weight, columns.norm_attention_bias
        return cube_norm(x_RBC, weight_C, bias_C, self.mesh).to(self.dtype)

    def project(self, columns: Columns, matrices: Matrices, x_RBC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (R, B, H, K), keys and values (R, B, 2, H, K) of all own rows."""
        shape = (-1, self.size.head_width)
        q_RBHK, kv_RB2HK = [], []
        for x in self.layout.split(x_RBC):
            qkv_RBE = self.linear(
                self.normed(columns, x),
                matrices.query_key_value,
                columns.query_key_value_bias,
                WIDENS,
            )
            qkv_RB3HK = qkv_RBE.unflatten(2, (3, *shape))
            q_RBHK.append(qkv_RB3HK[:, :, 0].clone())
            kv_RB2HK.append(qkv_RB3HK[:, :, 1:].clone())
        return _joined_rows(q_RBHK), _joined_rows(kv_RB2HK)

    def hidden(
        self,
        columns: Columns,
        matrices: Matrices,
        x_RBC: Tensor,
        out_RBHK: Tensor,
        kept_2RBC: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Of a block what follows attention: the residual stream, and the hidden activations."""
        branch_RBC = self.linear(out_RBHK.flatten(2), matrices.output, columns.output_bias, NARROWS)
        x_RBC = x_RBC + self.drop(0, branch_RBC, kept_2RBC)
        normed_RBC = cube_norm(
            x_RBC, columns.norm_feed_forward_weight, columns.norm_feed_forward_bias, self.mesh
        )
        hidden_RBF = self.linear(normed_RBC.to(self.dtype), matrices.up, columns.up_bias, WIDENS)
        return x_RBC, F.relu(hidden_RBF)


def _joined_rows(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
