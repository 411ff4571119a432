"""A folder of episodes and the ingest of it, for the tests of both."""

import numpy as np
from conftest import make_episode

from agentic.episodes import buffer_dir
from agentic.flat import store_path
from agentic.ingest import ingest
from agentic.sources import find_source
from envs import TASKS

SPEC = TASKS["cartpole_swingup"]


class Place:
    """An algorithm's cartpole episodes, twelve random ones by default, and their ingest."""

    def __init__(self, data_dir, algorithm="td3"):
        self.data_dir = data_dir
        self.algorithm = algorithm
        self.directory = buffer_dir(data_dir, "cartpole", algorithm)
        self.path = store_path(data_dir, "cartpole", algorithm)
        self.told = []

    def file(self, index):
        return self.directory / f"episode_{index:06d}_1000.npz"

    def ingest(self, on_bad_file="error", workers=1):
        self.told.clear()
        source = find_source(self.data_dir, "cartpole", self.algorithm)
        return ingest(
            source,
            source.files,
            self.path,
            SPEC,
            on_bad_file=on_bad_file,
            workers=workers,
            tell=self.told.append,
        )


def holds(flat, index, seed=None):
    """Whether the store's row of a file is the episode, to the last bit."""
    episode = make_episode(SPEC, index if seed is None else seed)
    row = flat.rows[f"episode_{index:06d}_1000.npz"]
    return all(
        np.array_equal(flat.arrays[name][row], getattr(episode, name))
        for name in ("observation", "action", "physics")
    )
