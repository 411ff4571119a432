"""What processes send each other. The only file that calls collectives on tensors of the model.

Everything is along one axis of a `CubeMesh`, and nothing is called on an axis of size 1. `gather`,
`scatter` and `everywhere` are differentiable, the others are not.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.mesh import CubeMesh


def all_gather(x: Tensor, mesh: CubeMesh, axis: str) -> Tensor:
    """(p, *x.shape): every peer's x."""
    p = mesh.sizes[axis]
    if p == 1:
        return x[None]
    out = x.new_empty(p * len(x), *x.shape[1:])
    with mesh.guard(axis):
        dist.all_gather_single(out, x.contiguous(), group=mesh.group(axis))
    return out.unflatten(0, (p, -1))


def reduce_scatter(x: Tensor, mesh: CubeMesh, axis: str) -> Tensor:
    """The sum of what all peers have for this one, of x (p, ...) with a part for every peer."""
    if mesh.sizes[axis] == 1:
        return x[0]
    x, group = x.contiguous(), mesh.group(axis)
    with mesh.guard(axis):
        if mesh.device.type != "cpu":
            out = torch.empty_like(x[0])
            dist.reduce_scatter_single(out, x.flatten(0, 1), group=group)
            return out
        # gloo's reduce-scatter is an all-reduce: twice the bytes of these parts.
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=group)
    return parts.sum(0)  # PyTorch sums half precision in fp32, and rounds once


def all_reduce(x: Tensor, mesh: CubeMesh, axis: str) -> Tensor:
    """The sum of all peers' x, which is left as it is."""
    if mesh.sizes[axis] == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    with mesh.guard(axis):
        dist.all_reduce(x, group=mesh.group(axis))
    return x


def pass_on(x: Tensor, mesh: CubeMesh, axis: str) -> Callable[[], Tensor]:
    """Starts to send x to the next peer of a ring; the result waits for what the last one sent."""
    p, here, peers = mesh.sizes[axis], mesh.place[axis], mesh.peers(axis)
    x, group = x.contiguous(), mesh.group(axis)
    received = torch.empty_like(x)
    with mesh.guard(axis):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, peers[(here + 1) % p], group),
                dist.P2POp(dist.irecv, received, peers[(here - 1) % p], group),
            ]
        )

    def wait() -> Tensor:
        with mesh.guard(axis):
            for work in works:
                work.wait()
        return received

    return wait


def joined(parts: Tensor, dim: int) -> Tensor:
    """(p, ...) stacked parts as one tensor, one after the other along `dim`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def stacked(x: Tensor, p: int, dim: int) -> Tensor:
    """The reverse of `joined`: p equal parts of `dim`, stacked in front."""
    return x.unflatten(dim, (p, -1)).movedim(dim, 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: CubeMesh, axis: str, dim: int) -> Tensor:
        ctx.where = mesh, axis, dim
        return joined(all_gather(x, mesh, axis), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mesh, axis, dim = ctx.where
        return reduce_scatter(stacked(grad, mesh.sizes[axis], dim), mesh, axis), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: CubeMesh, axis: str, dim: int) -> Tensor:
        ctx.where = mesh, axis, dim
        return reduce_scatter(stacked(x, mesh.sizes[axis], dim), mesh, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mesh, axis, dim = ctx.where
        return joined(all_gather(grad, mesh, axis), dim), None, None, None


class _Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: CubeMesh, axis: str) -> Tensor:
        ctx.where = mesh, axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(grad, *ctx.where), None, None


def gather(x: Tensor, mesh: CubeMesh, axis: str, dim: int) -> Tensor:
    """Every peer's x, one after the other along `dim`; each peer's gradient counts."""
    return x if mesh.sizes[axis] == 1 else _Gather.apply(x, mesh, axis, dim)


def scatter(x: Tensor, mesh: CubeMesh, axis: str, dim: int) -> Tensor:
    """The sum of all peers' x, of which this one keeps its part of `dim`."""
    return x if mesh.sizes[axis] == 1 else _Scatter.apply(x, mesh, axis, dim)


def everywhere(x: Tensor, mesh: CubeMesh, axis: str) -> Tensor:
    """x, of which every peer has the same copy; its gradient is the sum of all peers' gradients."""
    return x if mesh.sizes[axis] == 1 else _Everywhere.apply(x, mesh, axis)
