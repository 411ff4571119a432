import json
import warnings

import numpy as np
import pytest
from trials import DATASET, NOT_RUN, make_entry, make_trials

from agentic import results
from agentic.statistics import estimate


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _means(part, names=results.STATISTICS):
    return [part[name]["mean"] for name in names]


def test_statistics_by_hand():
    entry = make_entry([[1, 5, 3], [3, 1, 7]], [[1, 4, 1], [2, 2, 3]])
    assert _means(entry["kept"]) == [2.0, 5.0, pytest.approx(10 / 3), 6.0]
    assert _means(entry["reset"]) == [1.5, 2.0, pytest.approx(13 / 6), 3.5]
    assert [row["mean"] for row in entry["kept"]["by_trial"]] == [2.0, 3.0, 5.0]
    assert entry["kept"]["returns"] == [[1, 5, 3], [3, 1, 7]]
    assert entry["kept"]["seeds"] == [[0, 1, 2], [3, 4, 5]]
    assert entry["kept"]["slope"]["mean"] == pytest.approx((1 + 2) / 2)
    assert entry["kept_minus_reset"]["last"]["mean"] == 3.0
    assert (entry["contexts"], entry["trials"]) == (2, 3)
    assert entry["random"] == {"mean": 2.0, "returns": [1.0, 3.0]}
    assert entry["dataset"] == DATASET


def test_normalised_is_zero_for_random_and_one_for_the_best_with_intervals():
    kept, reset = np.array([[1.0, 3.0], [2.0, 8.0], [2.0, 10.0]]), np.ones((3, 2))
    entry = make_entry(kept, reset)
    last = entry["kept"]["last"]
    low, high = estimate(kept[:, 1]).interval
    assert last["interval_over_contexts"] == [low, high]
    assert last["normalised"]["mean"] == pytest.approx((7 - 2) / 8)
    assert last["normalised"]["interval_over_contexts"] == pytest.approx(
        [(low - 2) / 8, (high - 2) / 8]
    )
    # Differences have no zero point: only the unit changes.
    assert entry["kept"]["slope"]["normalised"]["mean"] == pytest.approx((2 + 6 + 8) / 3 / 8)
    assert entry["kept_minus_reset"]["last"]["normalised"]["mean"] == pytest.approx(6 / 8)
    no_scale = make_entry(kept, reset, random=np.array([10.0]))
    assert no_scale["kept"]["last"]["normalised"] is None


def test_a_difference_is_paired():
    # Contexts differ by 100, the two rollouts of a context always by 1.
    kept = np.array([[0.0, 1.0], [0.0, 101.0], [0.0, 201.0]])
    entry = make_entry(kept, kept - 1)
    assert entry["kept_minus_reset"]["last"]["interval_over_contexts"] == [1.0, 1.0]


def test_contexts_that_stopped_early():
    kept = [[1, 9, NOT_RUN], [4, 5, NOT_RUN], [8, NOT_RUN, NOT_RUN]]
    reset = [[2, 3, 50], [2, 4, 50], [2, 60, 50]]
    entry = make_entry(kept, reset)
    part = entry["kept"]
    assert part["returns"] == [[1, 9, None], [4, 5, None], [8, None, None]]
    assert _means(part) == [pytest.approx(v) for v in (13 / 3, 22 / 3, 17.5 / 3, 22 / 3)]
    rows = [(row["mean"], row["contexts"]) for row in part["by_trial"]]
    assert rows == [(pytest.approx(13 / 3), 3), (7.0, 2), (None, 0)]
    assert part["by_trial"][2]["interval_over_contexts"] is None
    assert part["slope"]["mean"] == pytest.approx((8 + 1) / 2)
    assert part["slope"]["contexts"] == 2
    # The last trial that was run, beside the reset one of the same seed.
    assert entry["kept_minus_reset"]["last"]["mean"] == pytest.approx((6 + 1 + 6) / 3)
    json.dumps(entry, allow_nan=False)


def test_who_reached_the_target_and_when():
    entry = make_entry([[1, 10, 12], [2, 3, 9.99], [11, NOT_RUN, NOT_RUN]], [[1, 2, 3]] * 3)
    assert entry["kept"]["reached"] == {"contexts": 2, "trial": [2, None, 1]}
    assert entry["reset"]["reached"] == {"contexts": 0, "trial": [None, None, None]}


def test_a_gap_between_trials_is_a_bug():
    with pytest.raises(AssertionError, match="left out"):
        make_entry([[1, NOT_RUN, 3]], None)
    with pytest.raises(AssertionError, match="a trial"):
        make_entry([[NOT_RUN, NOT_RUN]], None)


def test_failed_trials_are_counted_and_named():
    kept = make_trials([[1, 2], [3, 4]], failed=[(0, 1), (1, 0)])
    entry = make_entry(kept, [[1, 2], [3, 4]])
    assert entry["kept"]["failed"] == {"count": 2, "trials": [[0, 1], [1, 0]]}
    assert entry["reset"]["failed"] == {"count": 0, "trials": []}


def test_the_maximum_stands_beside_the_same_of_independent_trials_and_of_the_data():
    entry = make_entry([[1, 5, 3], [3, 1, 7]], [[1, 4, 1], [2, 2, 3]])
    beside = entry["max_beside"]
    assert beside["of"] == 3
    assert beside["kept"]["mean"] == 6.0
    assert beside["independent"]["mean"] == 3.5
    # 0 to 10: the largest of 3 out of 11.
    assert beside["dataset"] == pytest.approx(12 * 3 / 4 - 1)
    unknown = make_entry([[1, 5, 3]], [[1, 4, 1]], dataset_returns=None)
    assert unknown["max_beside"]["dataset"] is None


