"""Jobs as processes: some at a time, interrupted together, each with its time and memory noted."""

import ctypes
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from agentic.entries import check
from agentic.episodes import sweep, write_atomically
from agentic.interrupt import Interrupt
from agentic.jobs import Job
from agentic.results import last_return, read_entries
from agentic.texts import read_json

PYTHON = (sys.executable, "-m")  # runs the module that a job names
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_SESSION = ("seconds", "cpu_seconds", "peak_bytes", "code")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A job that has not left what it should."""

    job: Job
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Running:
    job: Job
    process: subprocess.Popen
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def command_line(job: Job, threads: int, prefix: Sequence[str] = PYTHON) -> str:
    """The job's command for a shell."""
    return f"OMP_NUM_THREADS={threads} " + shlex.join([*prefix, job.module, *job.settings])


def read_record(path: Path) -> list[dict[str, Any]]:
    """The sessions of a job: seconds, cpu_seconds, peak_bytes, code; none yet: an empty list.

    All are None of a session whose launcher was killed, and of one that still runs.

    Raises:
        ValueError: it is damaged, or another file.
    """
    if not path.is_file():
        return []
    try:
        content = read_json(path)
        check("file", content, {"sessions": [dict.fromkeys(_SESSION, (None, float))]})
        return [{name: session[name] for name in _SESSION} for session in content["sessions"]]
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}), expected a job's sessions") from error


def _write_record(path: Path, sessions: list[dict[str, Any]]) -> None:
    write_atomically(path, (json.dumps({"sessions": sessions}, indent=1) + "\n").encode())


class Launcher:
    """Runs jobs, and says on the console when one begins and ends.

    Signals of the terminal reach only this process, which passes them on: jobs save and end.

    Args:
        threads: of each job.
        console: to print on.
        prefix: what runs the module that a job names.
    """

    def __init__(self, threads: int, console: Console, prefix: Sequence[str] = PYTHON) -> None:
        self.threads, self.console, self.prefix = threads, console, prefix
        self.failures: list[Failure] = []
        self._took: dict[str, list[float]] = {}  # seconds of finished jobs, by `_kind`

    def run(self, jobs: Iterable[Job], at_once: int, interrupt: Interrupt) -> None:
        """Runs what is not finished, `at_once` at a time; what fails is added to `failures`.

        Raises:
            KeyboardInterrupt: asked twice; the jobs have been told so, and have ended.
        """
        jobs = list(jobs)
        waiting = [job for job in jobs if not job.finished()]
        number, total = 0, len(waiting)
        if len(jobs) > total:
            self._say(f"{len(jobs) - total} of {len(jobs)} jobs are finished already")
        self._took = {}
        for job in jobs:
            if job.finished() and (sessions := read_record(job.record)):
                self._took.setdefault(_kind(job), []).append(_seconds(sessions))
        running: list[_Running] = []
        told = False
        try:
            while running or (waiting and not interrupt.signal):
                if interrupt.signal and not told:
                    _pass_on(running, interrupt.signal)
                    self._say(f"{interrupt.signal.name}: {len(running)} jobs are saving and ending")
                    told = True
                while waiting and len(running) < at_once and not interrupt.signal:
                    job = waiting.pop(0)
                    number += 1
                    if job.finished():  # by another process meanwhile
                        self._say(f"[{number}/{total}] {job.name} is finished already")
                        continue
                    verb = "is taken up again" if read_record(job.record) else "begins"
                    began = self._start(job)
                    if began is not None:
                        running.append(began)
                        self._say(f"[{number}/{total}] {job.name} {verb}")
                for ended in [r for r in running if self._has_ended(r, bool(interrupt.signal))]:
                    running.remove(ended)
                    if ended.job.finished():
                        self._tell_end(ended, waiting, running, at_once)
                time.sleep(_POLL_SECONDS)
        finally:
            # Some are left where the user has asked twice, or the disk is full: none stays behind.
            _pass_on(running, signal.SIGTERM)
            for left_over in running:
                left_over.process.wait()

    def _start(self, job: Job) -> _Running | None:
        if job.needs in {failure.job.name for failure in self.failures}:
            self._fail(job, f"its data are missing: {job.needs} has failed")
            return None
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "ab") as log:
            try:
                # Held by the job through its output, even where this process is killed.
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._fail(job, "is running already, begun by another process")
                return None
            sweep(job.record.parent, job.record.name)
            unknown: dict[str, Any] = dict.fromkeys(_SESSION)
            _write_record(job.record, [*read_record(job.record), unknown])
            process = subprocess.Popen(
                [*self.prefix, job.module, *job.settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # Ctrl-C would come twice, and twice means: at once
                preexec_fn=_end_with_parent,
            )
        return _Running(job=job, process=process, began=time.monotonic())

    def _has_ended(self, running: _Running, interrupted: bool) -> bool:
        process, job = running.process, running.job
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = process.returncode = os.waitstatus_to_exitcode(status)
        session = {
            "seconds": running.seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "code": code,
        }
        _write_record(job.record, [*read_record(job.record)[:-1], session])
        if not (code == 0 and job.finished()) and not interrupted:
            self._fail(job, _reason(job.log, code))
        return True

    def _tell_end(
        self,
        ended: _Running,
        waiting: Sequence[Job],
        running: Sequence[_Running],
        at_once: int,
    ) -> None:
        job = ended.job
        self._took.setdefault(_kind(job), []).append(_seconds(read_record(job.record)))
        told = [f"{job.name} finished", spell_seconds(ended.seconds)]
        if isinstance(job.result, Path):
            told.append(f"last trial {last_return(read_entries(job.result)):.1f}")
        left = self._left(waiting, running) / at_once
        if left >= 1:  # those that run may take longer than any has
            told.append(f"about {spell_seconds(left)} left")
        self._say(", ".join(told))

    def _left(self, waiting: Sequence[Job], running: Sequence[_Running]) -> float:
        """Seconds of all that is left, by finished jobs of the same row, or of any."""
        overall = float(np.mean([s for values in self._took.values() for s in values]))
        expected = {kind: float(np.mean(values)) for kind, values in self._took.items()}
        left = sum(expected.get(_kind(job), overall) for job in waiting)
        for each in running:
            left += max(0.0, expected.get(_kind(each.job), overall) - each.seconds)
        return left

    def _fail(self, job: Job, reason: str) -> None:
        self.failures.append(Failure(job=job, reason=reason))
        self._say(f"{job.name} has failed: {reason}")

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False)


def _end_with_parent() -> None:
    """Has this process get SIGTERM when its parent is gone, even one that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def spell_seconds(seconds: float) -> str:
    """As `45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _pass_on(running: Sequence[_Running], number: int) -> None:
    for each in running:
        if each.process.returncode is None:
            os.kill(each.process.pid, number)  # send_signal would reap it, and its usage be lost


def _kind(job: Job) -> str:
    """Jobs that take about as long: of the same row, on any task."""
    section, _, *row = job.name.split("/")
    return "/".join([section, *row[:1]])


def _seconds(sessions: Sequence[dict[str, Any]]) -> float:
    return sum(session["seconds"] or 0.0 for session in sessions)


def _reason(log: Path, code: int) -> str:
    """The last line of the log, and how it ended."""
    lines = log.read_text(errors="replace").replace("\r", "\n").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "said nothing")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{said} ({how})"
