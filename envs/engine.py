"""Many environments of one domain in this process: one MuJoCo model, one state each.

The simulator's numbers are all that is handled environment by environment; what they mean is for
whoever reads them, for all environments at once.

Axes: E environments, A actions, R numbers of a reading.
"""

from collections.abc import Sequence

import numpy as np

from envs.dmc import DmcEnv
from envs.readings import Layout


class Engine:
    """Environments that step as dm_control steps, to the last bit.

    Episodes begin in a `DmcEnv` of the task, whose whole simulation is then copied: what cheetah's
    200 settling steps leave in the solver as well. A control step is dm_control's `legacy_step`:
    the rest of the first substep, the other substeps, and the part of the next one that positions
    and velocities suffice for, so that everything read belongs to the state reached.

    Args:
        tasks: Keys of `envs.TASKS`, all of one domain, one per environment.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._tasks = tuple(tasks)
        self._templates = {name: DmcEnv(name) for name in dict.fromkeys(tasks)}
        # Here: `import envs` must not import it, and `DmcEnv` says it better where it can't be.
        import mujoco

        self._mujoco = mujoco
        for template in self._templates.values():
            template.reset(seed=0)  # jaco's model is compiled here
        first = self._templates[self._tasks[0]]
        # The tasks of a domain differ in rewards, starts and jaco's mark for the target only.
        self._model = first._env.physics.model.ptr
        self._datas = [mujoco.MjData(self._model) for _ in tasks]
        self.layout = Layout(first.task, self._model)
        self.action_centre, self.action_scale = first._action_centre, first._action_scale
        seconds = first.task.control_seconds
        self._substeps = round(seconds / self._model.opt.timestep)
        self._splits = self._model.opt.integrator != mujoco.mjtIntegrator.mjINT_RK4

    def attach(self, control: np.ndarray, reading: np.ndarray, resting: np.ndarray) -> None:
        """Say where to read and write, in arrays that stay as they are and hold C-ordered rows.

        Args:
            control: (E, A) float64 in the actuators' native range.
            reading: (E, R) float64, in the order of `layout`.
            resting: (E,) bool, environments that don't step.
        """
        # memoryviews: assigning one to another takes a third of the time of numpy's assignment.
        self._controls = [
            (data, memoryview(data.ctrl), memoryview(row))
            for data, row in zip(self._datas, control, strict=True)
        ]
        self._views = [view for data in self._datas for view in self.layout.views(data)]
        self._reading = reading.reshape(-1)
        assert np.shares_memory(self._reading, reading)
        self._resting = resting

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin one episode per environment and read it, environment e with `seeds[e]`."""
        for name, data, seed in zip(self._tasks, self._datas, seeds, strict=True):
            template = self._templates[name]
            template.reset(seed=seed)
            self._mujoco.mj_copyData(data, self._model, template._env.physics.data.ptr)
        self._read()

    def step(self) -> None:
        """Apply the controls for one control step, where no environment rests, and read."""
        moving = self._controls
        if self._resting.any():
            rests = self._resting.tolist()
            moving = [row for row, rest in zip(moving, rests, strict=True) if not rest]
        step, begin, finish = self._mujoco.mj_step, self._mujoco.mj_step1, self._mujoco.mj_step2
        model, splits = self._model, self._splits
        others = self._substeps - 1 if splits else self._substeps
        for data, native, control in moving:
            native[:] = control
            if splits:
                finish(model, data)
            if others:
                step(model, data, others)
            begin(model, data)
        self._read()

    def close(self) -> None:
        """Free the templates. May be called twice."""
        for template in self._templates.values():
            template.close()

    def _read(self) -> None:
        # One call for all environments: one for each would take longer than a step of cheetah.
        np.concatenate(self._views, out=self._reading)
