import os
import subprocess
import sys

import pytest

NO_RENDERER = 3  # exit code of the script below

# In a process of its own: which renderer there is, is decided when dm_control is imported.
FILM = """
import sys
from pathlib import Path
import numpy as np
from agentic import video
from agentic.evaluator import Trials
from envs import TASKS

spec = TASKS["walker_walk"]
try:
    video.check(spec)
except ValueError as error:
    print(error)
    sys.exit(3)
rng = np.random.default_rng(0)
trials = Trials(
    returns=np.zeros((1, 3)),
    failed=np.zeros((1, 3), bool),
    seeds=np.arange(3)[None],
    actions=rng.uniform(-1, 1, (3, 5, 6)).astype(np.float32),
)
video.film(spec, trials, Path(sys.argv[1]))
"""


def _film(path, renderer):
    return subprocess.run(
        [sys.executable, "-c", FILM, str(path)],
        env=os.environ | {"MUJOCO_GL": renderer},
        capture_output=True,
        text=True,
    )


def test_first_and_last_trial_at_the_true_rate(tmp_path):
    path = tmp_path / "videos" / "walker.mp4"
    done = _film(path, "egl")
    if done.returncode == NO_RENDERER:
        # Drawing needs an OpenGL library of the system, which no Python package brings; any other
        # failure fails the test.
        pytest.skip(f"no EGL renderer on this machine: {done.stdout}")
    assert done.returncode == 0, done.stderr
    import imageio_ffmpeg

    frames = imageio_ffmpeg.read_frames(str(path))
    about = next(frames)
    assert about["fps"] == 40
    assert sum(1 for _ in frames) == 10


def test_a_missing_renderer_says_what_to_set(tmp_path):
    done = _film(tmp_path / "a.mp4", "disable")
    assert done.returncode == NO_RENDERER, done.stderr
    assert done.stdout.startswith("video: ")
    assert "MUJOCO_GL" in done.stdout
