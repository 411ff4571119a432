"""One algorithm's episodes as flat arrays on disk: what an ingest writes and training reads.

A folder of `.npy` files (anyone's `np.load(..., mmap_mode="r")` reads them) and an index:

    observation.npy (R, T+1, O) float32    action.npy (R, T+1, A) float32
    physics.npy (R, T+1, P) float64        moments.npy (R, 2, O) float64
    index.json

R rows, one episode each, in the order in which they were ingested; row 0 of an episode is the
reset (see `agentic.episodes`). Rewards are not among them: they follow from the states, for every
task (see `agentic.relabel`). `moments` are the mean of the T observations of an episode in which
actions were taken, and the sum of squares around it.
"""

import errno
import io
import json
import math
import mmap
import os
import tokenize
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentic.episodes import Episode, write_atomically
from agentic.strict import build
from envs import TaskSpec

FORMAT = 1
INDEX = "index.json"
ARRAYS = ("observation", "action", "physics", "moments")  # what a row's checksum covers, in order


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A file that holds no sound episode."""

    name: str
    size: int
    stamp: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What the rows of a flat store are; lists go by row."""

    domain: str
    algorithm: str
    source: str  # the folder or zip that was read
    format: int = FORMAT
    finished: bool = False  # false while an ingest is at work, or after it was killed
    names: tuple[str, ...] = ()  # of the files; "" is a row out of use
    sizes: tuple[int, ...] = ()
    stamps: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    note: str | None = None  # collect.json beside the buffer, where we collected it ourselves


def shapes(spec: TaskSpec) -> dict[str, tuple[int, int, np.dtype]]:
    """(rows, width, dtype) of an episode in every array."""
    rows = spec.episode_steps + 1
    single, double = np.dtype("<f4"), np.dtype("<f8")
    return {
        "observation": (rows, spec.observation_size, single),
        "action": (rows, spec.action_size, single),
        "physics": (rows, spec.physics_size, double),
        "moments": (2, spec.observation_size, double),
    }


def row_bytes(spec: TaskSpec) -> int:
    """Bytes on disk of one episode."""
    return sum(n * w * dtype.itemsize for n, w, dtype in shapes(spec).values())


class MappedArray:
    """A `.npy` file read through the page cache; `release` gives back what has been touched.

    A file that is deleted stays readable. One that is cut off does not: where it ends, a read would
    be a fault that ends the process, hence `check`.

    Raises:
        ValueError: the file is not such an array, or is shorter than it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                if np.lib.format.read_magic(file) != (1, 0):
                    raise ValueError("not an array of numpy's format 1.0")
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                if fortran or dtype.hasobject:
                    raise ValueError("not a plain array")
                offset, count = file.tell(), math.prod(shape)
                if os.fstat(file.fileno()).st_size < offset + count * dtype.itemsize:
                    raise ValueError("shorter than it says")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, SyntaxError, tokenize.TokenError, OverflowError) as error:
            raise ValueError(
                f"{path}: damaged ({error}); delete its folder to make it anew"
            ) from error
        self.array = np.frombuffer(self._map, dtype, count, offset).reshape(shape)
        self._mapped = len(self._map)

    def check(self) -> None:
        """Raises ValueError where the file has become shorter since it was opened."""
        size = self._map.size()  # of the file
        if size < self._mapped:
            raise ValueError(
                f"{self.path}: got {size:,} bytes, expected the {self._mapped:,} of when it was "
                "opened; another process has cut it off"
            )

    def release(self) -> None:
        """Takes the pages out of this process's memory; they stay in the system's cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class FlatStore:
    """A flat store that is complete, opened for reading.

    Attributes:
        path: its folder.
        index: what its rows are.
        arrays: by name, read only; rows beyond the index are not in use.
        rows: the row of every file.
    """

    def __init__(self, path: Path, index: Index, spec: TaskSpec) -> None:
        self.path = path
        self.index = index
        self.rows = {name: row for row, name in enumerate(index.names) if name}
        self._mapped = {name: MappedArray(array_path(path, name)) for name in ARRAYS}
        self.arrays = {name: mapped.array for name, mapped in self._mapped.items()}
        rows = len(index.names)
        for name, (length, width, dtype) in shapes(spec).items():
            array = self.arrays[name]
            if array.shape[1:] != (length, width) or array.dtype != dtype or len(array) < rows:
                raise ValueError(
                    f"{array_path(path, name)}: got {array.dtype} {array.shape}, expected {dtype} "
                    f"({rows}, {length}, {width}); delete {path} to make it anew"
                )

    @staticmethod
    def open(path: Path, spec: TaskSpec) -> "FlatStore":
        """Opens a finished store.

        Raises:
            ValueError: there is none, it is unfinished, damaged or of another domain.
        """
        index = read_index(path, spec)
        if index is None:
            raise ValueError(
                f"{path}: expected ingested episodes, found none; agentic-data inspect makes them"
            )
        if not index.finished:
            raise ValueError(
                f"{path}: its making was interrupted; agentic-data inspect completes it"
            )
        return FlatStore(path, index, spec)

    @property
    def digest(self) -> str:
        """Changes whenever a row does."""
        return digest(self.index)

    def row_checksum(self, row: int) -> int:
        """CRC-32 of a row's arrays as they are now."""
        return checksum([self.arrays[name][row] for name in ARRAYS])

    def check(self) -> None:
        """Raises ValueError where a file has become shorter since it was opened."""
        for mapped in self._mapped.values():
            mapped.check()

    def release(self) -> None:
        """Gives back the memory of what has been read."""
        for mapped in self._mapped.values():
            mapped.release()


