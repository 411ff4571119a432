import os
import subprocess
import sys

import imageio.v2 as imageio
import numpy as np
import pytest
from trials import NOT_RUN, make_trials

from agentic import video
from envs import TASKS, DmcEnv, EnvPool

HEIGHT, WIDTH = 240, 320
WALKER = TASKS["walker_walk"]
NO_RENDERER = 3  # exit code of the script below

# In a process of its own: which renderer there is, is decided when dm_control is imported.
FILM = """
import sys
from pathlib import Path
import numpy as np
from agentic import video
from trials import make_trials
from envs import TASKS

spec = TASKS["walker_walk"]
try:
    video.check(spec)
except ValueError as error:
    print(error)
    sys.exit(3)
actions = np.random.default_rng(0).uniform(-1, 1, (1, 2, 5, 6)).astype(np.float32)
trials = make_trials([[1, 2]], actions=actions)
video.film(spec, trials, Path(sys.argv[1]), which=("first", "last"), side_by_side=True)
"""


class Painted(DmcEnv):
    """An environment that needs no OpenGL: its pictures are as bright as many steps were made."""

    def __init__(self, task, render_mode=None):
        super().__init__(task)
        self.level = 0

    def reset(self, **arguments):
        self.level = 0
        return super().reset(**arguments)

    def step(self, action):
        self.level += 20
        return super().step(action)

    def render(self):
        return np.full((HEIGHT, WIDTH, 3), self.level, np.uint8)


@pytest.fixture
def _painted(monkeypatch):
    monkeypatch.setattr(video, "DmcEnv", Painted)


def _played(spec, contexts=2, trials=2, steps=6, nan=()):
    """Trials of random actions as a rollout makes them, with their states (C, n, T, P).

    `nan` lists (context, trial, step) whose action is not finite.
    """
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (contexts, trials, steps, spec.action_size)).astype(np.float32)
    for place in nan:
        actions[place] = np.nan
    seeds = np.arange(contexts * trials).reshape(contexts, trials) + 5
    states = np.zeros((contexts, trials, steps, spec.physics_size))
    returns, failed = np.zeros((contexts, trials)), np.zeros((contexts, trials), bool)
    pool = EnvPool([spec.name] * contexts)
    for k in range(trials):
        pool.reset(seeds[:, k].tolist())
        for t in range(steps):
            _, reward, states[:, k, t], _ = pool.step(actions[:, k, t])
            returns[:, k] += reward
        failed[:, k] = pool.failed
    pool.close()
    made = make_trials(returns, failed=np.argwhere(failed).tolist(), actions=actions, seeds=seeds)
    return made, states


def _read(path):
    """Frames per second, and the frames (n, height, width, 3)."""
    with imageio.get_reader(path) as reader:
        frames = [frame for frame in reader]  # list() would ask for its length, which is infinite
        return reader.get_meta_data()["fps"], np.array(frames)


@pytest.mark.parametrize(
    "task", ["walker_run", "cheetah_run", "cartpole_swingup", "jaco_reach_top_left"]
)
def test_a_replay_is_the_rollout_again_to_the_last_bit(task):
    trials, states = _played(TASKS[task])
    env = DmcEnv(task)
    for context, trial in ((1, 1), (0, 0)):
        again = list(video.replay(env, trials, context, trial))
        assert len(again) == 7
        np.testing.assert_array_equal(again[1:], states[context, trial])
    env.close()


def test_a_failed_trial_ends_where_it_failed():
    trials, states = _played(WALKER, nan=[(0, 1, 3)])
    assert trials.failed.tolist() == [[False, True], [False, False]]
    again = list(video.replay(DmcEnv(WALKER.name), trials, 0, 1))
    assert len(again) == 1 + 3
    np.testing.assert_array_equal(again[1:], states[0, 1, :3])


def test_a_failure_that_the_rollout_had_not_is_an_error():
    trials, _ = _played(WALKER)
    trials.actions[0, 0, 2] = np.nan
    with pytest.raises(ValueError, match="finite"):
        list(video.replay(DmcEnv(WALKER.name), trials, 0, 0))


