"""Several episodes of one task, played side by side and kept in ExoRL's layout."""

from collections.abc import Callable
from typing import Self

import numpy as np

from agentic.episodes import Episode
from envs import EnvPool

# (step, observation (E, O), physics (E, P)) -> action (E, A)
Controller = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


class Recording:
    """E episodes in progress, from a fresh reset of `pool`; all have the same length.

    Arrays are (E, T+1, ...); rows up to `step` are filled.

    Args:
        pool: the environments; they belong to the recording until it is `done`.
        rng: draws the seeds of the initial states.
    """

    def __init__(self, pool: EnvPool, rng: np.random.Generator) -> None:
        task, count = pool.task, len(pool)
        rows = (count, task.episode_steps + 1)
        self.pool = pool
        self.step = 0
        self.done = False
        self.observation = np.zeros((*rows, task.observation_size), np.float32)
        self.action = np.zeros((*rows, task.action_size), np.float32)
        self.reward = np.zeros((*rows, 1), np.float32)
        self.physics = np.zeros((*rows, task.physics_size), np.float64)
        seeds = [int(seed) for seed in rng.integers(2**31, size=count)]
        self.observation[:, 0], self.physics[:, 0] = pool.reset(seeds)

    def advance(self, action: np.ndarray) -> None:
        """Applies actions (E, A), clipped to [-1, 1], and records what followed."""
        self.step += 1
        row = self.step
        # What is stored must be what the environment got, to the last bit.
        self.action[:, row] = np.clip(action, -1, 1)
        observation, reward, physics, self.done = self.pool.step(self.action[:, row])
        self.observation[:, row] = observation
        self.reward[:, row, 0] = reward
        self.physics[:, row] = physics

    def play(self, controller: Controller) -> Self:
        """Runs `controller` to the end of the episodes; returns itself."""
        while not self.done:
            t = self.step
            self.advance(controller(t, self.observation[:, t], self.physics[:, t]))
        return self

    def episodes(self) -> list[Episode]:
        """The finished episodes: E, less those in which the simulation broke down.

        Raises:
            RuntimeError: all of them did; a recipe that went on would never yield again.
        """
        whole = np.flatnonzero(~self.pool.failed)
        if len(whole) == 0:
            raise RuntimeError(f"{self.pool.task.name}: the simulation broke down in every episode")
        return [
            Episode(
                observation=self.observation[e],
                action=self.action[e],
                reward=self.reward[e],
                discount=np.ones_like(self.reward[e]),
                physics=self.physics[e],
            )
            for e in whole
        ]
