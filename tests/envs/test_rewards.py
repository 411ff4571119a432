import numpy as np
import pytest
from simulator_reward import EXORLS_OWN, simulator

from envs import TASKS, DmcEnv, reward

# Every task with long saturated actions, one of each kind with actions in between.
EPISODES = [(task, "vigorous") for task in TASKS] + [
    (task, "random")
    for task in ("walker_run", "cheetah_run", "cartpole_swingup", "cartpole_balance")
]
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
        # Stiff, the body has 7.21348 kg m^2 about its centre of mass.
        ("walker_flip", walker(), 1 / 6),
        ("walker_flip", walker(speed=8), 1 / 6),
        ("walker_flip", walker(tilt_rate=0.4), (5 * 7.213481 * 0.4 / 5 + 1) / 6),
        ("walker_flip", walker(tilt_rate=-0.4), 1 / 6),
        ("walker_flip", walker(tilt_rate=2), 1.0),
        ("walker_flip", walker(tilt_rate=2, tilt=np.pi), 3 / 4),
    ],
)
def test_walker_by_hand(task, state, expected):
    assert physics_reward(task, state) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("speed", "expected"), [(0, 0), (-3, 0), (5, 0.5), (10, 1), (20, 1)])
def test_cheetah_by_hand(speed, expected):
    state = np.zeros(18)
    state[9] = speed
    assert physics_reward("cheetah_run", state) == pytest.approx(expected)
    assert physics_reward("cheetah_run_backward", -state) == pytest.approx(expected)
    assert physics_reward("cheetah_flip", state) == pytest.approx(0)
    assert physics_reward("cheetah_flip_backward", state) == pytest.approx(0)


@pytest.mark.parametrize(("rate", "expected"), [(-1, 0), (0.5, 0.332486), (1, 0.664972), (2, 1)])
def test_cheetah_flips_by_hand(rate, expected):
    """Stiff, the body has 3.32486 kg m^2 about its centre of mass."""
    state = np.zeros(18)
    state[11] = rate
    assert physics_reward("cheetah_flip", state) == pytest.approx(expected, abs=1e-6)
    assert physics_reward("cheetah_flip_backward", -state) == pytest.approx(expected, abs=1e-6)


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
    assert physics_reward("cartpole_balance", state, action) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ([0, 0, 9, 9], 1),  # speeds don't matter
        ([0.25, 0.1, 0, 0], 1),
        ([-0.25, -0.1, 0, 0], 1),
        ([0.2501, 0, 0, 0], 0),
        ([-0.2501, 0, 0, 0], 0),
        ([0, 0.1001, 0, 0], 0),  # cos 0.1001 = 0.99499
        ([0, -0.1001, 0, 0], 0),
        ([0, 2 * np.pi, 0, 0], 1),
        ([0, np.pi, 0, 0], 0),
    ],
)
@pytest.mark.parametrize("task", ["cartpole_balance_sparse", "cartpole_swingup_sparse"])
def test_cartpole_sparse_by_hand(task, state, expected):
    assert physics_reward(task, state) == expected
    assert simulator(task).reward(np.array(state)) == expected


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


@pytest.mark.parametrize(("task", "kind"), EPISODES)
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


@pytest.mark.parametrize(("task", "kind"), EPISODES)
def test_without_action_equals_exorl_relabelling(task, kind, record):
    # Random actions never swing the pole up, and a reward that is zero throughout proves nothing.
    episode = record("cartpole_balance" if task == "cartpole_swingup_sparse" else task, kind)
    expected = simulator(task).rewards(episode.physics)
    got = reward(task, observation=episode.observation, action=None, physics=episode.physics)
    tolerance = 1e-6 if task.startswith("jaco") else 1e-12
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    if not task.startswith("jaco"):
        assert np.ptp(expected) > 0.03


@pytest.mark.parametrize("task", EXORLS_OWN)
def test_live_rewards_of_exorls_own_tasks_are_the_simulators(task):
    env, rng = DmcEnv(task), np.random.default_rng(0)
    env.reset(seed=0)
    got, expected = [], []
    for _ in range(300):
        got.append(env.step(rng.choice([-1, 1], 6))[1])
        expected.append(EXORLS_OWN[task](env._env.physics))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert np.ptp(expected) > 0.03


def test_states_far_from_any_episode():
    rng = np.random.default_rng(0)
    state = np.concatenate([rng.uniform(-9, 9, (50, 9)), rng.normal(0, 5, (50, 9))], axis=1)
    for task in ("walker_run", "walker_flip", "cheetah_run_backward", "cheetah_flip"):
        got = reward(task, observation=None, action=None, physics=state)
        np.testing.assert_allclose(got, simulator(task).rewards(state), rtol=0, atol=1e-12)
        assert np.ptp(got) > 0.03


def test_cartpole_is_overpaid_without_its_action(record):
    episode = record("cartpole_swingup", "random")
    relabelled = reward("cartpole_swingup", observation=None, action=None, physics=episode.physics)
    assert (relabelled >= episode.reward).all()
    assert 1.02 < relabelled.sum() / episode.reward.sum() < 1.25


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("walker_stand", "walker_run"),
        ("walker_run", "walker_flip"),
        ("cheetah_run", "cheetah_flip_backward"),
        ("cartpole_balance_sparse", "cartpole_balance"),
        ("jaco_reach_top_left", "jaco_reach_bottom_right"),
    ],
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


@pytest.mark.parametrize("task", ["walker_flip", "cartpole_swingup", "jaco_reach_top_left"])
def test_blocks_leave_no_seam(task, monkeypatch):
    spec, rng = TASKS[task], np.random.default_rng(0)
    arrays = {
        "observation": rng.uniform(-0.1, 0.1, (25, 3, spec.observation_size)).astype(np.float32),
        "action": rng.uniform(-1, 1, (25, 3, spec.action_size)).astype(np.float32),
        "physics": rng.normal(size=(25, 3, spec.physics_size)),
    }
    whole = reward(task, **arrays)
    for size in (1, 7, 25, 74, 75, 76):
        monkeypatch.setattr("envs.rewards._BLOCK", size)
        # Rolled: rows left out would show the last call's results where its memory is used again.
        rolled = {name: np.roll(array, size, axis=0) for name, array in arrays.items()}
        expected = np.roll(whole, size, axis=0)
        np.testing.assert_allclose(reward(task, **rolled), expected, rtol=0, atol=1e-14)


def test_errors_name_the_field():
    with pytest.raises(ValueError, match=r"task: got 'jaco_reach', expected one of"):
        reward("jaco_reach", observation=np.zeros(42), action=None, physics=None)
    with pytest.raises(ValueError, match=r"physics: got None, expected an array \(\.\.\., 18\)"):
        reward("walker_run", observation=np.zeros(24), action=None, physics=None)
    with pytest.raises(
        ValueError, match=r"observation: got shape \(3, 55\), expected \(\.\.\., 42"
    ):
        reward("jaco_reach_top_left", observation=np.zeros((3, 55)), action=None, physics=None)
    with pytest.raises(ValueError, match=r"action: got shape \(3, 1\), expected \(2, 1\)"):
        reward(
            "cartpole_swingup",
            observation=None,
            action=np.zeros((3, 1)),
            physics=np.zeros((2, 4)),
        )
