"""Steps of environments per second, beside MuJoCo's own with nothing around them.

    python -m benchmarks.environments --json results.json

Everyone plays the same trajectories: --trajectories episodes' first --steps control steps with
uniform actions, one after the other or as many side by side as the contender has environments.
Resets are not timed. The floor is `mj_step` in a loop, with the substeps of a control step, in one
simulation, the controls written while the clock stands; "of floor" is the median over the rounds
of its time / the contender's. That of two processes is of one core's floor as well, and "x one
process" is the time of as many environments in this process / theirs. Then where the time of all
environments in one process goes; "rest" is checks, clipping and copies.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import mujoco
import numpy as np

from benchmarks import measure
from benchmarks.report import Report, number
from envs import TASKS, DmcEnv, EnvPool, quiet_simulator

TASKS_SHOWN = ("walker_run", "cheetah_run", "cartpole_swingup", "jaco_reach_top_left")
FLOOR, DM_CONTROL, SINGLE = "mj_step", "dm_control", "DmcEnv"


class Trajectories:
    """Seeds and actions that everyone plays, and the ways to play them, which time themselves.

    Attributes:
        action: (N, T, A) float32 of N trajectories.
    """

    def __init__(self, task: str, count: int, steps: int) -> None:
        self.task = task
        rng = np.random.default_rng(0)
        shape = (count, steps, TASKS[task].action_size)
        self.action = rng.uniform(-1, 1, shape).astype(np.float32)
        self._env = DmcEnv(task)

    @property
    def steps(self) -> int:
        """Control steps of all trajectories."""
        return self.action.shape[0] * self.action.shape[1]

    def simulator(self) -> float:
        """Seconds of `mj_step` alone."""
        seconds = 0.0
        for actions in self._begun():
            physics = self._env._env.physics
            model, data = physics.model.ptr, physics.data.ptr
            substeps = round(TASKS[self.task].control_seconds / model.opt.timestep)
            for action in actions:
                data.ctrl[:] = self._env._control(action)
                start = time.perf_counter()
                mujoco.mj_step(model, data, substeps)
                seconds += time.perf_counter() - start
        return seconds

    def dm_control(self) -> float:
        """Seconds of dm_control's own environment, with the native actions."""
        seconds = 0.0
        for actions in self._begun():
            native = [self._env._control(action) for action in actions]
            start = time.perf_counter()
            for action in native:
                self._env._env.step(action)
            seconds += time.perf_counter() - start
        return seconds

    def single(self) -> float:
        """Seconds of `DmcEnv`."""
        seconds = 0.0
        for actions in self._begun():
            start = time.perf_counter()
            for action in actions:
                self._env.step(action)
            seconds += time.perf_counter() - start
        return seconds

    def pool(self, pool: EnvPool) -> float:
        """Seconds of a pool, whose environments share the trajectories."""
        seconds = 0.0
        for first in range(0, len(self.action), len(pool)):
            actions = self.action[first : first + len(pool)].swapaxes(0, 1)
            pool.reset(range(first, first + len(pool)))
            start = time.perf_counter()
            for action in actions:
                pool.step(action)
            seconds += time.perf_counter() - start
        return seconds

    def _begun(self) -> Iterator[np.ndarray]:
        """The actions (T, A) of every trajectory; the environment stands at its beginning."""
        for seed, actions in enumerate(self.action):
            self._env.reset(seed=seed)
            yield actions


class Split:
    """What a pool in one process spends its steps on, in seconds since the last reset of it."""

    def __init__(self, pool: EnvPool) -> None:
        assert not pool._workers
        self._pool = pool
        self._engine, self._seconds = pool._engine, dict.fromkeys(("engine", "read"), 0.0)
        self._clock(self._engine, "step", "engine")
        self._clock(self._engine, "_read", "read")
        self._clock(pool._layout, "observation", "observation")
        self._clock(pool, "_rewards", "reward")

    def __call__(self, trajectories: Trajectories) -> dict[str, float]:
        """Seconds by part over all the trajectories."""
        trajectories.pool(self._pool)  # warm, and resets read as well
        for part in self._seconds:
            self._seconds[part] = 0.0
        whole = trajectories.pool(self._pool)
        spent = dict(self._seconds)
        steps = trajectories.steps // len(self._pool)
        start = time.perf_counter()
        for _ in range(steps):
            for _, native, control in self._engine._controls:
                native[:] = control
        controls = time.perf_counter() - start
        parts = {
            "simulator": spent["engine"] - spent["read"] - controls,
            "controls": controls,
            "reading": spent["read"],
            "observation": spent["observation"],
            "reward": spent["reward"],
        }
        return parts | {"rest": whole - sum(parts.values())}

    def _clock(self, owner: Any, method: str, part: str) -> None:
        """Count the seconds of a method of one object."""
        inner: Callable[..., Any] = getattr(owner, method)
        self._seconds[part] = 0.0

        @functools.wraps(inner)
        def clocked(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments)
            self._seconds[part] += time.perf_counter() - start
            return result

        setattr(owner, method, clocked)


