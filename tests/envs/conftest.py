"""Whole recorded episodes of every task, shared by the tests of this folder."""

import functools
from typing import NamedTuple

import numpy as np
import pytest

from envs import DmcEnv


class Episode(NamedTuple):
    observation: np.ndarray  # (T, O) reached
    action: np.ndarray  # (T, A) that led there
    physics: np.ndarray  # (T, P) reached
    reward: np.ndarray  # (T,) live


@functools.cache
def record_episode(task: str, kind: str = "random", seed: int = 0) -> Episode:
    """Play one episode with uniform ("random") or long saturated ("vigorous") actions."""
    env = DmcEnv(task)
    rng = np.random.default_rng(seed)
    size = env.task.action_size
    env.reset(seed=seed)
    action, rows, truncated = np.ones(size, np.float32), [], False
    while not truncated:
        if kind == "random":
            action = rng.uniform(-1, 1, size).astype(np.float32)
        elif rng.random() < 0.1:
            action = rng.choice(np.array([-1, 1], np.float32), size)
        observation, reward, _, truncated, info = env.step(action)
        rows.append((observation, action, info["physics"], reward))
    env.close()
    return Episode(*(np.array(column) for column in zip(*rows, strict=True)))


@pytest.fixture
def record():
    return record_episode
