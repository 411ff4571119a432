"""Rewards of recorded states: the formulas of `envs`, beside asking the simulator state by state.

    python -m benchmarks.relabel --json results.json

The simulator's way is ExoRL's: in a reset context set a state, leave it (which computes everything
that follows from the state), ask the task. Both ways get the same states, of episodes of uniform
actions in the task's own environment, repeated up to the number of states. The simulator takes
--asked states a turn, since its time for a state does not depend on their number; "x simulator" is
the median over the rounds of its seconds per state / those of the formula. "difference" is the
largest between the rewards of --asked states. A task whose live reward is our own formula is asked
for the suite's reward of the same body, and has no difference here: the tests hold it against the
simulator's quantities.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from benchmarks.report import Report, number
from envs import TASKS, DmcEnv, quiet_simulator, reward

DEVICE = torch.device("cpu")
TASKS_SHOWN = (
    "walker_stand",
    "walker_walk",
    "walker_run",
    "walker_flip",
    "cheetah_run",
    "cheetah_run_backward",
    "cheetah_flip",
    "cartpole_swingup",
    "cartpole_swingup_sparse",
    "jaco_reach_top_left",
)
# Whose simulator is asked about these tasks, which dm_control has no reward for.
ASKED_INSTEAD = {
    "walker_flip": "walker_run",
    "cheetah_run_backward": "cheetah_run",
    "cheetah_flip": "cheetah_run",
}


class Recorded:
    """One episode's states of a task, and both ways to their rewards.

    Args:
        task: a key of `envs.TASKS`.
        asked: states that the simulator is asked about.
    """

    def __init__(self, task: str, asked: int) -> None:
        self.task, self.asked = task, asked
        env = DmcEnv(ASKED_INSTEAD.get(task, task))
        self._simulator = env._env
        rng = np.random.default_rng(0)
        env.reset(seed=0)
        rows = []
        for _ in range(env.task.episode_steps):
            action = rng.uniform(-1, 1, env.task.action_size).astype(np.float32)
            observation, _, _, _, info = env.step(action)
            rows.append((observation, action, info["physics"]))
        self.episode = [np.array(column) for column in zip(*rows, strict=True)]

    def simulate(self) -> np.ndarray:
        """Rewards of the first states, one after the other, with zero control."""
        physics, task = self._simulator.physics, self._simulator.task
        states = np.resize(self.episode[2], (self.asked, self.episode[2].shape[1]))
        rewards = []
        for state in states:
            with physics.reset_context():
                physics.set_state(state)
            rewards.append(task.get_reward(physics))
        return np.array(rewards)

    def formula(self, states: int) -> Callable[[], np.ndarray]:
        """Rewards of that many states; the arrays are made here. With the actions, where read."""
        observation, action, physics = (
            np.resize(column, (states, column.shape[1])) for column in self.episode
        )
        return functools.partial(
            reward, self.task, observation=observation, action=action, physics=physics
        )

    def difference(self) -> float | None:
        """Largest between both ways, without the actions; None where dm_control has no reward."""
        if self.task in ASKED_INSTEAD:
            return None
        observation, _, physics = (
            np.resize(column, (self.asked, column.shape[1])) for column in self.episode
        )
        ours = reward(self.task, observation=observation, action=None, physics=physics)
        return float(np.abs(ours - self.simulate()).max())


def relabel(
    states: int, settings: argparse.Namespace
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of one number of states."""
    title = f"Rewards of {states:,} recorded states, one thread"
    measure.log(title)
    rows, measured = [], []
    for task in settings.tasks:
        recorded = Recorded(task, settings.asked)
        call = recorded.formula(states)
        difference = recorded.difference()  # warms the simulator's way
        call()
        once = measure.seconds(call, DEVICE)
        repeats = max(round(settings.turn / once), 1)

        def formula(call: Callable[[], Any] = call, repeats: int = repeats) -> float:
            def turn() -> None:
                for _ in range(repeats):
                    call()

            return measure.seconds(turn, DEVICE) / repeats / states

        def simulate(recorded: Recorded = recorded) -> float:
            return measure.seconds(recorded.simulate, DEVICE) / recorded.asked

        taken = measure.interleave(
            {f"{task}, simulator": simulate, f"{task}, formula": formula}, settings.rounds
        )
        slow, fast = taken.values()
        rows.append(
            {
                "task": task,
                "simulator, states/s": number(1 / statistics.median(slow)),
                "formula, states/s": number(1 / statistics.median(fast)),
                "x simulator": number(measure.ratio(slow, fast)),
                "difference": "" if difference is None else f"{difference:.0e}",
            }
        )
        measured.append(
            {
                "task": task,
                "simulator_seconds": slow,
                "formula_seconds": fast,
                "ratio": measure.ratio(slow, fast),
                "difference": difference,
            }
        )
    return title, rows, {"states": states, "tasks": measured}


def main(argv: Sequence[str] | None = None) -> None:
    """One table for every number of states."""
    parser = measure.arguments(__doc__, rounds=7)
    parser.add_argument("--states", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--asked", type=int, default=1000, help="of the simulator, in a turn")
    parser.add_argument("--turn", type=float, default=0.1, metavar="SECONDS", help="of the formula")
    parser.add_argument("--tasks", nargs="+", default=TASKS_SHOWN, choices=TASKS, metavar="TASK")
    settings = parser.parse_args(argv)
    measure.pin(1)
    quiet_simulator()
    packages = {name: version(name) for name in ("numpy", "mujoco", "dm-control")}
    report = Report(settings.json, **packages, **vars(settings))
    for states in settings.states:
        report.case(*relabel(states, settings))


if __name__ == "__main__":
    main()