def rates(
    trajectories: Trajectories, settings: argparse.Namespace
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of everyone on one task."""
    count = len(trajectories.action)
    title = f"{trajectories.task}, {count} trajectories of {trajectories.action.shape[1]} steps"
    measure.log(title)
    cases = [(size, 1) for size in settings.environments]
    cases += [(max(settings.environments), workers) for workers in settings.workers if workers > 1]
    names = {case: f"EnvPool, {case[0]} environments, {case[1]} process(es)" for case in cases}
    pools = {case: EnvPool([trajectories.task] * case[0], workers=case[1]) for case in cases}
    for pool in pools.values():
        pool.reset(range(len(pool)))  # every process is there
        pool.step(np.zeros((len(pool), pool.task.action_size)))
    contenders: dict[str, Callable[[], float]] = {
        FLOOR: trajectories.simulator,
        DM_CONTROL: trajectories.dm_control,
        SINGLE: trajectories.single,
    }
    for case, pool in pools.items():
        contenders[names[case]] = functools.partial(trajectories.pool, pool)
    taken = measure.interleave(contenders, settings.rounds)
    for pool in pools.values():
        pool.close()

    alone = names[max(settings.environments), 1]
    shared = [name for case, name in names.items() if case[1] > 1]
    rows = [
        {
            "": name,
            "steps/s": number(trajectories.steps / statistics.median(times)),
            "us/step": number(1e6 * statistics.median(times) / trajectories.steps),
            "of floor": f"{measure.ratio(taken[FLOOR], times):.0%}",
            "x one process": number(measure.ratio(taken[alone], times)) if name in shared else "",
        }
        for name, times in taken.items()
    ]
    return title, rows, {"task": trajectories.task, "steps": trajectories.steps, "seconds": taken}


def split(
    trajectories: Trajectories, settings: argparse.Namespace
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of where the time of the most environments goes."""
    size = max(settings.environments)
    pool = EnvPool([trajectories.task] * size)
    of_pool = Split(pool)
    rounds = [of_pool(trajectories) for _ in range(settings.rounds)]
    pool.close()
    middle = {part: statistics.median(r[part] for r in rounds) for part in rounds[0]}
    rows = [
        {
            "": part,
            "us/step": number(1e6 * seconds / trajectories.steps),
            "share": f"{seconds / sum(middle.values()):.1%}",
        }
        for part, seconds in middle.items()
    ]
    title = f"{trajectories.task}, one process, {size} environments: where the time goes"
    return title, rows, {"task": trajectories.task, "steps": trajectories.steps, "rounds": rounds}


def main(argv: Sequence[str] | None = None) -> None:
    """Two tables for every task."""
    parser = measure.arguments(__doc__, rounds=7)
    parser.add_argument("--tasks", nargs="+", default=TASKS_SHOWN, choices=TASKS, metavar="TASK")
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="processes")
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100, help="control steps of a trajectory")
    settings = parser.parse_args(argv)
    for size in settings.environments:
        if size < 1 or settings.trajectories % size:
            parser.error(f"--environments: got {size}, expected divisors of --trajectories")
    measure.pin(max(settings.workers))
    quiet_simulator()
    packages = {name: version(name) for name in ("numpy", "mujoco", "dm-control")}
    report = Report(settings.json, **packages, **vars(settings))
    for task in settings.tasks:
        trajectories = Trajectories(task, settings.trajectories, settings.steps)
        report.case(*rates(trajectories, settings))
        report.case(*split(trajectories, settings))


if __name__ == "__main__":
    main()
