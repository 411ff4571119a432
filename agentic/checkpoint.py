"""Checkpoints: one versioned dict of plain types and tensors, written whole or not at all.

Keys: format, version, step, spec (ModelSpec), config (TrainConfig), data (number and quantiles of
the episodes), model, averaged (the weights that act), optimizer, best (the best rollout
so far, or None), and where the clocks and the data stand (`schema`).

One process writes a file, `step_000000300.pt`. A cube of several writes a directory,
`step_000000300`, with the tensors in parts (`sharded`) and the rest in its `state.pt`, which makes
it a checkpoint: it is written last, replaced in one go, and removed first.

A file has its checksum inside (`seal`), and `state.pt` also those of the files beside it; they are
compared before anything else is done with what was read.
"""

import hashlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentic import episodes, migrations, plain, schema, sharded
from agentic.episodes import write_atomically
from agentic.layout import Layout, changed
from agentic.methods import fresh_model
from agentic.migrations import VERSION
from agentic.model import InUnits, ModelSpec
from agentic.seal import Damaged, is_sealed, sealed
from agentic.strict import build
from parallel.mesh import CUBE

FORMAT = "agentic-transformer"
FOLDER = "checkpoints"  # of a run directory
BEST = "best.pt"
STATE = "state.pt"  # what makes a directory a checkpoint
STEP = "step_" + 9 * "[0-9]"
_LONGEST = 500  # characters of a reason; a foreign file can hold texts of any length


def save(path: Path, state: dict[str, Any], layout: Layout | None = None) -> None:
    """Writes `state` with its format and version; replaces an older one of the same name.

    Args:
        path: the file. A cube of several processes writes the directory of that name without
            `.pt`; all of them call it.
        state: with the parts of this process where there is a layout.
        layout: None: this process has the whole model.

    Raises:
        OSError: it cannot be written; the older one is as it was.
        PeerLost: another process is gone.
    """
    state = {"format": FORMAT, "version": VERSION, **state}
    if layout is None:
        _save_file(path, state)
        return
    mesh = layout.mesh
    if mesh.place["dp"] > 0:
        return  # the first copy of the cube writes for all
    if mesh.sizes[CUBE] > 1:
        _save_directory(path, state, layout)
    else:
        _save_file(path, changed(state, layout.whole))


def load(
    path: Path, layout: Layout | None = None, model: nn.Module | None = None
) -> dict[str, Any]:
    """Reads a file or a directory; never unpickles anything but plain types and tensors.

    Each of several processes compares the checksums of all files for itself: it reads the whole,
    of which it keeps its parts.

    Args:
        path: of a checkpoint that any number of processes has written.
        layout: of this process, which then gets its parts; None: the whole, on the CPU.
        model: that the state is for, with this process's parts; None: any.

    Raises:
        Damaged: it is not what was written.
        ValueError: no such checkpoint, one of another version or of another model.
    """
    state = _checked(path, _content(path))
    _check_files(path, state)
    state = _filled(path, state, layout)
    if model is not None:
        try:
            schema.check_fit(state, model)
        except ValueError as error:
            raise ValueError(f"checkpoint: {path}: {_short(error)}") from error
    return state


def load_with_digest(path: Path) -> tuple[dict[str, Any], str]:
    """The whole, which fits its own specification, and the SHA-256 of the bytes that were read.

    Of a directory: of `state.pt` and its other files, one after the other by name.

    Raises:
        Damaged: it is not what was written; says which other checkpoint its run has.
        ValueError: as `load`.
    """
    content = _content(path)
    digest = hashlib.sha256(content)
    try:
        state = _checked(path, content)
        _check_files(path, state, digest.update)
    except Damaged as error:
        others = [place for place in step_files(path.parent.parent) if place != path]
        there = f"; the newest other one is {others[-1]}" if others else ""
        raise Damaged(f"{error}{there}") from error
    state = _filled(path, state, None)
    check_fit(f"checkpoint: {path}", state)
    return state, digest.hexdigest()


def verify(path: Path) -> None:
    """Raises Damaged, or another ValueError, where `load` would; makes nothing of the values."""
    _check_files(path, _checked(path, _content(path)))


def read(content: bytes, name: str) -> dict[str, Any]:
    """The state that a file holds, checked and in today's form.

    Args:
        content: of a file or of a directory's `state.pt`, whoever made it. Takes no more memory
            than a few times its length.
        name: for messages.

    Raises:
        Damaged: it is not what was written.
        ValueError: it is not a checkpoint that this version of the software knows.
    """
    try:
        whole = is_sealed(content)
    except Damaged as error:
        raise Damaged(f"checkpoint: {name} is damaged: {error}") from error
    try:
        state = plain.load(content)
    except ValueError as error:
        told = f"checkpoint: {name} is damaged or not a checkpoint ({_short(error)})"
        raise (ValueError if whole else Damaged)(told) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {name} is not a checkpoint of this software")
    try:
        older = state.get("version") == 1
        state = migrations.state(state)
    except ValueError as error:
        raise ValueError(f"checkpoint: {name} {_short(error)}") from error
    if not older and not whole:
        raise Damaged(f"checkpoint: {name} is damaged: it has no checksum")
    missing = [key for key in schema.KEYS if key not in state]
    if missing:
        raise ValueError(f"checkpoint: {name} lacks {missing}")
    try:
        return schema.check(state)
    except ValueError as error:
        raise ValueError(f"checkpoint: {name}: {_short(error)}") from error


