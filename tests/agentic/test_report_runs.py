import json

import pytest
from reports import leave_run

from agentic.report_runs import find_runs, order

KEPT, RESET = [[2, 6], [4, 10]], [[2, 4], [4, 4]]


def test_a_run_is_placed_by_its_path_or_by_its_settings(tmp_path):
    leave_run(tmp_path, "AT-4, wide", KEPT, RESET, section="wide")
    leave_run(tmp_path, "", KEPT, RESET, trajectories=8, place="cluster/0", seed=1)
    leave_run(tmp_path, "", None, RESET, method="bc", place="cluster/1", seed=1)
    leave_run(tmp_path, "", None, RESET, method="dt", place="cluster/2/deep", seed=1)
    runs, remarks = find_runs(tmp_path / "runs")
    assert remarks == []
    assert [(run.section, run.row, run.seed) for run in runs] == [
        ("step td3", "AT-8", 1),
        ("step td3", "BC-10%", 1),
        ("step td3", "DT", 1),
        ("wide", "AT-4, wide", 0),
    ]
    assert [run.place for run in runs][:3] == ["cluster/0", "cluster/1", "cluster/2/deep"]


def test_what_a_run_cost(tmp_path):
    sessions = [
        {"seconds": 60.0, "cpu_seconds": 50.0, "peak_bytes": 5000, "code": 130},
        {"seconds": 30.0, "cpu_seconds": 20.0, "peak_bytes": 4000, "code": 0},
    ]
    metrics = [
        {"step": 10, "train/tokens": 700.0, "train/memory_bytes": 4500.0},
        {"step": 20, "train/tokens": 300.0},
        {"step": 20, "validation/loss": 1.0},
    ]
    leave_run(tmp_path, "AT-4", KEPT, RESET, sessions=sessions, metrics=metrics)
    leave_run(tmp_path, "AT-8", KEPT, RESET, sessions=(), metrics=metrics)
    killed = [*sessions, dict.fromkeys(sessions[0])]
    leave_run(tmp_path, "AT-9", KEPT, RESET, sessions=killed, trajectories=9)
    (first, second, third), _ = find_runs(tmp_path / "runs")
    assert (first.seconds, first.cpu_seconds, first.peak_bytes) == (90.0, 70.0, 5000)
    assert (first.tokens, first.updates) == (1000.0, 100)
    assert (third.seconds, third.cpu_seconds, third.peak_bytes) == (None, None, 5000)
    assert (second.seconds, second.cpu_seconds, second.peak_bytes) == (None, None, 4500.0)


def test_other_evaluations_of_a_run_are_not_runs(tmp_path):
    run_dir = leave_run(tmp_path, "AT-4", KEPT, RESET)
    folder = run_dir / "evaluations" / "seed1"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text((run_dir / "results.json").read_text())
    runs, remarks = find_runs(tmp_path / "runs")
    assert (len(runs), remarks) == (1, [])


def test_seeds_of_other_settings_are_left_out_and_said_so(tmp_path):
    for seed in (0, 1, 2):
        changes = {"train_settings": "other"} if seed == 1 else {}
        leave_run(tmp_path, "AT-4", KEPT, RESET, seed=seed, **changes)
    leave_run(tmp_path, "DT", None, [[1, 2, 3]], seed=0, method="dt")
    leave_run(tmp_path, "DT", None, [[1, 2]], seed=1, method="dt")
    runs, remarks = find_runs(tmp_path / "runs")
    assert [(run.row, run.seed) for run in runs] == [("AT-4", 0), ("AT-4", 2), ("DT", 0)]
    assert remarks == [
        f"left out: step/walker_walk/{place}, whose settings are not those of other seeds"
        for place in ("AT-4/seed1", "DT/seed1")
    ]


@pytest.mark.parametrize(
    "changes",
    [{"relabel_mode": "state_only"}, {"stop": True}, {"remember": 1}, {"cache": "bf16"}],
)
def test_seeds_that_were_judged_otherwise_are_left_out(tmp_path, changes):
    for seed in (0, 1, 2):
        leave_run(tmp_path, "AT-4", KEPT, RESET, seed=seed, **(changes if seed == 0 else {}))
    runs, (remark,) = find_runs(tmp_path / "runs")
    assert [run.seed for run in runs] == [1, 2]
    assert remark.startswith("left out: step/walker_walk/AT-4/seed0, whose settings")


def test_the_first_target_counts_and_seeds_of_another_are_left_out(tmp_path):
    for seed in (0, 1, 2):
        path = leave_run(tmp_path, "AT-4", KEPT, RESET, seed=seed) / "results.json"
        content = json.loads(path.read_text())
        (entry,) = content["results"]
        other = entry | {"target": entry["target"] | {"asked": "0.5x"}}
        content["results"] = [other, entry] if seed == 0 else [entry, other]
        path.write_text(json.dumps(content))
    runs, (remark,) = find_runs(tmp_path / "runs")
    assert [(run.seed, len(run.entries)) for run in runs] == [(1, 1), (2, 1)]
    assert remark.startswith("left out: step/walker_walk/AT-4/seed0, whose settings")


