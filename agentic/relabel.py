"""A task's rewards for stored episodes, computed once per store and kept beside it.

Two modes. `with_control` gives the reward that the simulator gave, or would have given, to the
action taken. `state_only` is ExoRL's own relabelling: it restores a state without its control, so
a reward that charges for large actions (cartpole's) comes out too high.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from agentic import hindsight
from agentic.episodes import Episode, write_atomically
from agentic.flat import FlatStore, MappedArray
from envs import TaskSpec, reward

MODES = ("with_control", "state_only")
FORMULAS = 1  # to be raised when a reward's formula changes: rewards on disk are then made anew
BATCH_STEPS = 64_000  # relabelled in one go


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Rewards of all rows of a store for one task.

    Attributes:
        reward: (R, T) float32, r_t earned by a_t.
        return_to_go: (R, T) float32, undiscounted, of the episode itself.
        returns: (R,) float64, sums of `reward`.
        release: gives back the memory of what has been read.
    """

    reward: np.ndarray
    return_to_go: np.ndarray
    returns: np.ndarray
    release: Callable[[], None] = lambda: None


def relabel(spec: TaskSpec, episode: Episode, mode: str = "with_control") -> np.ndarray:
    """`spec`'s reward of every step of an episode, (T,) float32; row 0, the reset, has none."""
    arrays = {name: getattr(episode, name) for name in ("observation", "action", "physics")}
    return _relabel(spec, arrays, mode)


def _relabel(spec: TaskSpec, arrays: dict[str, np.ndarray], mode: str) -> np.ndarray:
    """(..., T) float32 from arrays (..., T+1, ·)."""
    r = reward(
        spec.name,
        observation=arrays["observation"][..., 1:, :],
        action=arrays["action"][..., 1:, :] if mode == "with_control" else None,
        physics=arrays["physics"][..., 1:, :],
    )
    return r.astype(np.float32)


def rewards(flat: FlatStore, spec: TaskSpec, mode: str, workers: int = 1) -> Rewards:
    """Rewards of every row, from the disk where they are there, else computed and kept.

    Raises:
        ValueError: the mode is unknown, or they cannot be written.
    """
    if mode not in MODES:
        raise ValueError(f"data.relabel: got {mode!r}, expected one of {list(MODES)}")
    note = _path(flat, spec, mode, "json")
    of = {"digest": flat.digest, "formulas": FORMULAS, "rows": len(flat.index.names)}
    stamp = json.dumps(of).encode()
    if not note.is_file() or note.read_bytes() != stamp:
        try:
            note.parent.mkdir(exist_ok=True)
            note.unlink(missing_ok=True)  # unfinished from here on
            _write(flat, spec, mode, workers)
        except OSError as error:
            raise ValueError(
                f"data.store_dir: cannot write {note.parent} ({error.strerror}), expected a "
                "place for rewards"
            ) from error
        write_atomically(note, stamp)
    mapped = {name: MappedArray(_path(flat, spec, mode, f"{name}.npy")) for name in _ARRAYS}

    def release() -> None:
        for array in mapped.values():
            array.release()

    return Rewards(**{name: array.array for name, array in mapped.items()}, release=release)


_ARRAYS = ("reward", "return_to_go", "returns")


def _path(flat: FlatStore, spec: TaskSpec, mode: str, suffix: str) -> Path:
    return flat.path / "rewards" / f"{spec.name}.{mode}.{suffix}"


def _write(flat: FlatStore, spec: TaskSpec, mode: str, workers: int) -> None:
    """Computes the rewards in batches of rows; numpy lets several threads compute at once."""
    R, T = len(flat.index.names), spec.episode_steps
    shapes = {"reward": (R, T), "return_to_go": (R, T), "returns": (R,)}
    assert tuple(shapes) == _ARRAYS
    # Under other names until they are complete: another process may be reading the old ones.
    paths = {name: _path(flat, spec, mode, f"{name}.{os.getpid()}.tmp") for name in shapes}
    written = {
        name: np.lib.format.open_memmap(
            paths[name], mode="w+", dtype="<f8" if name == "returns" else "<f4", shape=shape
        )
        for name, shape in shapes.items()
    }
    batch = max(1, BATCH_STEPS // T)

    def compute(start: int) -> None:
        rows = slice(start, min(start + batch, R))
        arrays = {name: flat.arrays[name][rows] for name in ("observation", "action", "physics")}
        r_RT = _relabel(spec, arrays, mode)
        returns_R = r_RT.sum(axis=1, dtype=np.float64)
        written["reward"][rows] = r_RT
        written["return_to_go"][rows] = hindsight.returns_to_go(r_RT, returns_R[:, None])
        written["returns"][rows] = returns_R
        flat.release()

    try:
        starts = range(0, R, batch)
        with ThreadPoolExecutor(max(1, workers)) as pool:
            done = pool.map(compute, starts)
            title = f"rewards of {spec.name}"
            for _ in tqdm(done, desc=title, total=len(starts), disable=None, leave=False):
                pass
        for name, array in written.items():
            array.flush()
            os.replace(paths[name], _path(flat, spec, mode, f"{name}.npy"))
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)
