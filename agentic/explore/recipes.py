"""The ways to explore, by the names that users choose them by."""

from collections.abc import Callable, Generator

import numpy as np

from agentic.episodes import Episode
from agentic.explore.babble import babble
from agentic.explore.td3 import td3
from agentic.explore.uniform import random
from envs import TaskSpec

Recipe = Callable[[TaskSpec, np.random.Generator], Generator[Episode, None, None]]

RECIPES: dict[str, Recipe] = {
    "td3": td3,
    "babble": babble,
    "random": random,
}
