"""The blockwise transformer layer on a cube of devices.

Every linear map is the product C = A Bᵀ of `parallel.products`; between two of them the directions
y and z change places: rows are cut along y, columns along z, then the other way round. A process
computes block by block as `parallel.blockwise` does, keeps the same two tensors (input and
attention output) of its own rows and columns, and gathers its layer's weights along x once in each
pass.

Axis letters: R rows of a process (positions), B sequences, C own columns, N rows times sequences, K
head width, F feed-forward width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.attention import Scope
from parallel.blocks import BlockSettings
from parallel.collectives import all_gather, joined, reduce_scatter, stacked
from parallel.cost import Shape, misfits
from parallel.cube_attention import SpreadAttention
from parallel.cube_norm import cube_norm
from parallel.gradients import sum_dtype
from parallel.kernels import kernel_for
from parallel.layers import TransformerLayer
from parallel.mesh import CubeMesh
from parallel.products import gathered, product_abt, summed
from parallel.rows import RowLayout
from parallel.sharding import SPREAD, Cut, gathered_spread
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
        self,
        x_RBC: Tensor,
        weight: Tensor,
        bias: Tensor,
        directions: tuple[str, str],
        keep: bool = True,
    ) -> Tensor:
        """A linear map of rows; its input's rows are cut along the first direction."""
        B = x_RBC.shape[1]
        into, out = directions
        z_NC = product_abt(x_RBC.flatten(0, 1), weight, self.mesh, (into, None, out), keep)
        return z_NC.unflatten(0, (-1, B)) + bias.to(z_NC.dtype)

    def project(self, columns: Columns, matrices: Matrices, x_RBC: Tensor) -> Tensor:
        """Queries, keys and values (R, B, 3, H, K) of a block."""
        normed_RBC = cube_norm(
            x_RBC, columns.norm_attention_weight, columns.norm_attention_bias, self.mesh
        )
        qkv_RBE = self.linear(
            normed_RBC.to(self.dtype),
            matrices.query_key_value,
            columns.query_key_value_bias,
            WIDENS,
            keep=False,  # all blocks of a layer are there at once
        )
        return qkv_RBE.unflatten(2, (3, -1, self.size.head_width))

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


class _CubeLayer(torch.autograd.Function):
    """From this process's part of x, columns of vectors, and parts of matrices."""

    @staticmethod
    def forward(ctx: Any, job: CubeJob, x_RBC: Tensor, *weights: Tensor) -> Tensor:
        columns, parts = Columns(*weights[: len(VECTORS)]), weights[len(VECTORS) :]
        with torch.autocast(x_RBC.device.type, enabled=False):
            matrices = _gathered(job, parts)
            blocks = job.layout.split(x_RBC)
            qkv_RB3HK = torch.cat([job.project(columns, matrices, x) for x in blocks])
            out_RBHK, lse_BHR = job.attention.forward(qkv_RB3HK)
            del qkv_RB3HK
            y = []
            for block, x, out in zip(
                job.layout.blocks, blocks, job.layout.split(out_RBHK), strict=True
            ):
                kept_2RBC = job.kept(block, x)
                x, hidden = job.hidden(columns, matrices, x, out, kept_2RBC)
                branch = job.linear(hidden, matrices.down, columns.down_bias, NARROWS)
                y.append(x + job.drop(1, branch, kept_2RBC))
        ctx.job = job
        ctx.save_for_backward(x_RBC, out_RBHK, lse_BHR, *weights)
        return torch.cat(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RBC: Tensor) -> tuple[Tensor | None, ...]:
        x_RBC, out_RBHK, lse_BHR, *weights = ctx.saved_tensors
        job = ctx.job
        columns, parts = weights[: len(VECTORS)], weights[len(VECTORS) :]
        with torch.autocast(x_RBC.device.type, enabled=False), torch.enable_grad():
            whole = [w.detach().requires_grad_() for w in (*columns, *_gathered(job, parts))]
            dx_RBC, sums = _backward(job, whole, x_RBC, out_RBHK, lse_BHR, dy_RBC)
        vectors, matrices = sums[: len(VECTORS)], sums[len(VECTORS) :]
        return None, dx_RBC, *vectors, *_scattered(job, matrices, parts)


