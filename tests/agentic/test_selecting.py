"""Rollouts in the course of a training: on their clock, within their share, resumed."""

import dataclasses
import json
import signal
import time

import numpy as np
import pytest
import torch
from conftest import make_store
from training import make_trainer, run_trainer

from agentic import checkpoint, selecting
from agentic.config import ClockConfig
from agentic.evaluator import SELECTION, Interrupted, Trials, trial_seeds
from agentic.selecting import score_of, trial_scalars

CLOCKS = ClockConfig(
    log_steps=0,
    validate_steps=0,
    rollout_steps=2,
    rollout_from=0.5,
    checkpoint_steps=0,
    histogram_steps=0,
)


class Simulated:
    """Rollouts that bring the scores given, one after the other, and take some of the time."""

    def __init__(self, monkeypatch, scores, seconds=0.0):
        self.scores, self.seconds, self.now = iter(scores), seconds, 0.0
        self.calls = 0
        monkeypatch.setattr(selecting, "score_of", self._score)
        monkeypatch.setattr(time, "monotonic", self._clock)

    def _clock(self):
        self.now += 1e-3
        return self.now

    def _score(self, model, store, config, interrupted):
        assert not model.training
        self.calls += 1
        self.now += self.seconds
        score = next(self.scores)
        if isinstance(score, type):
            raise score
        return score, {"cartpole_swingup": np.full((2, 1), score)}


