import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from parallel.collectives import all_gather, all_reduce, everywhere, gather, reduce_scatter, scatter
from parallel.mesh import CUBE, CubeMesh
from parallel.products import product_ab, product_abt, product_atb
from parallel.traffic import Traffic

N = 24  # bytes of six numbers in fp32
SIX = (6,)


def _counted(call):
    with Traffic() as traffic:
        call()
    return [(line.axis, line.size, line.kind, line.calls, line.bytes) for line in traffic.lines]


def _every_kind(rank):
    world, six = dist.group.WORLD, torch.ones(SIX)
    pair = dist.new_group([0, 2])
    whole, uneven = torch.ones(4, 6), [1, 2, 3, 0]
    ours = torch.ones(uneven[rank] * 4, 6)

    def pairwise():
        if rank in (0, 2):
            dist.all_gather_single(torch.empty(2, 6), six[None], group=pair)

    def neighbours():
        there, back = (rank + 1) % 4, (rank - 1) % 4
        sent = dist.P2POp(dist.isend, six, there), dist.P2POp(dist.irecv, torch.empty(SIX), back)
        for work in dist.batch_isend_irecv(list(sent)):
            work.wait()

    def lists(function, *arguments):
        return lambda: function([torch.empty(SIX) for _ in range(4)], *arguments)

    six_list = [six.clone() for _ in range(4)]
    calls = {
        "all_gather_single": lambda: dist.all_gather_single(torch.empty(4, 6), six[None]),
        "all_gather": lists(dist.all_gather, six),
        "pairwise": pairwise,
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(torch.empty(1, 6), whole),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(SIX), six_list),
        "all_reduce": lambda: dist.all_reduce(six.clone()),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4, 6), whole),
        "all_to_all_uneven": lambda: dist.all_to_all_single(
            torch.empty(6, 6), ours, uneven, [uneven[rank]] * 4
        ),
        "broadcast": lambda: dist.broadcast(six.clone(), src=1),
        "reduce": lambda: dist.reduce(six.clone(), dst=1),
        "scatter": lambda: dist.scatter(torch.empty(SIX), six_list if rank == 1 else None, src=1),
        "gather": lambda: dist.gather(
            six, [torch.empty(SIX) for _ in range(4)] if rank == 1 else None, dst=1
        ),
        "neighbours": neighbours,
        "barrier": dist.barrier,
        "functional gather": lambda: functional.all_gather_single(six, 0, world).sum(),
        "functional scatter": lambda: functional.reduce_scatter_single(whole, "sum", 0, world) + 1,
        "functional sum": lambda: functional.all_reduce(six, "sum", world) + 1,
        "functional exchange": lambda: functional.all_to_all_single(whole, None, None, world) + 1,
    }
    return {name: _counted(call) for name, call in calls.items()}


def test_every_kind_of_collective():
    answers = run_ranks(4, _every_kind)

    def expect(name, kind, received, size=4, calls=1):
        for rank, answer in enumerate(answers):
            value = received[rank] if isinstance(received, list) else received
            assert answer[name] == [("", size, kind, calls, value)], (name, rank)

    expect("all_gather_single", "all-gather", 3 * N)
    expect("all_gather", "all-gather", 3 * N)
    expect("reduce_scatter_single", "reduce-scatter", 3 * N)
    expect("reduce_scatter", "reduce-scatter", 3 * N)
    expect("all_reduce", "all-reduce", 2 * 3 * N / 4)
    expect("all_to_all_single", "all-to-all", 3 * N)
    expect("all_to_all_uneven", "all-to-all", [5 * N, 4 * N, 3 * N, 6 * N])
    expect("broadcast", "broadcast", [N, 0, N, N])
    expect("reduce", "reduce", 3 * N / 4)
    expect("scatter", "scatter", [N, 0, N, N])
    expect("gather", "gather", [0, 3 * N, 0, 0])
    expect("barrier", "barrier", 0)
    expect("functional gather", "all-gather", 3 * N)
    expect("functional scatter", "reduce-scatter", 3 * N)
    expect("functional sum", "all-reduce", 2 * 3 * N / 4)
    expect("functional exchange", "all-to-all", 3 * N)
    for rank, answer in enumerate(answers):
        both = [("", 2, "all-gather", 1, N)] if rank in (0, 2) else []
        assert answer["pairwise"] == both
        assert answer["neighbours"] == [("", 4, "receive", 1, N), ("", 4, "send", 1, 0)]


def _axes(rank):
    mesh = CubeMesh(x=2, y=1, z=2)
    x = torch.ones(4, 6, requires_grad=True)
    with Traffic(mesh) as outer:
        with Traffic(mesh) as traffic:
            all_gather(x.detach(), mesh, "x")
            all_gather(x.detach(), mesh, "y")
            all_reduce(x.detach(), mesh, CUBE)
        reduce_scatter(x.detach().unflatten(0, (2, 2)), mesh, "z")
    with Traffic(mesh) as forward:
        out = [gather(x, mesh, "x", 1), scatter(x, mesh, "z", 0), everywhere(x, mesh, "x")]
    with Traffic(mesh) as backward:
        sum(part.sum() for part in out).backward()
    seen = traffic.lines, outer.lines, forward.lines, backward.lines
    return [[(line.axis, line.kind, line.calls, line.bytes) for line in lines] for lines in seen]


def test_axes_of_a_mesh_nested_contexts_and_backward_passes():
    n = 4 * N
    for traffic, outer, forward, backward in run_ranks(4, _axes):
        assert traffic == [(CUBE, "all-reduce", 1, 2 * 3 * n / 4), ("x", "all-gather", 1, n)]
        assert outer == [*traffic, ("z", "all-to-all", 1, n / 2)]
        assert forward == [("x", "all-gather", 1, n), ("z", "all-to-all", 1, n / 2)]
        assert backward == [
            ("x", "all-reduce", 1, n),  # 2 (p - 1) / p of n
            ("x", "all-to-all", 1, n),
            ("z", "all-gather", 1, n / 2),
        ]


