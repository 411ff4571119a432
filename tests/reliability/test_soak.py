"""A long training with all clocks short, resumed three times: nothing grows and nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from played_data import play
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentic import checkpoint

SETTINGS = [
    "task=cartpole_swingup",
    "algorithms=[random]",
    "chain.trajectories=2",
    "chain.window_steps=100",
    "chain.window_batch=200",
    "chain.window_share=0.5",
    "batch_steps=2000",
    "model.width=16",
    "model.layers=1",
    "holdout=0.34",
    "steps=1000000",
    "clocks.log_steps=2",
    "clocks.validate_steps=10",
    "clocks.checkpoint_steps=10",
    "clocks.histogram_steps=20",
    "clocks.rollout_steps=100",
    "clocks.rollout_from=0",
    "clocks.rollout_share=0.5",
    "rollout.contexts=2",
    "rollout.trials=1",
    "rollout.workers=1",
    "run_dir=run",
]
ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM)  # of the four sessions
SAMPLE_SECONDS = 2.0
WINDOWS = 5  # of a session behind its warm-up, which is its first third


def _sample(group):
    """Resident MiB and open handles of a process group."""
    pages = handles = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                pages += int((process / "statm").read_text().split()[1])
                handles += len(list((process / "fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):  # has ended meanwhile
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, handles


def _session(place, seconds, end):
    """Trains for some seconds of steps, then ends it; samples (n, 2) from its first step on."""
    with open(place / "output", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentic.train", *SETTINGS],
            cwd=place,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
            start_new_session=True,
        )
    try:
        log, before = place / "run" / "metrics.jsonl", _size(place)
        until = time.monotonic() + 200
        while _size(place) <= before and time.monotonic() < until:
            assert process.poll() is None, (place / "output").read_text()[-1000:]
            time.sleep(0.1)
        assert log.exists()
        samples, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(SAMPLE_SECONDS)
            samples.append(_sample(process.pid))
            assert process.poll() is None, (place / "output").read_text()[-1000:]
        process.send_signal(end)
        expected = -end if end is signal.SIGKILL else 128 + end
        assert process.wait(60) == expected
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return np.array(samples)


def _size(place):
    log = place / "run" / "metrics.jsonl"
    return log.stat().st_size if log.exists() else 0


def _shown(run_dir):
    """The steps of every tag, as TensorBoard shows them."""
    everything = dict.fromkeys(("scalars", "histograms", "tensors", "images"), 0)
    board = EventAccumulator(str(run_dir), size_guidance=everything).Reload()
    readers = {"scalars": board.Scalars, "histograms": board.Histograms, "tensors": board.Tensors}
    tags = board.Tags()
    return {
        tag: [e.step for e in read(tag)] for kind, read in readers.items() for tag in tags[kind]
    }


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_and_handles_stay_flat_and_every_curve_goes_on(tmp_path, soak_minutes):
    play(tmp_path / "data", "cartpole_swingup", 6)
    uneven = []
    for number, end in enumerate(ENDS, start=1):
        samples = _session(tmp_path, 60 * soak_minutes / len(ENDS), end)
        step = checkpoint.load(checkpoint.newest(tmp_path / "run"))["step"]
        windows = np.array_split(samples[len(samples) // 3 :], WINDOWS)
        memory, handles = np.array([window.max(axis=0) for window in windows]).T
        print(f"\nsession {number}, to step {step}, {end.name}: most MiB by tenth", end=" ")
        print(*(f"{tenth[:, 0].max():.0f}" for tenth in np.array_split(samples, 10)), end="; ")
        print("handles", *sorted(set(samples[:, 1].astype(int))))
        if np.abs(memory / memory.mean() - 1).max() > 0.05:
            uneven.append(f"session {number}: MiB {memory.round(1)}")
        if np.ptp(handles) > 2:
            uneven.append(f"session {number}: handles {handles}")
    assert not uneven
    shown = _shown(tmp_path / "run")
    assert {"train/loss", "validation/loss", "rollout/cartpole_swingup/max"} <= shown.keys()
    assert any(tag.startswith("weights/") for tag in shown)
    for tag, steps in shown.items():
        assert (np.diff(steps) > 0).all(), tag
    # None is missing: every second step from the first to the last checkpoint's.
    assert shown["train/loss"][: step // 2] == list(range(2, step + 1, 2))