@pytest.mark.usefixtures("_painted")
@pytest.mark.parametrize(
    ("task", "fps"),
    [
        ("walker_walk", 40),
        ("cheetah_run", 100),
        ("cartpole_swingup", 100),
        ("jaco_reach_top_left", 25),
    ],
)
def test_one_file_a_trial_at_the_true_rate(tmp_path, task, fps):
    trials, _ = _played(TASKS[task], contexts=1)
    directory = tmp_path / "videos"
    takes = video.film(TASKS[task], trials, directory, which=("first", "last"), side_by_side=False)
    assert [take.path.name for take in takes] == [f"{task}_first.mp4", f"{task}_last.mp4"]
    assert [(take.context, take.trial) for take in takes] == [(0, 0), (0, 1)]
    for take in takes:
        rate, frames = _read(take.path)
        assert rate == fps
        assert frames.shape == (7, HEIGHT, WIDTH, 3)
        levels = frames.mean(axis=(1, 2, 3))
        assert levels == pytest.approx(np.arange(0, 140, 20), abs=6)
    assert sorted(path.name for path in directory.iterdir()) == sorted(t.path.name for t in takes)


@pytest.mark.usefixtures("_painted")
def test_side_by_side_in_step_and_who_has_failed_stands_still(tmp_path):
    trials, _ = _played(WALKER, nan=[(0, 1, 2)])
    takes = video.film(WALKER, trials, tmp_path, which=("first", "last", "best"), side_by_side=True)
    assert {take.path for take in takes} == {tmp_path / "walker_walk.mp4"}
    assert [path.name for path in tmp_path.iterdir()] == ["walker_walk.mp4"]
    rate, frames = _read(tmp_path / "walker_walk.mp4")
    assert rate == 40
    width = 3 * WIDTH + 2 * video.SEPARATOR
    assert width % 16 == 0
    assert frames.shape == (7, HEIGHT, width, 3)
    for k, levels in enumerate(([0, 20, 40, 60, 80, 100, 120], [0, 20, 40, 40, 40, 40, 40])):
        left = k * (WIDTH + video.SEPARATOR) + 20
        shown = frames[:, :, left : left + WIDTH - 40].mean(axis=(1, 2, 3))
        assert shown == pytest.approx(levels, abs=6)


@pytest.mark.usefixtures("_painted")
def test_a_trial_that_failed_at_once_shows_its_start(tmp_path):
    trials, _ = _played(WALKER, nan=[(0, 0, 0)])
    (take,) = video.film(WALKER, trials, tmp_path, which=("first",), side_by_side=False)
    assert len(_read(take.path)[1]) == 1


@pytest.mark.parametrize(
    ("returns", "failed", "last", "best"),
    [
        ([[1, 2, 3], [9, 8, 0]], [], (0, 2), (1, 0)),
        ([[1, 2, 3], [9, 8, 0]], [(1, 0)], (0, 2), (1, 1)),
        ([[1, 5, NOT_RUN], [-1, 4, 4]], [], (0, 1), (0, 1)),
        ([[-2, NOT_RUN]], [], (0, 0), (0, 0)),
        ([[3, 4]], [(0, 0), (0, 1)], (0, 1), None),
    ],
)
def test_choices(returns, failed, last, best):
    trials = make_trials(returns, failed=failed)
    assert video._choose(trials, "first") == (0, 0)
    assert video._choose(trials, "last") == last
    assert video._choose(trials, "best") == best


def _film(path, renderer):
    return subprocess.run(
        [sys.executable, "-c", FILM, str(path)],
        env=os.environ | {"MUJOCO_GL": renderer, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )


def test_drawn_by_opengl(tmp_path):
    done = _film(tmp_path, "egl")
    if done.returncode == NO_RENDERER:
        # Drawing needs an OpenGL library of the system, which no Python package brings; any other
        # failure fails the test.
        pytest.skip(f"no EGL renderer on this machine: {done.stdout}")
    assert done.returncode == 0, done.stderr
    rate, frames = _read(tmp_path / "walker_walk.mp4")
    assert rate == 40
    assert frames.shape == (6, HEIGHT, 2 * WIDTH + video.SEPARATOR, 3)
    assert frames.std() > 5
    assert not np.array_equal(frames[0], frames[-1])


def test_a_missing_renderer_says_what_to_set(tmp_path):
    done = _film(tmp_path, "disable")
    assert done.returncode == NO_RENDERER, done.stderr
    (line,) = done.stdout.splitlines()
    for word in ("video: ", "MUJOCO_GL=disable", "libegl1", "libosmesa6"):
        assert word in line
    assert not list(tmp_path.iterdir())
