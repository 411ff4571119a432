"""Transformer layers side by side: speed, memory and exactness of one forward and backward pass.

    python -m benchmarks.layers --lengths 4096 16384 --layers 1 3 --json results.json

In every round each variant takes one turn, so that "x ours" (median over the rounds of a variant's
time / ours) is free of drifts. Parameters have gradients to begin with, zeroed in place before the
clock starts; the input's is new in every pass. Useful FLOP count attention at its causal half and
nothing that is recomputed. Memory is what PyTorch's allocator hands out above parameters, their
gradients, input and output gradient, counted in a pass of its own; of JAX it is what XLA plans for
temporaries and results. The output is held during the backward pass, as a loss would. Errors are
max|difference| / max|value| against fp64 on at most 2048 tokens.
"""

import itertools
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.contenders import Case, Contender, JaxContender, TorchContender, draw, errors
from benchmarks.jax_client import JaxPeer
from benchmarks.peers import OURS, VARIANTS
from benchmarks.report import Report, mb, number

JAX = "jax ringattention"
PARITY_TOKENS = 2048


def compare(
    case: Case, variants: Sequence[str], rounds: int, jax: JaxPeer | None
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The table's rows, and all that was measured for them."""
    measure.log(case.title())
    measured: dict[str, dict[str, Any]] = {variant: {} for variant in variants}
    contenders = _ready(case, measured, jax)
    gemm: list[float] = []
    taken = measure.interleave(
        {name: contender.seconds for name, contender in contenders.items()},
        rounds,
        lambda: gemm.append(measure.gemm_rate(measure.DTYPES[case.precision], case.device)),
    )
    for name, contender in contenders.items():
        measure.log(f"  memory: {name}")
        peak, kept = contender.memory()
        middle = statistics.median(taken[name])
        rate = case.useful_flop / middle
        measured[name] |= {
            "seconds": middle,
            "rounds": taken[name],
            "gflop_per_second": rate / 1e9,
            "gemm_share": rate / statistics.median(gemm),
            "peak_bytes": peak,
            "kept_bytes": kept,
        }
        if OURS in contenders:
            measured[name]["time_over_ours"] = measure.ratio(taken[name], taken[OURS])
    ours = measured.get(OURS, {}).get("peak_bytes")
    rows = [_row(case, name, values, ours) for name, values in measured.items()]
    settings = {k: v for k, v in vars(case).items() if k != "device"}
    return rows, {**settings, "gemm_flop_per_second": gemm, "variants": measured}


def _ready(
    case: Case, measured: dict[str, dict[str, Any]], jax: JaxPeer | None
) -> dict[str, Contender]:
    """The variants that can run, warm; their errors, or why they cannot, go to `measured`."""
    short = replace(case, sequence=min(case.sequence, PARITY_TOKENS))
    inputs, short_inputs = draw(case), draw(short)
    expected = TorchContender("vanilla", replace(short, precision="fp64"), short_inputs).values()

    def enter(variant: str, at: Case, numbers: dict[str, Tensor]) -> Contender:
        if variant == JAX:
            assert jax is not None
            return JaxContender(jax, at, numbers)
        return TorchContender(variant, at, numbers)

    contenders: dict[str, Contender] = {}
    for variant, found in measured.items():
        available = measure.available_bytes(case.device)
        try:
            if variant == "vanilla" and case.score_bytes > available / 2:
                raise RuntimeError(
                    f"does not fit: about {case.score_bytes / 1e9:,.0f} GB of scores are more "
                    f"than half of the {available / 1e9:,.0f} GB available"
                )
            found |= errors(enter(variant, short, short_inputs).values(), expected)
            contender = enter(variant, case, inputs)
            measure.log(f"  warm-up: {variant} {contender.seconds():.4g} s")
            contenders[variant] = contender
        except RuntimeError as error:  # no memory, or whatever JAX has to say
            found["failure"] = str(error)
            measure.log(f"  {variant}: {error}")
    return contenders


def _row(case: Case, name: str, measured: dict[str, Any], ours: int | None) -> dict[str, str]:
    """A line of the table; what was not measured stays empty."""
    get = measured.get
    peak, kept, share = get("peak_bytes"), get("kept_bytes"), get("gemm_share")
    return {
        "variant": name,
        "seconds": get("failure", number(get("seconds"))).split(":")[0],
        "x ours": number(get("time_over_ours")),
        "GFLOP/s": number(get("gflop_per_second")),
        "of GEMM": "" if share is None else f"{share:.0%}",
        "peak MB": mb(peak),
        "BSD": number(peak and peak / case.unit),
        "peak x ours": number(peak / ours if peak and ours else None),
        "kept MB": mb(kept),
        "kept BSD": number(kept and kept / case.unit),
        "error y": f"{measured['y']:.0e}" if "y" in measured else "",
        "dx": f"{measured['dx']:.0e}" if "dx" in measured else "",
        "weights": f"{measured['parameters']:.0e}" if "parameters" in measured else "",
    }


def _shape(text: str) -> tuple[int, int]:
    """WIDTH/HEADS."""
    width, heads = map(int, text.split("/"))
    return width, heads


def main(argv: Sequence[str] | None = None) -> None:
    """Every combination of what is given, one table each."""
    parser = measure.arguments(__doc__, rounds=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[(128, 1)], metavar="D/H")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", nargs="+", choices=measure.DTYPES, default=["fp32"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jax-python", metavar="PYTHON", help="with jax-requirements.txt (CPU)")
    settings = parser.parse_args(argv)
    measure.pin(settings.threads)
    with ExitStack() as stack:
        jax, variants, about = None, list(settings.variants), {}
        if settings.jax_python:
            jax = stack.enter_context(JaxPeer(settings.jax_python, settings.threads))
            variants.append(JAX)
            about = {"jax": jax("info")}
        report = Report(settings.json, **vars(settings), **about)
        cases = itertools.product(
            settings.shapes, settings.precision, settings.layers, settings.lengths
        )
        for (width, heads), precision, layers, sequence in cases:
            case = Case(
                batch=settings.batch,
                sequence=sequence,
                layers=layers,
                width=width,
                heads=heads,
                precision=precision,
                device=torch.device(settings.device),
            )
            report.case(case.title(), *compare(case, variants, settings.rounds, jax))


if __name__ == "__main__":
    main()
