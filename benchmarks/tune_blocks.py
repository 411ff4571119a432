"""Block sizes of the blockwise layer, and whether the rule's are near the best.

    python -m benchmarks.tune_blocks --lengths 8192 32768 --json results.json

First rows of queries and of keys, with the rule's rows of the feed-forward; then those rows, with
the fastest of the former. "x rule" is the median over interleaved rounds of the time / that of
the rule's sizes; the fastest of many noisy times looks faster than it is.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks import measure
from benchmarks.contenders import Case, TorchContender, draw
from benchmarks.peers import OURS, Stack
from benchmarks.report import Report, mb, number
from parallel import BlockSettings, BlockSizes, LayerSize, TransformerLayer

QUERY = (256, 512, 1024, 2048, 4096)
KEY = (512, 1024, 2048, 4096)
ROWS = (128, 256, 512, 1024)
NEAR = 1.10  # the rule is good if no sizes are faster by more


class BlockContender(TorchContender):
    """Our layers with these block sizes."""

    def __init__(self, sizes: BlockSizes, case: Case, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__(OURS, case, inputs)
        assert isinstance(self.stack, Stack)
        for layer in self.stack.layers:
            assert isinstance(layer, TransformerLayer)
            layer.blocks = BlockSettings(**asdict(sizes))


def rule(case: Case) -> BlockSizes:
    """What is chosen where the user chooses nothing."""
    size = LayerSize(width=case.width, heads=case.heads, feed_forward=4 * case.width)
    fp32 = 4  # what x is under autocast, too
    return BlockSettings().sizes(size, batch=case.batch, sequence=case.sequence, element_bytes=fp32)


def tune(case: Case, rounds: int) -> tuple[list[dict[str, str]], dict[str, Any], str]:
    """Rows and measurements of all sizes, and the verdict on the rule."""
    chosen = rule(case)
    inputs = draw(case)
    measured: dict[BlockSizes, dict[str, Any]] = {}

    def run(grid: Iterable[BlockSizes]) -> None:
        """Measures the sizes of `grid` beside the rule's."""
        contenders = {s: BlockContender(s, case, inputs) for s in dict.fromkeys([chosen, *grid])}
        for contender in contenders.values():
            contender.seconds()
        names = {_name(sizes): contender.seconds for sizes, contender in contenders.items()}
        taken = measure.interleave(names, rounds)
        for sizes, contender in contenders.items():
            times = taken[_name(sizes)]
            measured.setdefault(
                sizes,
                {
                    "sizes": asdict(sizes),
                    "seconds": statistics.median(times),
                    "rounds": times,
                    "time_over_rule": measure.ratio(times, taken[_name(chosen)]),
                    "peak_bytes": contender.memory()[0],
                },
            )

    def best() -> BlockSizes:
        return min(measured, key=lambda sizes: measured[sizes]["time_over_rule"])

    short = [[n for n in grid if n <= case.sequence] for grid in (QUERY, KEY, ROWS)]
    run(replace(chosen, query=q, key=k) for q, k in itertools.product(*short[:2]))
    fastest = best()
    run(replace(fastest, rows=rows) for rows in short[2])
    loss = 1 / measured[best()]["time_over_rule"]
    verdict = (
        f"The rule's {_name(chosen)} takes {loss:.2f} x the time of the fastest, {_name(best())}: "
        f"{'within' if loss <= NEAR else 'NOT within'} {NEAR - 1:.0%}."
    )
    rows = [
        {
            "query": str(sizes.query),
            "key": str(sizes.key),
            "rows": str(sizes.rows),
            "seconds": number(values["seconds"]),
            "x rule": number(values["time_over_rule"]) + (" (rule)" if sizes == chosen else ""),
            "peak MB": mb(values["peak_bytes"]),
            "BSD": number(values["peak_bytes"] / case.unit),
        }
        for sizes, values in sorted(
            measured.items(), key=lambda item: tuple(asdict(item[0]).values())
        )
    ]
    return rows, {"rule_over_best": loss, "sizes": list(measured.values())}, verdict


def _name(sizes: BlockSizes) -> str:
    return f"{sizes.query}/{sizes.key}/{sizes.rows}"


def main(argv: Sequence[str] | None = None) -> None:
    """One table for every length."""
    parser = measure.arguments(__doc__, rounds=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", choices=measure.DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    settings = parser.parse_args(argv)
    measure.pin(settings.threads)
    report = Report(settings.json, **vars(settings))
    for sequence in settings.lengths:
        case = Case(
            sequence=sequence,
            layers=settings.layers,
            width=settings.width,
            heads=settings.heads,
            batch=settings.batch,
            precision=settings.precision,
            device=torch.device(settings.device),
        )
        measure.log(case.title())
        rows, measured, verdict = tune(case, settings.rounds)
        report.case(case.title(), rows, measured)
        report.note(verdict)


if __name__ == "__main__":
    main()
