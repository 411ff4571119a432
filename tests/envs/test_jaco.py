import numpy as np
import pytest

from envs import DmcEnv, jaco
from envs.rewards import JACO_TARGETS

CORNERS = list(JACO_TARGETS)


def test_observation_parts_and_their_order():
    timestep = jaco.load(CORNERS[0]).reset()
    assert [(name, np.size(part)) for name, part in timestep.observation.items()] == [
        ("jaco_arm/joints_pos", 12),
        ("jaco_arm/joints_torque", 6),
        ("jaco_arm/joints_vel", 6),
        ("jaco_arm/jaco_hand/joints_pos", 3),
        ("jaco_arm/jaco_hand/joints_vel", 3),
        ("jaco_arm/jaco_hand/pinch_site_pos", 3),
        ("jaco_arm/jaco_hand/pinch_site_rmat", 9),
    ]


def test_observation_columns(record):
    episode = record(CORNERS[0])
    arm, fingers = episode.physics[:, :6], episode.physics[:, 6:9]
    arm_rate, finger_rate = episode.physics[:, 9:15], episode.physics[:, 15:]
    observation = episode.observation.astype(np.float64)
    sin_cos = np.stack([np.sin(arm), np.cos(arm)], axis=-1).reshape(-1, 12)
    np.testing.assert_allclose(observation[:, :12], sin_cos, atol=1e-6)
    np.testing.assert_allclose(observation[:, 18:24], arm_rate, atol=1e-6)
    np.testing.assert_allclose(observation[:, 24:27], fingers, atol=1e-6)
    np.testing.assert_allclose(observation[:, 27:30], finger_rate, rtol=1e-6, atol=1e-6)
    rotation = observation[:, 33:].reshape(-1, 3, 3)
    identity = rotation @ rotation.transpose(0, 2, 1)
    np.testing.assert_allclose(identity, np.broadcast_to(np.eye(3), identity.shape), atol=1e-6)


def test_tool_centre_point_is_the_pinch_site():
    env = DmcEnv(CORNERS[0])
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        fingertips = env._env.physics.bind(env._env.task._hand.pinch_site).xpos
        np.testing.assert_allclose(observation[30:33], fingertips, rtol=1e-6, atol=1e-7)


def test_hand_starts_in_the_spawn_box_pointing_down():
    env = DmcEnv(CORNERS[1])
    starts = np.array([env.reset(seed=seed)[0] for seed in range(12)])
    tcp = starts[:, 30:33]
    assert (tcp >= np.array(jaco.SPAWN_LOWER) - 1e-3).all()
    assert (tcp <= np.array(jaco.SPAWN_UPPER) + 1e-3).all()
    assert (np.ptp(tcp, axis=0) > 0.1).all()
    np.testing.assert_allclose(starts[:, 41], -1, atol=1e-2)  # rotation zz
    assert np.ptp(starts[:, 24]) > 0.1  # fingers closed by a random amount


def test_the_target_is_hidden():
    """The four tasks show one and the same world; only their rewards differ."""
    trajectories = []
    for task in CORNERS:
        env = DmcEnv(task)
        observation, _ = env.reset(seed=2)
        rows = [observation]
        for _ in range(5):
            rows.append(env.step(np.full(9, 0.5))[0])
        trajectories.append(np.array(rows))
    for trajectory in trajectories[1:]:
        np.testing.assert_array_equal(trajectory, trajectories[0])


@pytest.mark.parametrize("task", CORNERS)
def test_target_stands_at_its_corner(task):
    env = DmcEnv(task)
    env.reset(seed=0)
    np.testing.assert_allclose(env._env.physics.named.data.site_xpos["target"], JACO_TARGETS[task])
    assert env._env.physics.named.model.site_size["target"][0] == 0.05


def test_actions_are_scaled_to_the_native_range():
    env = DmcEnv(CORNERS[0])
    env.reset(seed=0)
    native = env._env.action_spec().maximum
    np.testing.assert_allclose(native, [0.628] * 3 + [0.838] * 3 + [5] * 3, atol=1e-3)
    action = np.linspace(-1, 1, 9, dtype=np.float32)
    env.step(action)
    np.testing.assert_allclose(env._env.physics.control(), native * action, rtol=1e-12)


def test_keeping_the_compiled_model_changes_nothing():
    kept, fresh = DmcEnv(CORNERS[0]), DmcEnv(CORNERS[0])
    kept.reset(seed=8)
    kept.step(np.ones(9))
    for _ in range(2):  # the second reset of `kept` reuses a model that was stepped
        a, b = kept.reset(seed=9), fresh.reset(seed=9)
        np.testing.assert_array_equal(a[1]["physics"], b[1]["physics"])
        for _ in range(10):
            a, b = kept.step(np.ones(9)), fresh.step(np.ones(9))
            np.testing.assert_array_equal(a[4]["physics"], b[4]["physics"])
        fresh = DmcEnv(CORNERS[0])
