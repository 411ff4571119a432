"""Trials in context: kept, reset, interrupted, on real environments with short episodes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_model

from agentic import evaluator
from agentic.evaluator import Context, kept_trials, reset_trials
from agentic.journal import Journal
from agentic.policy import LockstepPolicy, Policy
from agentic.protocol import RolloutConfig
from agentic.window_policy import WindowPolicy
from envs import TASKS, EnvPool

STEPS = 20
STAND = replace(TASKS["walker_stand"], episode_steps=STEPS)
WALK = replace(TASKS["walker_walk"], episode_steps=STEPS)
PLAIN = RolloutConfig(contexts=1, trials=1, target=1.0, workers=1)


@pytest.fixture(autouse=True)
def short_episodes(monkeypatch):
    for spec in (STAND, WALK):
        monkeypatch.setitem(TASKS, spec.name, spec)


def _model(**changes):
    return make_model(
        tasks=(STAND.name, WALK.name),
        observation_size=STAND.observation_size,
        action_size=STAND.action_size,
        episode_steps=STAND.episode_steps,
        **changes,
    )


def _contexts(contexts, trials, specs=(STAND,), targets=(15.0,), seed=0):
    seeds = evaluator.trial_seeds(seed, evaluator.EVALUATION, contexts, trials)
    return [
        Context(spec=spec, target=target, seeds=tuple(row))
        for spec in specs
        for target in targets
        for row in seeds.tolist()
    ]


def _same(one, other):
    for name in ("returns", "failed", "seeds", "actions"):
        a, b = getattr(one, name), getattr(other, name)
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name


class Killed(Exception):
    pass


def _kill_after(monkeypatch, steps):
    """The next environment step but `steps` raises."""
    taken, step = [0], EnvPool.step

    def counted(pool, action):
        taken[0] += 1
        if taken[0] > steps:
            raise Killed
        return step(pool, action)

    monkeypatch.setattr(EnvPool, "step", counted)


def test_seeds_are_apart_and_do_not_depend_on_how_many_are_asked_for():
    few = evaluator.trial_seeds(0, evaluator.EVALUATION, 2, 2)
    many = evaluator.trial_seeds(0, evaluator.EVALUATION, 3, 5)
    assert np.array_equal(few, many[:2, :2])
    other = evaluator.trial_seeds(0, evaluator.SELECTION, 3, 5)
    assert len(set(many.ravel()) | set(other.ravel())) == 30


def test_rollout_is_deterministic_and_first_trials_do_not_depend_on_later_ones():
    model, contexts = _model(), _contexts(2, 2)
    both = kept_trials(model, contexts, PLAIN)
    _same(both, kept_trials(model, contexts, PLAIN))
    one = kept_trials(model, [replace(c, seeds=c.seeds[:1]) for c in contexts], PLAIN)
    assert one.returns[:, 0] == pytest.approx(both.returns[:, 0], abs=1e-4)
    assert both.actions.shape == (2, 2, STEPS, 6)
    # The recorded actions and seeds of any context give the same returns again.
    with EnvPool([STAND.name] * 2) as pool:
        pool.reset(both.seeds[:, 1].tolist())
        earned = sum(pool.step(both.actions[:, 1, t])[1] for t in range(STEPS))
    assert np.array_equal(earned, both.returns[:, 1])


def test_workers_change_nothing():
    model, contexts = _model(), _contexts(3, 1)
    alone = kept_trials(model, contexts, PLAIN)
    _same(alone, kept_trials(model, contexts, replace(PLAIN, workers=2)))


def test_contexts_of_several_tasks_and_targets_run_side_by_side_and_in_batches():
    model = _model()
    contexts = _contexts(1, 2, (STAND, WALK), (0.0, 20.0))
    together = kept_trials(model, contexts, PLAIN)
    for row, context in enumerate(contexts):
        alone = kept_trials(model, [context], PLAIN)
        assert together.returns[row] == pytest.approx(alone.returns[0], abs=1e-4)
    # The target and the task are told: other actions.
    assert not np.allclose(together.actions[0], together.actions[1], atol=1e-4)
    assert not np.allclose(together.actions[0], together.actions[2], atol=1e-4)
    batches = kept_trials(model, contexts, replace(PLAIN, batch=3))
    assert batches.returns == pytest.approx(together.returns, abs=1e-4)
    assert batches.actions.shape == together.actions.shape


@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_reset_contexts_are_the_first_trials_of_their_seeds(layout):
    model, contexts = _model(layout=layout), _contexts(2, 3)
    reset = reset_trials(model, contexts, PLAIN)
    # To the last bit: the difference to the kept context is nothing but the context.
    assert np.array_equal(reset.actions[:, 0], kept_trials(model, contexts, PLAIN).actions[:, 0])
    for k in range(3):
        alone = kept_trials(model, [replace(c, seeds=c.seeds[k : k + 1]) for c in contexts], PLAIN)
        assert np.array_equal(reset.returns[:, k], alone.returns[:, 0])
        assert np.array_equal(reset.seeds[:, k], [c.seeds[k] for c in contexts])
        assert np.array_equal(reset.actions[:, k], alone.actions[:, 0])


@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_a_context_that_remembers_one_trial_is_one_that_is_reset(layout):
    model, contexts = _model(layout=layout), _contexts(2, 3)
    reset = reset_trials(model, contexts, PLAIN)
    forgetful = kept_trials(model, contexts, replace(PLAIN, remember=1))
    _same(forgetful, reset)
    assert not np.allclose(kept_trials(model, contexts, PLAIN).actions, reset.actions, atol=1e-4)


def test_a_failing_trial_is_marked_and_the_rest_goes_on():
    model = _model()
    with torch.no_grad():  # not a number for one of the two tasks
        model.embedding.task.weight[0] = float("nan")
    trials = kept_trials(model, _contexts(1, 2, (STAND, WALK)), PLAIN)
    assert trials.failed.tolist() == [[True, True], [False, False]]
    assert (trials.returns[0] == 0).all()
    alone = kept_trials(model, _contexts(1, 2, (WALK,)), PLAIN)
    assert trials.returns[1] == pytest.approx(alone.returns[0], abs=1e-4)


def test_a_context_stops_with_the_first_trial_that_reaches_its_target():
    model = _model()
    free = kept_trials(model, _contexts(3, 3, targets=(1e9,)), PLAIN)
    # Told to reach nothing, all stop after one trial; told too much, none does.
    stop = replace(PLAIN, stop=True)
    none = kept_trials(model, _contexts(3, 3, targets=(0.0,)), stop)
    assert np.isfinite(none.returns[:, 0]).all()
    assert np.isnan(none.returns[:, 1:]).all()
    _same(kept_trials(model, _contexts(3, 3, targets=(1e9,)), stop), free)
    mixed = kept_trials(
        model, _contexts(1, 3, targets=(0.0,)) + _contexts(1, 3, targets=(1e9,)), stop
    )
    assert np.isnan(mixed.returns).tolist() == [[False, True, True], [False, False, False]]
    assert not mixed.failed.any()
    assert (mixed.actions[0, 1:] == 0).all()
    reset = reset_trials(model, _contexts(2, 3, targets=(0.0,)), stop)
    assert np.isfinite(reset.returns).all()


@pytest.mark.parametrize("changes", [{}, {"remember": 2}, {"cache": "bf16"}, {"stop": True}])
@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_a_killed_rollout_goes_on_to_the_last_bit(tmp_path, monkeypatch, layout, changes):
    model, contexts = _model(layout=layout), _contexts(2, 4, targets=(1e9,))
    config = replace(PLAIN, **changes)
    straight = kept_trials(model, contexts, config)
    part = tmp_path / "unfinished" / "keep_00000"
    for episodes, finished in ((2.8, 2), (1.2, 3), (0.4, 2), (9, 4)):
        with monkeypatch.context() as patch:
            _kill_after(patch, episodes * STEPS)
            try:
                resumed = kept_trials(model, contexts, config, journal=Journal(tmp_path, {"a": 1}))
            except Killed:
                assert finished < 4
        assert len(list(part.iterdir())) == finished
        if finished == 3:  # as if it had been killed in writing the third
            (part / "trial_002.pt").unlink()
    _same(resumed, straight)
    reset = reset_trials(model, contexts, config)
    with monkeypatch.context() as patch:
        _kill_after(patch, 2.5 * STEPS)
        with pytest.raises(Killed):
            reset_trials(model, contexts, config, journal=Journal(tmp_path, {"a": 1}))
    _same(reset_trials(model, contexts, config, journal=Journal(tmp_path, {"a": 1})), reset)
    with monkeypatch.context() as patch:  # all finished: nothing is played
        _kill_after(patch, 0)
        _same(kept_trials(model, contexts, config, journal=Journal(tmp_path, {"a": 1})), straight)


@pytest.mark.parametrize("run", [kept_trials, reset_trials])
def test_every_batch_keeps_trials_of_its_own(tmp_path, run):
    model, contexts = _model(), _contexts(2, 2)
    config, journal = replace(PLAIN, batch=1), Journal(tmp_path, {"a": 1})
    _same(run(model, contexts, config, journal=journal), run(model, contexts, config))


def test_an_interrupted_rollout_says_so():
    asked = []

    def third_time():
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(evaluator.Interrupted):
        kept_trials(_model(), _contexts(1, 1), PLAIN, interrupted=third_time)
    assert len(asked) == 3


@pytest.mark.parametrize(("asked", "given"), [(None, 2), (3, 3)])
def test_pytorch_has_fewer_threads_in_a_rollout_only(monkeypatch, asked, given):
    before, seen = torch.get_num_threads(), []
    act = Policy.act

    def watched(policy, *arguments):
        seen.append(torch.get_num_threads())
        return act(policy, *arguments)

    monkeypatch.setattr(Policy, "act", watched)
    torch.set_num_threads(4)
    try:
        kept_trials(_model(), _contexts(1, 1), replace(PLAIN, threads=asked))
        assert set(seen) == {given}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["at", "dt"])
def test_actions_beyond_the_range_are_clipped_where_they_are_executed_and_remembered(
    monkeypatch, capsys, method
):
    changes = {"past_action": "keep"}
    if method == "dt":
        changes |= {"method": "dt", "context_steps": 3, "trajectories": 1}
    model, contexts = _model(**changes), _contexts(2, 2)
    found = []
    for constant in (3.0, 1.0):
        with monkeypatch.context() as patch:
            decided = torch.full((2, STAND.action_size), constant)
            remembered = []

            def decide(policy, current, decided=decided):
                return decided

            def remember(policy, done, remembered=remembered):
                remembered.append(done.action)

            for policy in (Policy, WindowPolicy):
                patch.setattr(policy, "_decide", decide)
                patch.setattr(policy, "_remember", remember)
            patch.setattr(Policy, "memory", lambda policy: {})
            trials = kept_trials(model, contexts, PLAIN)
        assert torch.cat(remembered).unique().tolist() == [1.0]
        assert (trials.actions == 1).all()
        assert not trials.failed.any()
        found.append(trials)
    _same(*found)
    lines = [line for line in capsys.readouterr().out.splitlines() if "clipped" in line]
    assert lines == [f"trial {k}: {2 * STEPS} actions beyond [-1, 1] were clipped" for k in (1, 2)]


def test_random_returns():
    values = evaluator.random_returns(STAND, episodes=2, seed=0)
    assert values.shape == (2,)
    assert np.array_equal(values, evaluator.random_returns(STAND, episodes=2, seed=0))
    assert not np.array_equal(values, evaluator.random_returns(STAND, episodes=2, seed=1))


@pytest.mark.parametrize("method", ["at", "dt"])
def test_what_a_trial_has_earned_is_taken_off_its_target(monkeypatch, method):
    changes = {} if method == "at" else {"method": "dt", "context_steps": 3, "trajectories": 1}
    asked, earned = [], []
    act, step = LockstepPolicy.act, EnvPool.step

    def told(policy, observation, return_to_go):
        asked.append(return_to_go)
        return act(policy, observation, return_to_go)

    def paid(pool, action):
        result = step(pool, action)
        earned.append(result[1])
        return result

    monkeypatch.setattr(LockstepPolicy, "act", told)
    monkeypatch.setattr(EnvPool, "step", paid)
    config = RolloutConfig(contexts=2, trials=2, target=1.0, workers=1)
    kept_trials(_model(**changes), _contexts(2, 2), config)
    steps = STAND.episode_steps
    for trial in (0, 1):
        own = slice(trial * steps, (trial + 1) * steps)
        before = np.cumsum([np.zeros(2), *earned[own]], axis=0)[:-1]
        assert before[-1].min() > 0
        np.testing.assert_allclose(asked[own], 15.0 - before, rtol=0, atol=1e-6)
