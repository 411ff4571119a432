"""agentic-evaluate as a user types it: targets, contexts kept and reset, interruptions."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from training import save_checkpoint

WHOLE = ["contexts=2", "trials=3", "seed=5"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def _command(*arguments):
    return [sys.executable, "-m", "agentic.evaluate", *arguments]


def _run(cwd, *arguments, code=0):
    done = subprocess.run(
        _command(*arguments), cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, timeout=100
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def _results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two checkpoints of untrained models, of two training seeds."""
    folder = tmp_path_factory.mktemp("evaluations")
    for seed in (0, 1):
        save_checkpoint(folder / f"s{seed}.pt", seed=seed)
    return folder


@pytest.fixture(scope="module")
def undisturbed(place):
    done = _run(place, "checkpoint=s0.pt", *WHOLE, "output=undisturbed")
    return done, _results(place / "undisturbed")


def test_what_is_run_is_said_and_everything_is_written(place, undisturbed):
    done, results = undisturbed
    assert "2 context(s) of 3 trial(s), kept, then reset; 3,000 tokens" in done.stdout
    assert "context reset, trial 3 of 3: mean return of 2 contexts" in done.stdout
    assert "warning: a context holds up to 3 trials, trained with at most 1" not in done.stdout
    (entry,) = results["results"]
    assert results["schema_version"] == 1
    assert entry["task"] == "walker_walk"
    assert entry["checkpoint"] == "s0.pt"
    assert entry["target"] == {"asked": "1x", "return": 90.0}
    assert len(entry["kept"]["returns"]) == 2
    assert all(0 < value < 1000 for row in entry["kept"]["returns"] for value in row)
    names = {path.name for path in (place / "undisturbed").iterdir()}
    assert {"results.json", "curves"} <= names
    assert "unfinished" not in names


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_evaluation_is_completed_by_the_same_command(place, undisturbed, end):
    command = _command("checkpoint=s0.pt", *WHOLE)
    process = subprocess.Popen(
        command,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    while not (kept := list(place.glob("evaluations/*/unfinished/*/trial_001.pt"))):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(end)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (-end, 128 + end)
    assert "Traceback" not in err
    if end != signal.SIGKILL:
        told = err.strip().splitlines()[-1]
        assert f"; finished trials are kept in {kept[0].parents[2].relative_to(place)}; " in told
        assert told.endswith(f"; go on with agentic-evaluate {shlex.join(command[3:])}")
    stamp = kept[0].stat().st_mtime_ns
    folder = kept[0].parent.parent.parent
    if end == signal.SIGKILL:  # not mixed up with another one
        _run(place, "checkpoint=s0.pt", "contexts=1", "trials=1", "output=other")
        assert kept[0].stat().st_mtime_ns == stamp
    done = _run(place, "checkpoint=s0.pt", *WHOLE)
    assert f"going on with {folder.relative_to(place)}" in done.stdout
    (ours,), (theirs,) = _results(folder)["results"], undisturbed[1]["results"]
    assert ours == theirs
    assert not (folder / "unfinished").exists()


def test_another_evaluation_does_not_go_on_with_an_unfinished_one(place):
    folder = place / "taken"
    (folder / "unfinished").mkdir(parents=True)
    (folder / "unfinished" / "settings.json").write_text("{}")
    done = _run(place, "checkpoint=s0.pt", *WHOLE, "output=taken", code=2)
    assert "output: taken holds an unfinished evaluation with other settings" in done.stderr


def test_several_targets_and_training_seeds_in_one_call(place):
    arguments = ["checkpoint=[s0.pt,s1.pt]", "target=[1.5,return:7,quantile:0.5]"]
    done = _run(place, *arguments, "contexts=1", "trials=2", "context=keep", "output=several")
    entries = _results(place / "several")["results"]
    assert [(e["checkpoint"], e["target"]["return"]) for e in entries] == [
        (f"s{seed}.pt", value) for seed in (0, 1) for value in (135.0, 7.0, 50.0)
    ]
    assert [e["train_seed"] for e in entries] == [0, 0, 0, 1, 1, 1]
    assert all(e["reset"] is None for e in entries)
    assert len({str(e["kept"]["returns"]) for e in entries}) == 6
    assert done.stdout.count("trial by trial") >= 6


def test_only_reset_and_stopping(place):
    arguments = ["checkpoint=s0.pt", "contexts=1", "trials=2", "target=return:0"]
    _run(place, *arguments, "context=reset", "output=reset")
    (entry,) = _results(place / "reset")["results"]
    assert entry["kept"] is None
    assert None not in entry["reset"]["returns"][0]  # trials that know nothing of each other
    _run(place, *arguments, "stop=true", "output=stopped")
    (entry,) = _results(place / "stopped")["results"]
    assert entry["kept"]["returns"][0][1] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["target=best"], ["target: got 'best'", "return:<value>"]),
        (["checkpoint=[s0.pt,nowhere]"], ["checkpoint: got nowhere"]),
        (["video=true"], ["video: got True", "a list of str"]),
        (["contexts=20000", "batch=20000", "trials=32"], ["batch: got 20000", "GiB", "bf16"]),
        (["task=cheetah_run"], ["task: got 'cheetah_run'", "walker_walk"]),
    ],
)
def test_bad_input_gets_one_line(place, arguments, words):
    (line,) = _run(place, "checkpoint=s0.pt", *arguments, code=2).stderr.strip().splitlines()
    for word in words:
        assert word in line
