"""Where numbers go: TensorBoard and, the same scalars, one JSON object a line."""

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from agentic.console import say
from agentic.within import unfollowed

SKIPPED_CHAINS = "train/skipped_chains"  # the note of a step that was left out
_TENSORBOARD = "brain.Event:2"  # the version of its files
# Edges of a histogram's bins: a tenth apart, and fine near zero.
_EDGES = np.geomspace(1e-12, 1e20, 774)


class MetricLog:
    """TensorBoard events and `metrics.jsonl` in a run directory; a full disk leaves lines out.

    Args:
        run_dir: the run's folder.
        step: the step that the run starts from; what was logged later by an earlier, lost part of
            the run is taken out.
        config: the settings as text, shown on TensorBoard.
        lines: how many of `metrics.jsonl` belong to the run up to here, since the lost part may
            have logged more in this very step; None: all up to that step.
        tell: says that lines are left out.

    Attributes:
        lines: of `metrics.jsonl` so far.

    Raises:
        OSError: a file cannot be made.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        config: str = "",
        *,
        lines: int | None = None,
        tell: Callable[[str], None] = say,
    ) -> None:
        path = run_dir / "metrics.jsonl"
        kept = _kept(path, step, lines)
        self.lines = len(kept)
        self._scalars = _Growing(path, sum(map(len, kept)), tell)
        # TensorBoard reads files in the order of their names.
        second, part = divmod(time.time_ns(), 10**9)
        name = f"{second:010d}.{part:09d}.{socket.gethostname()}.{os.getpid()}"
        self._events = _Growing(run_dir / f"events.out.tfevents.{name}", 0, tell)
        self._board = RecordWriter(self._events)
        self._event(0, file_version=_TENSORBOARD)
        # TensorBoard forgets what it has read from this step on, and is told again what is kept.
        self._event(step, session_log=SessionLog(status=SessionLog.START))
        for values in map(json.loads, kept):
            if values.pop("step") == step:
                self._show(step, values)
        if config:
            lines_of = (f"    {line}" for line in config.splitlines())  # preformatted
            self._event(step, summary=summary.text("config", "\n".join(lines_of)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Logs named numbers."""
        self._show(step, values)
        self.note(step, values)

    def note(self, step: int, values: dict[str, Any]) -> None:
        """Logs a line of anything that JSON holds, in `metrics.jsonl` only."""
        self._scalars.step = step
        self.lines += self._scalars.write((json.dumps({"step": step, **values}) + "\n").encode())

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Logs a distribution, on TensorBoard only."""
        edges = np.concatenate([-_EDGES[::-1], [0.0], _EDGES])
        finite = values.detach().float().cpu()
        finite = finite[finite.isfinite()]
        if len(finite):
            self._event(step, summary=summary.histogram(name, finite.numpy(), edges))

    def _show(self, step: int, values: dict[str, Any]) -> None:
        """The numbers among the values, for TensorBoard."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._event(step, summary=summary.scalar(name, value))

    def _event(self, step: int, **content: Any) -> None:
        event = Event(step=step, wall_time=time.time(), **content)
        self._events.step = step
        self._board.write(event.SerializeToString())

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._events.close()
        self._scalars.close()


class _Growing:
    """A file that grows by whole records: one for which there is no room leaves no part behind.

    Args:
        path: of the file, which is made where there is none.
        size: bytes of it to keep.
        tell: is told of the first record that is left out, and in the end how many were: a disk at
            its limit takes some and leaves others.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, size: int, tell: Callable[[str], None]) -> None:
        self.path, self.size, self.tell = path, size, tell
        self.step = 0
        self._missing = 0
        self._file = open(path, "ab", buffering=0, opener=unfollowed)
        self._file.truncate(size)

    def write(self, record: bytes) -> bool:
        """Appends a record; whether that could be done."""
        try:
            self._append(record)
        except OSError as error:
            if self._missing == 0:
                self.tell(
                    f"step {self.step}: {self.path}: {error.strerror}; training goes on, and what "
                    "is to be logged is left out until it can be written again"
                )
            self._missing += 1
            return False
        return True

    def _append(self, record: bytes) -> None:
        written = 0
        try:
            while written < len(record):
                written += self._file.write(record[written:])
        except OSError:
            if written:
                self._file.truncate(self.size)
            raise
        self.size += len(record)

    def close(self) -> None:
        """Nothing is left to be written: there is no buffer."""
        self._file.close()
        if self._missing:
            self.tell(f"{self.path}: {self._missing:,} records are missing")


def _kept(path: Path, step: int, lines: int | None) -> list[bytes]:
    """The lines of a run up to a step, of which it has logged so many."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines(keepends=True)[:lines]:
        if not (line.endswith(b"\n") and _step_of(line) <= step):  # cut off by a crash, or later
            break
        kept.append(line)
    return kept


def _step_of(line: bytes) -> float:
    """A line's step; a damaged one's is beyond all."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def peak_memory(device: torch.device) -> float:
    """Peak bytes so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
