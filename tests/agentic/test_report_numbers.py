"""A report's numbers, computed by hand on invented runs (random earns 2, the best 10)."""

import json

import numpy as np
import pytest
from reports import CORNERS, leave_run, leave_table
from trials import NOT_RUN

from agentic.report_numbers import gains, kept_minus_reset, numbers
from agentic.report_runs import find_runs
from agentic.statistics import over_seeds

TASKS = ("walker_walk", "cheetah_run", "jaco_reach")


def _numbers(tmp_path, tasks=TASKS):
    runs, remarks = find_runs(tmp_path / "runs")
    assert remarks == []
    return numbers(runs, tasks)


def _cell(section, task, row):
    (cell,) = (c for c in section["cells"] if (c["task"], c["row"]) == (task, row))
    return cell


def test_a_cell_by_hand(tmp_path):
    leave_run(tmp_path, "AT-4", [[2, 6], [4, 10]], [[2, 4], [4, 4]], seed=0)
    leave_run(tmp_path, "AT-4", [[4, 4], [4, 4]], [[2, 2], [2, 6]], seed=1)
    section = _numbers(tmp_path)["step"]
    cell = _cell(section, "walker_walk", "AT-4")
    assert cell["seeds"] == [0, 1]
    raw = {name: cell[name]["raw"]["mean"] for name in ("first", "last", "mean", "max")}
    assert raw == {"first": 3.5, "last": 6.0, "mean": 4.75, "max": 6.0}
    # Seeds 8 and 4: half of all resamples have both.
    assert cell["last"]["raw"]["interval_over_seeds"] == [4.0, 8.0]
    assert cell["last"]["normalised"] == {
        "mean": (6 - 2) / 8,
        "interval_over_seeds": [(4 - 2) / 8, (8 - 2) / 8],
    }
    assert cell["independent"]["raw"]["mean"] == np.mean([np.mean([4, 4]), np.mean([2, 6])])
    assert cell["kept_minus_reset"]["raw"]["mean"] == np.mean([2, 6, 2, -2])
    assert cell["kept_minus_reset"]["normalised"]["mean"] == pytest.approx(2 / 8)
    assert cell["gain_per_trial"]["raw"]["mean"] == np.mean([4, 6, 0, 0])
    # Both drawn seeds are the first with chance 1/4, their contexts 6, 6, 6, 6 with 1/64 in all.
    assert cell["gain_per_trial"]["raw"]["interval_over_seeds_and_contexts"] == [0.0, 5.5]
    assert (cell["random"], cell["dataset"]["p90"], cell["dataset"]["max"]) == (2.0, 8.0, 10.0)
    assert cell["last_over_best"] == 0.6
    assert (cell["updates"], cell["seconds"], cell["peak_bytes"]) == (100, 60.0, 2**30)
    assert cell["tokens"] is None
    assert (cell["contexts"], cell["trials"], cell["context"]) == (2, 2, "kept")


def test_without_a_kept_context_the_trials_are_independent_and_nothing_is_gained(tmp_path):
    leave_run(tmp_path, "DT", None, [[2, 6], [4, 10]], method="dt", trajectories=1)
    cell = _cell(_numbers(tmp_path)["step"], "walker_walk", "DT")
    assert cell["context"] == "reset"
    assert cell["last"]["raw"] == {"mean": 8.0, "interval_over_seeds": None}  # one seed
    assert cell["max"]["raw"] == cell["independent"]["raw"]
    assert cell["kept_minus_reset"] == {"raw": None, "normalised": None}
    assert cell["gain_per_trial"] == {"raw": None, "normalised": None}


def test_without_reset_there_is_no_independent_maximum(tmp_path):
    leave_run(tmp_path, "AT-4", [[2, 6], [4, 10]], None)
    cell = _cell(_numbers(tmp_path)["step"], "walker_walk", "AT-4")
    assert cell["max"]["raw"]["mean"] == 8.0
    assert cell["independent"] == {"raw": None, "normalised": None}
    assert cell["kept_minus_reset"]["raw"] is None
    assert cell["gain_per_trial"]["raw"]["mean"] == 5.0


def test_jaco_is_the_mean_of_its_four_targets_context_by_context(tmp_path):
    kept = [[[2, 4 + k], [2, 8 + k]] for k in range(4)]
    reset = [[[2, 4], [2, 4 + 2 * k]] for k in range(4)]
    leave_run(tmp_path, "AT-4", kept, reset, task="jaco_reach")
    runs, _ = find_runs(tmp_path / "runs")
    (run,) = runs
    assert [entry["task"] for entry in run.entries] == list(CORNERS)
    np.testing.assert_allclose(kept_minus_reset(run, "raw"), [1.5, (4 + 3 + 2 + 1) / 4])
    np.testing.assert_allclose(gains(run, "normalised"), [3.5 / 8, 7.5 / 8])
    cell = _cell(_numbers(tmp_path)["step"], "jaco_reach", "AT-4")
    assert cell["last"]["raw"]["mean"] == 7.5
    assert cell["last"]["normalised"]["mean"] == pytest.approx(5.5 / 8)


