"""Checkpoints: one versioned dict of plain types and tensors, written whole or not at all.

Keys: format, version, step, spec (ModelSpec), config (TrainConfig), data (number and quantiles of
the episodes), model, averaged (the weights that act), optimizer, best (the best rollout
so far, or None). The order of the data needs no state of its own: `ChainSampler` is a pure
function of seed and step.

One process writes a file, `step_000000300.pt`. A cube of several writes a directory,
`step_000000300`, with the tensors in parts (`sharded`) and the rest in its `state.pt`, which makes
it a checkpoint: it is written last, replaced in one go, and removed first.
"""

import hashlib
import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from agentic import episodes, sharded
from agentic.episodes import write_atomically
from agentic.layout import Layout, changed
from agentic.methods import fresh_model
from agentic.model import InUnits, ModelSpec
from agentic.strict import build
from parallel import shards
from parallel.mesh import CUBE

FORMAT = "agentic-transformer"
FOLDER = "checkpoints"  # of a run directory
VERSION = 1
BEST = "best.pt"
STATE = "state.pt"  # what makes a directory a checkpoint
STEP = "step_" + 9 * "[0-9]"
KEYS = ("step", "spec", "config", "data", "model", "averaged", "optimizer", "best")


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


def load(path: Path, layout: Layout | None = None) -> dict[str, Any]:
    """Reads a file or a directory; never unpickles anything but plain types and tensors.

    Args:
        path: of a checkpoint that any number of processes has written.
        layout: of this process, which then gets its parts; None: the whole, on the CPU.

    Raises:
        ValueError: no such checkpoint, a damaged one, one of another version or of another model.
    """
    return _filled(path, _plain(path, _content(path)), layout)


def load_with_digest(path: Path) -> tuple[dict[str, Any], str]:
    """The whole, and the SHA-256 of the bytes that were read.

    Of a directory: of `state.pt` and its other files, one after the other by name.
    """
    content = _content(path)
    digest = hashlib.sha256(content)
    state = _plain(path, content)
    if sharded.TENSORS in state:
        for part in shards.files(sharded.tensors_of(path, state)):
            with open(part, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return _filled(path, state, None), digest.hexdigest()


def exists(path: Path) -> bool:
    """Whether a whole checkpoint is there."""
    return path.is_file() or (path / STATE).is_file()


def remove(path: Path) -> None:
    """Removes a checkpoint, or what is left of a directory."""
    if path.is_dir():
        (path / STATE).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink()


def sweep(run_dir: Path) -> None:
    """Removes what killed saves have left; for whoever alone writes there."""
    folder = run_dir / FOLDER
    for place in (folder, *filter(Path.is_dir, folder.iterdir())):
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
    """The checkpoint to resume from.

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


def restore_model(state: dict[str, Any], device: torch.device) -> InUnits:
    """The model of a checkpoint with its averaged weights, in evaluation mode.

    Raises:
        ValueError: the parameters do not fit the specification beside them.
    """
    model = fresh_model(build(ModelSpec, state["spec"], "checkpoint.spec"))
    try:
        model.load_state_dict(state["averaged"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"checkpoint: parameters of another size ({reason})") from error
    return model.to(device).eval()


def _directory(path: Path) -> Path:
    """Where several processes put what one puts into the file `path`."""
    return path.with_name(path.name.removesuffix(".pt"))


def _save_file(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, _packed(state))
    _tidy(path, _directory(path))


def _save_directory(path: Path, state: dict[str, Any], layout: Layout) -> None:
    directory = _directory(path)

    def commit(rest: dict[str, Any]) -> None:
        write_atomically(directory / STATE, _packed(rest))
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


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _content(path: Path) -> bytes:
    if not exists(path):
        raise ValueError(
            f"checkpoint: got {path}, which is neither a file nor a directory with {STATE}; "
            "expected a checkpoint or a run directory"
        )
    return (path / STATE if path.is_dir() else path).read_bytes()


def _plain(path: Path, content: bytes) -> dict[str, Any]:
    """What the file says, or `state.pt` of the directory."""
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        # torch's own words would advise to unpickle it.
        raise ValueError(
            f"checkpoint: {path} is damaged or not a checkpoint ({type(error).__name__})"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} is not a checkpoint of this software")
    if state.get("version") != VERSION:
        raise ValueError(
            f"checkpoint: {path} has version {state.get('version')}, expected {VERSION}"
        )
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ValueError(f"checkpoint: {path} lacks {missing}")
    if path.is_dir() != (sharded.TENSORS in state):
        raise ValueError(f"checkpoint: {path} is only a part of one, expected its directory")
    return state


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
