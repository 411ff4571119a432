"""Which checkpoint a run goes on from, when the newest is not what was written."""

import itertools
from collections.abc import Callable
from pathlib import Path

from agentic.checkpoint import newest, step_files, verify
from agentic.seal import Damaged


def newest_sound(run_dir: Path, tell: Callable[[str], None]) -> Path:
    """The newest sound checkpoint; damaged ones that are newer are renamed.

    Their new names are of no step: they neither count among those that are kept, nor are they ever
    removed. Reads everything once, besides what `checkpoint.load` reads.

    Args:
        run_dir: of a run that has checkpoints.
        tell: takes a line, if one was damaged.

    Raises:
        ValueError: there is none, or the newest that is what was written is of another version;
            where none is sound, all are named and stay as they are.
    """
    newest(run_dir)
    damaged: list[tuple[Path, Damaged]] = []
    for path in reversed(step_files(run_dir)):
        try:
            verify(path)
        except Damaged as error:
            damaged.append((path, error))
            continue
        if damaged:
            told = "; ".join(f"{error}, now {_set_aside(place)}" for place, error in damaged)
            tell(f"{told}; going on from {path.name}")
        return path
    told = "; ".join(str(error) for _, error in damaged)
    raise ValueError(f"resume: {run_dir} has no sound checkpoint: {told}")


def _set_aside(path: Path) -> str:
    """Renames a checkpoint; its new name."""
    for count in itertools.count(1):
        name = f"{path.name}.damaged" if count == 1 else f"{path.name}.damaged{count}"
        if not path.with_name(name).exists():
            path.rename(path.with_name(name))
            return name
    raise AssertionError("unreachable")
