"""What a layer receives when it is cut in one, two or three dimensions, beside the paper's times.

    python -m benchmarks.cube --json results.json

The sizes are those of arXiv:2105.14450, Tables 1 and 2. Every way is run forward and backward under
`parallel.traffic.Traffic`: at full size in one process that pretends to be one of all (tensors
without memory), at a reduced size in real ones, beside what the system says was sent over its
loopback interface, by whomever. "Sum" is the formula; it has to be equal. MB are 10^6 bytes that
one process receives, in fp32.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import measure, tensor_parallel
from benchmarks.paper_cube import PAPER
from benchmarks.processes import loopback_bytes, pretended, run
from benchmarks.report import Report, mb, number
from parallel import LayerSize
from parallel.cost import FULL, Shape, layer_terms, misfits, plan_shape
from parallel.mesh import CubeMesh
from parallel.rows import RowLayout
from parallel.traffic import Traffic

TOKENS = 512  # of a sequence, in the paper
# The paper tells neither; they only scale what the times imply.
LAYERS = 24
FLOPS = 14e12  # of a process, in fp32


def size_of(width: int, heads: int) -> LayerSize:
    """A layer as the paper's."""
    return LayerSize(width=width, heads=heads, feed_forward=4 * width)


def summed(ways: int, processes: int, batch: int, width: int, tokens: int = TOKENS) -> float:
    """Bytes of one layer and step by the formula, sides all equal."""
    size, rows = size_of(width, processes), batch * tokens
    side = round(processes ** (1 / ways))
    numbers = {
        1: lambda: tensor_parallel.megatron_sum(processes, size, rows),
        2: lambda: tensor_parallel.summa_sum(side, size, rows),
        3: lambda: tensor_parallel.cube_sum(Shape(side, side, side), size, rows),
    }[ways]()
    return FULL * numbers


def counted(ways: int, processes: int, batch: int, width: int) -> float | None:
    """The same, counted in one process; None where the width cannot be cut into equal parts."""
    size, rows = size_of(width, processes), batch * TOKENS
    side = round(processes ** (1 / ways))
    if width % side:
        return None
    with pretended(processes):
        if ways == 1:
            step = tensor_parallel.megatron(size, batch, TOKENS, cut_rows=False, device="meta")
        elif ways == 2:
            step = tensor_parallel.summa(size, rows, side, device="meta")
        else:
            step = tensor_parallel.cube(size, rows, Shape(side, side, side), device="meta")
        with Traffic() as traffic:
            step()
    return traffic.bytes()


def layer_sum(shape: Shape, size: LayerSize, batch: int, tokens: int) -> float:
    """Bytes of our layer by the formula."""
    return sum(term.bytes(FULL) for term in layer_terms(shape, size, batch=batch, tokens=tokens))


def layer_counted(shape: Shape, size: LayerSize, batch: int, tokens: int) -> float:
    """The same, counted in one process; it has to be equal."""
    with pretended(shape.processes):
        mesh = CubeMesh(*shape, timeout=None)
        layout = RowLayout.of(mesh, batch=batch, length=tokens)
        with FakeTensorMode(), Traffic(mesh) as traffic:
            tensor_parallel.layer(size, layout)()
    formula = layer_sum(shape, size, batch, tokens)
    assert _equal(traffic.bytes(), formula), (shape, traffic.bytes(), formula)
    return traffic.bytes()


def _equal(found: float, formula: float) -> bool:
    """Up to the rounding of sums that do not divide evenly."""
    return math.isclose(found, formula, rel_tol=1e-12)


def paper_table(report: Report) -> None:
    """The paper's rows: bytes, seconds, and the rate that they imply."""
    rows, cases = [], []
    for row in PAPER:
        sizes = row.ways, row.processes, row.batch, row.width
        formula, found = summed(*sizes), counted(*sizes)
        assert found is None or _equal(found, formula), (row, found, formula)
        # Forward and backward passes of linear maps and attention.
        flops = 72 * TOKENS * row.width**2 + 12 * TOKENS**2 * row.width
        waiting = row.seconds - LAYERS * flops / row.processes / FLOPS
        rate = LAYERS * formula / row.batch / waiting
        cases.append({**asdict(row), "sum": formula, "counted": found, "bytes_per_second": rate})
    base = statistics.median(case["bytes_per_second"] for case in cases if case["ways"] == 1)
    for row, case in zip(PAPER, cases, strict=True):
        case["over_1d"] = case["bytes_per_second"] / base
        rows.append(
            {
                "row": row.name,
                "batch": str(row.batch),
                "width": str(row.width),
                "counted MB": mb(case["counted"]) or "not equal parts",
                "sum MB": mb(case["sum"]),
                "MB / sequence": mb(case["sum"] / row.batch),
                "s / sequence": f"{row.seconds:.3f}",
                "printed": f"{row.printed:.3f}",
                "GB/s": number(case["bytes_per_second"] / 1e9),
                "x 1-D": f"{case['over_1d']:.2f}",
            }
        )
    title = f"The paper's rows; GB/s if there were {LAYERS} layers and {FLOPS / 1e12:g} TFLOP/s"
    report.case(title, rows, {"rows": cases})
    for note in _findings(cases):
        report.note(note)


