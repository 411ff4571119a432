"""Episodes in ExoRL's files: one npz each, T + 1 rows, row 0 the reset."""

import io
import os
import re
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from envs import TaskSpec

# ExoRL: episode_000000_1000.npz; URLB: 20210101T000000_0_1000.npz: index and length are last.
FILE_NAME = re.compile(r"(?:.+_)?(\d+)_(\d+)\.npz")


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def read_episode(path: Path, spec: TaskSpec) -> Episode:
    """Reads and checks one file of `spec`'s domain; extra arrays are ignored, pickles refused.

    Raises:
        ValueError: the file is unreadable, an array is missing, or a shape, dtype or value is not
            that of a whole episode of `spec`; names the file, the array, got and expected.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {f.name: archive[f.name] for f in fields(Episode)}
    except KeyError as error:
        raise ValueError(f"{path}: array missing: {error.args[0]}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable npz episode ({error})") from error
    except MemoryError as error:
        raise ValueError(f"{path}: an array declares more than the memory holds") from error
    rows = spec.episode_steps + 1
    widths = {
        "observation": spec.observation_size,
        "action": spec.action_size,
        "reward": None,  # ExoRL's multi-task domains store several; it is relabelled anyway
        "discount": 1,
        "physics": spec.physics_size,
    }
    for name, width in widths.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray):  # what numpy hands out for a member that is no array
            raise ValueError(f"{path}: {name} is not an array")
        expected = (rows, "any" if width is None else width)
        if array.ndim != 2 or len(array) != rows or width not in (None, array.shape[1]):
            raise ValueError(
                f"{path}: {name} has shape {array.shape}, expected {expected} for {spec.domain}"
            )
        if array.dtype.kind != "f":
            raise ValueError(f"{path}: {name} has dtype {array.dtype}, expected a float")
        # Checked as it will be used: a large double may be an infinite float.
        with np.errstate(over="ignore"):
            array = arrays[name] = array.astype(np.float64 if name == "physics" else np.float32)
        if not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0, 0])
            raise ValueError(f"{path}: {name} is not finite in row {row}")
    if np.abs(arrays["action"]).max() > 1 + 1e-6:
        largest = np.abs(arrays["action"]).max()
        raise ValueError(f"{path}: action reaches {largest:.3g}, expected values in [-1, 1]")
    return Episode(**arrays)


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
