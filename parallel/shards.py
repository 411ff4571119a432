"""Tensors on disk in parts: every process writes its own, and any cube, or none, reads them back.

PyTorch's distributed checkpoint in safetensors files, which hold no code: its own format keeps a
pickled index.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from parallel.mesh import CUBE, CubeMesh

SUFFIX = ".safetensors"


class _Writer(dcp.HuggingFaceStorageWriter):
    """Lets the first process finish when all have written; what it raises, all raise.

    What the processes say of their writing, which goes to the first, are their files' digests.
    """

    def __init__(
        self,
        folder: Path,
        digest: Callable[[Path], str],
        finish: Callable[[dict[str, str]], None],
    ) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._digest, self._finish = folder, digest, finish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        written = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in written})
        told: Future = Future()
        told.set_result([(name, self._digest(self._folder / name)) for name in names])
        return told

    def finish(self, metadata: Metadata, results: list) -> None:
        self._finish(dict(itertools.chain.from_iterable(results)))


def write(
    folder: Path,
    tensors: Mapping[str, DTensor],
    mesh: CubeMesh,
    digest: Callable[[Path], str],
    finish: Callable[[dict[str, str]], None],
) -> None:
    """Writes the tensors of one cube, all of whose processes call it.

    Args:
        folder: new or empty.
        tensors: with the same names everywhere; no two of them share memory.
        mesh: the cube.
        digest: of a file; every process computes those of the files that it has written.
        finish: called by the first process alone, once every part is on disk and before any process
            returns; with all digests by the files' names.

    Raises:
        OSError: a process could not write, or `finish` failed; all raise it.
        PeerLost: another process is gone.
    """
    try:
        with mesh.guard(CUBE):
            dcp.save(
                dict(tensors),
                storage_writer=_Writer(folder, digest, finish),
                process_group=mesh.group(CUBE),
            )
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError) and cause.filename is None:  # as of a full disk
            raise OSError(cause.errno, cause.strerror or str(cause), str(folder)) from error
        raise cause from error


def contents(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor there; reads no values.

    Raises:
        ValueError: a file is damaged, or the parts of a tensor do not make up a whole.
    """
    for path in files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({_line(error)})") from error
    try:
        index = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is damaged ({_line(error)})") from error
    found = {}
    for name, stored in index.items():
        assert isinstance(stored, TensorStorageMetadata)
        if not _complete(stored):
            raise ValueError(f"{folder} lacks parts of {name}, or has some twice")
        found[name] = stored.size, stored.properties.dtype
    return found


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills the tensors, or this process's parts of them, in place; every process by itself.

    Args:
        folder: whose `contents` have been found to be these.
        tensors: DTensors on any mesh, or plain ones.

    Raises:
        ValueError: it cannot be read.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ValueError(f"{folder} is damaged ({_line(cause)})") from error


def files(folder: Path) -> list[Path]:
    """The files of a folder, in a fixed order."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def _complete(stored: TensorStorageMetadata) -> bool:
    """Equal parts, each once and side by side."""
    sizes = stored.chunks[0].sizes
    if any(chunk.sizes != sizes for chunk in stored.chunks):
        return False
    count = len(stored.chunks) * math.prod(sizes)  # first: a grid of any length would be made
    if count == 0 or count != math.prod(stored.size):
        return False
    steps = (range(0, whole, part) for whole, part in zip(stored.size, sizes, strict=True))
    return {tuple(chunk.offsets) for chunk in stored.chunks} == set(itertools.product(*steps))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