def _findings(cases: list[dict[str, Any]]) -> list[str]:
    """What agrees with the volume, and what does not, by the numbers."""
    notes = []
    for ways in (1, 2, 3):
        rates = [case["bytes_per_second"] / 1e9 for case in cases if case["ways"] == ways]
        notes.append(
            f"{ways}-D: {min(rates):.2f} to {max(rates):.2f} GB/s over {len(rates)} rows, "
            f"{max(rates) / min(rates):.2f} apart."
        )
    off = [
        f"{row.name} ({case['over_1d']:.2f})"
        for row, case in zip(PAPER, cases, strict=True)
        if not 0.8 < case["over_1d"] < 1.25
    ]
    notes.append(f"Not explained by volume at 1-D's rate, to a quarter: {', '.join(off)}.")
    for table, processes in (("strong", 64), ("weak", 64), ("strong", 8), ("weak", 8)):
        there = [
            (case["sum"] / row.batch / 1e6, row.seconds, f"{row.ways}-D")
            for row, case in zip(PAPER, cases, strict=True)
            if (row.table, row.processes) == (table, processes)
        ]
        same = sorted(there) == sorted(there, key=lambda each: each[1])
        told = [f"{name} {megabytes:.1f} MB {each:.3f} s" for megabytes, each, name in there]
        notes.append(
            f"A sequence in {table} scaling at {processes}: {', '.join(told)}; "
            f"{'in the same order' if same else 'NOT in the same order'}."
        )
    wrong = [row for row in PAPER if abs(row.seconds - row.printed) > 0.0015]
    notes += [
        f"{row.name}: printed {row.printed}, its own times give {row.seconds:.3f}." for row in wrong
    ]
    return notes


