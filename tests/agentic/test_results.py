import io
import json

import numpy as np
import pytest
from rich.console import Console

from agentic import results
from agentic.evaluator import Trials


def _trials(returns):
    returns = np.array(returns, float)
    return Trials(
        returns=returns,
        failed=np.zeros(returns.shape, bool),
        seeds=np.zeros(returns.shape, np.int64),
        actions=np.zeros((1, 1, 1), np.float32),
    )


DATASET = {"min": 0.0, "median": 4.0, "p90": 8.0, "max": 10.0, "mean": 4.5}


def _entry(kept, reset):
    return results.task_result(
        task="cartpole_swingup",
        target=10.0,
        kept=_trials(kept),
        reset=_trials(reset),
        random=np.array([1.0, 3.0]),
        dataset=DATASET,
    )


def test_statistics_by_hand():
    entry = _entry([[1, 5, 3], [3, 1, 7]], [[1, 1, 1], [2, 2, 3]])
    assert [entry[name]["mean"] for name in ("first", "last", "mean", "max")] == [
        2.0,
        5.0,
        pytest.approx(10 / 3),
        6.0,
    ]
    assert entry["trial_means"] == [2.0, 3.0, 5.0]
    assert entry["context_reset"]["max"]["mean"] == 2.0
    assert entry["kept_minus_reset"]["mean"] == 3.0
    assert entry["normalised"]["last"] == (5.0 - 2.0) / (10.0 - 2.0)
    assert entry["returns"] == [[1, 5, 3], [3, 1, 7]]


def test_interval_holds_the_mean_and_one_context_has_none():
    values = np.random.default_rng(0).normal(5, 1, 40)
    low, high = results.interval(values)
    half = 1.96 * values.std(ddof=1) / 40**0.5
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1)
    assert results.interval(values[:1]) is None


def test_document_and_table(tmp_path):
    entries = [_entry([[1, 2]], [[1, 1]]), _entry([[1, 2], [2, 9]], [[1, 1], [1, 1]])]
    content = results.document(entries, {"evaluation_seed": 0})
    results.write(tmp_path / "results.json", content)
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["schema_version"] == 1
    assert set(again["versions"]) >= {"torch", "mujoco", "dm_control", "numpy"}
    assert again["results"][0]["first"]["interval"] is None
    text = io.StringIO()
    results.print_table(entries, Console(file=text, width=200))
    assert "n/a" in text.getvalue()
    assert "average" in text.getvalue()


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        results.write(tmp_path / "results.json", {"x": float("nan")})
    assert not (tmp_path / "results.json").exists()