def digest(index: Index) -> str:
    """Changes whenever a row does."""
    return f"{zlib.crc32(repr(index.checksums).encode()):08x}"


def checksum(arrays: list[np.ndarray]) -> int:
    """CRC-32 of the arrays' bytes, one after the other."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).data, value)
    return value


def store_path(store_dir: Path, domain: str, algorithm: str) -> Path:
    """Folder of the flat store, by default beside the buffer."""
    return store_dir / domain / algorithm / "store"


def array_path(path: Path, name: str) -> Path:
    """File of one array."""
    return path / f"{name}.npy"


def read_index(path: Path, spec: TaskSpec) -> Index | None:
    """The index of a store, None where there is none.

    Raises:
        ValueError: it is damaged, of another domain or of another version.
    """
    file = path / INDEX
    if not file.is_file():
        return None
    try:
        index = build(Index, json.loads(file.read_text()))
        columns = (index.names, index.sizes, index.stamps, index.checksums)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("its lists differ in length")
        if (index.format, index.domain) != (FORMAT, spec.domain):
            raise ValueError(
                f"format {index.format} of {index.domain}, expected {FORMAT} of {spec.domain}"
            )
    except (ValueError, RecursionError) as error:  # json's own errors among them
        raise ValueError(f"{file}: damaged ({error}); delete {path} to make it anew") from error
    return index


def write_index(path: Path, index: Index) -> None:
    """Replaces the index; what it names must be on disk by then."""
    write_atomically(path / INDEX, (json.dumps(asdict(index)) + "\n").encode())


class FlatWriter:
    """Writes rows of a flat store; several processes may, each its own rows.

    Args:
        path: folder of the store.
        spec: a task of its domain.
    """

    def __init__(self, path: Path, spec: TaskSpec) -> None:
        self.path = path
        self.shapes = shapes(spec)
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "FlatWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def resize(self, rows: int) -> None:
        """Makes room for `rows` episodes; existing ones stay."""
        for name, (length, width, dtype) in self.shapes.items():
            file = self._file(name)
            header = _header((rows, length, width), dtype)
            file.seek(0)
            file.write(header)
            file.truncate(len(header) + rows * length * width * dtype.itemsize)

    def write(self, row: int, episode: Episode) -> int:
        """Writes one episode; returns its checksum."""
        seen = episode.observation[:-1].astype(np.float64)
        mean = seen.mean(axis=0)
        arrays = {name: getattr(episode, name) for name in ARRAYS if name != "moments"}
        arrays["moments"] = np.stack([mean, np.square(seen - mean).sum(axis=0)])
        for name, (length, width, dtype) in self.shapes.items():
            array = np.ascontiguousarray(arrays[name], dtype)
            assert array.shape == (length, width), name
            offset = len(_header((0, length, width), dtype)) + row * array.nbytes
            self._write(name, array, offset)
        return checksum([arrays[name] for name in ARRAYS])

    def _write(self, name: str, array: np.ndarray, offset: int) -> None:
        place = str(array_path(self.path, name))
        try:
            written = os.pwrite(self._file(name).fileno(), array.data, offset)
        except OSError as error:  # a full disk does not say of which file it speaks
            raise OSError(error.errno, error.strerror, place) from error
        if written != array.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)

    def sync(self) -> None:
        """Returns when all that was written, by any process, is on disk."""
        for name in self.shapes:
            os.fsync(self._file(name).fileno())

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = array_path(self.path, name)
            self._files[name] = open(path, "r+b" if path.exists() else "x+b", buffering=0)
        return self._files[name]


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Makes numpy's header; with room for a growing first axis, so its length never changes."""
    buffer = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()