def ways_table(report: Report) -> None:
    """All ways on the same work, and the shape that the planner takes."""
    rows, cases = [], []
    for processes, batch, width in (
        (8, 24, 3072),
        (8, 192, 2048),
        (64, 24, 3072),
        (64, 192, 3072),
        (64, 384, 8192),
    ):
        size = size_of(width, width // 64)
        plan = plan_shape(processes, size, layers=1, batch=batch, tokens=TOKENS)
        best = plan[0].shape
        one, three = (counted(ways, processes, batch, width) for ways in (1, 3))
        square = round(processes**0.5) ** 2 == processes
        two = counted(2, processes, batch, width) if square else None
        side = round(processes ** (1 / 3))
        equal, ours = (
            layer_counted(shape, size, batch, TOKENS) for shape in (Shape(side, side, side), best)
        )
        cases.append(
            {
                "processes": processes,
                "batch": batch,
                "width": width,
                **{"1-D": one, "2-D": two, "3-D": three},
                "equal_sides": equal,
                "planned": list(best),
                "planned_bytes": ours,
            }
        )
        again = 1.5 * (one or 0)  # one pass of three is computed again
        rows.append(
            {
                "processes": str(processes),
                "batch": str(batch),
                "width": str(width),
                "1-D": mb(one),
                "2-D": mb(two) or "no square",
                "3-D": mb(three),
                "1-D, recomputed": mb(again),
                "ours, equal sides": mb(equal),
                "ours, planned": mb(ours),
                "x y z": str(best),
                "equal / planned": number(equal / ours),
                "1-D / planned": number(again / ours),
            }
        )
    report.case("MB of the same work, by all ways", rows, {"rows": cases})
    report.note(
        "1-D, 2-D and 3-D keep what they gathered; ours computes the layer again, attention's keys "
        "and norms included. x alone is fully sharded data parallelism, x and y are that with "
        "tensor parallelism: PyTorch has both."
    )


def long_table(report: Report, processes: int, width: int, tokens: int) -> None:
    """The planner's list for one long sequence."""
    size = size_of(width, max(width // 64, 1))
    plan = plan_shape(processes, size, layers=LAYERS, batch=1, tokens=tokens)
    side = round(processes ** (1 / 3))
    wanted = {Shape(side, side, side), Shape(processes, 1, 1), Shape(1, processes, 1)}
    found = layer_counted(plan[0].shape, size, 1, tokens)
    shown = [c for i, c in enumerate(plan) if i < 4 or c.shape in wanted]
    none = [str(shape) for shape in sorted(wanted) if misfits(shape, size)]
    title = (
        f"{processes} processes, one sequence of {tokens:,} tokens, {width} wide, {LAYERS} layers"
    )
    report.case(
        title + (f" ({', '.join(none)}: heads do not fit)" if none else ""),
        [candidate.row() for candidate in shown],
        {"plan": [{"shape": list(c.shape), "bytes": c.received} for c in plan], "counted": found},
    )
    report.note(f"Counted in {plan[0].shape}: {mb(found)} MB.")


def _step(way: str, width: int, batch: int, tokens: int) -> tensor_parallel.Step:
    """In this process, on the group's processes."""
    processes = dist.get_world_size()
    size = size_of(width, processes)
    if way.startswith("1-D"):
        rows = way.endswith("rows cut")
        return tensor_parallel.megatron(size, batch, tokens, cut_rows=rows, device="cpu")
    if way == "2-D":
        side = round(processes**0.5)
        return tensor_parallel.summa(size, batch * tokens, side, device="cpu")
    shape = Shape(*map(int, way.split()[-1].split("x")))
    if way.startswith("ours"):
        layout = RowLayout.of(CubeMesh(*shape), batch=batch, length=tokens)
        return tensor_parallel.layer(size, layout)
    return tensor_parallel.cube(size, batch * tokens, shape, device="cpu")


def _sent(way: str, width: int, batch: int, tokens: int) -> tuple[float, int]:
    """Bytes that this process receives, counted; and that the machine sends itself meanwhile."""
    step = _step(way, width, batch, tokens)
    step()
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    with Traffic() as traffic:
        step()
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    return traffic.bytes(), after - before


def real_table(report: Report, width: int, batch: int, tokens: int) -> None:
    """All ways in real processes, at a size that this machine can compute."""
    size = size_of(width, 8)
    best = str(plan_shape(8, size, layers=1, batch=batch, tokens=tokens)[0].shape)
    rows, cases = [], []
    for way, processes in (
        ("1-D", 8),
        ("1-D, rows cut", 8),
        ("2-D", 4),
        ("3-D 2x2x2", 8),
        ("ours 2x2x2", 8),
        (f"ours {best}", 8),
    ):
        measure.log(f"{way} in {processes} processes")
        answers = run(processes, _sent, way, width, batch, tokens)
        mean = sum(count for count, _ in answers) / processes
        wire = answers[0][1]
        if way.startswith("ours"):
            formula = layer_sum(Shape(*map(int, way.split()[1].split("x"))), size, batch, tokens)
        else:
            formula = summed(int(way[0]), processes, batch, width, tokens)
        assert _equal(mean, formula), (way, mean, formula)
        cases.append({"way": way, "processes": processes, "counted": mean, "sent": wire})
        rows.append(
            {
                "way": way,
                "processes": str(processes),
                "counted MB": mb(mean),
                "sum MB": mb(formula),
                "sent by all MB": mb(wire),
                "sent / counted": number(wire / (mean * processes)),
            }
        )
    title = f"Real processes: batch {batch}, {tokens} tokens, {width} wide"
    report.case(title, rows, {"rows": cases})


def main(argv: Sequence[str] | None = None) -> None:
    """Prints all tables."""
    parser = measure.arguments(__doc__, rounds=1)
    parser.add_argument("--tokens", type=int, default=131072, help="of the long sequence")
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--real-width", type=int, default=256, help="in real processes")
    settings = parser.parse_args(argv)
    report = Report(settings.json, **vars(settings))
    paper_table(report)
    ways_table(report)
    for processes in (8, 64):
        for width in settings.widths:
            long_table(report, processes, width, settings.tokens)
    real_table(report, settings.real_width, batch=8, tokens=128)


if __name__ == "__main__":
    main()