def test_a_seed_counts_once(tmp_path):
    leave_run(tmp_path, "AT-4", KEPT, RESET, place="a")
    leave_run(tmp_path, "AT-4", KEPT, RESET, place="b")
    runs, remarks = find_runs(tmp_path / "runs")
    assert [run.place for run in runs] == ["a"]
    assert remarks == ["left out: b, the same seed as a"]


def test_other_data_are_remarked_on(tmp_path):
    leave_run(tmp_path, "AT-4", KEPT, RESET)
    path = leave_run(tmp_path, "AT-8", KEPT, RESET) / "results.json"
    content = json.loads(path.read_text())
    content["results"][0]["dataset"]["median"] = 5.0
    path.write_text(json.dumps(content))
    runs, remarks = find_runs(tmp_path / "runs")
    assert len(runs) == 2
    assert remarks == ["step, walker_walk: not all runs learned from the same data"]


def test_other_versions_are_remarked_on(tmp_path):
    leave_run(tmp_path, "AT-4", KEPT, RESET)
    path = leave_run(tmp_path, "AT-8", KEPT, RESET) / "results.json"
    content = json.loads(path.read_text())
    ours = content["versions"]["mujoco"]
    content["versions"]["mujoco"] = "0.1"
    path.write_text(json.dumps(content))
    runs, remarks = find_runs(tmp_path / "runs")
    assert len(runs) == 2
    assert remarks == [f"not all runs were judged by the same mujoco: 0.1, {ours}"]


def test_failed_trials_are_remarked_on(tmp_path):
    leave_run(tmp_path, "DT", None, RESET, method="dt")
    path = leave_run(tmp_path, "AT-4", KEPT, RESET) / "results.json"
    content = json.loads(path.read_text())
    content["results"][0]["kept"]["failed"]["count"] = 1
    content["results"][0]["reset"]["failed"]["count"] = 2
    path.write_text(json.dumps(content))
    runs, remarks = find_runs(tmp_path / "runs")
    assert len(runs) == 2
    told = "failed trials, which count with what they had earned before: 3"
    assert remarks == [f"step/walker_walk/AT-4/seed0: {told}"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("results.json", "{", "results.json: damaged"),
        ("results.json", '{"schema_version": 9, "results": []}', "got version 9, expected 1"),
        ("results.json", '{"schema_version": 1, "results": []}', "got no results"),
        ("results.json", "[]", "results.json: damaged"),
        ("config.yaml", "task: [", "config.yaml: damaged"),
        ("config.yaml", "steps: 1", "config.yaml: damaged"),
        ("metrics.jsonl", "{", "metrics.jsonl: damaged"),
        ("../seed0.json", "{", "seed0.json: damaged"),
        ("../seed0.json", '{"sessions": [{"seconds": 1}]}', "seed0.json: damaged"),
        ("../seed0.json", "{}", "expected a job's sessions"),
    ],
)
def test_a_damaged_run_is_left_out_and_named(tmp_path, name, content, words):
    run_dir = leave_run(tmp_path, "AT-4", KEPT, RESET)
    leave_run(tmp_path, "AT-4", KEPT, RESET, seed=1)
    (run_dir / name).write_text(content)
    runs, (remark,) = find_runs(tmp_path / "runs")
    assert [run.seed for run in runs] == [1]
    assert remark.startswith("left out: step/walker_walk/AT-4/seed0")
    assert words in remark


def test_tasks_are_ordered_as_listed(tmp_path):
    for task in ("walker_walk", "cheetah_run", "cartpole_swingup", "cartpole_balance"):
        leave_run(tmp_path, "AT-4", KEPT, RESET, task=task)
    runs, _ = find_runs(tmp_path / "runs")
    tasks, _ = order(runs, ("walker_walk", "jaco_reach", "cheetah_run"))
    assert tasks == ["walker_walk", "cheetah_run", "cartpole_balance", "cartpole_swingup"]


def test_a_run_with_steps_left_out_is_read(tmp_path):
    lines = [
        {"step": 1, "train/skipped_chains": [{"task": "walker_walk", "episodes": ["td3/a.npz"]}]},
        {"step": 1, "train/loss": float("nan"), "train/tokens": 300.0},
        {"step": 2, "train/loss": 0.5, "train/tokens": 400.0},
    ]
    leave_run(tmp_path, "AT-4", KEPT, RESET, metrics=lines)
    (run,), remarks = find_runs(tmp_path / "runs")
    assert remarks == []
    assert [line.get("train/loss") for line in run.metrics] == [None, None, 0.5]
    assert run.tokens == 700.0
    assert all("train/skipped_chains" not in line for line in run.metrics)


def test_a_log_with_anything_else_in_it_is_damaged(tmp_path):
    for row, value in (("AT-4", "high"), ("AT-8", [1.0]), ("AT-9", {})):
        leave_run(tmp_path, row, KEPT, RESET, metrics=[{"step": 1, "train/loss": value}])
    runs, remarks = find_runs(tmp_path / "runs")
    assert runs == []
    assert len(remarks) == 3
    assert all("damaged" in remark for remark in remarks)
