"""Stored episodes as Minari datasets, and Minari datasets as ExoRL's files.

Importing this module needs the `minari` extra.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import h5py  # noqa: F401 - Minari asks for it only when it stores
import numpy as np
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import METADATA_FILE_NAME, MinariStorage
from minari.namespace import NAMESPACE_METADATA_FILENAME
from minari.storage import get_dataset_path
from tqdm import tqdm

from agentic.episodes import Episode, buffer_dir, episode_files, parse_episode, write_episode
from agentic.flat import Index
from agentic.foreign import Recorded, recorded
from agentic.sources import find_source
from agentic.store import EpisodeStore, Part
from agentic.within import within
from envs import TaskSpec

BATCH = 32  # episodes handed to Minari at once
PACKAGES = ("agentic-transformer", "dm_control", "mujoco", "gymnasium", "numpy", "minari")


def dataset_id(spec: TaskSpec, algorithm: str) -> str:
    """Minari's name for one algorithm's episodes with one task's rewards."""
    plain = re.sub(r"[^-\w]", "_", algorithm)  # the only characters that Minari takes
    return f"exorl/{spec.name}/{plain}-v0"


def export(store: EpisodeStore, root: Path | None, relabel: str) -> list[Path]:
    """Writes a Minari dataset for every task and algorithm of a store, each whole or not at all.

    Per episode observations (T+1, O), actions (T, A), rewards (T,) float32 of the task,
    terminations (T,) all false, truncations (T,) true at the last step, and infos["physics"]
    (T+1, P) float64. The task is also Minari's env_spec, `exorl/<task>-v0`.

    Args:
        store: the episodes, loaded from disk.
        root: Minari's folder of datasets; None is $MINARI_DATASETS_PATH, or Minari's own.
        relabel: the mode of the store's rewards, to be noted.

    Returns:
        The datasets' folders.

    Raises:
        ValueError: a dataset is there already, or cannot be written.
    """
    with _written("output", root):
        # Absolute: Minari 0.5.4 looks for the files of a relative folder in the wrong place.
        root = (get_dataset_path() if root is None else root).absolute()
        folders = []
        for k, spec in enumerate(store.specs):
            for part in store.parts:
                folder = root / dataset_id(spec, part.name)
                if folder.exists():
                    raise ValueError(f"output: {folder} is there already, expected a new dataset")
                for namespace in (folder.parent, folder.parent.parent):
                    namespace.mkdir(parents=True, exist_ok=True)
                    if not (namespace / NAMESPACE_METADATA_FILENAME).exists():
                        (namespace / NAMESPACE_METADATA_FILENAME).write_text("{}")
                with _whole(folder) as partial:
                    _write(partial / "data", part, k, spec, relabel)
                folders.append(folder)
    return folders


def _write(data: Path, part: Part, task: int, spec: TaskSpec, relabel: str) -> None:
    """Fills a dataset's folder `data` with the chosen rows and the rewards of one task."""
    flat, name = part.flat, dataset_id(spec, part.name)
    assert flat is not None, "the store was loaded from disk"
    data.mkdir()
    storage = MinariStorage.new(
        data,
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (spec.observation_size,)),
        action_space=gymnasium.spaces.Box(-1.0, 1.0, (spec.action_size,)),
        env_spec=gymnasium.spec(f"exorl/{spec.name}-v0"),
    )
    storage.update_metadata(_metadata(name, flat.index, spec, relabel))

    def buffer(row: int) -> EpisodeBuffer:
        T = spec.episode_steps
        return EpisodeBuffer(
            observations=np.array(flat.arrays["observation"][row]),
            actions=np.array(flat.arrays["action"][row, 1:]),
            rewards=np.array(part.rewards[task].reward[row]),
            terminations=np.zeros(T, bool),
            truncations=np.arange(T) == T - 1,
            infos={"physics": np.array(flat.arrays["physics"][row])},
        )

    for begin in tqdm(range(0, len(part.rows), BATCH), desc=name, disable=None, leave=False):
        rows = part.rows[begin : begin + BATCH]
        storage.update_episodes(buffer(row) for row in rows)
        files = [{"file": flat.index.names[row]} for row in rows]
        storage.update_episode_metadata(files, range(begin, begin + len(rows)))
        flat.release()
        part.rewards[task].release()


