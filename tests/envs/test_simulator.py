"""Recorded episodes in the simulator again: the same states, observations and rewards."""

import functools

import numpy as np
import pytest

from envs import DmcEnv
from envs.simulator import Simulator

STEPS = 60
TASKS = ["walker_run", "cheetah_run", "cartpole_swingup", "jaco_reach_top_left"]


@functools.cache
def _recorded(task: str) -> tuple[np.ndarray, ...]:
    """An episode's first rows: observation, action, reward and physics, row 0 the reset."""
    env = DmcEnv(task)
    rng = np.random.default_rng(0)
    observation, info = env.reset(seed=3)
    rows = [(observation, np.zeros(env.task.action_size, np.float32), 0.0, info["physics"])]
    for _ in range(STEPS):
        action = rng.uniform(-1, 1, env.task.action_size).astype(np.float32)
        observation, reward, _, _, info = env.step(action)
        rows.append((observation, action, reward, info["physics"]))
    env.close()
    return tuple(np.array(column) for column in zip(*rows, strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_open_loop_repeats_the_episode(task):
    _, action, _, physics = _recorded(task)
    simulator = Simulator(task)
    simulator.begin(physics[0])
    reached = np.array([simulator.step(a) for a in action[1:]])
    assert np.abs(reached - physics[1:]).max() <= (1e-11 if task == "cheetah_run" else 0)


@pytest.mark.parametrize("task", TASKS)
def test_every_state_leads_to_the_next_and_shows_what_was_recorded(task):
    observation, action, reward, physics = _recorded(task)
    simulator = Simulator(task)
    for t in range(STEPS):
        simulator.place(physics[t], action[t])
        reached = simulator.step(action[t + 1])
        assert np.abs(reached - physics[t + 1]).max() <= 1e-12
        simulator.place(physics[t + 1], action[t + 1])
        if t > 0:  # the first step has no solver's warm start, which jaco's torques show
            assert np.array_equal(simulator.observation(), observation[t + 1])
        assert simulator.reward() == pytest.approx(reward[t + 1], abs=1e-12)
    simulator.close()


def test_another_action_leads_elsewhere_and_earns_otherwise():
    _, action, _, physics = _recorded("cartpole_swingup")
    simulator = Simulator("cartpole_swingup")
    simulator.place(physics[0], action[0])
    assert np.abs(simulator.step(-action[1]) - physics[1]).max() > 1e-4
    rewards = []
    for control in (0.0, 1.0):
        simulator.place(physics[1], np.array([control], np.float32))
        rewards.append(simulator.reward())
    assert rewards[0] > rewards[1]
