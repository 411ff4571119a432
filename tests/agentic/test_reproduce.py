"""agentic-reproduce as a user types it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from reports import leave_run

from agentic.runs import config_text, settings

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
ROWS = "+rows={A:['chain.trajectories=1'],B:['chain.trajectories=2']}"
TWO = ["tasks=[cartpole_swingup]", "~rows", ROWS, "seeds=[0,1]"]
SMALL = [
    "batch_steps=1000",
    "chain.window_steps=50",
    "model.width=8",
    "model.layers=1",
    "steps=2",
    "clocks.rollout_steps=0",
    "rollout.contexts=1",
    "rollout.trials=1",
    "evaluation.contexts=2",
    "evaluation.trials=1",
    "evaluation.workers=1",
    "data.relabel=state_only",
]
# Runs the command with a stub in place of the modules that it starts.
STUBBED = """
import functools, sys
from agentic import launch, reproduce

stub = sys.argv.pop(1)
reproduce.Launcher = functools.partial(launch.Launcher, prefix=(sys.executable, stub))
reproduce.main()
"""
STUB = """
import pathlib, shutil, signal, sys, time

told = dict(setting.split("=", 1) for setting in sys.argv[2:])
run_dir, template = pathlib.Path(told["run_dir"]), pathlib.Path("template")
signals = []
if not pathlib.Path("go").exists():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    run_dir.mkdir(parents=True)
    (run_dir / "waiting").touch()
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)
    print("saved after", *signals)
    sys.exit(128 + signals[0])
