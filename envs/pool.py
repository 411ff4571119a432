"""Several environments of one domain in lockstep, for batched evaluation and collection."""

import os
import sys
from collections.abc import Sequence
from typing import Self

import numpy as np

from envs.engine import Engine
from envs.processes import Shared, Worker
from envs.rewards import reward
from envs.tasks import get_task

# Environments of which a step takes several times as long as waking a process.
_WORTH_WAKING = {"walker": 4, "jaco": 2}


class EnvPool:
    """E environments, one per entry of `tasks`, stepped together.

    They do what E `DmcEnv` do, to the last bit but for rewards, which are those of `envs.reward`.
    Episodes of a domain all have the same length, so they begin and end together. An environment
    that fails (an action that is not finite, a diverged simulation) is marked in `failed` and rests
    until the next reset: its reward is 0, and its observation and physics stay the last good ones.

    With several workers the results are the same, bit for bit. The other processes are spawned:
    they import the script that began, which therefore needs `if __name__ == "__main__":` around
    what it does. Close the pool, or use it as a context manager, to end them. Linux only.

    Args:
        tasks: Keys of `envs.TASKS`, all of one domain.
        workers: Processes that step, this one included; no more than environments are used. None:
            as many as pay, see `worthwhile_workers`.

    Raises:
        ValueError: A task is unknown, there is none, they are of several domains, or `workers` is
            not positive.
    """

    def __init__(self, tasks: Sequence[str], *, workers: int | None = 1) -> None:
        self.tasks = tuple(get_task(name) for name in tasks)
        if not self.tasks:
            raise ValueError("tasks: got none, expected at least one")
        if len({task.domain for task in self.tasks}) > 1:
            got = ", ".join(dict.fromkeys(tasks))
            raise ValueError(f"tasks: got {got}, expected tasks of one domain")
        self.task = self.tasks[0]
        if workers is None:
            workers = worthwhile_workers(self.task.domain, len(self.tasks))
        if workers < 1:
            raise ValueError(f"workers: got {workers}, expected at least 1")
        names = [task.name for task in self.tasks]
        self._rewarded = {name: _rows(names, name) for name in dict.fromkeys(names)}

        # This process is the first worker, and the one with as few environments as any.
        processes = min(workers, len(names))
        bounds = [len(names) * i // processes for i in range(processes + 1)]
        self._slices = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        mine = self._slices[0]
        self._engine = Engine(names[mine])
        self._layout = self._engine.layout
        shared = Shared(len(names), self.task.action_size, self._layout.size)
        self._control, self._reading, self.failed = shared.arrays()
        self._engine.attach(self._control[mine], self._reading[mine], self.failed[mine])
        self._workers = [Worker(names[rows], shared, rows) for rows in self._slices[1:]]

        self._observation = np.zeros((len(names), self.task.observation_size), dtype=np.float32)
        self._physics = np.zeros((len(names), self.task.physics_size))
        self._steps_left = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self.tasks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def reset(self, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Begin one episode per environment, environment e with `seeds[e]`.

        Returns:
            Observation (E, O) float32 and physics (E, P) float64.

        Raises:
            ValueError: There is not one seed per environment, or one is not in [0, 2**63).
            RuntimeError: The pool is closed, or a process of it died.
        """
        if len(seeds) != len(self):
            raise ValueError(f"seeds: got {len(seeds)}, expected {len(self)}")
        seeds = [int(seed) for seed in seeds]
        for seed in seeds:
            if not 0 <= seed < 2**63:
                raise ValueError(f"seeds: got {seed}, expected 0 to 2**63 - 1")
        if self._closed:
            raise RuntimeError("reset: the pool is closed")
        self._steps_left = 0
        self._run(seeds)
        self.failed[:] = False
        self._observation = self._layout.observation(self._reading).astype(np.float32)
        self._physics = self._layout.physics(self._reading)
        self._steps_left = self.task.episode_steps
        return self._observation.copy(), self._physics.copy()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Apply `action` (E, A), clipped to [-1, 1], for one control step.

        Returns:
            Observation (E, O) float32, reward (E,) float64, physics (E, P) float64, and whether
            the episodes are over.

        Raises:
            ValueError: The actions have another shape.
            RuntimeError: No episode is running; reset first. Or a process of the pool died.
        """
        action = np.asarray(action)
        expected = (len(self), self.task.action_size)
        if action.shape != expected:
            raise ValueError(f"action: got shape {action.shape}, expected {expected}")
        if self._steps_left == 0:
            raise RuntimeError("step: no episode is running; call reset first")
        # An interrupted step leaves environments at different times: only a reset helps.
        steps_left, self._steps_left = self._steps_left - 1, 0

        self.failed |= ~np.isfinite(action).all(axis=1)
        clipped = np.clip(action, -1, 1).astype(np.float32)
        self._control[:] = self._engine.action_centre + self._engine.action_scale * clipped
        self._run()
        shown = self._layout.observation(self._reading)
        physics = self._layout.physics(self._reading)
        self.failed |= self._layout.warned(self._reading) | ~np.isfinite(shown).all(axis=1)
        if self.failed.any():
            shown[self.failed] = self._observation[self.failed]
            physics[self.failed] = self._physics[self.failed]
        rewards = self._rewards(shown, clipped, physics)
        self._observation, self._physics = shown.astype(np.float32), physics
        self._steps_left = steps_left
        return self._observation.copy(), rewards, physics.copy(), steps_left == 0

    def close(self) -> None:
        """Free all environments and end the processes. May be called twice."""
        for worker in self._workers:
            worker.close()
        self._engine.close()
        self._closed = True
        self._steps_left = 0

    def _run(self, seeds: Sequence[int] = ()) -> None:
        """Let all processes reset with `seeds`, or take a step without; wait until all have."""
        mine, *others = self._slices
        for worker, rows in zip(self._workers, others, strict=True):
            worker.begin(seeds[rows])
        if seeds:
            self._engine.reset(seeds[mine])
        else:
            self._engine.step()
        for worker in self._workers:
            worker.finish()

    def _rewards(
        self, observation: np.ndarray, action: np.ndarray, physics: np.ndarray
    ) -> np.ndarray:
        """The rewards (E,) of the states reached, each by its own task; 0 where failed."""
        rewards = np.empty(len(self))
        for name, rows in self._rewarded.items():
            rewards[rows] = reward(
                name, observation=observation[rows], action=action[rows], physics=physics[rows]
            )
        rewards[self.failed] = 0
        return rewards


def worthwhile_workers(domain: str, environments: int) -> int:
    """Processes that step faster than this one alone, this one included: one a core at most.

    A step of the other domains takes less than it takes to wake a process.
    """
    least = _WORTH_WAKING.get(domain)
    if least is None or sys.platform != "linux":
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), environments // least))


def _rows(names: Sequence[str], name: str) -> slice | np.ndarray:
    """Where `name` stands; a slice where that is everywhere, since indices would copy."""
    rows = np.flatnonzero([other == name for other in names])
    return slice(None) if len(rows) == len(names) else rows
