"""Ingest: an algorithm's npz files, checked once, into a flat store that opens at once.

Files are read by several processes, each writing its own rows. The index names a row only when the
row is on disk, so whatever kills an ingest, the next one goes on behind the last row named.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from agentic.episodes import Episode, parse_episode, sweep
from agentic.flat import INDEX, FlatStore, FlatWriter, Index, read_index, row_bytes
from agentic.ledger import Ledger, missing
from agentic.locks import locked
from agentic.sources import Source, SourceFile
from agentic.within import unfollowed, within
from envs import TaskSpec

JOB_FILES = 16  # read by one process in one go
SAVE_SECONDS = 5.0  # between two indexes: at most so much is read again after a kill
SMALL = 64  # so few files are read in this process
NOTE_BYTES = 2**16  # most of collect.json
CLEAR_OF = 2**28  # bytes that an ingest leaves free on the disk


@dataclass(frozen=True, kw_only=True)
class Job:
    """Files for one process, with the rows that they go to."""

    source: Source  # without its list of files
    path: Path
    spec: TaskSpec
    files: tuple[tuple[SourceFile, int], ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one file: a checksum, or the reason why not."""

    file: SourceFile
    row: int
    checksum: int = 0
    reason: str | None = None
    lasting: bool = True  # the reason is the file's content, so that it need not be read again


def ingest(
    source: Source,
    wanted: Sequence[SourceFile],
    path: Path,
    spec: TaskSpec,
    *,
    on_bad_file: str,
    workers: int,
    tell: Callable[[str], None],
    base: Path | None = None,
) -> FlatStore:
    """Brings the store at `path` up to date with the wanted files; reads new and changed ones only.

    Args:
        source: where the files are.
        wanted: those that the store must hold afterwards; others that it holds stay.
        path: folder of the store.
        spec: a task of the domain.
        on_bad_file: `error` ends at the first file that holds no sound episode, `skip` goes on.
        workers: reading processes; fewer than 2 read in this one.
        tell: says what is going on.
        base: out of which nothing is written where a link leads there; None: out of `path`. A
            store that has all that is wanted is only read, wherever it is.

    Raises:
        ValueError: a bad file, a damaged store, a link, or too little space on the disk.
    """
    index = read_index(path, spec)
    if index is None or not index.finished or missing(index, wanted):
        within(path, base or path, "data.store_dir")
        try:
            path.mkdir(parents=True, exist_ok=True)
            open(path / ".lock", "a", opener=unfollowed).close()
        except OSError as error:
            raise ValueError(
                f"data.store_dir: cannot write {path} ({error.strerror}), expected a place for "
                "ingested episodes"
            ) from error
        waiting = partial(tell, f"waiting for another process that works in {path}")
        with locked(path, waiting) as alone:
            if alone:
                sweep(path, INDEX)
            index = _update(source, wanted, path, spec, on_bad_file, workers, tell)
    if on_bad_file == "error":
        names = {file.name for file in wanted}
        for rejected in index.rejected:
            if rejected.name in names:
                raise ValueError(_advice(rejected.reason))
    return FlatStore(path, index, spec)


def _advice(reason: str) -> str:
    return f"{reason}; data.on_bad_file=skip goes on without such files"


def _update(
    source: Source,
    wanted: Sequence[SourceFile],
    path: Path,
    spec: TaskSpec,
    on_bad_file: str,
    workers: int,
    tell: Callable[[str], None],
) -> Index:
    index = read_index(path, spec)  # again: another process may have done the work meanwhile
    if index is None:
        index = Index(
            domain=spec.domain, algorithm=source.algorithm, source=str(source.place), note=None
        )
    elif index.names:
        FlatStore(path, index, spec)  # what is there must be whole before it grows
    todo = missing(index, wanted)
    ledger = Ledger(index, todo)
    # Always new rows: others may be mapped by a training that runs now.
    rows = range(len(index.names), len(index.names) + len(todo))
    size = len(index.names) + len(todo)
    if todo:
        tell(_estimate(source, todo, path, spec, workers))
    with FlatWriter(path, spec) as writer:
        ledger.save(path)  # unfinished from here on; rows of changed files are out of use
        writer.resize(size)
        saved = time.monotonic()
        try:
            with tqdm(
                total=len(todo),
                desc=f"reading {spec.domain}/{source.algorithm}",
                unit="ep",
                disable=None,
                leave=False,
            ) as bar:
                for outcome in _read(
                    source, path, spec, list(zip(todo, rows, strict=True)), workers
                ):
                    bar.update()
                    if outcome.reason is None:
                        ledger.enter(outcome.file, outcome.row, outcome.checksum)
                    else:
                        ledger.reject(outcome.file, outcome.reason, lasting=outcome.lasting)
                        if on_bad_file == "error":
                            raise ValueError(_advice(outcome.reason))
                    if time.monotonic() - saved > SAVE_SECONDS:
                        writer.sync()
                        ledger.save(path)
                        saved = time.monotonic()
        finally:
            writer.sync()
            ledger.save(path)
        return ledger.save(path, finished=True, source=str(source.place), note=_note(source))


