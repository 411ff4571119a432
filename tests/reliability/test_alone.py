"""One process at a time in a run's directory, and what killed ones have left there."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import dying
import pytest
from conftest import make_model
from training import make_config

from agentic import locks
from agentic.locks import LOCK, locked
from agentic.runs import open_run

RUN = [
    "task=cartpole_swingup",
    "task.collect.recipe=random",
    "task.collect.episodes=100000",
    "task.collect.seconds=1000",
    "task.collect.workers=0",
    "run_dir=run",
]
LEFT = f".{{}}.{'0f' * 16}.tmp"  # by a killed write


@pytest.fixture
def config(tmp_path):
    return replace(make_config(make_model()), run_dir=str(tmp_path / "run"), data_dir="/data")


def _open(config):
    with ExitStack() as held:
        return open_run(config, held)


def _taken():
    raise BlockingIOError


def test_a_second_training_is_refused_until_the_first_is_gone(tmp_path):
    first = dying.start(dying.command, tmp_path, "train", RUN)
    try:
        until = time.monotonic() + 100
        while not list(tmp_path.glob("data/cartpole/random/buffer/*.npz")):
            assert first.is_alive()
            assert time.monotonic() < until
            time.sleep(0.05)
        refused = "agentic-train: error: run_dir: run is in use by another process that trains "
        for second in (RUN, ["resume=run"]):
            (tmp_path / "output").unlink()
            assert dying.run(dying.command, tmp_path, "train", second, timeout=60) == 2
            assert (tmp_path / "output").read_text().strip().splitlines() == [
                refused + "there; expected one at a time"
            ]
    finally:
        dying.end(first)
    with locked(tmp_path / "run" / "checkpoints", _taken) as held:
        assert held


def test_the_lock_of_a_killed_process_goes_though_its_children_live(tmp_path):
    code = f"""
import multiprocessing, os, pathlib, subprocess, time
from agentic.locks import locked
if __name__ == "__main__":
    with locked(pathlib.Path({str(tmp_path)!r}), lambda: None):
        ours = subprocess.Popen(["sleep", "60"])
        theirs = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        theirs.start()
        print(ours.pid, theirs.pid, flush=True)
        time.sleep(60)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        children = [int(pid) for pid in process.stdout.readline().split()]
        with pytest.raises(BlockingIOError), locked(tmp_path, _taken):
            pass
        process.kill()
        process.wait()
        for child in children:
            os.kill(child, 0)  # lives
        with locked(tmp_path, _taken) as held:
            assert held
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_all_the_same(number, config, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    run_dir, resumed = _open(config)
    assert not resumed
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"{run_dir}/checkpoints: no locks on this file system")
    # Whoever wrote this may still be there.
    left = Path(run_dir) / "checkpoints" / LEFT.format("best.pt")
    left.touch()
    _open(config)
    assert left.exists()


def test_another_error_of_the_lock_is_none_of_a_lockless_file_system(config, monkeypatch):
    def flock(file, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"):
        _open(config)


def test_what_killed_writes_have_left_is_swept_and_nothing_else(config, tmp_path):
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    whole, half = checkpoints / "step_000000005", checkpoints / "step_000000010"
    for folder in (whole, half):
        (folder / "tensors_1").mkdir(parents=True)
    (whole / "state.pt").touch()
    (run_dir / "config.yaml").touch()
    kept = [whole / "state.pt", checkpoints / "notes", run_dir / LEFT.format("other")]
    kept += [run_dir / ".config.yaml.tmp", checkpoints / LOCK]
    swept = [run_dir / LEFT.format("config.yaml"), whole / LEFT.format("state.pt")]
    swept += [checkpoints / LEFT.format(name) for name in ("best.pt", "step_000000005.pt")]
    for path in (*kept, *swept):
        path.touch()
    _open(replace(config, run_dir=None, resume=str(run_dir)))
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in (*swept, half))


@pytest.mark.parametrize("left", [None, f"checkpoints/{LOCK}", LEFT.format("config.yaml")])
def test_a_run_that_was_killed_at_its_very_start_begins_again(left, config, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    if left is not None:
        (run_dir / left).touch()
    assert _open(config) == (str(run_dir), False)
    assert (run_dir / "config.yaml").is_file()
    assert not list(run_dir.glob(".*.tmp"))
    assert _open(replace(config, seed=5)) == (str(run_dir), False)  # nothing has begun yet


@pytest.mark.parametrize("name", ["letter.txt", "checkpoints/step_000000005.pt"])
def test_a_folder_with_other_files_is_left_alone(name, config, tmp_path):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.touch()
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(ValueError, match="run holds other files, expected a new or empty one"):
        _open(config)
    assert sorted((tmp_path / "run").rglob("*")) == before