def test_every_target_of_jaco_has_a_scale_of_its_own(tmp_path):
    run_dir = leave_run(tmp_path, "AT-4", [[[6, 6]]] * 4, [[[4, 4]]] * 4, task="jaco_reach")
    path = run_dir / "results.json"
    content = json.loads(path.read_text())
    for entry, best in zip(content["results"], (4.0, 10.0, 18.0, 34.0), strict=True):
        entry["dataset"]["max"] = best
        entry["kept"]["last"]["normalised"]["mean"] = (6 - 2) / (best - 2)
    path.write_text(json.dumps(content))
    cell = _cell(_numbers(tmp_path)["step"], "jaco_reach", "AT-4")
    assert cell["last"]["normalised"]["mean"] == pytest.approx(np.mean([2, 0.5, 0.25, 0.125]))
    widths = np.array([2, 8, 16, 32])
    expected = np.mean(2 / widths)
    assert cell["kept_minus_reset"]["normalised"]["mean"] == pytest.approx(expected)


def test_contexts_that_stopped_early(tmp_path):
    kept = [[1, 9, NOT_RUN], [4, 5, 6], [8, NOT_RUN, NOT_RUN]]
    leave_run(tmp_path, "AT-4", kept, [[2, 3, 50], [2, 4, 5], [2, 60, 50]])
    (run,), _ = find_runs(tmp_path / "runs")
    np.testing.assert_allclose(kept_minus_reset(run, "raw"), [6, 1, 6])
    np.testing.assert_allclose(gains(run, "raw"), [8, 1])  # one trial has no slope


def test_a_dataset_that_random_actions_beat_has_no_normalised_returns(tmp_path):
    run_dir = leave_run(tmp_path, "AT-4", [[2, 6]], [[2, 4]])
    path = run_dir / "results.json"
    content = json.loads(path.read_text())
    (entry,) = content["results"]
    entry["dataset"]["max"] = 2.0
    for part in (entry["kept"], entry["reset"]):
        for name in ("first", "last", "mean", "max"):
            part[name]["normalised"] = None
    path.write_text(json.dumps(content))
    section = _numbers(tmp_path)["step"]
    cell = _cell(section, "walker_walk", "AT-4")
    assert cell["last"]["raw"]["mean"] == 6.0
    assert cell["last"]["normalised"] is None
    assert cell["kept_minus_reset"]["normalised"] is None
    assert section["averages"][0]["rows"]["AT-4"]["last"] is None


def test_averages_are_over_tasks_that_all_rows_have_and_seeds_that_all_have(tmp_path):
    for seed in (0, 1, 2):
        for row, level in (("AT-4", 4.0), ("AT-32", 6.0)):
            count = int(row[3:])
            for task, more in (("walker_walk", 0.0), ("cheetah_run", 2.0)):
                if (seed, row, task) == (2, "AT-32", "cheetah_run"):
                    continue  # not finished yet
                last = level + more + seed * count / 4
                reset = [[2, last - 1]]
                leave_run(
                    tmp_path, row, [[2, last]], reset, task=task, seed=seed, trajectories=count
                )
    leave_run(tmp_path, "AT-8", [[2, 5]], [[2, 5]], trajectories=8)
    section = _numbers(tmp_path)["step"]
    assert (section["tasks"], section["rows"]) == (list(TASKS[:2]), ["AT-4", "AT-8", "AT-32"])
    every, shared = section["averages"]
    assert every["tasks"] == list(TASKS[:2])
    assert every["seeds"] == [0, 1]
    assert list(every["rows"]) == ["AT-4", "AT-32"]
    normalised = [(np.array([k, k + 1]) - 2) / 8 for k in (4.0, 6.0)]
    expected = over_seeds(normalised)
    told = every["rows"]["AT-4"]["last"]
    assert told["mean"] == pytest.approx(expected.mean)
    assert told["interval_over_seeds"] == pytest.approx(expected.mean_interval)
    assert every["rows"]["AT-4"]["kept_minus_reset"]["mean"] == pytest.approx(1 / 8)
    assert shared["tasks"] == ["walker_walk"]
    assert shared["seeds"] == [0]
    assert list(shared["rows"]) == ["AT-4", "AT-8", "AT-32"]
    assert shared["rows"]["AT-8"]["last"] == {"mean": 3 / 8, "interval_over_seeds": None}
    (difference,) = section["differences"]
    assert (difference["row"], difference["less"]) == ("AT-32", "AT-4")
    # Seed by seed 2 and 2 + 8 - 1, on both tasks: what is common to a seed cancels.
    assert difference["last"]["mean"] == pytest.approx(np.mean([2, 9]) / 8)
    assert difference["last"]["interval_over_seeds"] == pytest.approx(
        over_seeds([np.array([2, 9]) / 8] * 2).mean_interval
    )
    assert difference["seeds"] == [0, 1]


def test_rows_are_ordered_by_method_and_trajectories_and_all_pairs_are_told(tmp_path):
    leave_table(tmp_path, tasks=TASKS[:1], seeds=(0, 1))
    section = _numbers(tmp_path)["step"]
    assert section["rows"] == ["BC-10%", "DT", "AT-4", "AT-8", "AT-32"]
    assert len(section["averages"]) == 1
    pairs = [(d["row"], d["less"]) for d in section["differences"]]
    assert {("AT-32", "AT-4"), ("AT-4", "DT"), ("DT", "BC-10%")} <= set(pairs)
    assert len(set(pairs)) == 10
    assert all(d["last"]["mean"] > 0 for d in section["differences"])


def test_no_row_has_all_tasks(tmp_path):
    leave_run(tmp_path, "AT-4", [[2, 6]], None)
    leave_run(tmp_path, "DT", None, [[2, 6]], task="cheetah_run", method="dt")
    section = _numbers(tmp_path)["step"]
    assert (section["averages"], section["differences"]) == ([], [])