def _note(source: Source) -> str | None:
    """How the episodes were collected, where we did it ourselves."""
    note = source.place.parent / "collect.json"
    if not (source.place.is_dir() and note.is_file()):
        return None
    with open(note, "rb") as file:
        content = file.read(NOTE_BYTES + 1)
    if len(content) > NOTE_BYTES:
        raise ValueError(f"data_dir: {note} is longer than {NOTE_BYTES:,} bytes, a note is not")
    return content.decode(errors="replace")


def _estimate(
    source: Source, todo: list[SourceFile], path: Path, spec: TaskSpec, workers: int
) -> str:
    """What the ingest will take, from a few files and the free space.

    Raises:
        ValueError: the disk has too little.
    """
    needed, free = len(todo) * row_bytes(spec), shutil.disk_usage(path).free
    if needed > free - CLEAR_OF:
        raise ValueError(
            f"data.store_dir: {path} needs {needed / 1e9:,.1f} GB for {len(todo):,} episodes, got "
            f"{free / 1e9:,.1f} GB of free space, expected {CLEAR_OF / 1e9:,.1f} GB to spare"
        )
    few = todo[:: -(-len(todo) // 4)]
    began = time.monotonic()
    with source.opened() as open_file:
        for file in few:
            _episode(source, open_file, file, 0, spec)
    processes = workers if workers > 1 and len(todo) > SMALL else 1
    seconds = (time.monotonic() - began) / len(few) * len(todo) / processes
    return (
        f"reading {len(todo):,} files of {source.place} once "
        f"({sum(file.size for file in todo) / 1e6:,.0f} MB into {needed / 1e6:,.0f} MB at {path}), "
        f"about {seconds:,.0f} s with {processes} process{'es' * (processes > 1)}"
    )


def _read(
    source: Source, path: Path, spec: TaskSpec, files: list[tuple[SourceFile, int]], workers: int
) -> Iterator[Outcome]:
    """Reads the files into their rows; outcomes come in the order in which they are known.

    Raises:
        OSError: the disk is full.
        ChildProcessError: a reading process was killed.
    """
    place = replace(source, files=())
    jobs = [
        Job(source=place, path=path, spec=spec, files=tuple(files[i : i + JOB_FILES]))
        for i in range(0, len(files), JOB_FILES)
    ]
    if workers < 2 or len(files) <= SMALL:
        for job in jobs:
            yield from work(job)
        return
    # Spawned: a fork would copy the locks of this process's threads, held or not.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_work)
    try:
        waiting: set[Future[list[Outcome]]] = set()
        for job in jobs:
            waiting.add(_submit(pool, job))
            if len(waiting) > 2 * workers:  # the list of jobs is not copied into the pool at once
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        for future in waiting:
            yield from future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"a process reading {source.place} was killed; what was read before is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, job: Job) -> Future[list[Outcome]]:
    """Ctrl-C is for this process alone: those that are started here inherit that it is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(work, job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(job: Job) -> list[Outcome]:
    """Reads, checks and writes one job's files."""
    outcomes = []
    with FlatWriter(job.path, job.spec) as writer, job.source.opened() as open_file:
        for file, row in job.files:
            found = _episode(job.source, open_file, file, row, job.spec)
            if isinstance(found, Episode):
                found = Outcome(file=file, row=row, checksum=writer.write(row, found))
            outcomes.append(found)
    return outcomes


def _episode(
    source: Source,
    open_file: Callable[[SourceFile], BinaryIO],
    file: SourceFile,
    row: int,
    spec: TaskSpec,
) -> Episode | Outcome:
    """The file's episode, or the outcome that there is none."""
    name = source.path(file)
    try:
        with open_file(file) as content:
            return parse_episode(content, name, spec)
    except ValueError as error:
        return Outcome(file=file, row=row, reason=str(error))
    except (OSError, MemoryError) as error:
        reason = f"{name}: cannot be read now ({error})"
        return Outcome(file=file, row=row, reason=reason, lasting=False)


def _begin_work() -> None:
    """A reading process ends when the ingest is gone."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
