"""A signal in every phase of a command: it soon ends, and its last line says how to go on."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from played_data import play

from agentic import checkpoint

ROOT = Path(__file__).parents[2]
TASK = "jaco_reach_top_left"
SETTINGS = [
    *(
        f"task={TASK}",
        "trajectories=2",
        "batch_steps=500",
        "chain.window_steps=100",
        "holdout=0.25",
    ),
    *("model.width=16", "model.layers=1", "steps=100000", "clocks.log_steps=1"),
    *("clocks.checkpoint_steps=0", "clocks.validate_steps=0", "clocks.rollout_steps=0"),
    *("rollout.contexts=4", "evaluation.contexts=4", "evaluation.trials=20"),
]
STORED = "algorithms=[random]"
BUFFER = "data/jaco/random/buffer/*.npz"
# Settings of a training, and a file that has something in it in the midst of the phase.
PHASES = {
    "collection": (["task.collect.recipe=random"], BUFFER),
    "ingest": ([STORED], "data/jaco/random/store/action.npy"),
    "training": ([STORED], "run/metrics.jsonl"),
    "a long step": ([STORED, "chains=200", "chain.window_share=0"], "run/metrics.jsonl"),
    "validation": ([STORED, "clocks.validate_steps=1"], "run/metrics.jsonl"),
    "rollouts": ([STORED, "clocks.rollout_steps=1", "clocks.rollout_from=0"], "run/checkpoints/s*"),
    "checkpoint": ([STORED, "clocks.checkpoint_steps=1"], "run/checkpoints/.*.tmp"),
    "evaluation": ([STORED, "steps=1"], "run/unfinished/*/trial_001.pt"),
}
SECONDS = 30  # on a busy machine, with the interpreter's own end


def _filled(path):
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # a temporary one
        return False


def _signalled(cwd, arguments, pattern, number):
    """What a command says that gets a signal once there is such a file; Ctrl-C for its group."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MUJOCO_GL": "disable", "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not any(_filled(path) for path in cwd.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, told
    assert "Traceback" not in told
    return told.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_a_training_in_every_phase(tmp_path, phase, number):
    settings, pattern = PHASES[phase]
    if phase != "collection":
        play(tmp_path / "data", TASK, 300 if phase == "ingest" else 8)
    arguments = ["agentic.train", *SETTINGS, *settings, "run_dir=run", "data.workers=2"]
    line = _signalled(tmp_path, arguments, pattern, number)
    assert line.endswith("go on with agentic-train resume=run")
    files = checkpoint.step_files(tmp_path / "run")
    if phase in ("collection", "ingest"):
        assert not files
    else:
        step = checkpoint.load(files[-1])["step"]
        said = (
            f"step {step} of 100000 saved" if phase != "evaluation" else "finished trials are kept"
        )
        assert said in line
    assert not list(tmp_path.glob("**/*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_collection_and_the_line_goes_on_with_it(tmp_path, number):
    arguments = ["agentic.collect", f"task={TASK}", "recipe=random", "episodes=5000", "workers=1"]
    line = _signalled(tmp_path, arguments, BUFFER, number)
    assert line.endswith(f"; go on with {shlex.join(['agentic-collect', *arguments[1:]])}")
    note = json.loads((tmp_path / "data" / "jaco" / "random" / "collect.json").read_text())
    assert (note["finished"], note["sessions"]) == (False, 1)
    assert not list(tmp_path.glob("**/*.tmp"))
    shutil.rmtree(tmp_path / "data")
