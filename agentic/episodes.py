"""Episodes in ExoRL's files: one npz each, T + 1 rows, row 0 the reset."""

import io
import math
import os
import re
import uuid
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from agentic.archive import open_zip, read_member
from agentic.npy import read_header
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
        with open(path, "rb") as file:
            return parse_episode(file, str(path), spec)
    except OSError as error:
        raise ValueError(f"{path}: not a readable npz episode ({error})") from error


def parse_episode(file: BinaryIO, name: str, spec: TaskSpec) -> Episode:
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
        arrays = _arrays(file, spec)
    except _Unfit as error:
        raise ValueError(f"{name}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: not a readable npz episode ({error})") from error
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


class _Unfit(ValueError):
    """An array that is read well and is not one of an episode."""


def _arrays(file: BinaryIO, spec: TaskSpec) -> dict[str, np.ndarray]:
    """The arrays of an npz, in the dtypes in which they will be used; others are left alone."""
    with open_zip(file, most_bytes(spec)) as archive:
        members = {info.filename: info for info in archive.infolist()}
        absent = [f.name for f in fields(Episode) if f"{f.name}.npy" not in members]
        if absent:
            raise ValueError(f"array missing: {absent[0]}")
        return {
            key: _array(archive, members[f"{key}.npy"], key, spec, width)
            for key, width in _widths(spec).items()
        }


def _array(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, key: str, spec: TaskSpec, width: int | None
) -> np.ndarray:
    """One array; what its header says is checked before memory is taken for it."""
    content = io.BytesIO(read_member(archive, info, most_bytes(spec)))
    try:
        shape, fortran, dtype = read_header(content)
    except ValueError as error:
        raise _Unfit(f"{key} is not an array of numbers: {error}") from error
    rows = spec.episode_steps + 1
    if len(shape) != 2 or shape[0] != rows or shape[1] < 1 or width not in (None, shape[1]):
        expected = (rows, "any" if width is None else width)
        raise _Unfit(f"{key} has shape {shape}, expected {expected} for {spec.domain}")
    if dtype.kind != "f":
        raise _Unfit(f"{key} has dtype {dtype}, expected a float")
    declared, held = math.prod(shape) * dtype.itemsize, info.file_size - content.tell()
    if declared != held:
        raise ValueError(f"{key} declares {declared:,} bytes, holds {held:,}")
    order: Literal["F", "C"] = "F" if fortran else "C"
    array = np.frombuffer(content.read(), dtype).reshape(shape, order=order)
    # Checked as it will be used: a large double may be an infinite float.
    with np.errstate(over="ignore"):
        array = array.astype(np.float64 if key == "physics" else np.float32)
    if not np.isfinite(array).all():
        raise _Unfit(f"{key} is not finite in row {int(np.argwhere(~np.isfinite(array))[0, 0])}")
    return array


def most_bytes(spec: TaskSpec) -> int:
    """Of an array of an episode, and of its file: generous, and far from what fills a memory."""
    width = spec.observation_size + spec.action_size + spec.physics_size
    return 2**20 + 128 * (spec.episode_steps + 1) * width


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
