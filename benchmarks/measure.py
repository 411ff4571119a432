"""Times that can be compared: pinned cores, interleaved rounds, the machine's own peak beside them.

Wall-clock seconds of a machine that does nothing else. Speeds drift by several per cent within
minutes (clock, neighbours on the same host), so that contenders take turns, and are compared by
the ratios inside a round.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """What every benchmark is told; the first line of `description` is shown by --help."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of every contender")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="new file for the results")
    return parser


def _new_file(text: str) -> str:
    """Found out before anything is measured."""
    if Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} exists; results are never overwritten")
    return text


TURN_SECONDS = 0.1
_ALLOWED = os.sched_getaffinity(0)


def pin(threads: int) -> None:
    """Leaves this process, and those it starts, `threads` threads on as many cores.

    The last cores of those allowed: interrupts tend to go to the first.

    Raises:
        ValueError: more threads than cores.
    """
    cores = sorted(_ALLOWED)
    if not 1 <= threads <= len(cores):
        raise ValueError(f"threads: got {threads}, expected 1 to {len(cores)}, the cores allowed")
    os.sched_setaffinity(0, cores[-threads:])
    torch.set_num_threads(threads)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, to the end of what it started on the device."""
    _wait(device)
    start = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - start


class Turns:
    """A short call that is timed in turns of as many calls as take about `TURN_SECONDS`.

    It is called three times at once, to be warm and to know how many.
    """

    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        self._call, self._device = call, device
        call()
        call()
        self._repeats = max(round(TURN_SECONDS / seconds(call, device)), 1)

    def __call__(self) -> float:
        """Seconds of one call, in the mean over a turn."""

        def turn() -> None:
            for _ in range(self._repeats):
                self._call()

        return seconds(turn, self._device) / self._repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every contender, which time themselves, in every round.

    Everyone takes one turn in a round; who begins changes from round to round. What has to be
    warm must be so before. `between` runs before every round.
    """
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        between()
        first = i % max(len(names), 1)
        for name in names[first:] + names[:first]:
            taken[name].append(contenders[name]())
            log(f"  round {i + 1} of {rounds}: {name} {taken[name][-1]:.4g} s")
    return taken


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over the rounds of time / time of `base`."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def log(message: str) -> None:
    """A line on stderr, so that a long run can be followed beside its results on stdout."""
    print(message, file=sys.stderr, flush=True)


def gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product, the most that this device gives here and now."""
    n, repeats = (8192, 3) if device.type == "cuda" else (1024, 5)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    times = [seconds(lambda: torch.mm(a, b), device) for _ in range(repeats)]
    return 2 * n**3 / statistics.median(times)


def read_rate(size: int = 2**29) -> float:
    """Bytes/s at which this CPU reads memory: the sum of a tensor far larger than its caches."""
    x = torch.ones(size // 4)
    x.sum()
    return size / min(seconds(x.sum, x.device) for _ in range(5))


def available_bytes(device: torch.device) -> int:
    """Memory that a case may take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
