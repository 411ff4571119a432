"""Exploration without a reward: smooth controllers with random parameters."""

from collections.abc import Generator
from functools import partial

import numpy as np

from agentic.episodes import Episode
from agentic.explore import noise
from agentic.explore.recording import Controller, Recording
from agentic.explore.servo import Servo
from envs import EnvPool, TaskSpec


def babble(
    task: TaskSpec, rng: np.random.Generator, environments: int = 8
) -> Generator[Episode, None, None]:
    """Episodes of `task`'s domain without end, `environments` played side by side.

    Jaco's hand is driven to random goals; other bodies get a `mixture` of simple controllers.
    """
    pool = EnvPool([task.name] * environments)
    draw = Servo(task) if task.domain == "jaco" else partial(mixture, task)
    while True:
        yield from Recording(pool, rng).play(draw(rng, environments)).episodes()


def mixture(task: TaskSpec, rng: np.random.Generator, environments: int) -> Controller:
    """A random controller for each environment, for one episode.

    Of every eight environments four follow sinusoids, two pink noise, one uniform noise and one a
    random linear feedback.
    """
    shape = (environments, task.episode_steps, task.action_size)
    kind = np.arange(environments) % 8
    open_loop = np.zeros(shape, np.float32)
    for make, kinds in (
        (noise.sinusoids, (1, 3, 5, 7)),
        (noise.pink, (0, 4)),
        (noise.uniform, (2,)),
    ):
        chosen = np.isin(kind, kinds)
        open_loop[chosen] = make(rng, (int(chosen.sum()), *shape[1:]))
    # Feedback weights, zero where an open loop has been drawn.
    gain = np.exp(rng.uniform(np.log(0.3), np.log(3), environments)) * (kind == 6)
    weights = rng.standard_normal((environments, task.observation_size, task.action_size))
    weights *= gain[:, None, None] / np.sqrt(task.observation_size)

    def policy(t: int, observation: np.ndarray, physics: np.ndarray) -> np.ndarray:
        return open_loop[:, t] + np.tanh(np.einsum("eo,eoa->ea", observation, weights))

    return policy
