"""Memory that ran out: one line with the plan, from wherever it comes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from played_data import play
from training import save_checkpoint

from agentic import entry
from agentic.memory import KERNELS, planned, ran_out

ROOT = Path(__file__).parents[2]


def _too_much():
    torch.empty(2**62, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a memory object"),
    ],
)
def test_kinds_of_failed_allocations(error):
    assert ran_out(error)
    with (
        pytest.raises(ValueError, match="^memory: .*; planned were 3$"),
        planned(lambda: "planned were 3"),
    ):
        raise error


def test_the_allocator_of_pytorch():
    with pytest.raises(
        ValueError, match="memory: .*tried to allocate 4611686018427387904 bytes.*; p"
    ):
        with planned(lambda: "planned were 3"):
            _too_much()


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="another"), planned(lambda: "none"):
        raise RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"), entry._told("agentic-data"):
        raise RuntimeError("another")


def test_a_command_without_a_plan_ends_with_one_line(capfd):
    with pytest.raises(SystemExit) as ended, entry._told("agentic-data"):
        _too_much()
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("agentic-data: error: memory: ")
    assert "you tried to allocate" in line


def test_every_command_bounds_the_kernels_but_where_the_user_does(monkeypatch):
    def begun():
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "quiet_simulator", begun)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "5")  # to be taken back afterwards
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    with pytest.raises(KeyboardInterrupt):
        entry.run("agentic-train", "train", lambda values: None)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(KERNELS)
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


LIMITED = """
import resource
import agentic.{command} as command
import agentic.{module} as module
from agentic.trainer import Trainer

place = {place}
before = place.{name}

def limited(*arguments, **named):
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + {room}, resource.RLIM_INFINITY))
    return before(*arguments, **named)

place.{name} = limited
command.main()
"""


def _limited(cwd, *arguments, **places):
    """What a command says whose memory may grow by `room` bytes from a call of `name` on."""
    script = cwd / "limited.py"
    script.write_text(LIMITED.format(**places))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MUJOCO_GL": "disable", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_training_whose_memory_runs_out(tmp_path):
    play(tmp_path / "data", "jaco_reach_top_left", 6)
    line = _limited(
        tmp_path,
        *("task=jaco_reach_top_left", "algorithms=[random]", "trajectories=2", "model.width=16"),
        *("holdout=0", "chain.window_share=0", "batch_steps=50000", "run_dir=run", "steps=2"),
        command="train",
        module="trainer",
        place="Trainer",
        name="train",
        room=2**27,
    )
    assert line.startswith("agentic-train: error: memory: ")
    assert re.search(r"planned were [0-9.,]+ [MG]iB of [0-9.,]+ GiB at the peak of a step", line)
    assert "a smaller batch_steps, chain.window_batch or chain.trajectories" in line
    assert "rollout.cache=bf16" in line


def test_an_evaluation_whose_memory_runs_out(tmp_path):
    save_checkpoint(tmp_path / "model.pt", "jaco_reach_top_left")
    line = _limited(
        tmp_path,
        *("checkpoint=model.pt", "contexts=512", "batch=512", "trials=8", "output=out"),
        command="evaluate",
        module="judge",
        place="module",
        name="kept_trials",
        room=2**27,
    )
    assert line.startswith("agentic-evaluate: error: memory: ")
    for setting in ("a smaller batch", "remember", "cache=bf16"):
        assert setting in line
    assert not (tmp_path / "out" / "results.json").exists()