def _metadata(name: str, index: Index, spec: TaskSpec, relabel: str) -> dict[str, Any]:
    versions = {package: version(package) for package in PACKAGES}
    return {
        "dataset_id": name,
        "minari_version": versions["minari"],
        "algorithm_name": index.algorithm,
        "description": f"ExoRL episodes of {index.domain} explored by {index.algorithm}, with the "
        f"rewards of {spec.name}. infos/physics is the simulator's state (positions, velocities); "
        "an episode's attribute `file` is the name it came from; `import envs` registers the "
        "environment.",
        "requirements": [f"{package}=={versions[package]}" for package in ("dm_control", "mujoco")],
        "relabel": relabel,
        "source": index.source,
        "collected": index.note,
        "versions": versions,
    }


def import_dataset(source: str, spec: TaskSpec, data_dir: Path, algorithm: str) -> list[Path]:
    """Writes a Minari dataset's episodes as ExoRL's files, all of them or none.

    Args:
        source: a dataset's folder, or its id among the local ones.
        spec: the task that it was recorded for; sizes and length have to be its own.
        data_dir: where to, `<data_dir>/<domain>/<algorithm>/buffer`.
        algorithm: the new folder's name.

    Returns:
        The new files.

    Raises:
        ValueError: there is no readable dataset, it is not of `spec`'s spaces or length, it has no
            physics states, the folder holds episodes already, or it cannot be written.
    """
    directory = within(buffer_dir(data_dir, spec.domain, algorithm), data_dir, "data_dir")
    if held := find_source(data_dir, spec.domain, algorithm):
        raise ValueError(f"name: {held.place} holds episodes already, expected a new folder")
    found = _find(source)
    with _written("data_dir", directory), _whole(directory) as partial:
        for index, played in enumerate(recorded(found, spec)):
            where = f"source: {source}, episode {index}"
            path = partial / f"episode_{index:06d}_{spec.episode_steps}.npz"
            write_episode(path, _episode(played, spec, where))
            with open(path, "rb") as file:
                parse_episode(file, where, spec)  # all that makes an episode unfit is told here
    return episode_files(directory)


def _find(source: str) -> Path:
    """The data folder of a dataset that is named by its folder, its data folder or its id."""
    by_path = (Path(source) / "data", Path(source))
    for place in by_path:
        if (place / METADATA_FILE_NAME).is_file():
            return place
    by_id = get_dataset_path(source) / "data"  # asked last: it makes Minari's folder
    if not (by_id / METADATA_FILE_NAME).is_file():
        raise ValueError(f"source: got {source!r}, expected a Minari dataset there or in {by_id}")
    return by_id


def _episode(recorded: Recorded, spec: TaskSpec, where: str) -> Episode:
    if recorded.physics is None:
        shape = (spec.episode_steps + 1, spec.physics_size)
        raise ValueError(f"{where} lacks infos['physics'], expected simulator states {shape}")
    if np.any(recorded.terminations):
        raise ValueError(f"{where} is terminated, expected an end by the time limit only")
    return Episode(
        observation=np.asarray(recorded.observations, np.float32),
        action=_after_reset(recorded.actions),
        reward=_after_reset(recorded.rewards),
        discount=np.ones((len(recorded.rewards) + 1, 1), np.float32),
        physics=np.asarray(recorded.physics, np.float64),
    )


def _after_reset(values: Any) -> np.ndarray:
    """(T,) or (T, D) behind row 0, the reset, which has neither action nor reward: (T+1, D)."""
    values_TD = np.asarray(values, np.float32).reshape(len(values), -1)
    return np.concatenate([np.zeros((1, values_TD.shape[1]), np.float32), values_TD])


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` at the end, or vanishes after an error."""
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")  # readers pass over such names
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _written(field: str, place: Path | None) -> Iterator[None]:
    """Words what the file system refuses."""
    try:
        yield
    except OSError as error:
        refused = error.filename or place
        raise ValueError(f"{field}: cannot write {refused} ({error.strerror or error})") from error
