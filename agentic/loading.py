"""From episode files to a store: what is chosen, ingested, relabelled, and what is left out."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from agentic.config import DataConfig
from agentic.episodes import buffer_dir
from agentic.flat import FlatStore, store_path
from agentic.ingest import ingest
from agentic.relabel import rewards
from agentic.selection import Selection, parse_all
from agentic.sources import Source, SourceFile, archive_path, check_level, find_source
from agentic.store import EpisodeStore, Part
from envs import TaskSpec

DEFAULT = DataConfig()


def load_store(
    data_dir: str | Path,
    specs: tuple[TaskSpec, ...],
    algorithms: tuple[str, ...],
    data: DataConfig = DEFAULT,
    tell: Callable[[str], None] = lambda text: None,
) -> EpisodeStore:
    """The chosen episodes of the tasks' domain; ingests and relabels what is not yet.

    Args:
        data_dir: holds `<domain>/<algorithm>/buffer/*.npz` or `<domain>/<algorithm>.zip`.
        specs: tasks of one domain.
        algorithms: see `agentic.selection`.
        data: what to do with unfit files, and how.
        tell: says what is going on.

    Raises:
        ValueError: an algorithm has no episodes, or a file is unfit; says what was looked for, or
            names the file.
    """
    parts = [_part(Path(data_dir), choice, specs, data, tell) for choice in parse_all(algorithms)]
    return EpisodeStore(specs, tuple(parts))


def _part(
    data_dir: Path,
    selection: Selection,
    specs: tuple[TaskSpec, ...],
    data: DataConfig,
    tell: Callable[[str], None],
) -> Part:
    spec, name = specs[0], selection.algorithm
    base = data_dir if data.store_dir is None else Path(data.store_dir)
    path = store_path(base, spec.domain, name)
    workers = (os.cpu_count() or 1) if data.workers is None else data.workers
    source = find_source(data_dir, spec.domain, name)
    if source is None:
        check_level(data_dir)
        raise _nothing(buffer_dir(data_dir, spec.domain, name), spec)
    beside = archive_path(data_dir, spec.domain, name)
    if source.place != beside and beside.is_file():
        tell(f"{source.place} is read, {beside} beside it is not")
    whole, lengths = _whole_episodes(source, spec, data)
    wanted = selection.take(whole, spec.episode_steps)
    flat = ingest(
        source,
        wanted,
        path,
        spec,
        base=base,
        on_bad_file=data.on_bad_file,
        workers=workers,
        tell=tell,
    )
    names = [file.name for file in wanted]
    rows = np.array([flat.rows[n] for n in names if n in flat.rows])
    chosen = set(names)
    reasons = tuple(r.reason for r in flat.index.rejected if r.name in chosen)
    if len(rows) == 0:
        raise ValueError(
            f"algorithms: none of the {len(names)} files of {name} is sound: {reasons[0]}"
        )
    return part_of(
        flat,
        rows,
        specs,
        data.relabel,
        base=base,
        workers=workers,
        other_lengths=lengths,
        rejected=reasons,
    )


def part_of(
    flat: FlatStore,
    rows: np.ndarray,
    specs: tuple[TaskSpec, ...],
    relabel: str,
    *,
    base: Path | None = None,
    workers: int = 1,
    other_lengths: dict[int, int] | None = None,
    rejected: tuple[str, ...] = (),
) -> Part:
    """Rows of a flat store with the rewards of some tasks, which are computed if need be.

    Nothing is written where a link leads out of `base`, or where that is None of the store.
    """
    return Part(
        name=flat.index.algorithm,
        rows=rows,
        observation=flat.arrays["observation"],
        action=flat.arrays["action"],
        moments=flat.arrays["moments"],
        rewards=tuple(rewards(flat, spec, relabel, workers, base) for spec in specs),
        other_lengths=other_lengths or {},
        rejected=rejected,
        flat=flat,
    )


def _whole_episodes(
    source: Source, spec: TaskSpec, data: DataConfig
) -> tuple[list[SourceFile], dict[int, int]]:
    """The files of the task's length, and how many there are of others.

    Raises:
        ValueError: there are none, or of others where those are not to be skipped.
    """
    whole = [file for file in source.files if file.steps == spec.episode_steps]
    others = [file for file in source.files if file.steps != spec.episode_steps]
    if not whole or (others and data.on_other_length == "error"):
        advice = (
            "data.on_other_length=skip leaves out such files" if whole else "no file has so many"
        )
        raise ValueError(
            f"{source.path(others[0])}: {others[0].steps} steps, expected {spec.episode_steps} for "
            f"{spec.domain}; {advice} ({len(others):,} of {len(source.files):,} here have not)"
        )
    return whole, dict(Counter(file.steps for file in others))


def _nothing(directory: Path, spec: TaskSpec) -> ValueError:
    return ValueError(
        f"data_dir: looked for {directory}/<name>_<index>_{spec.episode_steps}.npz or "
        f"{directory.parent}.zip, expected ExoRL episodes, got {_what_is_there(directory)}"
    )


def _what_is_there(directory: Path) -> str:
    """The nearest existing folder on the way to `directory`, and what it holds."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    names = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
    more = ["..."] if len(names) > 8 else []
    return f"{place} with {', '.join(names[:8] + more) or 'nothing in it'}"
