from dataclasses import replace

import numpy as np
import pytest

from agentic.config import EvaluateConfig
from agentic.protocol import RolloutConfig, target_return
from agentic.store import quantiles
from agentic.strict import build

RETURNS = np.array([3.0, 10.0, 40.0, 80.0, 95.0])
DATASET = quantiles(RETURNS)
PLAIN = RolloutConfig(contexts=2, trials=16, target=1.0)


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        (1.0, 95.0),
        (0, 0.0),
        (1.2, 114.0),
        ("return:850", 850.0),
        ("quantile:0.9", np.quantile(RETURNS, 0.9)),
        ("quantile:0.33", np.quantile(RETURNS, 0.33)),
        ("quantile:1", 95.0),
    ],
)
def test_a_target_is_a_multiple_a_return_or_a_quantile(asked, value):
    assert target_return(asked, DATASET, RETURNS) == pytest.approx(value, abs=1e-12)


def test_older_checkpoints_know_some_quantiles():
    assert target_return("quantile:0.9", DATASET) == pytest.approx(np.quantile(RETURNS, 0.9))
    with pytest.raises(ValueError, match="target: got quantile:0.8, expected one of"):
        target_return("quantile:0.8", DATASET)


@pytest.mark.parametrize(
    "asked",
    [
        "best",
        "return:",
        "return:much",
        "quantile:1.1",
        "quantile:-1",
        "multiple:2",
        -0.5,
        "1.0",
        "",
    ],
)
def test_other_targets_are_refused_by_name(asked):
    with pytest.raises(ValueError, match="rollout.target: got"):
        replace(PLAIN, target=(1.0, asked)).check("rollout.")
    with pytest.raises(ValueError, match="target: got"):
        target_return(asked, DATASET, RETURNS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": 0}, "contexts: got 0"),
        ({"trials": 0}, "trials: got 0"),
        ({"target": ()}, "target: got an empty list"),
        ({"target": (1.0, "return:5", 1)}, "target: got 1x twice"),
        ({"context": "none"}, "context: got 'none'"),
        ({"stop": True, "context": "reset"}, "stop: got true with context=reset"),
        ({"remember": 0}, "remember: got 0"),
        ({"cache": "fp16"}, "cache: got 'fp16'"),
        ({"batch": 0}, "batch: got 0"),
        ({"threads": 0}, "threads: got 0"),
        ({"workers": 0}, "workers: got 0"),
    ],
)
def test_settings_out_of_range(changes, message):
    PLAIN.check()
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes).check()


def test_a_context_holds_all_trials_or_as_many_as_it_remembers():
    assert PLAIN.held == 16
    assert replace(PLAIN, remember=4).held == 4
    assert replace(PLAIN, remember=40).held == 16


def test_how_many_trials_are_cached_at_once():
    assert PLAIN.cached(goals=3) == 3 * 2 * 16
    assert replace(PLAIN, batch=4).cached(goals=3) == 4 * 16
    assert replace(PLAIN, remember=3).cached(goals=3) == 3 * 2 * 3


def test_targets_and_checkpoints_one_or_several():
    values = {"contexts": 2, "trials": 3, "device": "cpu", "seed": 1, "output": None}
    one = build(EvaluateConfig, values | {"target": 1, "checkpoint": "run"})
    assert (one.targets, one.checkpoints) == ((1.0,), ("run",))
    several = build(
        EvaluateConfig, values | {"target": [1.0, "return:5"], "checkpoint": ["a", "b"]}
    )
    assert (several.targets, several.checkpoints) == ((1.0, "return:5"), ("a", "b"))
    with pytest.raises(ValueError, match="checkpoint: got an empty list"):
        build(EvaluateConfig, values | {"target": 1.0, "checkpoint": []})
    with pytest.raises(ValueError, match="target: got None, expected float or str or a list of"):
        build(EvaluateConfig, values | {"target": None, "checkpoint": "run"})
    with pytest.raises(ValueError, match="video: got 'middle'"):
        build(EvaluateConfig, values | {"target": 1.0, "checkpoint": "a", "video": ["middle"]})
