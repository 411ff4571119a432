"""Episodes in ExoRL's files: one npz each, T + 1 rows, row 0 the reset."""

import io
import os
import re
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from envs import TaskSpec

# ExoRL: episode_000000_1000.npz; URLB: 20210101T000000_0_1000.npz: index and length are last.
# Hidden files, as some systems keep beside every other, are none.
FILE_NAME = re.compile(r"(?!\.)(?:.+_)?(\d+)_(\d+)\.npz")


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode of T steps; reward[t] belongs to the state reached at t (ExoRL's alignment).

    Attributes:
        observation: (T+1, O) float32.
        action: (T+1, A) float32 in [-1, 1]; action[t] led to observation[t]; row 0 zeros.
        reward: (T+1, 1) float32 of the task at collection; row 0 zero.
        discount: (T+1, 1) float32, 1 everywhere.
        physics: (T+1, P) float64 simulator state, qpos then qvel.
    """

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    physics: np.ndarray

    @property
    def steps(self) -> int:
        """T, the number of actions."""
        return len(self.action) - 1


def write_episode(path: Path, episode: Episode) -> None:
    """Writes one npz; a reader sees the whole file or none."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{f.name: getattr(episode, f.name) for f in fields(episode)})
    write_atomically(path, buffer.getvalue())


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`, complete and on disk, or leaves it as it was."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # a full disk does not say of which file it speaks
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path, name: str = "*") -> None:
    """Removes what `write_atomically` left where it was killed; for whoever alone writes there.

    Args:
        folder: of the files.
        name: theirs, or a pattern.
    """
    for left in folder.glob(f".{name}.{32 * '[0-9a-f]'}.tmp"):
        left.unlink(missing_ok=True)


def read_episode(path: Path, spec: TaskSpec) -> Episode:
    """Reads and checks one file of `spec`'s domain; see `parse_episode`.

    Raises:
        ValueError: as there, or it cannot be opened.
    """
    try:
        return parse_episode(path, str(path), spec)
    except OSError as error:
        raise ValueError(f"{path}: not a readable npz episode ({error})") from error


def parse_episode(file: Path | BinaryIO, name: str, spec: TaskSpec) -> Episode:
    """Reads and checks one npz; extra arrays are ignored, pickles refused.

    Args:
        file: the npz.
        name: of the file, for messages.
        spec: a task of its domain.

    Raises:
        ValueError: the file is damaged, an array is missing, or a shape, dtype or value is not
            that of a whole episode of `spec`; names the file, the array, got and expected.
        OSError: the system cannot read it.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            absent = [f.name for f in fields(Episode) if f.name not in archive.files]
            if absent:
                raise ValueError(f"array missing: {absent[0]}")
            arrays = {f.name: archive[f.name] for f in fields(Episode)}
    except MemoryError as error:
        raise ValueError(f"{name}: an array declares more than the memory holds") from error
    except Exception as error:  # damage shows in zipfile, zlib, lzma, tokenize and numpy alike
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, and not of the content
        raise ValueError(f"{name}: not a readable npz episode ({error})") from error
    for key, width in _widths(spec).items():
        try:
            arrays[key] = _checked(arrays[key], key, spec, width)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    largest = np.abs(arrays["action"]).max()
    if largest > 1 + 1e-6:
        raise ValueError(f"{name}: action reaches {largest:.3g}, expected values in [-1, 1]")
    for key, value in _RESET_ROW.items():
        first = arrays[key][0]
        if (first != value).any():
            raise ValueError(
                f"{name}: {key} is {first.tolist()} in row 0, expected {value:g}: it is the reset"
            )
    return Episode(**arrays)


_RESET_ROW = {"action": 0.0, "reward": 0.0, "discount": 1.0}


def _widths(spec: TaskSpec) -> dict[str, int | None]:
    return {
        "observation": spec.observation_size,
        "action": spec.action_size,
        "reward": None,  # ExoRL's multi-task domains store several; it is relabelled anyway
        "discount": 1,
        "physics": spec.physics_size,
    }


def _checked(array: object, key: str, spec: TaskSpec, width: int | None) -> np.ndarray:
    """The array in the dtype in which it will be used."""
    if not isinstance(array, np.ndarray):  # what numpy hands out for a member that is no array
        raise ValueError(f"{key} is not an array")
    rows = spec.episode_steps + 1
    if array.ndim != 2 or len(array) != rows or width not in (None, array.shape[1]):
        expected = (rows, "any" if width is None else width)
        raise ValueError(f"{key} has shape {array.shape}, expected {expected} for {spec.domain}")
    if array.dtype.kind != "f":
        raise ValueError(f"{key} has dtype {array.dtype}, expected a float")
    # Checked as it will be used: a large double may be an infinite float.
    with np.errstate(over="ignore"):
        array = array.astype(np.float64 if key == "physics" else np.float32, copy=False)
    if not np.isfinite(array).all():
        raise ValueError(
            f"{key} is not finite in row {int(np.argwhere(~np.isfinite(array))[0, 0])}"
        )
    return array


def buffer_dir(data_dir: Path, domain: str, algorithm: str) -> Path:
    """Where ExoRL keeps a domain's episodes of one exploration algorithm."""
    return data_dir / domain / algorithm / "buffer"


def episode_files(directory: Path) -> list[Path]:
    """The episodes of one buffer folder, by index; other names are left alone."""
    if not directory.is_dir():
        return []
    named = [(FILE_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    found = [(int(match[1]), path) for match, path in named if match]
    return [path for _, path in sorted(found)]
