import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs import TASKS, DmcEnv

REMEDY = "MUJOCO_GL=egl (Debian's package libegl1) or MUJOCO_GL=osmesa (libosmesa6)"
SETTINGS = [
    None,
    "",
    "egl",
    "osmesa",
    "glfw",
    "glx",
    "disable",
    "off",
    "0",
    "nonsense",
]  # MUJOCO_GL
ONE_PER_DOMAIN = ["walker_walk", "cheetah_run", "cartpole_swingup", "jaco_reach_top_left"]


def rollout(env, seed, steps=20):
    """Observations, rewards and states of a few steps after `reset(seed=seed)`."""
    observation, info = env.reset(seed=seed)
    rng = np.random.default_rng(7)
    rows = [(observation, 0.0, info["physics"])]
    for _ in range(steps):
        observation, reward, _, _, info = env.step(rng.uniform(-1, 1, env.action_space.shape))
        rows.append((observation, reward, info["physics"]))
    return [np.array(column) for column in zip(*rows, strict=True)]


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:.*infinity")  # observations have no bounds
@pytest.mark.parametrize("task", [*ONE_PER_DOMAIN, "cheetah_flip"])
def test_gymnasium_contract(task):
    check_env(DmcEnv(task), skip_render_check=True)
    env = gymnasium.make(f"exorl/{task}-v0")
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_registered(task):
    env = gymnasium.make(f"exorl/{task}-v0")
    assert env.unwrapped.task is TASKS[task]
    assert env.spec.max_episode_steps == TASKS[task].episode_steps
    env.close()


@pytest.mark.parametrize(
    ("task", "same_world"),
    [
        ("walker_flip", "walker_run"),
        ("cheetah_run_backward", "cheetah_run"),
        ("cheetah_flip", "cheetah_run"),
        ("cheetah_flip_backward", "cheetah_run"),
        ("cartpole_balance", "cartpole_balance_sparse"),
        ("cartpole_swingup", "cartpole_swingup_sparse"),
    ],
)
def test_tasks_that_differ_in_their_reward_only(task, same_world):
    observation, reward, physics = rollout(DmcEnv(task), seed=1)
    other_observation, other_reward, other_physics = rollout(DmcEnv(same_world), seed=1)
    np.testing.assert_array_equal(observation, other_observation)
    np.testing.assert_array_equal(physics, other_physics)
    assert not np.array_equal(reward, other_reward)


@pytest.mark.parametrize("task", TASKS)
def test_types_and_sizes(task):
    env, spec = DmcEnv(task), TASKS[task]
    observation, info = env.reset(seed=0)
    assert env.action_space == gymnasium.spaces.Box(-1, 1, (spec.action_size,), np.float32)
    for _ in range(2):
        assert observation.shape == (spec.observation_size,)
        assert observation.dtype == np.float32
        assert info["physics"].shape == (spec.physics_size,)
        assert info["physics"].dtype == np.float64
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert type(reward) is float
        assert (terminated, truncated) == (False, False)
    kept = info["physics"].copy()
    previous = info["physics"]
    env.step(env.action_space.sample())
    np.testing.assert_array_equal(previous, kept)


def test_walker_observation_order(record):
    episode = record("walker_walk")
    position, velocity = np.split(episode.physics, 2, axis=1)
    tilt, right, left = position[:, 2], position[:, 3:6], position[:, 6:9]
    # Links turn about -y; angles are counted from the torso down each leg.
    legs = [tilt[:, None] - np.cumsum(leg, axis=1) for leg in (right, left)]
    angles = np.concatenate([tilt[:, None], *legs], axis=1)
    orientations = np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(-1, 14)
    expected = np.concatenate([orientations, 1.3 + position[:, :1], velocity], axis=1)
    np.testing.assert_allclose(episode.observation, expected, rtol=1e-6, atol=1e-6)


def test_cheetah_observation_order(record):
    episode = record("cheetah_run")
    np.testing.assert_array_equal(episode.observation, episode.physics[:, 1:].astype(np.float32))


