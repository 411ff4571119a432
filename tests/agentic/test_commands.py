"""The commands as a user types them, in a shell of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentic.episodes import buffer_dir, episode_files
from agentic.explore.memory import Memory

SMALL = [
    "task=jaco_reach_top_left",
    "algorithms=[random]",
    "chain.trajectories=2",
    "batch_steps=500",
    "chain.window_steps=100",
    "model.width=16",
    "model.layers=1",
    "steps=4",
    "clocks.rollout_steps=2",
    "clocks.rollout_from=0",
    "clocks.validate_steps=2",
    "clocks.checkpoint_steps=2",
    "clocks.log_steps=1",
    "rollout.contexts=1",
    "rollout.trials=1",
    "evaluation.contexts=2",
    "evaluation.trials=2",
    "holdout=0.25",
]


def _run(
    cwd: Path, command: str, *arguments: str, mujoco_gl: str = "disable"
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"agentic.{command}", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "MUJOCO_GL": mujoco_gl},
        timeout=250,
    )


def _fails(done: subprocess.CompletedProcess, *words: str) -> None:
    """One line on standard error that has all the words, and an exit code that is not 0."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with 8 random jaco episodes, collected by the command."""
    place = tmp_path_factory.mktemp("workplace")
    wanted = ["task=jaco_reach_top_left", "recipe=random", "episodes=8", "workers=1"]
    done = _run(place, "collect", *wanted, mujoco_gl="nonsense")
    assert done.returncode == 0, done.stderr
    assert "jaco_reach_bottom_right" in done.stdout
    assert len(episode_files(buffer_dir(place / "data", "jaco", "random"))) == 8
    assert [p.name for p in place.iterdir()] == ["data"]  # hydra leaves nothing behind
    return place


@pytest.fixture(scope="module")
def run_dir(workplace) -> Path:
    done = _run(workplace, "train", *SMALL, "run_dir=run", mujoco_gl="osmesa")
    assert done.returncode == 0, done.stderr
    for word in (
        "8 episodes",
        "memory, predicted",
        "longest chain",
        "last trial",
        "random policy",
        "dataset p90",
        "last trial, reset",
        "over training seeds: n/a",
    ):
        assert word in done.stdout
    return workplace / "run"


