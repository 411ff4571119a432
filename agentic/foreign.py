"""Minari datasets of anyone, read as what they are: arrays in a file of HDF5.

Minari itself would make the environment that a dataset names, by whatever Python function its
metadata name, and take memory for whatever shape an array declares.

Importing this module needs the `minari` extra.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from minari.dataset.minari_storage import METADATA_FILE_NAME
from tqdm import tqdm

from agentic.episodes import most_bytes
from agentic.texts import parse_json, read_json
from envs import TaskSpec

FILE = "main_data.hdf5"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One episode of a dataset, in Minari's alignment; lengths are those of the file."""

    observations: np.ndarray  # one more than there are steps
    actions: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    physics: np.ndarray | None  # infos["physics"], where there is one


def recorded(data: Path, spec: TaskSpec) -> Iterator[Recorded]:
    """The episodes of a dataset's data folder.

    Raises:
        ValueError: it is damaged, of another format, or not of `spec`'s spaces; names the folder.
    """
    try:
        with h5py.File(data / FILE, "r") as file:
            count = len(file)
            _check_metadata(read_json(data / METADATA_FILE_NAME), spec, count)
            if not count:
                raise ValueError("it has no episodes")
            for index in tqdm(range(count), desc="importing", disable=None, leave=False):
                group = _item(file, f"episode_{index}", h5py.Group)
                yield _episode(group, most_bytes(spec))
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        # h5py meets damage in many ways, not always with a word.
        reason = str(error) or type(error).__name__
        raise ValueError(f"source: {data} is no dataset of {spec.name}: {reason}") from error


def _check_metadata(metadata: Any, spec: TaskSpec, count: int) -> None:
    expected = {"data_format": "hdf5", "total_episodes": count}
    for key, value in expected.items():
        got = metadata.get(key) if isinstance(metadata, dict) else None
        if got != value:
            raise ValueError(f"{METADATA_FILE_NAME}: {key} is {got!r}, expected {value!r}")
    sizes = {"observation": spec.observation_size, "action": spec.action_size}
    for name, size in sizes.items():
        text = metadata.get(f"{name}_space")
        space = parse_json(text, finite=False) if isinstance(text, str) else None
        if not isinstance(space, dict):
            raise ValueError(f"{METADATA_FILE_NAME} has no {name}_space")
        kind, shape = space.get("type"), space.get("shape")
        if (kind, shape) != ("Box", [size]):
            raise ValueError(f"{name} space is {kind} {shape}, expected a Box of shape ({size},)")


def _episode(group: h5py.Group, most: int) -> Recorded:
    names = ("observations", "actions", "rewards", "terminations")
    arrays = {name: _array(group, name, most) for name in names}
    physics = None
    if "infos" in group:
        infos = _item(group, "infos", h5py.Group)
        physics = _array(infos, "physics", most) if "physics" in infos else None
    return Recorded(**arrays, physics=physics)


def _array(group: h5py.Group, name: str, most: int) -> np.ndarray:
    """A dataset of numbers in this very file, of a size that an episode may have."""
    found = _item(group, name, h5py.Dataset)
    place = f"{group.name}/{name}"
    if found.external or found.is_virtual:
        raise ValueError(f"{place} lies in another file")
    if not found.shape or found.dtype.kind not in "fiub":
        raise ValueError(f"{place} is not an array of numbers")
    for declared in (found.shape, found.chunks or ()):
        size = math.prod(declared) * found.dtype.itemsize
        if size > most:
            raise ValueError(f"{place} declares {size:,} bytes, expected at most {most:,}")
    return found[()]


def _item(group: h5py.Group, name: str, kind: type) -> Any:
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{group.name}/{name} is missing, or in another place or file")
    found = group[name]
    if not isinstance(found, kind):
        raise ValueError(f"{group.name}/{name} is no {kind.__name__.lower()}")
    return found