def test_cartpole_observation_order(record):
    episode = record("cartpole_swingup")
    x, angle, *velocity = episode.physics.T
    expected = np.stack([x, np.cos(angle), np.sin(angle), *velocity], axis=1)
    np.testing.assert_allclose(episode.observation, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("task", ONE_PER_DOMAIN)
def test_same_seed_same_trajectory(task):
    env = DmcEnv(task)
    first = rollout(env, seed=3)
    assert same(first, rollout(env, seed=3))
    assert same(first, rollout(DmcEnv(task), seed=3))
    assert not np.array_equal(first[2][0], rollout(env, seed=4)[2][0])


@pytest.mark.parametrize("task", ONE_PER_DOMAIN)
def test_seed_zero_is_a_seed(task):
    assert same(rollout(DmcEnv(task), seed=0, steps=2), rollout(DmcEnv(task), seed=0, steps=2))


@pytest.mark.parametrize("task", ONE_PER_DOMAIN)
def test_reset_without_seed_continues_the_stream(task):
    one, other = DmcEnv(task), DmcEnv(task)
    states = [one.reset(seed=5)[1]["physics"], one.reset()[1]["physics"], one.reset()[1]["physics"]]
    other.reset(seed=5)
    np.testing.assert_array_equal(other.reset()[1]["physics"], states[1])
    assert not np.array_equal(states[0], states[1])
    assert not np.array_equal(states[1], states[2])


def test_seeds_beyond_32_bits_are_distinct():
    env = DmcEnv("cartpole_swingup")
    low, high = env.reset(seed=1)[0], env.reset(seed=1 + 2**40)[0]
    assert not np.array_equal(low, high)


@pytest.mark.parametrize("task", ONE_PER_DOMAIN)
def test_truncated_at_exactly_the_step_limit(task):
    env, steps = DmcEnv(task), TASKS[task].episode_steps
    env.reset(seed=0)
    action = np.zeros(env.action_space.shape, np.float32)
    for step in range(1, steps + 1):
        _, _, terminated, truncated, _ = env.step(action)
        assert not terminated
        assert truncated == (step == steps)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(action)
    env.reset()
    env.step(action)


@pytest.mark.parametrize(
    ("task", "fps"),
    [
        ("walker_run", 40),
        ("cheetah_run", 100),
        ("cartpole_swingup", 100),
        ("jaco_reach_top_left", 25),
    ],
)
def test_fps_is_the_true_control_rate(task, fps):
    env = DmcEnv(task)
    assert env.metadata["render_fps"] == fps
    assert env._env.control_timestep() == pytest.approx(1 / fps)
    assert TASKS[task].control_seconds == pytest.approx(1 / fps)


def test_actions_reach_the_actuators_unchanged_and_clipped():
    env = DmcEnv("walker_walk")
    env.reset(seed=0)
    env.step(np.array([-2, -1, -0.3, 0.1, 1, 1e6]))
    expected = np.array([-1, -1, -0.3, 0.1, 1, 1], np.float32)
    np.testing.assert_array_equal(env._env.physics.control(), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_action_must_be_finite(bad):
    env = DmcEnv("cheetah_run")
    env.reset(seed=0)
    action = np.zeros(6)
    action[3] = bad
    with pytest.raises(ValueError, match=r"action: got .*expected finite values"):
        env.step(action)
    env.step(np.zeros(6))  # the refused action left the episode as it was


@pytest.mark.parametrize("shape", [(), (5,), (7,), (1, 6), (6, 1)])
def test_action_shape(shape):
    env = DmcEnv("cheetah_run")
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action: got shape .*expected \(6,\)"):
        env.step(np.zeros(shape))


def test_step_before_reset():
    with pytest.raises(RuntimeError, match="call reset first"):
        DmcEnv("cartpole_swingup").step(np.zeros(1))


@pytest.mark.parametrize("task", ONE_PER_DOMAIN)
def test_divergence_is_an_error_and_reset_recovers(task):
    env = DmcEnv(task)
    first = rollout(env, seed=1, steps=3)
    env._env.physics.data.qvel[:] = np.nan
    with pytest.raises(RuntimeError, match=rf"simulation of {task} diverged"):
        env.step(np.zeros(env.action_space.shape))
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros(env.action_space.shape))
    assert same(first, rollout(env, seed=1, steps=3))


@pytest.mark.parametrize("task", ONE_PER_DOMAIN)
def test_closed(task):
    env = DmcEnv(task)
    env.reset(seed=0)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros(env.action_space.shape))


def test_unknown_names():
    with pytest.raises(ValueError, match=r"task: got 'jaco_reach', expected one of"):
        DmcEnv("jaco_reach")
    with pytest.raises(ValueError, match=r"render_mode: got 'human', expected None or 'rgb_array'"):
        DmcEnv("walker_walk", render_mode="human")
    with pytest.raises(RuntimeError, match="render_mode=None"):
        DmcEnv("walker_walk").render()


