"""The blockwise transformer layer on a cube of devices.

A process computes block by block as `parallel.blockwise` does, keeps the same two tensors (input
and attention output) of its own rows and columns, and gathers its layer's weights along x once in
each pass. Axis letters as in `parallel.cube_job`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.attention import Scope
from parallel.blocks import BlockSettings
from parallel.collectives import all_gather, joined, reduce_scatter, stacked
from parallel.cost import Shape, misfits
from parallel.cube_attention import SpreadAttention
from parallel.cube_job import MATRICES, NARROWS, VECTORS, WIDENS, Columns, CubeJob, Matrices
from parallel.gradients import sum_dtype
from parallel.kernels import kernel_for
from parallel.layers import TransformerLayer
from parallel.mesh import CubeMesh
from parallel.products import gathered, summed
from parallel.rows import RowLayout
from parallel.sharding import SPREAD, Cut, gathered_spread
from parallel.sublayers import Dropout


class _CubeLayer(torch.autograd.Function):
    """From this process's part of x, columns of vectors, and parts of matrices."""

    @staticmethod
    def forward(ctx: Any, job: CubeJob, x_RBC: Tensor, *weights: Tensor) -> Tensor:
        columns, parts = Columns(*weights[: len(VECTORS)]), weights[len(VECTORS) :]
        y_RBC = torch.empty_like(x_RBC)
        with torch.autocast(x_RBC.device.type, enabled=False):
            matrices = _gathered(job, parts)
            out_RBHK, lse_BHR = job.attention.forward(*job.project(columns, matrices, x_RBC))
            split = map(job.layout.split, (x_RBC, out_RBHK, y_RBC))
            for block, x, out, y in zip(job.layout.blocks, *split, strict=True):
                kept_2RBC = job.kept(block, x)
                stream, hidden = job.hidden(columns, matrices, x, out, kept_2RBC)
                branch = job.linear(hidden, matrices.down, columns.down_bias, NARROWS)
                y.copy_(stream + job.drop(1, branch, kept_2RBC))
        ctx.job = job
        ctx.save_for_backward(x_RBC, out_RBHK, lse_BHR, *weights)
        return y_RBC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RBC: Tensor) -> tuple[Tensor | None, ...]:
        x_RBC, out_RBHK, lse_BHR, *weights = ctx.saved_tensors
        vectors, parts = weights[: len(VECTORS)], weights[len(VECTORS) :]
        with torch.autocast(x_RBC.device.type, enabled=False):
            back = _Backward(ctx.job, [*vectors, *_gathered(ctx.job, parts)])
            dx_RBC = back.layer(x_RBC, out_RBHK, lse_BHR, dy_RBC)
        sums = back.sums[: len(VECTORS)], back.sums[len(VECTORS) :]
        return None, dx_RBC, *sums[0], *_scattered(ctx.job, sums[1], parts)


class _Backward:
    """Gradients of one layer, block by block; those of its weights are summed in fp32."""

    def __init__(self, job: CubeJob, weights: list[Tensor]) -> None:
        self.job = job
        self.weights = [weight.detach().requires_grad_() for weight in weights]
        self.columns = Columns(*self.weights[: len(VECTORS)])
        self.matrices = Matrices(*self.weights[len(VECTORS) :])
        self.sums = [torch.zeros_like(w, dtype=sum_dtype(w)) for w in weights]

    def layer(self, x_RBC: Tensor, out_RBHK: Tensor, lse_BHR: Tensor, dy_RBC: Tensor) -> Tensor:
        """The gradient of x."""
        job = self.job
        dx_RBC, dout_RBHK = torch.empty_like(x_RBC), torch.empty_like(out_RBHK)
        split = map(job.layout.split, (x_RBC, out_RBHK, dy_RBC, dx_RBC, dout_RBHK))
        for block, x, out, dy, dx, dout in zip(job.layout.blocks, *split, strict=True):
            self._finish(block, x, out, dy, dx, dout)
        q_RBHK, kv_RB2HK = job.project(self.columns, self.matrices, x_RBC)
        dq_RBHK, dkv_RB2HK = job.attention.backward(dout_RBHK, q_RBHK, kv_RB2HK, out_RBHK, lse_BHR)
        del q_RBHK, kv_RB2HK, dout_RBHK
        split = map(job.layout.split, (x_RBC, dq_RBHK, dkv_RB2HK, dx_RBC))
        for x, dq, dkv, dx in zip(*split, strict=True):
            dqkv_RBE = torch.cat([dq[:, :, None], dkv], dim=2).to(job.dtype).flatten(2)
            self._project(x, dqkv_RBE, dx)
        return dx_RBC

    def _finish(
        self, block: range, x: Tensor, out: Tensor, dy: Tensor, dx: Tensor, dout: Tensor
    ) -> None:
        """A block of what follows attention; fills the gradients of its input and its attention."""
        job = self.job
        x, out = x.detach().requires_grad_(), out.detach().requires_grad_()
        kept_2RBC = job.kept(block, x)
        with torch.enable_grad():
            stream, hidden = job.hidden(self.columns, self.matrices, x, out, kept_2RBC)
        dbranch = job.drop(1, dy, kept_2RBC).to(job.dtype)
        dhidden = self._linear("down", "down_bias", hidden.detach(), dbranch, NARROWS)
        dx_found, dout_found = self._grad([stream, hidden], [x, out], [dy, dhidden])
        dx.copy_(dx_found)
        dout.copy_(dout_found)

    def _project(self, x: Tensor, dqkv: Tensor, dx: Tensor) -> None:
        """A block of the projection; adds to the gradient of its input."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            normed = self.job.normed(self.columns, x)
        dnormed = self._linear(
            "query_key_value", "query_key_value_bias", normed.detach(), dqkv, WIDENS
        )
        dx += self._grad([normed], [x], [dnormed])[0]

    def _linear(
        self, weight: str, bias: str, x_RBC: Tensor, dz_RBE: Tensor, directions: tuple[str, str]
    ) -> Tensor:
        """The gradient of a linear map's input, without its output, which is not needed again."""
        into, out = directions
        dz_NE, mesh = dz_RBE.flatten(0, 1), self.job.mesh
        dbias = self.sums[Columns._fields.index(bias)]
        dbias += dz_NE.sum(0, dtype=dbias.dtype)
        dz_NE = gathered(dz_NE, mesh, out)
        dweight = self.sums[len(VECTORS) + Matrices._fields.index(weight)]
        dweight += dz_NE.T @ gathered(x_RBC.flatten(0, 1), mesh, into)
        with torch.no_grad():
            return summed(dz_NE @ getattr(self.matrices, weight), mesh, into).view_as(x_RBC)

    def _grad(
        self, outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """By autograd: gradients of `inputs`; those of the weights are added to the sums."""
        found = torch.autograd.grad(outputs, [*inputs, *self.weights], grads, allow_unused=True)
        for total, more in zip(self.sums, found[len(inputs) :], strict=True):
            if more is not None:
                total += more
        return list(found[: len(inputs)])


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
            x_RBC: the input; `layout.own(x_BSD)` gives it of whole sequences.
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