def _backward(
    job: CubeJob,
    weights: list[Tensor],
    x_RBC: Tensor,
    out_RBHK: Tensor,
    lse_BHR: Tensor,
    dy_RBC: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of x and of the weights as gathered, the latter summed over blocks in fp32."""
    columns, matrices = Columns(*weights[: len(VECTORS)]), Matrices(*weights[len(VECTORS) :])
    sums = [torch.zeros_like(w, dtype=sum_dtype(w)) for w in weights]
    down, down_bias = len(weights) - 1, len(VECTORS) - 1

    def grad(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Gradients of `inputs`; those of the weights are added to the sums."""
        found = torch.autograd.grad(outputs, [*inputs, *weights], grads, allow_unused=True)
        for total, more in zip(sums, found[len(inputs) :], strict=True):
            if more is not None:
                total += more
        return list(found[: len(inputs)])

    dx: list[Tensor] = []
    dout: list[Tensor] = []
    for block, x, out, dy in zip(
        job.layout.blocks, *map(job.layout.split, (x_RBC, out_RBHK, dy_RBC)), strict=True
    ):
        x, out = x.detach().requires_grad_(), out.detach().requires_grad_()
        kept_2RBC = job.kept(block, x)
        stream, hidden = job.hidden(columns, matrices, x, out, kept_2RBC)
        # The last map by hand: its output is not needed again.
        with torch.no_grad():
            dbranch_NC = job.drop(1, dy, kept_2RBC).to(job.dtype).flatten(0, 1)
            sums[down_bias] += dbranch_NC.sum(0, dtype=sums[down_bias].dtype)
            dbranch_NC = gathered(dbranch_NC, job.mesh, "y")
            sums[down] += dbranch_NC.T @ gathered(hidden.flatten(0, 1), job.mesh, "z")
            dhidden_NF = summed(dbranch_NC @ matrices.down, job.mesh, "z")
        for part, more in zip(
            (dx, dout),
            grad([stream, hidden], [x, out], [dy, dhidden_NF.view_as(hidden)]),
            strict=True,
        ):
            part.append(more)
    inputs = [x.detach().requires_grad_() for x in job.layout.split(x_RBC)]
    qkv = [job.project(columns, matrices, x) for x in inputs]
    with torch.no_grad():
        dqkv_RB3HK = job.attention.backward(torch.cat(dout), torch.cat(qkv), out_RBHK, lse_BHR).to(
            job.dtype
        )
    dx_by_qkv = grad(qkv, inputs, list(job.layout.split(dqkv_RB3HK)))
    return torch.cat(dx) + torch.cat(dx_by_qkv), sums


def _gathered(job: CubeJob, parts: Any) -> Matrices:
    """The layer's matrices along x, all in one call, in the dtype that they are multiplied in."""
    flat = torch.cat([part.detach().flatten() for part in parts]).to(job.dtype)
    whole_XN = all_gather(flat, job.mesh, "x")
    found = []
    sizes = [part.numel() for part in parts]
    for piece, part, cut in zip(
        whole_XN.split(sizes, dim=1), parts, MATRICES.values(), strict=True
    ):
        matrix = joined(piece.unflatten(1, part.shape), cut.x)  # type: ignore[arg-type]
        found.append(matrix.flatten(0, -2))
    return Matrices(*found)


def _scattered(job: CubeJob, sums: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    """The sums along x of gradients, of which each process keeps its own parts."""
    x = job.mesh.sizes["x"]
    pieces = []
    for matrix, cut in zip(sums, MATRICES.values(), strict=True):
        if cut.stack > 1:
            matrix = matrix.unflatten(0, (cut.stack, -1))
        pieces.append(stacked(matrix, x, cut.x).flatten(1))  # type: ignore[arg-type]
    flat = reduce_scatter(torch.cat(pieces, dim=1), job.mesh, "x")
    grads = flat.split([part.numel() for part in parts])
    return [g.view_as(part).to(part.dtype) for g, part in zip(grads, parts, strict=True)]


class CubeLayer(nn.Module):
    """A `TransformerLayer` of which this process holds 1/P; the same names and the same function.

    Args:
        layer: the whole layer, of any kind; it is left as it is.
        mesh: the cube.
        ring: whether the keys of other slabs go round in a ring along x; else they are gathered.

    Raises:
        ValueError: the layer's sizes cannot be cut into equal parts.
    """

    def __init__(self, layer: TransformerLayer, mesh: CubeMesh, *, ring: bool = False) -> None:
        super().__init__()
        wrong = misfits(Shape(*(mesh.sizes[axis] for axis in "xyz")), layer.size)
        if wrong:
            raise ValueError(wrong[0])
        self.size = layer.size
        self.blocks: BlockSettings = layer.blocks
        self.mesh = mesh
        self.ring = ring
        for name, cut in layer_cuts().items():
            module, kind = name.split(".")
            if module not in self._modules:
                self.add_module(module, nn.Module())
            part = cut.part(layer.get_parameter(name).detach(), mesh).clone()
            self.get_submodule(module).register_parameter(kind, nn.Parameter(part))

    def forward(self, x_RBC: Tensor, layout: RowLayout, scope: Scope | None = None) -> Tensor:
        """This process's rows and columns, in and out: rows cut along y, columns along z.

        Args:
            x_RBC: the input.
            layout: of the rows; padding stands on the right of causal sequences.
            scope: whether causal, and which positions the serial layer would compute: all are
                computed here, but those have its dropout.
        """
        scope = scope or Scope()
        if not scope.causal and layout.padded > layout.length:
            raise ValueError(
                f"layout: got {layout.length} positions padded to {layout.padded}, expected a "
                f"multiple of what the cube cuts them into where later positions are seen"
            )
        assert scope.lengths is None, "padding needs no lengths: nothing before it can see it"
        device = x_RBC.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else x_RBC.dtype
        batch = (layout.sequences.stop - layout.sequences.start, layout.padded)
        blocks = self.blocks.sizes(
            self.size,
            batch=batch[0],
            sequence=batch[1],
            element_bytes=x_RBC.element_size(),
            device=device,
        )
        attention = SpreadAttention(
            layout=layout,
            kernel=kernel_for(device, dtype, self.size.head_width),
            causal=scope.causal,
            ring=self.ring,
            block_key=blocks.key,
        )
        job = CubeJob(
            mesh=self.mesh,
            layout=layout,
            size=self.size,
            attention=attention,
            dtype=dtype,
            scope=scope,
            dropout=self._dropout(layout, scope),
        )
        matrices = [self.get_parameter(name) for name in MATRICES]
        return _CubeLayer.apply(job, x_RBC, *self._columns(), *matrices)

    def _columns(self) -> Columns:
        """The layer's vectors, of the whole cube in one call, then the own columns of each."""
        parts = {name: (self.get_parameter(name), SPREAD) for name in VECTORS}
        found = []
        for name, whole in gathered_spread(parts, self.mesh).items():
            axis, stack = VECTORS[name], 3 if name == "query_key_value.bias" else 1
            columns = whole.unflatten(0, (stack, self.mesh.sizes[axis], -1))
            found.append(columns[:, self.mesh.place[axis]].flatten())
        return Columns(*found)

    def _dropout(self, layout: RowLayout, scope: Scope) -> Dropout | None:
        """The serial layer's: the seed is the next number of PyTorch's global generator."""
        if not self.training or self.size.dropout == 0:
            return None
        rows = len(scope.positions(layout.length))
        return Dropout(self.size.dropout, int(torch.randint(2**31, ())), rows)


def layer_cuts() -> dict[str, Cut]:
    """How every parameter of a layer is cut, in the order of the serial layer's parameters."""
    cuts: dict[str, Cut] = {**MATRICES, **dict.fromkeys(VECTORS, SPREAD)}
    modules = ("norm_attention", "query_key_value", "output", "norm_feed_forward", "up", "down")
    return {
        name: cuts[name] for module in modules for name in (f"{module}.weight", f"{module}.bias")
    }
