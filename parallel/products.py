"""Matrix products of a cube (arXiv:2105.14450, algorithms 1 to 6, corrected).

Every matrix is cut along two of the three axes and *misses* the third, its direction, along which
its rows are cut once more, so that a process holds 1/P of it. For Z = op(A) op(B), with A missing
u, B missing v and Z missing w, the index that is summed over is cut along w:

    gather A along u and B along v; multiply; sum along w, and keep the own rows.

A product's two gradients are products with the roles exchanged, and the gradient that comes in is
gathered once for both.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.collectives import all_gather, joined, reduce_scatter, stacked
from parallel.mesh import CubeMesh

Directions = tuple[str | None, str | None, str | None]  # of A, B and Z; None: nothing is missing


def product_ab(a: Tensor, b: Tensor, mesh: CubeMesh, directions: Directions) -> Tensor:
    """Z = A B, all of them this process's parts, with all gradients."""
    return _Product.apply(a, b, mesh, "nn", directions, False)


def product_abt(
    a: Tensor, b: Tensor, mesh: CubeMesh, directions: Directions, keep: bool = False
) -> Tensor:
    """Z = A Bᵀ, a linear map of A's rows; with `keep` A is kept gathered for the gradient of B."""
    return _Product.apply(a, b, mesh, "nt", directions, keep)


def product_atb(a: Tensor, b: Tensor, mesh: CubeMesh, directions: Directions) -> Tensor:
    """Z = Aᵀ B."""
    return _Product.apply(a, b, mesh, "tn", directions, False)


def gathered(x: Tensor, mesh: CubeMesh, axis: str | None) -> Tensor:
    """The rows of all peers along a matrix's direction."""
    return x if axis is None else joined(all_gather(x, mesh, axis), 0)


def summed(x: Tensor, mesh: CubeMesh, axis: str | None) -> Tensor:
    """The sum along a direction, of which the own rows are kept."""
    return x if axis is None else reduce_scatter(stacked(x, mesh.sizes[axis], 0), mesh, axis)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        mesh: CubeMesh,
        form: str,
        directions: Directions,
        keep: bool,
    ) -> Tensor:
        whole_a, whole_b = gathered(a, mesh, directions[0]), gathered(b, mesh, directions[1])
        ctx.save_for_backward(whole_a if keep else a, b)
        ctx.job = mesh, form, directions, keep
        left = whole_a.T if form == "tn" else whole_a
        right = whole_b.T if form == "nt" else whole_b
        return summed(left @ right, mesh, directions[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        mesh, form, (u, v, w), keep = ctx.job
        dz = gathered(dz, mesh, w)
        da = db = None
        if ctx.needs_input_grad[0]:
            b = gathered(b, mesh, v)
            da = {"nn": lambda: dz @ b.T, "nt": lambda: dz @ b, "tn": lambda: b @ dz.T}[form]()
            da = summed(da, mesh, u)
        if ctx.needs_input_grad[1]:
            a = a if keep else gathered(a, mesh, u)
            db = {"nn": lambda: a.T @ dz, "nt": lambda: dz.T @ a, "tn": lambda: a @ dz}[form]()
            db = summed(db, mesh, v)
        return da, db, None, None, None, None
