"""The layer norm over processes against PyTorch's of all columns."""

import pytest
import torch
from ranks import run_ranks

from parallel.cube_norm import cube_norm
from parallel.mesh import CubeMesh

CASES = [  # dtype, distance from zero, largest error
    (torch.float64, 0, 1e-13),
    (torch.float64, 1e4, 1e-10),
    (torch.float32, 2048, 2e-3),  # squares of which leave no digit of the rest
    (torch.bfloat16, 0, 0.1),
]


def _distances(rank, mesh, z, dtype, far):
    """Largest distances from double precision of the value and its three gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 2, 6 * z), (6 * z,), (6 * z,), (5, 2, 6 * z))
    )
    # A distance from zero that `dtype` holds exactly, another one for every process.
    x = (x * 8).round() / 8 + far * torch.arange(z).repeat_interleave(6)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = torch.nn.functional.layer_norm(whole[0], (6 * z,), *whole[1:])
    y.backward(dy)
    own = [t.chunk(z, -1)[rank].to(dtype).requires_grad_() for t in (x, weight, bias)]
    own_y = cube_norm(*own, mesh)
    assert own_y.dtype == dtype
    own_y.backward(dy.chunk(z, -1)[rank].to(dtype))
    pairs = [(own_y, y), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return [(a.double() - b.chunk(z, -1)[rank]).abs().max().item() for a, b in pairs]


def _check(rank, z):
    mesh = CubeMesh(z=z)
    return [max(_distances(rank, mesh, z, dtype, far)) for dtype, far, _ in CASES]


@pytest.mark.parametrize("z", [1, 2, 3])
def test_value_and_gradients_are_those_of_all_columns_in_the_inputs_dtype(z):
    for distances in run_ranks(z, _check, z):
        for distance, (*case, most) in zip(distances, CASES, strict=True):
            assert distance < most, (case, distance)
