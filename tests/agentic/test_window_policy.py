"""Acting on the last K steps alone."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_model

from agentic import evaluator
from agentic.evaluator import Context, kept_trials, reset_trials
from agentic.journal import Journal
from agentic.methods import policy_of
from agentic.policy import Policy
from agentic.protocol import RolloutConfig
from agentic.window_policy import WindowPolicy
from envs import TASKS, EnvPool

K, T = 3, 5
MODELS = [
    {"method": "bc"},
    {"method": "dt"},
    {"method": "dt", "past_action": "none", "past_reward": "none"},
    {"method": "dt", "layout": "interleaved"},
]


def _model(context_steps=K, **changes):
    return make_model(context_steps=context_steps, trajectories=1, tasks=("a", "b"), **changes)


def _act_through(policy, steps):
    """The actions of a policy to which the world answers as recorded in `steps`."""
    actions = []
    for t in range(steps.timestep.shape[1]):
        if steps.timestep[0, t] == 0:
            policy.begin_trial()
        seen = (steps.observation[:, t].numpy(), steps.return_to_go[:, t].numpy())
        actions.append(policy.act(*seen))
        outcome = (steps.action[:, t], steps.reward[:, t], steps.completion[:, t])
        policy.record(*(x.numpy() for x in outcome))
    return np.stack(actions, axis=1)


def _cut(steps, first, end):
    """A part of the steps, copied."""
    names = [f.name for f in dataclasses.fields(steps) if f.name != "task"]
    return replace(steps, **{n: getattr(steps, n)[:, first:end].clone() for n in names})


@pytest.mark.parametrize("context_steps", [1, K, T])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("changes", MODELS)
def test_acts_as_the_model_on_the_last_steps(changes, double, context_steps, random_steps):
    model, steps = _model(context_steps, **changes), random_steps(4, 2, T, tasks=2)
    if double:
        model = model.double()
        floating = {
            f.name: value.double()
            for f in dataclasses.fields(steps)
            if (value := getattr(steps, f.name)).is_floating_point()
        }
        steps = replace(steps, **floating)
    acted = _act_through(WindowPolicy(model, steps.task.numpy()), steps)
    assert acted.dtype == (np.float64 if double else np.float32)
    for trial in range(2):
        for t in range(T):
            end = trial * T + t + 1
            known = _cut(steps, end - min(t + 1, context_steps), end)
            known.trajectory.zero_()  # a trial has no place among others
            for name in ("action", "reward", "completion"):
                getattr(known, name)[:, -1] = 0  # not known yet
            with torch.no_grad():
                expected = model(known)[:, -1].numpy()
            assert acted[:, end - 1] == pytest.approx(expected, abs=1e-12 if double else 1e-6)


@pytest.mark.parametrize("changes", MODELS)
def test_a_trial_knows_nothing_of_the_one_before(changes, random_steps):
    model, steps = _model(**changes), random_steps(4, 2, T, tasks=2)
    second = _act_through(WindowPolicy(model, steps.task.numpy()), steps)[:, T:]
    alone = _act_through(WindowPolicy(model, steps.task.numpy()), _cut(steps, T, 2 * T))
    assert np.array_equal(second, alone)


def test_the_window_policy_is_for_models_that_see_their_last_steps():
    task = np.zeros(2, int)
    assert type(policy_of(_model(**MODELS[1]), task, 2, None, "fp32")) is WindowPolicy
    assert type(policy_of(_model(**MODELS[0]), task, 2, None, "fp32")) is WindowPolicy
    assert type(policy_of(make_model(), task, 2, None, "fp32")) is Policy


@pytest.mark.parametrize("method", ["bc", "dt"])
def test_kept_is_reset_and_a_killed_rollout_is_completed(method, tmp_path, monkeypatch):
    spec = replace(TASKS["walker_stand"], episode_steps=8)
    monkeypatch.setitem(TASKS, spec.name, spec)
    model = make_model(
        method=method,
        context_steps=K,
        trajectories=1,
        tasks=(spec.name,),
        observation_size=spec.observation_size,
        action_size=spec.action_size,
        episode_steps=8,
    )
    seeds = evaluator.trial_seeds(0, evaluator.EVALUATION, 2, 3)
    contexts = [Context(spec=spec, target=9.0, seeds=tuple(row)) for row in seeds.tolist()]
    plain = RolloutConfig(contexts=2, trials=3, target=1.0, workers=1)
    straight = kept_trials(model, contexts, plain)
    reset = reset_trials(model, contexts, plain)
    assert np.array_equal(straight.actions, reset.actions)
    assert np.array_equal(straight.returns, reset.returns)

    class Killed(Exception):
        pass

    taken, step = [0], EnvPool.step

    def dying(pool, action):
        taken[0] += 1
        if taken[0] > 13:  # in the second trial
            raise Killed
        return step(pool, action)

    monkeypatch.setattr(EnvPool, "step", dying)
    with pytest.raises(Killed):
        kept_trials(model, contexts, plain, journal=Journal(tmp_path, {}))
    monkeypatch.setattr(EnvPool, "step", step)
    completed = kept_trials(model, contexts, plain, journal=Journal(tmp_path, {}))
    assert np.array_equal(completed.actions, straight.actions)
    assert np.array_equal(completed.returns, straight.returns)
