"""Commands under torchrun: who speaks when something is off, and how soon all have ended."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentic import entry

SCRIPT = """
import os
import signal
import sys
import time

import torch

from agentic.entry import run
from parallel.collectives import all_reduce
from parallel.mesh import CubeMesh
from parallel.world import World

fault = sys.argv.pop()


def missing():
    raise ValueError("data_dir: got nothing, expected episodes")


def task(values):
    if fault == "before":
        time.sleep(float(os.environ["RANK"] == "0"))  # the others find it sooner
        raise ValueError("steps: got 0, expected 1 or more")
    if fault == "alone" and os.environ["RANK"] == "1":
        raise ValueError("steps: got 0 on one host, expected 1 or more")
    world = World.start("cpu", timeout=30)
    if fault == "main":
        world.on_main(missing)
    mesh = CubeMesh(x=2, y=world.size // 2, timeout=30, world=world)
    for step in range(10_000):
        if step == 5 and fault == "later":
            raise ValueError(f"value: got {world.rank}, expected none")
        if step == 5 and fault == "kill" and world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(torch.ones(1), mesh, "xy"[step % 2])
        time.sleep(0.01)


run("agentic-train", "train", task, spread=True)
"""


@pytest.fixture
def torchrun(tmp_path):
    """Runs the script with a fault; all lines on standard error that are the command's own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(fault: str, processes: int = 2) -> list[str]:
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                str(script),
                "hydra.run.dir=.",
                "hydra.output_subdir=null",
                fault,
            ],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        )
        try:
            _, told = process.communicate(timeout=120)
        finally:
            process.send_signal(signal.SIGTERM)  # torchrun ends its processes
            process.wait(60)
        assert process.returncode == 1
        assert 'script.py", line' not in told
        return [line for line in told.splitlines() if "agentic-train:" in line]

    return start


def test_a_mistake_that_all_find_is_told_once(torchrun):
    assert torchrun("before") == ["agentic-train: error: steps: got 0, expected 1 or more"]


@pytest.mark.slow
def test_a_mistake_that_main_does_not_share_is_told_after_a_while(torchrun):
    (line,) = torchrun("alone")
    assert line == "[rank 1] agentic-train: error: steps: got 0 on one host, expected 1 or more"


def test_what_main_fails_at_is_told_by_main_alone(torchrun):
    assert torchrun("main") == [
        "[rank 0] agentic-train: error: data_dir: got nothing, expected episodes"
    ]


def test_a_later_mistake_is_told_with_its_rank(torchrun):
    told = torchrun("later")
    assert told
    for line in told:
        rank = re.fullmatch(r"\[rank (\d)\] agentic-train: error: value: got (\d), .*", line)
        assert rank[1] == rank[2]


def test_the_others_of_a_killed_rank_name_it_although_torchrun_ends_them(torchrun):
    told = sorted(torchrun("kill", processes=4))
    assert len(told) == 3
    for rank, line in zip((0, 1, 3), told, strict=True):
        start = f"[rank {rank}] agentic-train: error: lost rank 2 on axis "
        assert re.match(
            re.escape(start) + rf"[xy] \(it died or hangs\); this is rank {rank}: ", line
        )


@pytest.fixture
def of_two(monkeypatch):
    """Rank 0 of two processes; ends so that a test can go on."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_only_training_runs_in_several_processes(of_two, capsys):
    with pytest.raises(SystemExit) as ended:
        entry.run("agentic-data", "data", lambda values: pytest.fail("has run"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "agentic-data: error: torchrun: got 2 processes, expected agentic-data in one; "
        "WORLD_SIZE is set\n"
    )


PRINTS = """
from agentic.entry import run


def task(values):
    for line in range(100_000):
        print(line)


run("agentic-train", "train", task)
"""


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path):
    (tmp_path / "script.py").write_text(PRINTS)
    command = f"{sys.executable} {tmp_path / 'script.py'} | head -n 1; echo ${{PIPESTATUS[0]}}"
    root = str(Path(entry.__file__).parent.parent)
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout.split(), done.stderr) == (["0", "141"], "")


def test_a_broken_pipe_of_something_else_is_told(capfd):
    with pytest.raises(SystemExit) as ended, entry._told("agentic-train"):
        raise BrokenPipeError(32, "Broken pipe")
    assert ended.value.code == 2
    assert capfd.readouterr().err == "agentic-train: error: Broken pipe\n"
