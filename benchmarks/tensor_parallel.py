"""One transformer block, forward and backward, cut over processes in the ways that came before.

1-D is Megatron's (arXiv:1909.08053), by PyTorch's own `parallelize_module`, plain and with the rows
cut between the maps (arXiv:2205.05198); 2-D is SUMMA's (arXiv:2104.05343); 3-D is the paper's
(arXiv:2105.14450) of our products. Every builder returns a step, which is called under
`parallel.traffic.Traffic`, and every sum says what a process receives in it: numbers, not bytes. In
2-D and 3-D the linear maps alone are there: no norms, biases or attention, which the papers do not
count. T rows of all sequences, D width, P processes; the feed-forward is four widths.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallel import LayerSize
from parallel.cost import Shape
from parallel.mesh import CubeMesh
from parallel.products import product_abt

Step = Callable[[], None]


def megatron_sum(processes: int, size: LayerSize, rows: int) -> float:
    """8 (P - 1) / P T D: two sums of all rows in each pass, or twice a gather and a scatter."""
    return 8 * (processes - 1) * rows * size.width / processes


def summa_sum(side: int, size: LayerSize, rows: int) -> float:
    """(q - 1) / P of three times all inputs (T D, T D, T D, 4 T D) and weights (12 D^2)."""
    return 3 * (side - 1) * (7 * rows * size.width + size.matrices) / side**2


def cube_sum(shape: Shape, size: LayerSize, rows: int) -> float:
    """Inputs gathered and results scattered, 16 T D for equal sides, both ways; weights 3 times."""
    x, y, z = shape
    along_y = 4 * (y - 1) * rows * size.width
    along_z = 12 * (z - 1) * rows * size.width
    return (2 * (along_y + along_z) + 3 * (x - 1) * size.matrices) / shape.processes


class _Block(nn.Module):
    """A pre-norm block whose heads are those of this process."""

    def __init__(self, size: LayerSize, heads: int, device: str) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(size.width, device=device)
        self.query_key_value = nn.Linear(size.width, 3 * size.width, device=device)
        self.output = nn.Linear(size.width, size.width, device=device)
        self.norm_feed_forward = nn.LayerNorm(size.width, device=device)
        self.up = nn.Linear(size.width, size.feed_forward, device=device)
        self.down = nn.Linear(size.feed_forward, size.width, device=device)

    def forward(self, x_BSD: Tensor) -> Tensor:
        qkv_BSHK3 = self.query_key_value(self.norm_attention(x_BSD)).unflatten(
            2, (self.heads, -1, 3)
        )
        q_BHSK, k_BHSK, v_BHSK = qkv_BSHK3.transpose(1, 2).unbind(4)
        out_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        x_BSD = x_BSD + self.output(out_BHSK.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.relu(self.up(self.norm_feed_forward(x_BSD))))


def megatron(size: LayerSize, batch: int, tokens: int, *, cut_rows: bool, device: str) -> Step:
    """All processes of the group on one axis."""
    processes = dist.get_world_size()
    between = Shard(1)  # rows, where the width is not cut
    column = ColwiseParallel(input_layouts=between) if cut_rows else ColwiseParallel()
    row = RowwiseParallel(output_layouts=between) if cut_rows else RowwiseParallel()
    plan: dict[str, Any] = {"query_key_value": column, "output": row, "up": column, "down": row}
    if cut_rows:
        plan |= {"norm_attention": SequenceParallel(), "norm_feed_forward": SequenceParallel()}
    block = _Block(size, size.heads // processes, device)
    block = parallelize_module(block, init_device_mesh("cpu", (processes,)), plan)
    own = tokens // processes if cut_rows else tokens

    def step() -> None:
        block(
            torch.ones(batch, own, size.width, device=device, requires_grad=True)
        ).sum().backward()

    return step


class Summa(torch.autograd.Function):
    """C = A B of blocks on a q x q mesh, by q broadcasts of a block of each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
        """A's block of this process, and B's: C's."""
        ctx.save_for_backward(a, b)
        ctx.mesh = mesh
        q = mesh.size(0)
        c = a.new_zeros(len(a), b.shape[1])
        for t in range(q):
            c += _from_column(a, mesh, t) @ _from_row(b, mesh, t)
        return c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        """Both gradients by as many broadcasts and sums."""
        a, b = ctx.saved_tensors
        mesh = ctx.mesh
        da, db = torch.empty_like(a), torch.empty_like(b)
        row, column = mesh.get_coordinate()
        for t in range(mesh.size(0)):
            part = dc @ _from_row(b, mesh, t).T
            dist.reduce(part, group=mesh.get_group(1), group_dst=t)
            da = part if column == t else da
            part = _from_column(a, mesh, t).T @ dc
            dist.reduce(part, group=mesh.get_group(0), group_dst=t)
            db = part if row == t else db
        return da, db, None


def _from_column(a: Tensor, mesh: DeviceMesh, t: int) -> Tensor:
    """The block of column t in this row."""
    a = a.clone()
    dist.broadcast(a, group=mesh.get_group(1), group_src=t)
    return a


def _from_row(b: Tensor, mesh: DeviceMesh, t: int) -> Tensor:
    """The block of row t in this column."""
    b = b.clone()
    dist.broadcast(b, group=mesh.get_group(0), group_src=t)
    return b


def summa(size: LayerSize, rows: int, side: int, *, device: str) -> Step:
    """All processes on a square."""
    mesh = init_device_mesh("cpu", (side, side))
    D, wide = size.width, size.feed_forward

    def block(rows: int, columns: int) -> Tensor:
        return torch.ones(rows // side, columns // side, device=device, requires_grad=True)

    maps = [block(D, 3 * D), block(D, D), block(D, wide), block(wide, D)]

    def step() -> None:
        qkv = Summa.apply(block(rows, D), maps[0], mesh)
        x = Summa.apply(qkv.unflatten(1, (3, -1)).sum(1), maps[1], mesh)
        Summa.apply(Summa.apply(x, maps[2], mesh).relu(), maps[3], mesh).sum().backward()

    return step


def cube(size: LayerSize, rows: int, shape: Shape, *, device: str) -> Step:
    """The paper's: input and output directions change places after every map."""
    x, y, z = shape
    mesh = CubeMesh(x, y, z, timeout=None)
    D, wide = size.width, size.feed_forward

    def part(rows: int, columns: int, cut: int, missing: int) -> Tensor:
        sides = rows // (cut * missing), columns * cut * missing // shape.processes
        return torch.ones(*sides, device=device, requires_grad=True)

    maps = [part(3 * D, D, y, x), part(D, D, z, x), part(wide, D, y, x), part(D, wide, z, x)]

    def step() -> None:
        there, back = ("y", "x", "z"), ("z", "x", "y")
        qkv = product_abt(part(rows, D, x, y), maps[0], mesh, there, keep=True)
        out = product_abt(qkv.unflatten(1, (3, -1)).sum(1), maps[1], mesh, back, keep=True)
        hidden = product_abt(out, maps[2], mesh, there, keep=True).relu()
        product_abt(hidden, maps[3], mesh, back, keep=True).sum().backward()

    return step
