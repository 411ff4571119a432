"""Commands on a real small disk that is full, or that nobody may write to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from played_data import play
from training import save_checkpoint

ROOT = Path(__file__).parents[2]
TASK = "jaco_reach_top_left"
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "MUJOCO_GL": "disable",
    "COLUMNS": "200",
    "PYTHONPATH": str(ROOT),
}
# Fills the disk at the first checkpoint, and clears it when the training has said so of both logs:
# the page that a file ends in may still have room for some lines.
TRAINING = """
mount -t tmpfs -o size=2m none small
$PYTHON -m agentic.train "$@" run_dir=small/run > told 2>&1 &
training=$!
until ls small/run/checkpoints/step_*.pt > none 2>&1; do sleep 0.05; done
dd if=/dev/zero of=small/fill bs=1k > none 2>&1
until grep -q "the next try is at step" told && [ $(grep -c "is to be logged" told) = 2 ]; do
    kill -0 $training || exit 9
    sleep 0.05
done
rm small/fill
wait $training
code=$?
cp -r small/run/. kept
exit $code
"""


def _in_namespace(cwd, script, *arguments):
    return subprocess.run(
        ["unshare", "-Urm", "bash", "-c", script, "bash", *arguments],
        cwd=cwd,
        env=ENVIRONMENT | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture
def place(tmp_path):
    """A folder with an empty one, `small`, where a disk can be mounted.

    Skips where no user can mount one: systems other than Linux have no `unshare`, and many
    containers forbid it. test_keeping.py has the same failures without a disk, and runs everywhere.
    """
    (tmp_path / "small").mkdir()
    (tmp_path / "kept").mkdir()
    try:
        done = _in_namespace(tmp_path, "mount -t tmpfs -o size=2m none small")
    except FileNotFoundError:
        pytest.skip("no `unshare` (Linux), which mounts the disk of 2 MB")
    if done.returncode:
        pytest.skip(f"no user may mount a disk of 2 MB here: {done.stderr.strip()}")
    return tmp_path


def test_a_training_outlives_a_full_disk(place):
    play(place / "data", TASK, 6)
    settings = [
        *(f"task={TASK}", "algorithms=[random]", "trajectories=2", "holdout=0", "model.width=16"),
        *("model.layers=1", "batch_steps=500", "chain.window_steps=50", "chain.window_batch=50"),
        *("steps=600", "clocks.rollout_steps=0", "clocks.checkpoint_steps=10"),
        *("clocks.log_steps=1", "evaluation.contexts=1", "evaluation.trials=1"),
    ]
    done = _in_namespace(place, TRAINING, *settings)
    told = (place / "told").read_text()
    assert done.returncode == 0, told + done.stderr
    assert "Traceback" not in told
    assert told.count("what is to be logged is left out") == 2  # both files, once
    assert told.count("records are missing") == 2
    for line in told.splitlines():
        if "the next try is at step" in line:
            assert "No space left on device; training goes on without this checkpoint" in line
            assert ", the newest one is small/run/checkpoints/step_0" in line
    lines = (place / "kept" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == 600
    assert len(steps) < 600
    assert (place / "kept" / "results.json").exists()
    names = sorted(path.name for path in (place / "kept" / "checkpoints").glob("step_*"))
    assert names == ["step_000000590.pt", "step_000000600.pt"]


COMMANDS = {
    "collect": [f"task={TASK}", "recipe=random", "episodes=400", "workers=0", "data_dir=small"],
    "evaluate": ["checkpoint=model.pt", "contexts=16", "trials=3", "output=small/out"],
    "train": [f"task={TASK}", "algorithms=[random]", "data.store_dir=small", "run_dir=run"],
}


@pytest.mark.parametrize("size", ["0", "256k"])
@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_names_the_file(place, command, size):
    if command == "train":
        play(place / "data", TASK, 20)  # more than fit into the store
    save_checkpoint(place / "model.pt", TASK)
    script = "mount -t tmpfs -o size=256k none small\n"
    if size == "0":
        script = "mount -t tmpfs -o size=256k,ro none small\n"
    script += f'$PYTHON -m agentic.{command} "$@"; code=$?; find small -name "*.tmp"; exit $code'
    done = _in_namespace(place, script, *COMMANDS[command])
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"agentic-{command}: error: ")
    assert "small/" in line
    assert ("Read-only file system" if size == "0" else "space") in line
    assert "Traceback" not in done.stderr
    assert ".tmp" not in done.stdout  # nothing half-written stays
