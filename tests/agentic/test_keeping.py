"""Checkpoints on a disk that is full, or that nobody may write to."""

import contextlib
import dataclasses
import errno
import os

import pytest
from ranks import run_ranks
from spread import spread_trainer
from training import make_trainer, run_trainer

from agentic import checkpoint, episodes, selecting
from agentic.metrics import MetricLog


class Disk:
    """Refuses to write whole files while it is full."""

    def __init__(self, patch):
        self.full = False
        self.sync = os.fsync
        patch.setattr(episodes.os, "fsync", self._fsync)

    def _fsync(self, descriptor):
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.sync(descriptor)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def _between(trainer, disk, first, end):
    """The disk is full from the update behind step `first` to that behind step `end`."""
    update = trainer.update

    def updated():
        disk.full = first <= trainer.step < end
        return update()

    trainer.update = updated


def _names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_full_disk_leaves_a_checkpoint_out_and_the_newest_as_it_was(tmp_path, disk, capsys):
    straight = make_trainer(tmp_path / "straight", steps=22)
    run_trainer(straight)
    trainer = make_trainer(tmp_path / "full", steps=22)
    _between(trainer, disk, 9, 17)
    update = trainer.update
    seen = {}

    def watched():
        seen[trainer.step] = _names(trainer.run_dir)
        return update()

    trainer.update = watched
    capsys.readouterr()
    run_trainer(trainer)
    assert seen[11] == seen[16] == ["step_000000005.pt"]  # no temporary file is left behind
    assert _names(trainer.run_dir) == ["step_000000020.pt", "step_000000022.pt"]
    folder = trainer.run_dir / "checkpoints"
    told = [line for line in capsys.readouterr().out.splitlines() if "No space" in line]
    assert told == [
        f"step {step}: {folder}/step_{step:09d}.pt: No space left on device; training goes on "
        f"without this checkpoint, the newest one is {folder}/step_000000005.pt, the next try is "
        f"at step {step + 5}"
        for step in (10, 15)
    ]
    for key, value in straight.state()["model"].items():
        assert value.equal(trainer.state()["model"][key])


@pytest.mark.parametrize("signalled", [False, True])
def test_the_last_checkpoint_must_be_written(tmp_path, disk, signalled):
    trainer = make_trainer(tmp_path)
    _between(trainer, disk, 5, 99)
    if signalled:
        update = trainer.update

        def asked():
            if trainer.step == 7:
                trainer.interrupt.signal = 15
            return update()

        trainer.update = asked
    told = f"No space left on device; the newest checkpoint is .*5.pt; .* resume={tmp_path}"
    with pytest.raises(OSError, match=told) as failed:
        run_trainer(trainer)
    name = "step_000000007.pt" if signalled else "step_000000012.pt"
    assert failed.value.filename == str(tmp_path / "checkpoints" / name)
    assert _names(tmp_path) == ["step_000000005.pt"]
    disk.full = False
    resumed = make_trainer(tmp_path)
    resumed.resume()
    run_trainer(resumed)
    assert _names(tmp_path)[-1] == "step_000000012.pt"


def test_a_best_checkpoint_that_cannot_be_written_is_not_the_best(tmp_path, disk, monkeypatch):
    scores = iter([0.5, 0.9, 0.6, 0.4])
    monkeypatch.setattr(selecting, "score_of", lambda *_: (next(scores), {}))
    trainer = make_trainer(tmp_path)
    clocks = dataclasses.replace(trainer.config.clocks, rollout_steps=3, checkpoint_steps=0)
    trainer = make_trainer(tmp_path, clocks=clocks)
    _between(trainer, disk, 5, 8)
    run_trainer(trainer)
    assert trainer.rollouts.best == {"score": 0.6, "step": 9}
    assert checkpoint.load(checkpoint.find(tmp_path))["step"] == 9


@pytest.mark.parametrize("case", ["data", "x"])
def test_in_a_group_all_go_on_or_end_together(tmp_path, case):
    ours, theirs = run_ranks(2, _full, case, tmp_path)
    assert ours[0] == theirs[0] == [None, 5, 5, 15, 15]
    assert "No space left on device; the newest checkpoint is" in ours[1]
    assert theirs[1] in ("MainFailed", ours[1])
    names = _names(tmp_path)
    assert names == (
        ["step_000000005.pt", "step_000000015.pt"]
        if case == "data"
        else ["step_000000005", "step_000000015"]
    )
    assert checkpoint.load(checkpoint.newest(tmp_path))["step"] == 15


def _full(rank, case, run_dir):
    """The first process alone cannot write from step 6 to 12, and at the end."""
    trainer = spread_trainer(case, run_dir, 22)
    saved, told, update = [], None, trainer.update
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)

        def updated():
            disk.full = rank == 0 and (6 <= trainer.step < 12 or trainer.step > 16)
            if trainer.step % 5 == 1:
                saved.append(trainer.keeping.step)
            return update()

        trainer.update = updated
        with MetricLog(run_dir, 0) if rank == 0 else contextlib.nullcontext() as log:
            try:
                trainer.train(log, progress=False)
            except (OSError, RuntimeError) as error:
                told = getattr(error, "strerror", None) or type(error).__name__
    return saved, told