def python(code, mujoco_gl):
    """Run `code` in a fresh interpreter; MUJOCO_GL is read once, at dm_control's import."""
    ours = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    chosen = {} if mujoco_gl is None else {"MUJOCO_GL": mujoco_gl}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environ | chosen | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("mujoco_gl", ["", "egl", "osmesa", "glfw", "disable", "nonsense"])
def test_import_is_light_and_needs_no_opengl(mujoco_gl):
    code = """
import os, sys
before = dict(os.environ)
import envs
assert dict(os.environ) == before
for name in ("torch", "agentic", "parallel", "dm_control", "mujoco"):
    assert name not in sys.modules, name
"""
    done = python(code, mujoco_gl)
    assert done.returncode == 0, done.stderr


def test_steps_without_opengl_and_says_how_to_render():
    code = """
import sys, numpy as np, envs
for task in ("walker_run", "jaco_reach_top_left"):
    env = envs.DmcEnv(task)
    env.reset(seed=0)
    env.step(env.action_space.sample())
assert "torch" not in sys.modules
try:
    envs.DmcEnv("walker_run", render_mode="rgb_array")
except RuntimeError as error:
    print(error)
"""
    done = python(code, "disable")
    assert done.returncode == 0, done.stderr
    assert REMEDY in done.stdout


@pytest.mark.parametrize(
    "made", ["DmcEnv('walker_run')", "DmcEnv('jaco_reach_top_left')", "EnvPool(['walker_run'])"]
)
def test_a_broken_backend_is_reported_with_the_remedy(made):
    done = python(f"import envs; envs.{made}", "nonsense")
    assert "RuntimeError: got MUJOCO_GL=nonsense, with which dm_control can't be" in done.stderr
    assert REMEDY in done.stderr


@pytest.mark.parametrize("mujoco_gl", SETTINGS)
def test_without_rendering_no_setting_matters_to_this_process_and_its_children(mujoco_gl):
    code = """
import multiprocessing, numpy as np, envs
from envs.simulator import Simulator

def play():
    env = envs.DmcEnv("cartpole_swingup")
    env.reset(seed=0)
    physics = env.step(np.ones(1))[-1]["physics"]
    assert np.isfinite(Simulator("cartpole_swingup").step(np.ones(1))).all()
    print("played", flush=True)

if __name__ == "__main__":
    envs.without_rendering()
    play()
    child = multiprocessing.get_context("spawn").Process(target=envs.DmcEnv, args=("walker_run",))
    child.start()
    child.join()
    assert child.exitcode == 0
"""
    done = python(code, mujoco_gl)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("played\n", "")


@pytest.mark.parametrize("mujoco_gl", [s for s in SETTINGS if s not in ("egl", "osmesa")])
def test_who_renders_without_a_display_is_told_the_setting_and_the_remedy(mujoco_gl):
    code = """
import envs
try:
    envs.DmcEnv("cartpole_swingup", render_mode="rgb_array")
except RuntimeError as error:
    print(error)
"""
    done = python(code, mujoco_gl)
    setting = "got no MUJOCO_GL," if mujoco_gl is None else f"got MUJOCO_GL={mujoco_gl},"
    (line,) = (done.stdout + done.stderr).splitlines()
    assert setting in line
    assert REMEDY in line


def test_frames():
    """Frames differ as the robot moves, and drawing doesn't disturb the simulation."""
    code = """
import numpy as np, envs
for task in ("walker_run", "jaco_reach_top_left"):
    seen, blind = envs.DmcEnv(task, render_mode="rgb_array"), envs.DmcEnv(task)
    seen.reset(seed=0), blind.reset(seed=0)
    frames = []
    for _ in range(5):
        frames.append(seen.render())
        action = np.ones(seen.task.action_size)
        assert np.array_equal(seen.step(action)[0], blind.step(action)[0])
    assert frames[0].shape == (240, 320, 3) and frames[0].dtype == np.uint8
    assert frames[0].std() > 5 and not np.array_equal(frames[0], frames[-1])
    seen.close()
"""
    done = python(code, "egl")
    if REMEDY in done.stderr:
        pytest.skip("this machine has no EGL")
    assert done.returncode == 0, done.stderr
