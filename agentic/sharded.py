"""The directory of a checkpoint of several processes: a state, and its tensors in parts beside it.

The state is that of one process, but its weights and moments lie on the device "meta": they have
shape and type of the serial model's and no values. Those are in a folder of safetensors files, one
per process, that the state names. A new state gets a folder of another name, so that the old one
keeps its own until the new one is in its place. The state holds the checksum of every file.
"""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentic.layout import Layout, Place, changed, name
from agentic.seal import Damaged, digest_of
from parallel import shards
from parallel.collectives import all_reduce
from parallel.mesh import CUBE

TENSORS = "tensors"  # the key of the folder's name, which is this with a number
DIGESTS = "digests"  # the key of the checksums, by the files' names


def write(
    directory: Path,
    state: dict[str, Any],
    layout: Layout,
    commit: Callable[[dict[str, Any]], None],
) -> None:
    """Writes the tensors of a cube, all of whose processes call it.

    Args:
        directory: may hold an older state, which stays good until `commit`.
        state: with the parts of this process.
        layout: of this process.
        commit: puts the rest of the state into the directory, in one go; called by the first
            process alone when all tensors are on disk, before any process returns.

    Raises:
        OSError: a process could not write.
        PeerLost: another process is gone.
    """
    mesh = layout.mesh
    # One process looks: on a shared disk the others may see an older directory.
    own = _next_number(directory) if mesh.place[CUBE] == 0 else 0
    number = int(all_reduce(torch.tensor([own], device=mesh.device), mesh, CUBE))
    folder = directory / f"{TENSORS}_{number}"
    tensors = {}

    def described(place: Place, part: Tensor) -> Tensor:
        cut = layout.cut(place)
        whole = tensors[name(place)] = cut.dtensor(part, mesh)
        described = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        return described if cut.stack == 1 else described.flatten(0, 1)

    rest = {**changed(state, described), TENSORS: folder.name}

    def finish(digests: dict[str, str]) -> None:
        _sync(folder)
        _sync(directory)
        commit(rest | {DIGESTS: digests})

    shards.write(folder, tensors, mesh, digest_of, finish)


def read(directory: Path, state: dict[str, Any], layout: Layout | None) -> dict[str, Any]:
    """The state with values.

    Args:
        directory: where it lies.
        state: its part without values.
        layout: of this process, which reads its parts alone; None: the whole, on the CPU.

    Raises:
        ValueError: the tensors are damaged, or are not those of the state or of the layout.
    """
    folder = tensors_of(directory, state)
    found = shards.contents(folder)
    targets = {}

    def made(place: Place, told: Tensor) -> Tensor:
        key = name(place)
        if not told.is_meta or key not in found:
            raise ValueError(f"{folder} lacks {key}")
        shape, dtype = found.pop(key)
        flat = shape if len(shape) == told.ndim else (shape[0] * shape[1], *shape[2:])
        # Before any memory is taken: a shape is only told, the files are as long as they are.
        if (tuple(flat), dtype) != (tuple(told.shape), told.dtype):
            raise ValueError(
                f"{folder} has {key} as {dtype} {tuple(shape)}, expected {told.dtype} "
                f"{tuple(told.shape)}"
            )
        if layout is None:
            whole = torch.empty(told.shape, dtype=dtype)
            targets[key] = whole.view(shape)
            return whole
        part = torch.empty_like(layout.part(place, told), device=layout.mesh.device)
        targets[key] = layout.cut(place).dtensor(part, layout.mesh)
        if targets[key].shape != shape:
            raise ValueError(
                f"{folder} has {key} as {tuple(shape)}, expected {tuple(targets[key].shape)}"
            )
        return part

    rest = {key: value for key, value in state.items() if key not in (TENSORS, DIGESTS)}
    full = changed(rest, made)
    if found:
        raise ValueError(f"{folder} has {sorted(found)}, which the state beside it does not know")
    shards.read(folder, targets)
    return full


def check(directory: Path, state: dict[str, Any], seen: Callable[[bytes], None]) -> None:
    """Compares the files of the tensors with their checksums.

    Args:
        directory: where the state lies.
        state: its part without values; has None for the checksums where it is of version 1.
        seen: takes the files' bytes, in the order of their names.

    Raises:
        Damaged: a file is another, is missing, or is one too many.
        ValueError: the state does not say what there should be.
    """
    folder, told = tensors_of(directory, state), state.get(DIGESTS, "")
    files = shards.files(folder)
    if not isinstance(told, dict | None):
        raise ValueError(f"{directory} has no checksums, expected one of every file")
    if told is not None:
        for name in sorted(told.keys() ^ {path.name for path in files}):
            raise Damaged(f"{folder} {'lacks' if name in told else 'has a foreign'} {name}")
    for path in files:
        found = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
                seen(block)
        if told is not None and found.hexdigest() != told[path.name]:
            raise Damaged(f"{path} is damaged: its checksum is another")


def tensors_of(directory: Path, state: dict[str, Any]) -> Path:
    """The folder of the state's tensors.

    Raises:
        ValueError: the name is not of a folder in this directory.
    """
    told = state[TENSORS]
    if not isinstance(told, str) or re.fullmatch(f"{TENSORS}_[0-9]+", told) is None:
        raise ValueError(f"{directory} is damaged ({TENSORS}: {told!r})")
    return directory / told


def _next_number(directory: Path) -> int:
    """Greater than that of any folder there, a killed save's among them."""
    numbers = [re.fullmatch(f"{TENSORS}_([0-9]+)", path.name) for path in directory.glob("*")]
    return 1 + max((int(number[1]) for number in numbers if number), default=0)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