for name in ("config.yaml", "metrics.jsonl", "results.json"):
    text = (template / name).read_text()
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).write_text(text.replace('"train_seed": 0', f'"train_seed": {told["seed"]}'))
"""


def _run(cwd, *arguments, program=("-m", "agentic.reproduce")):
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=250,
    )


@pytest.fixture
def stubbed(tmp_path, cartpole_data):
    """What starts the command with a stub that waits until there is a file `go`."""
    (tmp_path / "stubbed.py").write_text(STUBBED)
    (tmp_path / "stub.py").write_text(STUB)
    leave_run(tmp_path / "made", "A", [[2, 6]], [[2, 4]], task="cartpole_swingup", sessions=())
    (tmp_path / "made/runs/step/cartpole_swingup/A/seed0").rename(tmp_path / "template")
    return ("stubbed.py", "stub.py")


def test_ctrl_c_in_a_terminal_has_the_jobs_save_once_and_the_next_call_goes_on(tmp_path, stubbed):
    arguments = [*TWO, "overrides=[]", "extra=[]", "output=out"]
    process = subprocess.Popen(
        [sys.executable, *stubbed, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    places = [tmp_path / "out/runs/step/cartpole_swingup" / row / "seed0" for row in "AB"]
    while not all((place / "waiting").exists() for place in places):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of its group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "agentic-reproduce: interrupted"
    assert "4 of 4 jobs are left; the same command goes on" in out
    for place in places:
        assert place.with_name("seed0.log").read_text() == f"saved after {int(signal.SIGINT)}\n"
    (tmp_path / "go").touch()
    done = _run(tmp_path, *arguments, program=stubbed)
    assert done.returncode == 0, done.stderr
    assert "[4/4] step/cartpole_swingup/B/seed1 begins" in done.stdout
    assert "4 runs: out/report/report.html" in done.stdout
    content = json.loads((tmp_path / "out/report/results.json").read_text())
    assert [(run["row"], run["seed"]) for run in content["runs"]] == [
        *(("A", 0), ("A", 1), ("B", 0), ("B", 1))
    ]
    first = content["sections"]["step"]["cells"][0]
    assert first["last"]["raw"] == {"mean": 6.0, "interval_over_seeds": [6.0, 6.0]}


def test_a_failing_job_is_named_at_the_end_with_its_log(tmp_path, stubbed):
    (tmp_path / "go").touch()
    (tmp_path / "stub.py").write_text(
        f"import sys\nif 'seed=1' in sys.argv: sys.exit('agentic-train: error: x')\n{STUB}"
    )
    done = _run(tmp_path, *TWO, "overrides=[]", "extra=[]", "output=out", program=stubbed)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"step/cartpole_swingup/{row}/seed1: agentic-train: error: x (exit code 1), see "
        f"out/runs/step/cartpole_swingup/{row}/seed1.log"
        for row in "AB"
    ]
    assert "2 runs: out/report/report.html" in done.stdout


def test_the_plan_runs_nothing_and_leaves_out_what_is_finished(tmp_path, cartpole_data):
    one = [[2, 6]], [[2, 4]]
    run_dir = leave_run(tmp_path / "out", "A", *one, task="cartpole_swingup", seed=1)
    with initialize_config_module("configs", version_base="1.3"):
        composed = compose("train", ["+experiment=small", "chain.trajectories=1"])
    config = settings(OmegaConf.to_container(composed, resolve=True), [])
    (run_dir / "config.yaml").write_text(config_text(config))
    done = _run(tmp_path, *TWO, "extra=[]", "output=out", "plan=true", "threads=3")
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert all(line[:3] == ["OMP_NUM_THREADS=3", sys.executable, "-m"] for line in lines)
    places = [next(s for s in line if s.startswith("run_dir=")) for line in lines]
    assert places == [
        f"run_dir=out/runs/step/cartpole_swingup/{place}"
        for place in ("A/seed0", "B/seed0", "B/seed1")
    ]
    assert all("+experiment=small" in line for line in lines)
    assert done.stderr == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "out"]
    done = _run(tmp_path, *TWO, "extra=[]", "plan=true", "data_dir=elsewhere")
    first, *rest = done.stdout.splitlines()
    assert first.endswith("-m agentic.collect task=cartpole_swingup data_dir=elsewhere")
    assert len(rest) == 4
    assert "the first 1 lines collect data" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seeds=[0,0]"], "seeds: got [0, 0]"),
        (["rows.DT=5"], "rows.DT: got 5, expected a list of str"),
        (["rows=[]"], "rows: got '[]', expected another kind"),
        (["only=[XT]"], "only: got 'XT', expected rows of ['AT-16',"),
        (["tasks=[walker_fly]"], "task: got 'walker_fly'"),
        (["extra=[{section:x}]"], "extra.tasks: missing"),
        (["overrides=['stepz=3']"], "rows: step/walker_stand/BC-10%: stepz: unknown setting"),
        (["collect=['recipe=ppo']"], "recipe: got 'ppo'"),
        (
            ["report=true", "plan=false", "output=nowhere"],
            "output: no finished runs below nowhere/runs",
        ),
        (["output=/proc/x", "plan=false"], "/proc/x: "),
        (["threads=0"], "threads: got 0"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, arguments, words):
    done = _run(tmp_path, "plan=true", *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("agentic-reproduce: error: ")
    assert words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_rows_and_two_seeds_from_data_to_report(tmp_path, cartpole_data):
    overrides = "overrides=[" + ",".join(f"'{setting}'" for setting in SMALL) + "]"
    arguments = [*TWO, overrides, "extra=[]", "output=out", "jobs=2"]
    done = _run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    for row in "AB":
        for seed in (0, 1):
            place = tmp_path / "out/runs/step/cartpole_swingup" / row
            assert (place / f"seed{seed}" / "results.json").is_file()
            (session,) = json.loads((place / f"seed{seed}.json").read_text())["sessions"]
            assert session["code"] == 0
    content = json.loads((tmp_path / "out/report/results.json").read_text())
    cells = content["sections"]["step"]["cells"]
    assert [(c["row"], c["seeds"], c["trajectories"]) for c in cells] == [
        ("A", [0, 1], 1),
        ("B", [0, 1], 2),
    ]
    assert all(c["kept_minus_reset"]["raw"]["mean"] == 0.0 for c in cells)  # one trial
    again = _run(tmp_path, *arguments)
    assert again.returncode == 0
    assert "4 of 4 jobs are finished already" in again.stdout
    other = _run(tmp_path, *arguments, "report=true")
    assert other.returncode == 0
    assert "begins" not in other.stdout
    changed = _run(tmp_path, *arguments, overrides.replace("steps=2'", "steps=3'"))
    assert changed.returncode == 2
    assert "A/seed0 is finished, with other settings than now" in changed.stderr
    # What was begun with other settings is refused by the job itself, and shown.
    for path in Path(tmp_path / "out/runs").rglob("results.json"):
        path.unlink()
    changed = _run(tmp_path, *arguments, overrides.replace("steps=2'", "steps=3'"))
    assert changed.returncode == 1
    assert len(changed.stderr.splitlines()) == 4
    line = next(line for line in changed.stderr.splitlines() if "A/seed0" in line)
    assert "A/seed0: agentic-train: error: run_dir: " in line
    assert "holds a run with other settings" in line
