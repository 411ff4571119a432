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
from training import assert_same, scalars

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
ORDER = ("start", "collection", "ingest", "rewards", "preparation", "training", "evaluation")


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

    def reached(self, aim):
        """Whether it is there, or has come by."""
        phase = self.phase()
        later = aim in ORDER and phase in ORDER and ORDER.index(phase) > ORDER.index(aim)
        return phase == aim or later or phase == "evaluation"

    def _is_finished(self, note):
        return note.exists() and json.loads(note.read_text())["finished"]

    def _acting(self):
        """Whether the last thing written is the checkpoint in front of rollouts."""
        files = checkpoint.step_files(self.run_dir)
        lines = (self.run_dir / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        if not files or not lines:
            return False
        step, last = int(files[-1].stem.rpartition("_")[2]), json.loads(lines[-1])
        acted = any(name.startswith("rollout/") for name in last)
        return step % ROLLOUTS == 0 and last["step"] == step and not acted

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
        return {"states": states, "metrics": scalars(self.run_dir), "results": results}

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


class Starts:
    """Starts one life after the other, and kills them.

    Args:
        rng: draws the moments.
        seconds: that a whole life takes behind its first word.
    """

    def __init__(self, rng, seconds):
        self.rng, self.seconds = rng, seconds
        self.phases = collections.Counter()

    def kill(self, life, aim):
        """Starts it and kills it, in a phase or anywhere; one that comes to its end is spared."""
        process = life.start()
        try:
            if aim == "start":
                self._wait(process, lambda: False, self.rng.uniform(0, 2))
            elif aim == "anywhere":
                self._wait(process, life.speaks)
                self._wait(process, lambda: False, self.rng.uniform(0, self.seconds))
            else:
                self._wait(process, lambda: life.reached(aim))
                # None of it, or a part: of collection, rollouts and evaluation any one.
                most = self.seconds / 8 if aim in LONG else 0.01
                self._wait(process, lambda: False, self.rng.uniform(0, most))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.phases[life.phase()] += 1
            else:
                assert process.returncode == 0, life.said()
        finally:
            _end(process)

    def _wait(self, process, condition, seconds=300.0):
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until and not condition():
            time.sleep(0.001)


def _end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _seconds(place):
    """Of a whole life behind its first word."""
    life = Life(place)
    process = life.start()
    try:
        while not life.speaks():
            time.sleep(0.01)
        began = time.monotonic()
        assert process.wait(600) == 0, life.said()
        return time.monotonic() - began
    finally:
        _end(process)


KILLS = 50
LONG = ("collection", "rollouts", "evaluation")
# In the order in which a life comes by; half of the kills are anywhere.
AIMS = ("start", "collection", "collection", "ingest", "rewards", "training", "checkpoint")
AIMS += ("rollouts", "checkpoint", "evaluation", "evaluation")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_fifty_random_moments(tmp_path):
    starts = Starts(random.Random(0), _seconds(tmp_path / "first"))
    lives = 0
    while starts.phases.total() < KILLS:
        lives += 1
        life = Life(tmp_path / f"life{lives}")
        # Every second life is killed where it is hard to hit, the others anywhere.
        aims = iter(AIMS if lives % 2 else ["anywhere"] * 2 * len(AIMS))
        while not life.finished:
            aim = next(aims, None) if starts.phases.total() < KILLS else None
            if aim is None:
                _spare(life)
            else:
                starts.kill(life, aim)
        life.check()
    print(f"\n{KILLS} kills in {lives} lives: {dict(starts.phases.most_common())}")
    assert {"start", "collection", "training", "rollouts", "evaluation"} <= starts.phases.keys()
    # These take milliseconds, and on some machines one of them is never hit.
    assert starts.phases.keys() & {"ingest", "rewards", "checkpoint"}


def _spare(life):
    process = life.start()
    try:
        assert process.wait(600) == 0, life.said()
    finally:
        _end(process)


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
