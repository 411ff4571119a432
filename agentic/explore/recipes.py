"""The ways to explore, by the names that users choose them by."""

import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import numpy as np

from agentic.collect_config import RndConfig
from agentic.episodes import Episode
from agentic.explore.babble import babble
from agentic.explore.memory import Memory
from agentic.explore.rnd import problem, rnd
from agentic.explore.td3 import td3
from agentic.explore.uniform import random
from envs import TaskSpec

Recipe = Callable[[TaskSpec, np.random.Generator], Generator[Episode, None, None]]

RECIPES: dict[str, Recipe] = {
    "td3": td3,
    "rnd": rnd,
    "babble": babble,
    "random": random,
}


def for_workers(
    name: str, workers: int, config: RndConfig | None, folder: Path | None
) -> list[Recipe]:
    """The recipe as each of `workers` processes runs it.

    Args:
        name: a key of `RECIPES`.
        workers: how many.
        config: sizes and rates of rnd; configs/rnd/small.yaml by default.
        folder: where learners that remember are saved and go on; without it they forget. A line on
            standard error says which of them begin anew although episodes are there.

    Raises:
        ValueError: the recipe is unknown, or a learner in the folder does not fit `config`.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe: got {name!r}, expected one of {sorted(RECIPES)}")
    if name != "rnd":
        return [RECIPES[name]] * workers
    if folder is None:
        return [partial(rnd, config=config)] * workers
    memories = [Memory(folder=folder, worker=w, workers=workers) for w in range(workers)]
    for memory in memories:
        reason = problem(memory, config)
        if reason is not None:
            print(reason, file=sys.stderr)
    return [partial(rnd, config=config, memory=memory) for memory in memories]
