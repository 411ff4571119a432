"""One training step on a very long context: 32 trajectories of 1,000 steps are 128,000 tokens.

    python -m benchmarks.long_step --threads 2

Forward, backward and AdamW once, on random data, with its time, the peak of allocated bytes beside
the plan's, and the share of the machine's matrix-product rate.
"""

import resource
import time
from collections.abc import Sequence

import torch

from agentic.model import AgenticTransformer
from agentic.tokens import ACTION_READ_AT
from benchmarks import measure
from benchmarks.allocations import allocated
from benchmarks.whole_model import DEVICE, LAYERS, WIDTH, Training, draw_steps, make_spec
from parallel import LAYERS as KINDS


def useful_flop(sequence: int, rows: range) -> int:
    """Of one layer, forward and backward, nothing computed twice, for these rows of its output."""
    pairs = sum(rows) + len(rows)
    linear = 12 * sequence + 60 * len(rows)  # keys and values of all positions; the rest of rows
    return 14 * WIDTH * pairs + linear * WIDTH**2


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line for each quantity."""
    parser = measure.arguments(__doc__, rounds=1)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--episode-steps", type=int, default=1000)
    parser.add_argument("--kind", choices=list(KINDS), default="blockwise")
    parser.add_argument("--last", action="store_true", help="the loss counts the last trajectory")
    parser.add_argument("--precision", choices=list(measure.DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    settings = parser.parse_args(argv)
    measure.pin(settings.threads)
    spec = make_spec(settings.kind, settings.trajectories, settings.episode_steps)
    steps = settings.trajectories * settings.episode_steps
    S = steps * spec.tokens_per_step
    group = spec.tokens_per_step
    first = steps - settings.episode_steps if settings.last else 0
    read_at = range(first * group + ACTION_READ_AT[spec.tokens.layout], S, group)
    torch.manual_seed(0)
    training = Training(
        AgenticTransformer(spec), draw_steps(spec), first, settings.precision == "bf16"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    peak = allocated(training.step).peak
    taken = time.perf_counter() - started
    rate = measure.gemm_rate(measure.DTYPES[settings.precision], DEVICE)
    useful = (LAYERS - 1) * useful_flop(S, range(S)) + useful_flop(S, read_at)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{settings.kind}, {S:,} tokens, {LAYERS} layers, width {WIDTH}, {settings.precision}")
    print(f"step            {taken:.1f} s on {settings.threads} threads")
    print(f"peak allocated  {peak / 1e6:.0f} MB; resident {resident / 1024:.0f} MiB, before the ")
    print(f"                step {before / 1024:.0f} MiB")
    print(f"useful work     {useful / 1e12:.1f} TFLOP: {useful / taken / 1e9:.0f} GFLOP/s, ")
    print(
        f"                {useful / taken / rate:.0%} of the {rate / 1e9:.0f} of a matrix product"
    )


if __name__ == "__main__":
    main()
