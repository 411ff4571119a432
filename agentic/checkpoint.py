"""Checkpoints: one versioned dict of plain types and tensors, written whole or not at all.

Keys: format, version, step, spec (ModelSpec), config (TrainConfig), data (number and quantiles of
the episodes), model, averaged (the weights that act), optimizer, torch_rng, best (the best rollout
so far, or None). The order of the data needs no state of its own: `ChainSampler` is a pure
function of seed and step.
"""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from agentic.episodes import write_atomically
from agentic.model import AgenticTransformer, ModelSpec
from agentic.strict import build

FORMAT = "agentic-transformer"
VERSION = 1
BEST = "best.pt"
KEYS = ("step", "spec", "config", "data", "model", "averaged", "optimizer", "torch_rng", "best")


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` with its format and version."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, **state}, buffer)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU; never unpickles anything but plain types and tensors.

    Raises:
        ValueError: no such file, not a checkpoint, or one of another version.
    """
    return load_with_digest(path)[0]


def load_with_digest(path: Path) -> tuple[dict[str, Any], str]:
    """The same, and the SHA-256 of the very bytes that were read."""
    if not path.is_file():
        raise ValueError(
            f"checkpoint: got {path}, which is no file; expected a checkpoint or a run directory"
        )
    content = path.read_bytes()
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
    return state, hashlib.sha256(content).hexdigest()


def step_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of an optimiser step lies."""
    return run_dir / "checkpoints" / f"step_{step:09d}.pt"


def step_files(run_dir: Path) -> list[Path]:
    """The run's resumable checkpoints, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step_*.pt"))


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
    """A file as it is; of a run directory the best checkpoint, else the newest.

    Raises:
        ValueError: there is none.
    """
    if not place.is_dir():
        return place
    best = place / "checkpoints" / BEST
    if best.is_file():
        return best
    files = step_files(place)
    if not files:
        raise ValueError(
            f"checkpoint: got {place}, expected a checkpoint file or a run directory with "
            f"checkpoints/{BEST} or checkpoints/step_*.pt"
        )
    return files[-1]


def restore_model(state: dict[str, Any], device: torch.device) -> AgenticTransformer:
    """The model of a checkpoint with its averaged weights, in evaluation mode.

    Raises:
        ValueError: the parameters do not fit the specification beside them.
    """
    model = AgenticTransformer(build(ModelSpec, state["spec"], "checkpoint.spec"))
    try:
        model.load_state_dict(state["averaged"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"checkpoint: parameters of another size ({reason})") from error
    return model.to(device).eval()
