"""A run that was ended and goes on is, to the last bit, the one that was never ended."""

import json
import os
import shutil
import signal

import dying
import numpy as np
import pytest
import torch
from training import assert_same, make_trainer, run_trainer, scalars

from agentic import checkpoint, selecting
from agentic.config import ClockConfig, DataConfig

CLOCKS = ClockConfig(
    log_steps=1,
    validate_steps=4,
    rollout_steps=3,
    rollout_from=0.0,
    rollout_share=1.0,
    checkpoint_steps=5,
    histogram_steps=6,
)
STEPS = 5  # of an episode
# Every method in both precisions, and every number of threads with both signals.
FEW = [
    ("at", "fp32", 0, signal.SIGKILL),
    ("at", "bf16", 1, signal.SIGTERM),
    ("dt", "fp32", 1, signal.SIGKILL),
    ("dt", "bf16", 2, signal.SIGKILL),
    ("bc", "fp32", 2, signal.SIGTERM),
    ("bc", "bf16", 0, signal.SIGTERM),
]
ALL = [
    (method, precision, threads, number)
    for method in ("at", "dt", "bc")
    for precision in ("fp32", "bf16")
    for threads in (0, 1, 2)
    for number in (signal.SIGKILL, signal.SIGTERM)
]


class Recorded:
    """A stream that notes which episodes it hands out, and may end the process behind one of them.

    Args:
        stream: of micro-batches.
        path: a line for each of them.
        end: the number of a micro-batch and a signal.
    """

    def __init__(self, stream, path, end):
        self.stream, self.path, self.end = stream, path, end

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __next__(self):
        number = self.stream.position
        steps, weight_BL = next(self.stream)
        places_BL = steps.observation[..., 0]  # each step of the data has its own
        with open(self.path, "a") as lines:
            lines.write(json.dumps([number, (places_BL // STEPS).tolist()]) + "\n")
        if self.end is not None and number == self.end[0]:
            os.kill(os.getpid(), self.end[1])
        return steps, weight_BL


def _score(model, store, config, interrupted):
    """Rollouts that draw random numbers, and tell apart models that differ in one bit."""
    assert not model.training
    torch.rand(3)
    value = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return value, {"cartpole_swingup": np.full((2, 2), value)}


def train(run_dir, method, precision, threads, end=None):
    """Trains from the newest checkpoint, if there is one, until the end or its own."""
    torch.set_num_threads(1)
    selecting.score_of = _score
    trainer = make_trainer(
        run_dir,
        method=method,
        precision=precision,
        data=DataConfig(prefetch=threads),
        clocks=CLOCKS,
    )
    resumed = bool(checkpoint.step_files(run_dir))
    if resumed:
        torch.manual_seed(99)
        trainer.resume()
    trainer.stream = Recorded(trainer.stream, run_dir / "taken", end)
    run_trainer(trainer)
    assert end is None or end[1] is signal.SIGTERM


def _outcome(run_dir):
    """Everything that must be the same, less what clocks and the number of threads say."""
    state = checkpoint.load(checkpoint.newest(run_dir))
    best = checkpoint.load(run_dir / "checkpoints" / checkpoint.BEST)
    for each in (state, best):
        del each["spent"], each["config"]["data"]["prefetch"]
        each["updated"] = each["updated"][1]
    return {"state": state, "best": best, "metrics": scalars(run_dir), "taken": _taken(run_dir)}


def _taken(run_dir):
    """The episodes of every micro-batch; one that was taken twice was the same again."""
    taken = {}
    for number, episodes in map(json.loads, (run_dir / "taken").read_text().splitlines()):
        assert taken.setdefault(number, episodes) == episodes
    return taken


@pytest.mark.parametrize(
    ("method", "precision", "threads", "number"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW)],
)
def test_resumed_equals_straight_to_the_last_bit(
    method, precision, threads, number, tmp_path, monkeypatch
):
    monkeypatch.setattr(selecting, "score_of", _score)  # to be undone
    case, other = (method, precision, threads), (method, precision, (threads + 1) % 3)
    train(tmp_path / "straight", *case)
    straight = _outcome(tmp_path / "straight")
    assert sorted(straight["taken"]) == list(range(24))  # 12 steps of two micro-batches
    assert {3, 6, 9, 12} <= {
        line["step"] for line in straight["metrics"] if "rollout/cartpole_swingup/max" in line
    }
    # Ended between the two micro-batches of step 8: after validation and rollouts.
    code = dying.run(train, tmp_path / "ended", *case, (16, number))
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    step = checkpoint.load(checkpoint.newest(tmp_path / "ended"))["step"]
    assert step == (6 if number is signal.SIGKILL else 8)
    for name in ("once", "twice", "elsewhere"):
        shutil.copytree(tmp_path / "ended", tmp_path / name)
    train(tmp_path / "once", *case)
    train(tmp_path / "twice", *case)
    assert dying.run(train, tmp_path / "elsewhere", *other) == 0
    for name in ("once", "twice", "elsewhere"):
        assert_same(_outcome(tmp_path / name), straight)


def test_a_save_that_was_killed_before_it_removed_older_ones_is_made_up_for(tmp_path):
    run_trainer(make_trainer(tmp_path))
    whole = checkpoint.step_files(tmp_path)
    shutil.copy(whole[0], checkpoint.step_path(tmp_path, 5))
    resumed = make_trainer(tmp_path)
    resumed.resume()
    assert resumed.step == 12
    run_trainer(resumed)
    assert checkpoint.step_files(tmp_path) == whole