def test_what_was_not_played_is_null():
    only_kept = make_entry([[1, 2]], None)
    assert only_kept["reset"] is only_kept["kept_minus_reset"] is None
    assert only_kept["max_beside"]["independent"] is None
    only_reset = make_entry(None, [[1, 2]])
    assert only_reset["kept"] is only_reset["kept_minus_reset"] is None
    assert only_reset["max_beside"]["kept"] is None
    assert only_reset["reset"]["last"]["mean"] == 2.0
    with pytest.raises(AssertionError):
        make_entry(None, None)


def test_one_context_has_no_interval():
    entry = make_entry([[1, 2]], [[1, 1]])
    assert entry["kept"]["first"]["interval_over_contexts"] is None
    assert entry["kept"]["first"]["normalised"]["interval_over_contexts"] is None
    assert entry["kept_minus_reset"]["last"]["interval_over_contexts"] is None


def _runs(task, lasts, **about):
    """One entry per training seed; two contexts end at `last` - 1 and `last` + 1."""
    return [
        make_entry(
            [[0, last - 1], [0, last + 1]],
            [[0, 0], [0, 0]],
            task=task,
            about={"train_seed": seed, "checkpoint": f"{task}-{seed}", "checkpoint_step": seed}
            | about,
        )
        for seed, last in enumerate(lasts)
    ]


def test_seeds_are_told_apart_from_contexts():
    entries = _runs("walker_walk", [4, 6, 8]) + _runs("walker_run", [10, 10, 2])
    (row,) = results.summarise(entries)
    assert row["group"]["method"] == "at"
    assert row["group"]["target"] == "1x"
    assert row["seeds"] == {"walker_walk": [0, 1, 2], "walker_run": [0, 1, 2]}
    last = row["statistics"]["raw"]["walker_walk"]["kept"]["last"]
    assert last["mean"]["value"] == 6.0
    assert last["mean"]["interval_over_seeds"] == list(estimate(np.array([4.0, 6, 8])).interval)
    everything = row["statistics"]["normalised"]["kept"]["last"]
    runs = (np.array([4, 6, 8, 10, 10, 2]) - 2) / 8
    assert everything["mean"]["value"] == pytest.approx(runs.mean())
    assert everything["iqm"]["value"] == pytest.approx(np.sort(runs)[1:-1].mean())
    low, high = everything["iqm"]["interval_over_seeds"]
    assert low < everything["iqm"]["value"] < high
    assert row["statistics"]["raw"]["walker_walk"]["reset"]["last"]["mean"]["value"] == 0.0


def test_one_seed_has_no_interval_over_seeds():
    (row,) = results.summarise(_runs("walker_walk", [4]))
    last = row["statistics"]["raw"]["walker_walk"]["kept"]["last"]
    assert last["mean"] == {"value": 4.0, "interval_over_seeds": None}
    assert last["iqm"] == {"value": 4.0, "interval_over_seeds": None}


def test_two_checkpoints_of_one_run_are_not_two_seeds():
    twice = _runs("walker_walk", [4]) + _runs("walker_walk", [5])
    (row,) = results.summarise(twice)
    assert row["seeds"] == {"walker_walk": [0, 0]}
    assert row["statistics"] is None


def test_runs_of_another_method_or_target_are_not_pooled():
    entries = [
        *_runs("walker_walk", [4, 5]),
        *_runs("walker_walk", [6, 7], method="dt"),
        make_entry([[1, 2]], [[1, 1]], asked="0.9x"),
    ]
    rows = results.summarise(entries)
    assert [(r["group"]["method"], r["group"]["target"]) for r in rows] == [
        ("at", "1x"),
        ("dt", "1x"),
        ("at", "0.9x"),
    ]
    assert rows[1]["statistics"]["raw"]["walker_walk"]["kept"]["last"]["mean"]["value"] == 6.5


def test_seeds_without_a_part_make_no_statistic_of_it():
    entries = [
        make_entry([[1, 2]], [[1, 1]]),
        make_entry([[1, 2]], None, about={"train_seed": 1}),
        make_entry([[1, 2]], None, random=np.array([10.0]), about={"train_seed": 2}),
    ]
    (row,) = results.summarise(entries)
    assert row["statistics"]["raw"]["walker_walk"]["reset"]["last"] is None
    assert row["statistics"]["raw"]["walker_walk"]["kept"]["last"]["mean"]["value"] == 2.0
    assert row["statistics"]["normalised"]["kept"]["last"] is None


def test_document(tmp_path):
    entries = _runs("walker_walk", [4, 6])
    results.write(tmp_path / "results.json", results.document(entries, {"evaluation_seed": 3}))
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["schema_version"] == 1
    assert again["evaluation_seed"] == 3
    assert set(again["versions"]) >= {"torch", "mujoco", "dm_control", "numpy"}
    assert again["results"] == entries
    assert again["over_seeds"] == results.summarise(entries)
    assert set(again["intervals"]) == {"interval_over_contexts", "interval_over_seeds"}
    assert again["results"][1]["train_seed"] == 1


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        results.write(tmp_path / "results.json", {"x": float("nan")})
    assert not (tmp_path / "results.json").exists()
