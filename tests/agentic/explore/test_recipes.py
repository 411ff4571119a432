import itertools
from dataclasses import replace

import numpy as np
import pytest

from agentic.collect_config import small_rnd
from agentic.explore import RECIPES
from agentic.explore.babble import mixture
from agentic.explore.recording import Recording
from agentic.explore.servo import Servo
from agentic.explore.td3 import Td3Settings
from envs import TASKS, EnvPool, reward

FEW = {"environments": 2}
FEW_TD3 = {"settings": Td3Settings(environments=2, warmup_steps=2000, hidden=8, batch=8)}
TINY = {"hidden": 8, "novelty_hidden": 8, "novelty_size": 4, "batch": 8}
FEW_RND = {"config": replace(small_rnd(), environments=2, seed_steps=1000, **TINY)}
CASES = [
    ("random", "cartpole_swingup", FEW),
    ("babble", "cartpole_swingup", {"environments": 8}),
    ("babble", "jaco_reach_top_left", FEW),
    ("td3", "cartpole_swingup", FEW_TD3),
    ("td3", "cheetah_run", FEW_TD3),
    ("rnd", "cartpole_swingup", FEW_RND),
    ("rnd", "walker_stand", FEW_RND),
]


@pytest.mark.parametrize(("recipe", "name", "arguments"), CASES)
def test_episodes_have_exorls_layout_and_their_rewards_align(recipe, name, arguments):
    task = TASKS[name]
    episodes = RECIPES[recipe](task, np.random.default_rng(0), **arguments)
    episode = next(itertools.islice(episodes, 3, None))
    rows = task.episode_steps + 1
    for array, width, dtype in (
        (episode.observation, task.observation_size, np.float32),
        (episode.action, task.action_size, np.float32),
        (episode.reward, 1, np.float32),
        (episode.discount, 1, np.float32),
        (episode.physics, task.physics_size, np.float64),
    ):
        assert array.shape == (rows, width)
        assert array.dtype == dtype
    assert (episode.action[0] == 0).all()
    assert episode.reward[0] == 0
    assert (episode.discount == 1).all()
    assert np.abs(episode.action).max() <= 1
    expected = reward(
        task.name,
        observation=episode.observation[1:],
        action=episode.action[1:],
        physics=episode.physics[1:],
    )
    np.testing.assert_allclose(episode.reward[1:, 0], expected, atol=1e-6)


@pytest.mark.parametrize(("recipe", "name", "_"), CASES[:3])
def test_the_same_generator_gives_the_same_episodes(recipe, name, _):
    def take(seed):
        return next(RECIPES[recipe](TASKS[name], np.random.default_rng(seed), environments=1))

    assert (take(0).physics == take(0).physics).all()
    assert (take(0).physics != take(1).physics).any()


def test_environments_differ_within_one_mixture():
    task = TASKS["cartpole_swingup"]
    recording = Recording(EnvPool([task.name] * 8), np.random.default_rng(0))
    recording.play(mixture(task, np.random.default_rng(0), 8))
    for one, other in itertools.combinations(recording.action, 2):
        assert (one != other).any()


def test_an_environment_that_breaks_down_gives_no_episode():
    task = TASKS["cartpole_swingup"]
    recording = Recording(EnvPool([task.name] * 2), np.random.default_rng(0))

    def policy(t, observation, physics):
        return np.array([[0.0], [np.nan if t == 5 else 0.0]])

    assert len(recording.play(policy).episodes()) == 1

    def nowhere(t, observation, physics):
        return np.full((2, 1), np.nan)

    recording = Recording(recording.pool, np.random.default_rng(0)).play(nowhere)
    with pytest.raises(RuntimeError, match="every episode"):
        recording.episodes()


def test_the_servo_brings_the_hand_to_a_goal():
    task = TASKS["jaco_reach_top_left"]
    servo = Servo(task)
    goal = np.tile([0.1, -0.1, 0.2], (2, 1))

    def policy(t, observation, physics):
        np.testing.assert_allclose(servo._hand(physics)[0], observation[:, 30:33], atol=1e-6)
        fingers = np.zeros((2, 3))
        return np.concatenate((servo.towards(goal, physics), fingers), axis=1)

    recording = Recording(EnvPool([task.name] * 2), np.random.default_rng(0)).play(policy)
    distance = np.linalg.norm(recording.observation[:, -1, 30:33] - goal, axis=1)
    assert distance.max() < 0.02


def test_the_servos_jacobian_is_the_derivative_of_the_hand():
    servo = Servo(TASKS["jaco_reach_top_left"])
    state = np.tile(np.linspace(0.5, 2.0, 18), (7, 1))
    state[1:, :6] += 1e-6 * np.eye(6)
    position, jacobian = servo._hand(state)
    np.testing.assert_allclose(jacobian[0], (position[1:] - position[0]).T / 1e-6, atol=1e-5)