def _rollouts(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    name = "rollout/cartpole_swingup/trial_1"
    return {line["step"]: line[name] for line in lines if name in line}


def test_the_clock_and_the_best(tmp_path, monkeypatch):
    Simulated(monkeypatch, [0.5, 0.7, 0.7, 0.6])
    run_trainer(make_trainer(tmp_path, clocks=CLOCKS))
    assert _rollouts(tmp_path) == {6: 0.5, 8: 0.7, 10: 0.7, 12: 0.6}
    best = checkpoint.load(checkpoint.find(tmp_path))
    assert best["best"] == {"score": 0.7, "step": 10}  # the later of two alike
    assert best["step"] == 10


def test_rollouts_keep_to_their_share_of_the_time_but_for_the_last(tmp_path, monkeypatch, capsys):
    clocks = dataclasses.replace(CLOCKS, rollout_from=0.0, rollout_share=0.25)
    simulated = Simulated(monkeypatch, [0.1] * 20, seconds=0.01)  # 1 ms for all else
    run = make_trainer(tmp_path, clocks=clocks, steps=40)
    run_trainer(run)
    done = sorted(_rollouts(tmp_path))
    assert done[0] == 2
    assert done[-1] == 40
    assert 3 <= simulated.calls <= 10
    others = run.rollouts.spent - 0.022  # but for the first and the last
    assert others <= 0.25 * run.spent
    told = capsys.readouterr().out
    assert "no rollouts, they would take" in told
    assert "clocks.rollout_share=0.25" in told


@pytest.mark.parametrize("way", [KeyboardInterrupt, Interrupted])
def test_a_run_that_ended_in_a_rollout_begins_with_it_again(tmp_path, monkeypatch, way):
    with monkeypatch.context() as patch:
        Simulated(patch, [0.5, 0.7, 0.6, 0.6])
        straight = make_trainer(tmp_path / "straight", clocks=CLOCKS)
        run_trainer(straight)
    with monkeypatch.context() as patch:
        Simulated(patch, [0.5, way])
        run = make_trainer(tmp_path / "parts", clocks=CLOCKS)
        if way is KeyboardInterrupt:  # killed
            with pytest.raises(way):
                run_trainer(run)
        else:  # asked to end
            act = run.rollouts.act

            def interrupted(*arguments):
                if run.step == 8:
                    run.interrupt.signal = signal.SIGTERM
                return act(*arguments)

            run.rollouts.act = interrupted
            assert run_trainer(run) is signal.SIGTERM
    with monkeypatch.context() as patch:
        simulated = Simulated(patch, [0.7, 0.6, 0.6])
        resumed = make_trainer(tmp_path / "parts", clocks=CLOCKS)
        resumed.load_state(checkpoint.load(checkpoint.newest(tmp_path / "parts")))
        assert resumed.step == 8
        run_trainer(resumed)
    assert simulated.calls == 3
    assert _rollouts(tmp_path / "parts") == _rollouts(tmp_path / "straight")
    assert resumed.rollouts.best == straight.rollouts.best == {"score": 0.7, "step": 8}
    for key, value in straight.state()["averaged"].items():
        assert torch.equal(resumed.state()["averaged"][key], value)


def test_what_a_rollout_has_brought_is_saved_at_once(tmp_path, monkeypatch):
    Simulated(monkeypatch, [0.5, 0.7], seconds=10.0)
    run = make_trainer(tmp_path, clocks=CLOCKS)
    update = run.update

    def killed_behind_the_second():
        if run.step == 8:
            raise KeyboardInterrupt
        return update()

    run.update = killed_behind_the_second
    with pytest.raises(KeyboardInterrupt):
        run_trainer(run)
    resumed = make_trainer(tmp_path, clocks=CLOCKS)
    resumed.load_state(checkpoint.load(checkpoint.newest(tmp_path)))
    assert resumed.rollouts.done == 8
    assert resumed.rollouts.best == {"score": 0.7, "step": 8}
    assert 20 < resumed.rollouts.spent < 21
    assert 10 < resumed.rollouts.last < 11
    assert resumed.spent > 10


def test_the_score_is_the_last_trial_over_the_best_of_the_data_averaged_over_tasks(
    tmp_path, monkeypatch
):
    store = make_store([-4.0, 2.0, 10.0], tasks=2)  # the second task's returns: 4, -2, -10
    config = make_trainer(tmp_path).config
    rolling = dataclasses.replace(config.rollout, contexts=2, trials=3, target="quantile:0.5")
    config = dataclasses.replace(config, rollout=rolling, seed=3)
    seeds_CN = trial_seeds(3, SELECTION, 2, 3)

    def rolled(model, contexts, given, *, interrupted):
        assert given == rolling
        assert [c.spec for c in contexts] == [spec for spec in store.specs for _ in range(2)]
        assert [c.target for c in contexts] == pytest.approx([2, 2, -2, -2])
        assert np.array_equal([c.seeds for c in contexts], np.tile(seeds_CN, (2, 1)))
        returns = np.array([[9.0, 9.0, 5.0], [9.0, 9.0, 15.0], [8.0, 8.0, 1.0], [8.0, 8.0, 3.0]])
        nothing = np.zeros((4, 3))
        return Trials(returns=returns, failed=nothing > 0, seeds=nothing, actions=nothing)

    monkeypatch.setattr(selecting, "kept_trials", rolled)
    score, by_task = score_of(None, store, config, lambda: False)
    assert score == pytest.approx((10 / 10 + 2 / 4) / 2)
    first, second = store.specs
    assert by_task[first.name].tolist() == [[9, 9, 5], [9, 9, 15]]
    assert by_task[second.name].tolist() == [[8, 8, 1], [8, 8, 3]]


def test_trials_are_logged_with_their_intervals():
    returns_CN = np.array([[1.0, 4.0], [3.0, 4.0]])
    values = trial_scalars("rollout/a", returns_CN)
    assert values["rollout/a/trial_1"] == 2.0
    assert values["rollout/a/max"] == 4.0
    assert values["rollout/a/trial_1_low"] < 2.0 < values["rollout/a/trial_1_high"]
    assert values["rollout/a/trial_2_low"] == values["rollout/a/trial_2_high"] == 4.0
    assert set(trial_scalars("a", returns_CN[:1])) == {"a/max", "a/trial_1", "a/trial_2"}