def packed(state: dict[str, Any]) -> bytes:
    """What a file holds; `read` reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return sealed(buffer)


def exists(path: Path) -> bool:
    """Whether a whole checkpoint is there."""
    return path.is_file() or (path / STATE).is_file()


def remove(path: Path) -> None:
    """Removes a checkpoint, or what is left of a directory; of a link the link."""
    if path.is_dir() and not path.is_symlink():
        (path / STATE).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink()


def sweep(run_dir: Path) -> None:
    """Removes what killed saves have left; for whoever alone writes there."""
    folder = run_dir / FOLDER
    for place in (folder, *filter(Path.is_dir, folder.iterdir())):
        if place == folder or not place.is_symlink():
            episodes.sweep(place)
    _drop_unfinished(folder)


def step_path(run_dir: Path, step: int) -> Path:
    """Where one process puts the checkpoint of an optimiser step."""
    return run_dir / FOLDER / f"step_{step:09d}.pt"


def step_files(run_dir: Path) -> list[Path]:
    """The run's resumable checkpoints, files and directories, oldest first."""
    folder = run_dir / FOLDER
    places = [*folder.glob(STEP), *folder.glob(f"{STEP}.pt")]
    return sorted(filter(exists, places), key=lambda path: path.stem)


def newest(run_dir: Path) -> Path:
    """The newest one, sound or not; see `recovery.newest_sound`.

    Raises:
        ValueError: the run has none.
    """
    files = step_files(run_dir)
    if not files:
        raise ValueError(f"resume: got {run_dir}, expected a run with checkpoints/step_*.pt")
    return files[-1]


def find(place: Path) -> Path:
    """A checkpoint as it is; of a run directory the best one, else the newest.

    Raises:
        ValueError: there is none.
    """
    if exists(place) or not place.is_dir():
        return place
    best = place / FOLDER / BEST
    found = [*step_files(place), *filter(exists, (_directory(best), best))]
    if not found:
        raise ValueError(
            f"checkpoint: got {place}, expected a checkpoint or a run directory with "
            f"checkpoints/{BEST} or checkpoints/step_*.pt"
        )
    return found[-1]


def check_fit(name: str, state: dict[str, Any]) -> None:
    """Raises ValueError where weights or moments are not those of the specification beside them.

    Args:
        name: that the message begins with.
        state: whole, as `read` or `load` returns it.
    """
    try:
        schema.check_fit(state, schema.empty_model(state))
    except ValueError as error:
        raise ValueError(f"{name}: {_short(error)}") from error


def restore_model(state: dict[str, Any], device: torch.device) -> InUnits:
    """The model of a checkpoint with its averaged weights, in evaluation mode.

    Raises:
        ValueError: the parameters do not fit the specification beside them.
    """
    check_fit("checkpoint", state)
    model = fresh_model(build(ModelSpec, state["spec"]))
    model.load_state_dict(state["averaged"])
    return model.to(device).eval()


def _directory(path: Path) -> Path:
    """Where several processes put what one puts into the file `path`."""
    return path.with_name(path.name.removesuffix(".pt"))


def _save_file(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, packed(state))
    _tidy(path, _directory(path))


def _save_directory(path: Path, state: dict[str, Any], layout: Layout) -> None:
    directory = _directory(path)
    if layout.mesh.place[CUBE] == 0 and directory.is_symlink():
        directory.unlink()  # replaced, and not written behind it

    def commit(rest: dict[str, Any]) -> None:
        write_atomically(directory / STATE, packed(rest))
        for old in directory.iterdir():
            if old.name not in (STATE, rest[sharded.TENSORS]):
                remove(old)
        _tidy(directory, path)

    sharded.write(directory, state, layout, commit)


def _tidy(path: Path, other: Path) -> None:
    """Removes the other form of this checkpoint, and what killed saves have left beside it."""
    if exists(other) and other.is_dir() != path.is_dir():
        remove(other)
    _drop_unfinished(path.parent)


def _drop_unfinished(folder: Path) -> None:
    """Removes directories of a step that have no state yet, or no more."""
    for place in folder.glob(STEP):
        if not exists(place):
            remove(place)


def _content(path: Path) -> bytes:
    if not exists(path):
        raise ValueError(
            f"checkpoint: got {path}, which is neither a file nor a directory with {STATE}; "
            "expected a checkpoint or a run directory"
        )
    return (path / STATE if path.is_dir() else path).read_bytes()


def _checked(path: Path, content: bytes) -> dict[str, Any]:
    """What the file says, or `state.pt` of the directory."""
    state = read(content, str(path))
    if path.is_dir() != (sharded.TENSORS in state):
        raise ValueError(f"checkpoint: {path} is only a part of one, expected its directory")
    return state


def _check_files(
    path: Path, state: dict[str, Any], seen: Callable[[bytes], None] = lambda _: None
) -> None:
    """Compares the files beside a directory's state with it."""
    if sharded.TENSORS in state:
        try:
            sharded.check(path, state, seen)
        except Damaged as error:
            raise Damaged(f"checkpoint: {error}") from error
        except ValueError as error:
            raise ValueError(f"checkpoint: {error}") from error


def _short(error: ValueError) -> str:
    """What it says, in one line."""
    return " ".join(str(error).split())[:_LONGEST]


def _filled(path: Path, state: dict[str, Any], layout: Layout | None) -> dict[str, Any]:
    """The state with values, or with this process's parts of them."""
    if layout is not None:
        missing = [parameter for parameter in layout.cuts if parameter not in state["model"]]
        if missing:
            raise ValueError(f"checkpoint: {path} lacks the parameters {missing}")
    alone = layout is None or layout.mesh.sizes[CUBE] == 1
    try:
        if sharded.TENSORS in state:
            state = sharded.read(path, state, None if alone else layout)
            if not alone:
                return state
        return state if layout is None else changed(state, layout.part)
    except ValueError as error:
        raise ValueError(f"checkpoint: {error}") from error
