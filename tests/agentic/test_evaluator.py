import numpy as np
import pytest
import torch
from conftest import make_model

from agentic import evaluator
from envs import TASKS, EnvPool

JACO = TASKS["jaco_reach_top_left"]  # the shortest episodes


def _model(**changes):
    return make_model(
        tasks=("jaco_reach_top_left",),
        observation_size=JACO.observation_size,
        action_size=JACO.action_size,
        episode_steps=JACO.episode_steps,
        **changes,
    )


def test_seeds_are_apart_and_do_not_depend_on_how_many_are_asked_for():
    few = evaluator.trial_seeds(0, evaluator.EVALUATION, 2, 2)
    many = evaluator.trial_seeds(0, evaluator.EVALUATION, 3, 5)
    assert np.array_equal(few, many[:2, :2])
    other = evaluator.trial_seeds(0, evaluator.SELECTION, 3, 5)
    assert len(set(many.ravel()) | set(other.ravel())) == 30


def test_rollout_is_deterministic_and_first_trials_do_not_depend_on_later_ones():
    model = _model()
    seeds = evaluator.trial_seeds(0, evaluator.EVALUATION, 2, 2)
    both = evaluator.rollout(model, JACO, target=100.0, seeds=seeds)
    again = evaluator.rollout(model, JACO, target=100.0, seeds=seeds)
    assert np.array_equal(both.returns, again.returns)
    assert np.array_equal(both.actions, again.actions)
    one = evaluator.rollout(model, JACO, target=100.0, seeds=seeds[:, :1])
    assert one.returns[:, 0] == pytest.approx(both.returns[:, 0], abs=1e-3)
    assert both.actions.shape == (2, 250, 9)
    # The recorded actions and seeds give the same return again.
    pool = EnvPool([JACO.name])
    pool.reset([int(seeds[0, 1])])
    total = sum(pool.step(a[None])[1][0] for a in both.actions[1])
    assert total == both.returns[0, 1]


def test_reset_contexts_are_the_first_trials_of_their_seeds():
    model = _model()
    seeds = evaluator.trial_seeds(0, evaluator.EVALUATION, 1, 2)
    reset = evaluator.rollout_reset(model, JACO, target=100.0, seeds=seeds)
    for k in range(2):
        alone = evaluator.rollout(model, JACO, target=100.0, seeds=seeds[:, k : k + 1])
        assert reset.returns[:, k] == pytest.approx(alone.returns[:, 0], abs=1e-3)


def test_a_failing_trial_is_marked_and_the_rest_goes_on():
    model = _model()
    with torch.no_grad():
        model.head.bias[:] = float("nan")
    seeds = evaluator.trial_seeds(0, evaluator.EVALUATION, 2, 1)
    trials = evaluator.rollout(model, JACO, target=100.0, seeds=seeds)
    assert trials.failed.all()
    assert (trials.returns == 0).all()


def test_random_returns():
    values = evaluator.random_returns(JACO, episodes=2, seed=0)
    assert values.shape == (2,)
    assert np.array_equal(values, evaluator.random_returns(JACO, episodes=2, seed=0))
    assert not np.array_equal(values, evaluator.random_returns(JACO, episodes=2, seed=1))
