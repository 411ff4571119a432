import numpy as np
import pytest

from envs import TASKS, DmcEnv, reward

WALKER = np.zeros(18)  # upright, torso at 1.3 m, at rest


def physics_reward(task, state, action=None):
    return float(reward(task, observation=None, action=action, physics=np.asarray(state)))


def walker(height=1.3, tilt=0.0, speed=0.0, tilt_rate=0.0):
    state = WALKER.copy()
    state[[0, 2, 10, 11]] = height - 1.3, tilt, speed, tilt_rate
    return state


@pytest.mark.parametrize(
    ("task", "state", "expected"),
    [
        ("walker_stand", walker(), 1.0),
        ("walker_stand", walker(height=1.2), 1.0),
        ("walker_stand", walker(height=0.6), (3 * 0.1 + 1) / 4),  # one margin below
        ("walker_stand", walker(tilt=np.pi), 3 / 4),
        ("walker_stand", walker(tilt=np.pi / 2), 7 / 8),
        ("walker_walk", walker(), 1 / 6),
        ("walker_walk", walker(speed=-1), 1 / 6),
        ("walker_walk", walker(speed=0.5), (5 * 0.5 + 1) / 6),
        ("walker_walk", walker(speed=1), 1.0),
        ("walker_walk", walker(speed=3), 1.0),
        ("walker_run", walker(speed=2), (5 * 0.25 + 1) / 6),
        ("walker_run", walker(speed=8, height=0.6), 0.325),
        # The centre of mass hangs 0.52766 m below the torso's: tilting back moves it backwards.
        ("walker_walk", walker(speed=1, tilt_rate=1), (5 * (1 - 0.527656) + 1) / 6),
    ],
)
def test_walker_by_hand(task, state, expected):
    assert physics_reward(task, state) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("speed", "expected"), [(0, 0), (-3, 0), (5, 0.5), (10, 1), (20, 1)])
def test_cheetah_by_hand(speed, expected):
    state = np.zeros(18)
    state[9] = speed
    assert physics_reward("cheetah_run", state) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("state", "action", "expected"),
    [
        ([0, 0, 0, 0], 0.0, 1.0),
        ([0, np.pi, 0, 0], 0.0, 0.0),
        ([0, np.pi / 2, 0, 0], 0.0, 0.5),
        ([2, 0, 0, 0], 0.0, 0.55),
        ([-2, 0, 9, 0], 0.0, 0.55),  # the cart's own speed doesn't matter
        ([0, 0, 0, -5], 0.0, 0.55),
        ([0, 0, 0, 0], -0.5, 0.95),
        ([0, 0, 0, 0], 1.0, 0.8),
        ([0, 0, 0, 0], None, 1.0),
    ],
)
def test_cartpole_by_hand(state, action, expected):
    action = None if action is None else np.array([action], np.float32)
    assert physics_reward("cartpole_swingup", state, action) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("offset", "expected"), [(0, 1), (0.0499, 1), (0.075, 0.1**0.25), (0.1, 0.1), (0.15, 1e-4)]
)
@pytest.mark.parametrize(
    ("corner", "x", "y"),
    [
        ("top_left", -0.09, 0.09),
        ("top_right", 0.09, 0.09),
        ("bottom_left", -0.09, -0.09),
        ("bottom_right", 0.09, -0.09),
    ],
)
def test_jaco_by_hand(corner, x, y, offset, expected):
    observation = np.full(42, 7.0)
    observation[30:33] = x, y, 0.001 + offset
    got = reward(f"jaco_reach_{corner}", observation=observation, action=None, physics=None)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["random", "vigorous"])
@pytest.mark.parametrize("task", TASKS)
def test_equals_the_live_reward(task, kind, record):
    episode = record(task, kind)
    got = reward(
        task, observation=episode.observation, action=episode.action, physics=episode.physics
    )
    assert got.dtype == np.float64
    # jaco reads the tool centre point from the float32 observation.
    tolerance = 1e-6 if task.startswith("jaco") else 1e-12
    np.testing.assert_allclose(got, episode.reward, rtol=0, atol=tolerance)
    assert got.min() >= 0
    assert got.max() <= 1


@pytest.mark.parametrize("kind", ["random", "vigorous"])
@pytest.mark.parametrize("task", TASKS)
def test_without_action_equals_exorl_relabelling(task, kind, record):
    """ExoRL sets each state in a reset context, which zeroes the control, and asks the task."""
    episode = record(task, kind)
    env = DmcEnv(task)
    expected = []
    for state in episode.physics:
        with env._env.physics.reset_context():
            env._env.physics.set_state(state)
        expected.append(env._env.task.get_reward(env._env.physics))
    got = reward(task, observation=episode.observation, action=None, physics=episode.physics)
    tolerance = 1e-6 if task.startswith("jaco") else 1e-12
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def test_cartpole_is_overpaid_without_its_action(record):
    episode = record("cartpole_swingup", "random")
    relabelled = reward("cartpole_swingup", observation=None, action=None, physics=episode.physics)
    assert (relabelled >= episode.reward).all()
    assert 1.02 < relabelled.sum() / episode.reward.sum() < 1.25


@pytest.mark.parametrize(
    ("source", "target"),
    [("walker_stand", "walker_run"), ("jaco_reach_top_left", "jaco_reach_bottom_right")],
)
def test_relabelled_data_equals_live_data_of_the_other_task(source, target, record):
    source_episode, target_episode = record(source), record(target)
    np.testing.assert_array_equal(source_episode.physics, target_episode.physics)
    got = reward(
        target,
        observation=source_episode.observation,
        action=source_episode.action,
        physics=source_episode.physics,
    )
    np.testing.assert_allclose(got, target_episode.reward, rtol=0, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_any_leading_axes_and_no_side_effects(task, record):
    episode = record(task)
    arrays = {
        "observation": episode.observation[:24].reshape(2, 3, 4, -1),
        "action": episode.action[:24].reshape(2, 3, 4, -1),
        "physics": episode.physics[:24].reshape(2, 3, 4, -1),
    }
    for array in arrays.values():
        array.flags.writeable = False
    batch = reward(task, **arrays)
    assert batch.shape == (2, 3, 4)
    single = [
        reward(task, **{name: array[index] for name, array in arrays.items()})
        for index in np.ndindex(2, 3, 4)
    ]
    np.testing.assert_allclose(batch.ravel(), single, rtol=0, atol=1e-14)
    empty = {name: array.reshape(-1, array.shape[-1])[:0] for name, array in arrays.items()}
    assert reward(task, **empty).shape == (0,)


def test_errors_name_the_field():
    with pytest.raises(ValueError, match=r"task: got 'jaco_reach', expected one of"):
        reward("jaco_reach", observation=np.zeros(42), action=None, physics=None)
    with pytest.raises(ValueError, match=r"physics: got None, expected an array \(\.\.\., 18\)"):
        reward("walker_run", observation=np.zeros(24), action=None, physics=None)
    with pytest.raises(
        ValueError, match=r"observation: got shape \(3, 55\), expected \(\.\.\., 42"
    ):
        reward("jaco_reach_top_left", observation=np.zeros((3, 55)), action=None, physics=None)
