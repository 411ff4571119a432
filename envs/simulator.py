"""A task's simulation put into recorded states: what they lead to, what they show and earn."""

import numpy as np

from envs.dmc import DmcEnv, join_parts


class Simulator:
    """MuJoCo without the episode around it, for states and actions as ExoRL stores them.

    It steps the model with `mj_step`, as many substeps as a control step has. From the state where
    an episode of this same MuJoCo began, that repeats dm_control's own states to the last bit.
    Cheetah's solver starts from 200 settling steps that no state holds: 1e-15 at first, which
    contacts amplify (to 1e-3 within the worst of 24 episodes of a learning agent).

    Args:
        task: A key of `envs.TASKS`.

    Raises:
        ValueError: The task is unknown.
    """

    def __init__(self, task: str) -> None:
        self._env = DmcEnv(task)
        import mujoco  # here and not above: it chooses its OpenGL backend at import

        self._mujoco = mujoco
        self.task = self._env.task
        self._env.reset(seed=0)  # jaco's physics is compiled again here
        self._physics = self._env._env.physics
        self._model, self._data = self._physics.model.ptr, self._physics.data.ptr
        self._substeps = round(self.task.control_seconds / self._model.opt.timestep)

    def begin(self, physics: np.ndarray) -> None:
        """Forget everything and stand in the state `physics` (P,) float64, without control."""
        self._mujoco.mj_resetData(self._model, self._data)
        self._set(physics)
        self._mujoco.mj_forward(self._model, self._data)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Apply `action` (A,) for one control step. Returns the state reached, (P,) float64."""
        self._data.ctrl[:] = self._env._control(action)
        self._mujoco.mj_step(self._model, self._data, self._substeps)
        return np.concatenate([self._data.qpos, self._data.qvel])

    def place(self, physics: np.ndarray, action: np.ndarray) -> None:
        """Stand in the state `physics` (P,), reached by `action` (A,), to be observed.

        What the last step leaves behind stays: jaco's joint torques, which belong to accelerations
        and not to states, and where the solver starts from.
        """
        self._data.ctrl[:] = self._env._control(action)
        self._set(physics)
        self._mujoco.mj_step1(self._model, self._data)

    def observation(self) -> np.ndarray:
        """What the state shows after `place`, (O,) float32."""
        task = self._env._env.task
        if self.task.domain == "jaco":
            parts = [
                observable.observation_callable(self._physics, None)()
                for observable in task.observables.values()
                if observable.enabled
            ]
        else:
            parts = list(task.get_observation(self._physics).values())
        return join_parts(parts)

    def reward(self) -> float:
        """What the simulator's own task pays for the state and its action, after `place`."""
        return float(self._env._env.task.get_reward(self._physics))

    def close(self) -> None:
        """Free the simulation."""
        self._env.close()

    def _set(self, physics: np.ndarray) -> None:
        self._data.qpos[:] = physics[: self._model.nq]
        self._data.qvel[:] = physics[self._model.nq :]
