"""Several environments of one task in lockstep, for batched evaluation and collection."""

from collections.abc import Sequence

import numpy as np

from envs.dmc import DmcEnv
from envs.tasks import get_task


class EnvPool:
    """`count` (E) environments of one task, stepped together in this process.

    Episodes of a task all have the same length, so they begin and end together. An environment
    that fails (an action that is not finite, a diverged simulation) is marked in `failed` and rests
    until the next reset: its reward is 0, and its observation and physics stay the last good ones.

    Args:
        task: A key of `envs.TASKS`.
        count: Number of environments, at least 1.

    Raises:
        ValueError: The task is unknown or the count is not positive.
    """

    def __init__(self, task: str, count: int) -> None:
        if count < 1:
            raise ValueError(f"count: got {count}, expected at least 1")
        self.task = get_task(task)
        self.envs = [DmcEnv(task) for _ in range(count)]
        self.failed = np.zeros(count, dtype=bool)
        self._observation = np.zeros((count, self.task.observation_size), dtype=np.float32)
        self._physics = np.zeros((count, self.task.physics_size))
        self._steps_left = 0

    def __len__(self) -> int:
        return len(self.envs)

    def reset(self, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Begin one episode per environment, environment e with `seeds[e]`.

        Returns:
            Observation (E, O) float32 and physics (E, P) float64.

        Raises:
            ValueError: There is not one seed per environment.
        """
        if len(seeds) != len(self):
            raise ValueError(f"seeds: got {len(seeds)}, expected {len(self)}")
        for index, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self._observation[index], info = env.reset(seed=int(seed))
            self._physics[index] = info["physics"]
        self.failed[:] = False
        self._steps_left = self.task.episode_steps
        return self._observation.copy(), self._physics.copy()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Apply `action` (E, A) for one control step.

        Returns:
            Observation (E, O) float32, reward (E,) float64, physics (E, P) float64, and whether
            the episodes are over.

        Raises:
            ValueError: The actions have another shape.
            RuntimeError: No episode is running; reset first.
        """
        action = np.asarray(action)
        expected = (len(self), self.task.action_size)
        if action.shape != expected:
            raise ValueError(f"action: got shape {action.shape}, expected {expected}")
        if self._steps_left == 0:
            raise RuntimeError("step: no episode is running; call reset first")
        reward = np.zeros(len(self))
        for index in np.flatnonzero(~self.failed):
            try:
                self._observation[index], reward[index], _, _, info = self.envs[index].step(
                    action[index]
                )
                self._physics[index] = info["physics"]
            except (ValueError, RuntimeError):
                self.failed[index] = True
        self._steps_left -= 1
        return self._observation.copy(), reward, self._physics.copy(), self._steps_left == 0

    def close(self) -> None:
        """Free all environments. May be called twice."""
        for env in self.envs:
            env.close()
        self._steps_left = 0
