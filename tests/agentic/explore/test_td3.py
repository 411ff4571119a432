import itertools

import numpy as np
import pytest
import torch

from agentic.explore.recording import Recording
from agentic.explore.td3 import Learner, Td3Settings, td3
from envs import TASKS, EnvPool

CARTPOLE = TASKS["cartpole_swingup"]
SMALL = Td3Settings(environments=2, warmup_steps=2000, hidden=8, batch=8, replay_capacity=3000)


def test_the_same_generator_gives_the_same_episodes():
    torch.set_num_threads(1)
    # The warm-up's two episodes and the first two that are learned from.
    first, again = (
        list(itertools.islice(td3(CARTPOLE, np.random.default_rng(0), SMALL), 4)) for _ in range(2)
    )
    for one, other in zip(first, again, strict=True):
        assert (one.physics == other.physics).all()
        assert (one.action == other.action).all()
    assert len({episode.physics.tobytes() for episode in first}) == 4


def constant(t, observation, physics):
    return np.full((len(observation), 1), 0.5, np.float32)


def test_replay_rows_are_n_step_transitions():
    rng = np.random.default_rng(0)
    recording = Recording(EnvPool([CARTPOLE.name] * 2), rng).play(constant)
    learner = Learner(CARTPOLE, SMALL, [recording], rng)
    # 2 environments, 998 transitions of 3 steps each; row 2 * 10 + 1 starts at t = 10 in the second
    assert learner.stored == 2 * 998
    x, action, reward, next_x = learner.rows[21].split(learner.widths)
    seen = recording.observation.reshape(-1, CARTPOLE.observation_size)
    standardised = (recording.observation - seen.mean(0)) / np.maximum(seen.std(0), 1e-2)
    np.testing.assert_allclose(x, standardised[1, 10], atol=1e-4)
    np.testing.assert_allclose(next_x, standardised[1, 13], atol=1e-4)
    assert action.item() == recording.action[1, 11, 0]
    expected = recording.reward[1, 11:14, 0] @ np.array([1, 0.99, 0.99**2])
    assert reward.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_full_replay_forgets_the_oldest():
    rng = np.random.default_rng(0)
    recording = Recording(EnvPool([CARTPOLE.name] * 2), rng).play(constant)
    learner = Learner(CARTPOLE, SMALL, [recording, recording], rng)
    assert learner.stored == 4 * 998  # of 3000 rows; 992 rows have been written twice
    assert torch.isfinite(learner.rows).all()
    np.testing.assert_array_equal(learner.rows[0], learner.rows[3000 - 2 * 998])


def test_updates_follow_the_environment_steps():
    rng = np.random.default_rng(0)
    recording = Recording(EnvPool([CARTPOLE.name] * 2), rng).play(constant)
    learner = Learner(CARTPOLE, SMALL, [recording], rng)
    before = learner.actor.vector.clone()
    for _ in range(4):
        learner.learn(steps=3)  # 12 steps at 0.25 updates each
    assert learner.updates == 3
    assert (learner.actor.vector != before).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [("environments", 0), ("warmup_steps", 0), ("noise_low", 0.0), ("noise_high", 0.01)],
)
def test_settings_name_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=field):
        Td3Settings(**{field: value})


@pytest.mark.slow
def test_cartpole_is_learned():
    torch.set_num_threads(1)
    episodes = itertools.islice(td3(CARTPOLE, np.random.default_rng(0)), 96)
    returns = np.array([episode.reward.sum() for episode in episodes])
    assert np.percentile(returns, 90) > 700
    assert np.percentile(returns, 30) < 300