def _alone(rank):
    mesh = CubeMesh(y=2, dp=2)
    with Traffic(mesh) as traffic:
        for axis in ("y", CUBE, "dp"):
            all_reduce(torch.ones(6), mesh, axis)
    return [(line.axis, line.calls) for line in traffic.lines]


def test_an_axis_that_is_the_whole_cube_takes_what_goes_over_it():
    assert run_ranks(4, _alone) == [[("dp", 1), ("y", 2)]] * 4


def _library(rank):
    """DDP, FSDP, tensor parallelism and DTensors: collectives that PyTorch calls."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}

    def step(model):
        model(torch.ones(5, 4, requires_grad=True)).sum().backward()

    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 6))
    found["ddp"] = _counted(lambda: step(ddp))
    sharded = fully_shard(nn.Linear(4, 6, bias=False), mesh=mesh)
    found["fsdp"] = _counted(lambda: step(sharded))
    pair = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    found["tensor"] = _counted(lambda: step(pair))
    part = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    found["dtensor"] = _counted(lambda: part.redistribute(mesh, [Replicate()]).to_local().sum())
    return found


def test_collectives_of_the_library():
    weight, rows = 4 * 6 * 4, 5 * 4 * 4
    for found in run_ranks(2, _library):
        assert found["ddp"] == [("", 2, "all-reduce", 1, weight + 6 * 4)]
        assert found["fsdp"] == [
            ("", 2, "all-gather", 1, weight / 2),
            ("", 2, "reduce-scatter", 1, weight / 2),
        ]
        # Two sums over both: of the output, and of the input's gradient.
        assert found["tensor"] == [("", 2, "all-reduce", 2, 2 * rows)]
        assert found["dtensor"] == [("", 2, "all-gather", 1, weight / 2)]


FORMS = {"ab": product_ab, "abt": product_abt, "atb": product_atb}
MNK = 12, 24, 36  # rows and columns of the result, and what is summed over


def _part(form, shape, directions, sizes, operand):
    """Shape of this process's part of an operand of a product."""
    u, v, w = directions
    M, N, K = shape
    rows, columns, missing = {
        ("a", "ab"): ((M, v), (K, w), u),
        ("b", "ab"): ((K, w), (N, u), v),
        ("a", "abt"): ((M, v), (K, w), u),
        ("b", "abt"): ((N, u), (K, w), v),
        ("a", "atb"): ((K, w), (M, v), u),
        ("b", "atb"): ((K, w), (N, u), v),
    }[operand, form]
    cut = [length // sizes[axis] for length, axis in (rows, columns)]
    return cut[0] // sizes[missing], cut[1]


def _products(rank, x, y, z):
    mesh, found = CubeMesh(x, y, z), {}
    for form, directions in itertools.product(FORMS, itertools.permutations("xyz")):
        a, b = (
            torch.ones(_part(form, MNK, directions, mesh.sizes, operand), requires_grad=True)
            for operand in "ab"
        )
        with Traffic(mesh) as forward:
            out = FORMS[form](a, b, mesh, directions)
        with Traffic(mesh) as backward:
            out.sum().backward()
        counts = [(t.calls(axis), t.bytes(axis)) for t in (forward, backward) for axis in "xyz"]
        found[form, directions] = counts
    return found


@pytest.mark.parametrize("cube", [(1, 2, 1), (2, 1, 2), (2, 2, 2), (3, 2, 1)])
def test_products_receive_what_the_formula_says(cube):
    sizes, P = dict(zip("xyz", cube, strict=True)), cube[0] * cube[1] * cube[2]
    M, N, K = MNK
    for found in run_ranks(P, _products, *cube):
        for (_, (u, v, w)), counts in found.items():
            received = {
                axis: 4 * (sizes[axis] - 1) * elements / P
                for axis, elements in ((u, M * K), (v, N * K), (w, M * N))
            }
            calls = {axis: int(sizes[axis] > 1) for axis in "xyz"}
            # Backward: A and B are gathered again, their gradients scattered, Z's gathered.
            twice = {u: 2, v: 2, w: 1}
            assert counts[:3] == [(calls[axis], received[axis]) for axis in "xyz"]
            assert counts[3:] == [
                (twice[axis] * calls[axis], twice[axis] * received[axis]) for axis in "xyz"
            ]


def _interface_bytes():
    """Bytes that the loopback interface has received, told by the kernel."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def _on_the_wire(rank):
    mesh, x = CubeMesh(x=2, y=2), torch.ones(2**20)
    measured = {}
    for name, call in {
        "all_gather": lambda: all_gather(x, mesh, "y"),
        "reduce_scatter": lambda: reduce_scatter(x.unflatten(0, (2, -1)), mesh, "x"),
        "all_reduce": lambda: all_reduce(x, mesh, CUBE),
    }.items():
        dist.barrier()
        before = _interface_bytes()
        dist.barrier()
        with Traffic(mesh) as traffic:
            for _ in range(4):
                call()
        dist.barrier()
        measured[name] = traffic.bytes(), _interface_bytes() - before
        dist.barrier()
    return measured


@pytest.mark.slow
def test_bytes_are_those_on_the_wire():
    answers = run_ranks(4, _on_the_wire)
    for name in answers[0]:
        counted = sum(answer[name][0] for answer in answers)
        assert answers[0][name][1] == pytest.approx(counted, rel=0.05), name
