"""A task's rewards for stored episodes, computed once per store and kept beside it.

Two modes. `with_control` gives the reward that the simulator gave, or would have given, to the
action taken. `state_only` is ExoRL's own relabelling: it restores a state without its control, so
a reward that charges for large actions (cartpole's) comes out too high.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from agentic import hindsight
from agentic.episodes import Episode
from agentic.flat import FlatStore, MappedArray
from agentic.locks import locked
from agentic.within import within
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
        check: raises ValueError where a file has become shorter since it was opened.
        release: gives back the memory of what has been read.
    """

    reward: np.ndarray
    return_to_go: np.ndarray
    returns: np.ndarray
    check: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None


def relabel(spec: TaskSpec, episode: Episode, mode: str = "with_control") -> np.ndarray:
    """`spec`'s reward of every step of an episode, (T,) float32; row 0, the reset, has none."""
    arrays = {name: getattr(episode, name) for name in ("observation", "action", "physics")}
    return _relabel(spec, arrays, mode)


def _relabel(spec: TaskSpec, arrays: dict[str, np.ndarray], mode: str) -> np.ndarray:
    """(..., T) float32 from arrays (..., T+1, ·)."""
    with np.errstate(over="ignore", invalid="ignore"):  # an absurd state is told by its file
        r = reward(
            spec.name,
            observation=arrays["observation"][..., 1:, :],
            action=arrays["action"][..., 1:, :] if mode == "with_control" else None,
            physics=arrays["physics"][..., 1:, :],
        )
    return r.astype(np.float32)


def rewards(
    flat: FlatStore, spec: TaskSpec, mode: str, workers: int = 1, base: Path | None = None
) -> Rewards:
    """Rewards of every row, from the disk where they are there, else computed and kept.

    They are not kept where a link leads out of `base`, or where that is None of the store.

    Raises:
        ValueError: the mode is unknown, a state has no finite reward (names the file), or the
            rewards cannot be written, or not there.
    """
    if mode not in MODES:
        raise ValueError(f"data.relabel: got {mode!r}, expected one of {list(MODES)}")
    found = _read(flat, spec, mode)
    if found is None:
        folder = within(flat.path / "rewards", base or flat.path, "data.store_dir")
        try:
            folder.mkdir(exist_ok=True)
            with locked(folder, lambda: None) as alone:
                found = _read(flat, spec, mode)  # another process may have made them meanwhile
                if found is None:
                    for unfinished in folder.glob("*.tmp") if alone else ():
                        unfinished.unlink()
                    _write(flat, spec, mode, workers)
                    found = _read(flat, spec, mode)
                    assert found is not None, "they have just been written"
        except OSError as error:
            raise ValueError(
                f"data.store_dir: cannot write {folder} ({error.strerror}), expected a place for "
                "rewards"
            ) from error
    return found


def changed_rewards(flat: FlatStore, spec: TaskSpec, mode: str) -> list[int]:
    """Rows in use whose rewards on disk, if there are any, are not those of their states."""
    found = _read(flat, spec, mode)
    if found is None:
        return []
    computed = {name: np.empty_like(getattr(found, name)) for name in _TYPES}
    for rows in _batches(flat, spec):
        _compute(flat, spec, mode, rows, computed)
    same_R = np.ones(len(found.returns), bool)
    for name, array in computed.items():
        differs = np.asarray(getattr(found, name)) != array
        same_R &= ~differs.reshape(len(differs), -1).any(axis=1)
    return [row for row in flat.rows.values() if not same_R[row]]


_TYPES = {"reward": "<f4", "return_to_go": "<f4", "returns": "<f8"}  # the last is written last


def _path(flat: FlatStore, spec: TaskSpec, mode: str, name: str) -> Path:
    """The file's name says of which rows it is: others' rewards are never taken for these."""
    rows = f"{flat.digest}{FORMULAS:x}"
    return flat.path / "rewards" / f"{spec.name}.{mode}.{rows}.{name}.npy"


def _shapes(flat: FlatStore, spec: TaskSpec) -> dict[str, tuple[int, ...]]:
    R, T = len(flat.index.names), spec.episode_steps
    return {"reward": (R, T), "return_to_go": (R, T), "returns": (R,)}


def _batches(flat: FlatStore, spec: TaskSpec) -> list[slice]:
    R, batch = len(flat.index.names), max(1, BATCH_STEPS // spec.episode_steps)
    return [slice(start, min(start + batch, R)) for start in range(0, R, batch)]


def _read(flat: FlatStore, spec: TaskSpec, mode: str) -> Rewards | None:
    """What is on disk, None where it is not there or not whole."""
    try:
        mapped = {name: MappedArray(_path(flat, spec, mode, name)) for name in _TYPES}
    except (FileNotFoundError, ValueError):
        return None
    for name, shape in _shapes(flat, spec).items():
        array = mapped[name].array
        if array.shape != shape or array.dtype != _TYPES[name]:
            return None

    def check() -> None:
        for array in mapped.values():
            array.check()

    def release() -> None:
        for array in mapped.values():
            array.release()

    arrays = {name: array.array for name, array in mapped.items()}
    return Rewards(**arrays, check=check, release=release)


def _compute(
    flat: FlatStore, spec: TaskSpec, mode: str, rows: slice, into: Mapping[str, np.ndarray]
) -> None:
    arrays = {name: flat.arrays[name][rows] for name in ("observation", "action", "physics")}
    r_RT = _relabel(spec, arrays, mode)
    returns_R = r_RT.sum(axis=1, dtype=np.float64)
    into["reward"][rows] = r_RT
    into["return_to_go"][rows] = hindsight.returns_to_go(r_RT, returns_R[:, None])
    into["returns"][rows] = returns_R
    flat.release()


def _write(flat: FlatStore, spec: TaskSpec, mode: str, workers: int) -> None:
    """Computes the rewards in batches of rows; numpy lets several threads compute at once."""
    paths = {name: _path(flat, spec, mode, name) for name in _TYPES}
    unfinished = {name: path.with_suffix(".tmp") for name, path in paths.items()}
    written = {}
    for name, shape in _shapes(flat, spec).items():
        written[name] = np.lib.format.open_memmap(unfinished[name], "w+", _TYPES[name], shape)
        with open(unfinished[name], "r+b") as file:  # a full disk is told here, not by a signal
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    batches = _batches(flat, spec)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        done = pool.map(lambda rows: _compute(flat, spec, mode, rows, written), batches)
        title = f"rewards of {spec.name}"
        for _ in tqdm(done, desc=title, total=len(batches), disable=None, leave=False):
            pass
    for name, row in flat.rows.items():
        if not np.isfinite(written["returns"][row]):
            raise ValueError(
                f"{flat.index.source}/{name}: its states have no finite {spec.name} reward"
            )
    former = set((flat.path / "rewards").glob(f"{spec.name}.{mode}.*.npy"))
    for name, array in written.items():
        array.flush()
        os.replace(unfinished[name], paths[name])
    for path in former - set(paths.values()):
        path.unlink(missing_ok=True)  # whoever has it mapped keeps it