def test_a_run_leaves_everything_that_is_promised(run_dir):
    names = {p.name for p in run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "results.json", "checkpoints", "curves"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {name for line in lines for name in line}
    assert logged >= {
        "train/loss",
        "train/learning_rate",
        "train/gradient_norm",
        "train/tokens_per_second",
        "train/memory_bytes",
        "validation/loss",
        "rollout/jaco_reach_top_left/trial_1",
    }
    results = json.loads((run_dir / "results.json").read_text())
    (entry,) = results["results"]
    assert np.array(entry["kept"]["returns"]).shape == (2, 2)
    assert np.array(entry["reset"]["returns"]).shape == (2, 2)
    assert entry["relabel_mode"] == "with_control"
    assert {"p90", "max", "mean"} <= set(entry["dataset"])
    assert (run_dir / "curves" / "jaco_reach_top_left.png").is_file()


def test_no_command_loads_the_simulator_before_it_knows_whether_it_will_draw():
    code = """
import sys
import agentic.collect, agentic.data, agentic.evaluate, agentic.train
assert not {"mujoco", "dm_control"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_evaluate_again_gives_the_same_and_never_writes_over_it(run_dir):
    arguments = ["checkpoint=run", "contexts=2", "trials=2", "seed=0"]
    done = _run(run_dir.parent, "evaluate", *arguments, "output=again")
    assert done.returncode == 0, done.stderr
    again = json.loads((run_dir.parent / "again" / "results.json").read_text())
    first = json.loads((run_dir / "results.json").read_text())
    for context in ("kept", "reset"):
        assert again["results"][0][context] == first["results"][0][context]
    _fails(_run(run_dir.parent, "evaluate", *arguments, "output=again"), "output:", "again")


def test_checkpoint_of_another_task(run_dir):
    done = _run(run_dir.parent, "evaluate", "checkpoint=run", "task=walker_walk")
    _fails(done, "task: got 'walker_walk'", "jaco_reach_top_left")


def test_the_same_command_resumes_and_other_settings_are_refused(run_dir):
    (run_dir / "results.json").unlink()
    done = _run(run_dir.parent, "train", *SMALL, "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stdout
    assert (run_dir / "results.json").exists()
    done = _run(run_dir.parent, "train", *SMALL, "run_dir=run", "seed=5")
    _fails(done, "run_dir: run holds a run with other settings")
    done = _run(run_dir.parent, "train", "resume=run", "steps=9")
    _fails(done, "resume", "steps")


def test_a_run_without_checkpoint_is_begun_by_resume(run_dir):
    begun = run_dir.parent / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    done = _run(run_dir.parent, "train", "resume=begun")
    assert done.returncode == 0, done.stderr
    assert (begun / "results.json").exists()
    (begun / "config.yaml").write_text("steps: 1")
    _fails(_run(run_dir.parent, "train", "resume=begun"), "begun/config.yaml is damaged")


def test_resume_from_elsewhere(run_dir):
    done = _run(Path("/"), "train", f"resume={run_dir}")
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stdout


@pytest.mark.parametrize("method", ["bc", "dt"])
def test_a_baseline_is_trained_judged_and_judged_again(workplace, method):
    few = [setting for setting in SMALL if not setting.startswith("chain.")]
    done = _run(workplace, "train", *few, f"method={method}", f"run_dir={method}")
    assert done.returncode == 0, done.stderr
    assert "windows" in done.stdout
    assert "of 20 environment steps" in done.stdout
    planned = next(line for line in done.stdout.splitlines() if "memory, predicted" in line)
    assert ("none" in planned) == (method == "bc")
    (entry,) = json.loads((workplace / method / "results.json").read_text())["results"]
    assert (entry["method"], entry["context_steps"], entry["kept"]) == (method, 20, None)
    assert np.array(entry["reset"]["returns"]).shape == (2, 2)
    both = ["contexts=2", "trials=2", "seed=0", "context=both", f"output={method}_again"]
    done = _run(workplace, "evaluate", f"checkpoint={method}", *both)
    assert done.returncode == 0, done.stderr
    assert "context: got both, only reset is run" in done.stdout
    again = json.loads((workplace / f"{method}_again" / "results.json").read_text())
    assert again["results"][0]["kept"] is None
    assert again["results"][0]["reset"] == entry["reset"]


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("train", ["task=walker_fly"], ["task: got 'walker_fly'", "walker_walk"]),
        ("train", ["optimiser.lr=1"], ["optimiser.lr: unknown setting"]),
        ("train", ["steps=many"], ["steps: got 'many', expected int"]),
        ("train", ["layer.kind=flash"], ["layer.kind: got 'flash'", "vanilla"]),
        ("train", ["model.heads=3"], ["model.heads: got 3", "model.width=128"]),
        ("train", ["algorithms=[rnd]"], ["data_dir: looked for", "data/cartpole/rnd/buffer"]),
        ("train", ["algorithms=[rnd]", "data_dir=/nowhere"], ["looked for /nowhere/cartpole"]),
        ("train", ["run_dir=/proc/run"], ["run_dir: cannot make /proc/run"]),
        ("train", ["resume=nowhere"], ["resume: got nowhere"]),
        ("train", ["hydra.job.chdir=true"], ["hydra.job.chdir: is hydra's own"]),
        ("train", ["action_repeat=2"], ["action_repeat"]),
        ("collect", ["task=walker_fly"], ["task: got 'walker_fly'"]),
        ("collect", ["recipe=ppo"], ["recipe: got 'ppo'", "td3"]),
        ("collect", ["data_dir=/proc/x"], ["data_dir: cannot make /proc/x/cartpole"]),
        ("collect", ["episodes=0"], ["episodes: got 0"]),
        ("collect", ["seed=-1"], ["seed: got -1"]),
        ("collect", ["rnd=large"], ["rnd: got 'large'", "paper", "small"]),
        ("collect", ["rnd.batch=1"], ["rnd.batch: got 1, expected at least 2"]),
        ("train", ["evaluation.contexts=0"], ["evaluation.contexts: got 0"]),
        ("train", ["task.name=walker_walk"], ["task.name: got 'walker_walk'", "cartpole"]),
        ("train", ["resume=5"], ["resume: got 5"]),
        ("train", ["method=td3"], ["method: got 'td3'", "at", "bc", "dt"]),
        ("train", ["context_steps=20"], ["context_steps: got 20", "method=at"]),
        ("evaluate", [], ["checkpoint: missing, expected checkpoint=..."]),
        ("evaluate", ["checkpoint=nowhere"], ["checkpoint: got nowhere"]),
        ("evaluate", ["checkpoint=.", "trials=0"], ["trials: got 0"]),
        ("evaluate", ["checkpoint=."], ["checkpoint: got .", "run directory"]),
        ("evaluate", ["checkpoint=.", "task=fly"], ["task: got 'fly'", "walker_walk"]),
    ],
)
def test_bad_input_gets_one_line(tmp_path, command, arguments, words):
    _fails(_run(tmp_path, command, *arguments), *words)


def test_a_killed_rnd_collection_goes_on_learning(tmp_path):
    tiny = ["rnd.environments=1", "rnd.hidden=8", "rnd.batch=8", "rnd.updates_per_step=0.03125"]
    command = [sys.executable, "-m", "agentic.collect", "recipe=rnd", "workers=0", *tiny]
    folder = tmp_path / "data" / "cartpole" / "rnd"
    counts = []
    for end, episodes in ((signal.SIGKILL, 6), (signal.SIGINT, 8)):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )
        while len(episode_files(folder / "buffer")) < episodes:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
        counts.append(Memory(folder=folder).load()["counts"])
    assert process.returncode == 130
    assert "new learner" not in err
    told = err.strip().splitlines()[-1]
    assert told.startswith("agentic-collect: interrupted; go on with agentic-collect recipe=rnd ")
    whole = len(episode_files(folder / "buffer"))
    assert f"{whole} episodes: returns by task" in out
    first, second = (c["steps"] for c in counts)
    assert 6000 <= first < second
    # Uniform steps, which earn no updates, came once.
    assert counts[1]["updates"] == (second - 4000) // 32


def test_too_few_trajectories(workplace):
    done = _run(workplace, "train", *SMALL, "chain.trajectories=9", "run_dir=few")
    _fails(done, "chain.trajectories: got 9", "8 episodes")


def test_a_run_beyond_the_memory_is_refused_before_its_first_step(workplace):
    # The same directory may be tried again with other settings: nothing has begun there.
    for large in ("batch_steps=1000000000", "batch_steps=2000000000"):
        done = _run(workplace, "train", *SMALL, "layer=vanilla", large, "run_dir=large")
        _fails(done, "layer.kind: got 'vanilla'", "GiB", large, "layer=blockwise")


def test_two_runs_in_one_second_have_their_own_directories(tmp_path):
    from agentic.runs import fresh_dir

    made = {fresh_dir(tmp_path / "runs", "x") for _ in range(5)}
    assert len(made) == 5
