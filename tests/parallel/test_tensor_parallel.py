import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.pretended import pretended
from benchmarks.tensor_parallel import (
    Summa,
    cube,
    cube_sum,
    megatron,
    megatron_sum,
    summa,
    summa_sum,
)
from parallel import LayerSize
from parallel.cost import Shape
from parallel.traffic import Traffic

BATCH, TOKENS = 2, 12
ROWS = BATCH * TOKENS


def _size(processes):
    return LayerSize(width=12 * processes, heads=processes, feed_forward=48 * processes)


def _counted(step):
    with Traffic() as traffic:
        step()
    return traffic.bytes() / 4, traffic.calls()


def _megatron(rank, processes, cut_rows):
    step = megatron(_size(processes), BATCH, TOKENS, cut_rows=cut_rows, device="cpu")
    return _counted(step)


@pytest.mark.parametrize(("cut_rows", "calls"), [(False, 4), (True, 8)])
def test_one_dimension_receives_what_the_sum_says(cut_rows, calls):
    """Of the library, in two processes; 8 (P - 1) / P T D are 4 T D."""
    answers = run_ranks(2, _megatron, 2, cut_rows)
    assert answers == [(megatron_sum(2, _size(2), ROWS), calls)] * 2
    assert megatron_sum(2, _size(2), ROWS) == 4 * ROWS * 24


def _summa(rank, side):
    return _counted(summa(_size(side**2), ROWS, side, device="cpu"))


def test_two_dimensions_receive_what_the_sum_says():
    size = _size(4)
    received = [answer[0] for answer in run_ranks(4, _summa, 2)]
    assert sum(received) / 4 == summa_sum(2, size, ROWS)
    assert summa_sum(2, size, ROWS) == (21 * ROWS * 48 + 36 * 48**2) / 4


def _matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator).double() for _ in range(2)]


def _summa_gradients(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_coordinate()
    whole = [matrix if i == 0 else matrix.T for i, matrix in enumerate(_matrices())]
    a, b = (
        matrix.chunk(2, 0)[row].chunk(2, 1)[column].contiguous().requires_grad_()
        for matrix in whole
    )
    c = Summa.apply(a, b, mesh)
    c.sin().sum().backward()
    return [part.detach().numpy() for part in (c, a.grad, b.grad)]


def test_summa_is_the_product():
    a, b = (matrix.requires_grad_() for matrix in _matrices())
    c = a @ b.T
    c.sin().sum().backward()
    whole = c, a.grad, b.grad.T
    for rank, parts in enumerate(run_ranks(4, _summa_gradients)):
        for part, matrix in zip(parts, whole, strict=True):
            expected = matrix.detach().chunk(2, 0)[rank // 2].chunk(2, 1)[rank % 2]
            torch.testing.assert_close(torch.from_numpy(part), expected, rtol=0, atol=1e-13)


def _cube(rank, shape):
    return _counted(cube(_size(8), ROWS, Shape(*shape), device="cpu"))


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 2, 1)])
def test_three_dimensions_receive_what_the_sum_says(shape):
    size = LayerSize(width=96, heads=6, feed_forward=384)
    answers = run_ranks(Shape(*shape).processes, _cube, shape)
    received = {answer[0] for answer in answers}
    assert received == {cube_sum(Shape(*shape), size, ROWS)}
    assert cube_sum(Shape(2, 2, 2), size, ROWS) == (32 * ROWS * 96 + 36 * 96**2) / 8


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_pretended_processes_count_the_same(device):
    size = LayerSize(width=192, heads=64, feed_forward=768)
    with pretended(64):
        one = megatron(size, 2, 64, cut_rows=True, device=device)
        two, three = (
            summa(size, 128, 8, device=device),
            cube(size, 128, Shape(4, 4, 4), device=device),
        )
        assert _counted(one)[0] == megatron_sum(64, size, 128)
        assert _counted(two)[0] == summa_sum(8, size, 128)
        assert _counted(three)[0] == cube_sum(Shape(4, 4, 4), size, 128)
