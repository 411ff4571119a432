"""Where numbers go: TensorBoard and, the same scalars, one JSON object a line."""

import json
import resource
import sys
from pathlib import Path
from types import TracebackType

import torch
from torch.utils.tensorboard import SummaryWriter

from agentic.episodes import write_atomically


class MetricLog:
    """TensorBoard events and `metrics.jsonl` in a run directory.

    Args:
        run_dir: the run's folder.
        step: the step that the run starts from; what was logged later by an earlier, lost part of
            the run is taken out.
        config: the settings as text, shown on TensorBoard.
    """

    def __init__(self, run_dir: Path, step: int, config: str = "") -> None:
        path = run_dir / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
        self._lines = open(path, "a", encoding="utf-8")
        self._board = SummaryWriter(str(run_dir), purge_step=step + 1)
        if config:
            lines = (f"    {line}" for line in config.splitlines())  # preformatted
            self._board.add_text("config", "\n".join(lines))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Logs named numbers."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Logs a distribution, on TensorBoard only."""
        self._board.add_histogram(name, values.detach().float().cpu(), step)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._board.close()
        self._lines.close()


def _step_of(line: str) -> float:
    """A line's step; one cut off by a crash counts as never written."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


def peak_memory(device: torch.device) -> float:
    """Peak bytes so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
