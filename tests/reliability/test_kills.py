"""Trainings that are killed at any moment of their life, and started again by the same command."""

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import dying
import pytest
import torch
from training import scalars

from agentic import checkpoint
from agentic.locks import LOCK

SETTINGS = [
    "task=cartpole_swingup",
    "task.collect.recipe=random",
    "task.collect.episodes=6",
    "task.collect.workers=0",
    "chain.trajectories=2",
    "chain.window_steps=100",
    "chain.window_batch=200",
    "tokens.past_action=dropout",
    "model.width=16",
    "model.layers=1",
    "holdout=0.34",
    "steps=24",
    "clocks.log_steps=1",
    "clocks.validate_steps=4",
    "clocks.checkpoint_steps=3",
    "clocks.histogram_steps=6",
    "clocks.rollout_steps=12",
    "clocks.rollout_from=0",
    "clocks.rollout_share=1",
    "rollout.contexts=1",
    "rollout.trials=1",
    "rollout.workers=1",
    "evaluation.contexts=1",
    "evaluation.context=keep",
    "evaluation.trials=2",
    "evaluation.workers=1",
    "run_dir=run",
]
ROLLOUTS = 12  # steps
KILLS = 50


class Life:
    """A training from the first episode to the results, in a folder of its own."""

    def __init__(self, place):
        self.place = place
        self.run_dir = place / "run"
        self.data = place / "data" / "cartpole" / "random"
        place.mkdir()

    @property
    def finished(self):
        return (self.run_dir / "results.json").is_file() and not self._evaluating

    @property
    def _evaluating(self):
        return (self.run_dir / "unfinished").exists()

    def start(self):
        """The command, as its users start it."""
        with open(self.place / "output", "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "agentic.train", *SETTINGS],
                cwd=self.place,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
                start_new_session=True,
            )

    def speaks(self):
        return (self.place / "output").stat().st_size > 0

    def said(self):
        return (self.place / "output").read_text()

    def phase(self):
        """What a killed process was about, by what it has left."""
        if not self.speaks():
            return "start"
        if not self._is_finished(self.data / "collect.json"):
            return "collection"
        if not self._is_finished(self.data / "store" / "index.json"):
            return "ingest"
        if not list((self.data / "store").glob("rewards/*.returns.npy")):
            return "rewards"
        if self._evaluating or self.finished:
            return "evaluation"
        if list((self.run_dir / "checkpoints").glob(".*.tmp")):
            return "checkpoint"
        if not (self.run_dir / "metrics.jsonl").exists():
            return "preparation"
        return "rollouts" if self._acting() else "training"

    def _is_finished(self, note):
        return note.exists() and json.loads(note.read_text())["finished"]

    def _acting(self):
        """Whether the last thing written is the checkpoint in front of rollouts."""
        files, lines = checkpoint.step_files(self.run_dir), self._lines()
        if not files or not lines:
            return False
        step = int(files[-1].stem.rpartition("_")[2])
        return (
            step % ROLLOUTS == 0
            and lines[-1]["step"] == step
            and not any(name.startswith("rollout/") for name in lines[-1])
        )

    def _lines(self):
        return scalars(self.run_dir)

    def undisturbed(self):
        """The same training on a copy of the episodes, all in one go."""
        whole = Life(self.place.with_name(f"{self.place.name}-whole"))
        whole.data.mkdir(parents=True)
        shutil.copytree(self.data / "buffer", whole.data / "buffer")
        shutil.copy(self.data / "collect.json", whole.data)
        assert dying.run(dying.command, whole.place, "train", SETTINGS) == 0, whole.said()
        return whole

    def outcome(self):
        """All that must be the same, less what the clock and the place say."""
        results = json.loads((self.run_dir / "results.json").read_text())
        del results["cases"][0]["checkpoint"]  # the digest of a file with seconds in it
        states = {}
        for path in (checkpoint.newest(self.run_dir), checkpoint.find(self.run_dir)):
            state = checkpoint.load(path)
            del state["spent"], state["config"]["data_dir"]
            state["updated"] = state["updated"][1]
            states[path.name] = state
        return {"states": states, "metrics": self._lines(), "results": results}

    def files(self):
        """What lies in the run's folder; TensorBoard's files have names of their own."""
        paths = (p.relative_to(self.run_dir) for p in self.run_dir.rglob("*") if p.is_file())
        return sorted(str(p) for p in paths if not p.name.startswith("events.out."))

    def check(self):
        """It is the undisturbed run, to the last bit, and nothing else is left."""
        whole = self.undisturbed()
        assert_same(self.outcome(), whole.outcome())
        assert self.files() == whole.files()
        hidden = [p for p in self.place.rglob(".*") if p.name != LOCK]
        assert not hidden
        assert not list(self.place.rglob("*.tmp"))
        assert len(list(self.run_dir.glob("events.out.*.curves"))) == 1


def assert_same(ours, theirs, place=""):
    assert type(ours) is type(theirs), place
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for key in ours:
            assert_same(ours[key], theirs[key], f"{place}/{key}")
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), place
    else:
        assert ours == theirs, place


def _wait(condition, process, seconds):
    """Whether the process still runs when the condition holds, or the time is over."""
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until and not condition():
        time.sleep(0.01)
    return process.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_fifty_random_moments(tmp_path):
    rng = random.Random(0)
    phases = collections.Counter()
    lives = 0
    while sum(phases.values()) < KILLS:
        lives += 1
        life = Life(tmp_path / f"life{lives}")
        while not life.finished:
            process = life.start()
            try:
                # Every tenth in its first two seconds, the others from its first word on.
                early = rng.random() < 0.1
                running = early or _wait(life.speaks, process, 100)
                pause = rng.uniform(0, 2) if early else rng.expovariate(0.5)
                spared = sum(phases.values()) == KILLS
                if running and _wait(lambda: False, process, 200 if spared else pause):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    phases[life.phase()] += 1
                else:
                    assert process.wait() == 0, life.said()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        life.check()
    print(f"\n{sum(phases.values())} kills in {lives} lives: {dict(phases.most_common())}")
    assert sum(phases.values()) == KILLS


FEW = (13, 60, 6)  # see `deaths`: in an episode, in a checkpoint, in a later one


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "moments",
    [pytest.param(FEW, id="few"), pytest.param(range(1, 400), id="all", marks=pytest.mark.slow)],
)
def test_killed_around_every_write(moments, tmp_path):
    """Start n is killed at its n-th moment: each gets a little further than the one before."""
    life = Life(tmp_path / "life")
    for moment in moments:
        code = dying.run(dying.command, life.place, "train", SETTINGS, moment)
        if code == 0:
            break
        assert code == -signal.SIGKILL, life.said()
    else:
        assert dying.run(dying.command, life.place, "train", SETTINGS) == 0, life.said()
    deaths = (life.place / "deaths").read_text()
    print(f"\n{deaths}")
    life.check()
