"""Exploration by independent, uniformly drawn actions: ExoRL's `random`."""

from collections.abc import Generator

import numpy as np

from agentic.episodes import Episode
from agentic.explore import noise
from agentic.explore.recording import Recording
from envs import EnvPool, TaskSpec


def random(
    task: TaskSpec, rng: np.random.Generator, environments: int = 8
) -> Generator[Episode, None, None]:
    """Episodes of `task` without end, `environments` played side by side."""
    pool = EnvPool([task.name] * environments)
    while True:
        actions = noise.uniform(rng, (environments, task.episode_steps, task.action_size))
        yield from Recording(pool, rng).play(lambda t, *_, a=actions: a[:, t]).episodes()
