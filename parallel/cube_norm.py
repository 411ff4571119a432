"""Layer norm of rows whose columns are cut along z."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.collectives import all_gather, all_reduce
from parallel.gradients import sum_dtype
from parallel.mesh import CubeMesh

EPSILON = 1e-5


def cube_norm(x_RBC: Tensor, weight_C: Tensor, bias_C: Tensor, mesh: CubeMesh) -> Tensor:
    """The layer norm over all columns of all peers on z, of the own ones C; in x's dtype."""
    if mesh.sizes["z"] == 1:
        return F.layer_norm(x_RBC, weight_C.shape, weight_C, bias_C, EPSILON)
    return _CubeNorm.apply(x_RBC, weight_C, bias_C, mesh)


class _CubeNorm(torch.autograd.Function):
    """Moments are merged from every peer's own mean and squared deviations (Chan et al. 1979).

    The mean of squares less the square of the mean would lose all digits far from zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RBC: Tensor, weight_C: Tensor, bias_C: Tensor, mesh: CubeMesh
    ) -> Tensor:
        C, dtype, x_RBC = x_RBC.shape[2], x_RBC.dtype, x_RBC.to(sum_dtype(x_RBC))
        mean_RB = x_RBC.mean(2)
        squares_RB = (x_RBC - mean_RB[..., None]).square().sum(2)
        means_ZRB, squares_ZRB = all_gather(torch.stack([mean_RB, squares_RB]), mesh, "z").unbind(1)
        mean_RB = means_ZRB.mean(0)
        squares_RB = squares_ZRB.sum(0) + C * (means_ZRB - mean_RB).square().sum(0)
        scale_RB = (squares_RB / (C * len(means_ZRB)) + EPSILON).rsqrt()
        ctx.save_for_backward(x_RBC, weight_C, mean_RB, scale_RB)
        ctx.mesh = mesh
        y_RBC = (x_RBC - mean_RB[..., None]) * scale_RB[..., None] * weight_C + bias_C
        return y_RBC.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RBC: Tensor) -> tuple[Tensor | None, ...]:
        x_RBC, weight_C, mean_RB, scale_RB = ctx.saved_tensors
        dy_RBC = dy_RBC.to(x_RBC.dtype)
        normal_RBC = (x_RBC - mean_RB[..., None]) * scale_RB[..., None]
        dnormal_RBC = dy_RBC * weight_C
        sums_2RB = torch.stack([dnormal_RBC.sum(2), (dnormal_RBC * normal_RBC).sum(2)])
        sums_2RB = all_reduce(sums_2RB, ctx.mesh, "z")
        mean_2RB1 = (sums_2RB / (x_RBC.shape[2] * ctx.mesh.sizes["z"]))[..., None]
        dx_RBC = (dnormal_RBC - mean_2RB1[0] - normal_RBC * mean_2RB1[1]) * scale_RB[..., None]
        return dx_RBC, (dy_RBC * normal_RBC).sum((0, 1)), dy_RBC.sum((0, 1)), None
