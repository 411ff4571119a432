"""Judging in one process, with short episodes: what happens to its files meanwhile."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from training import save_checkpoint

from agentic import checkpoint, results
from agentic import judge as judging
from agentic.evaluate import command
from agentic.evaluator import EVALUATION, trial_seeds
from agentic.judge import case_of, judge
from agentic.locks import locked
from agentic.protocol import RolloutConfig
from envs import TASKS

PLAIN = RolloutConfig(contexts=2, trials=2, target=1.0, workers=1)


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "walker_walk", replace(TASKS["walker_walk"], episode_steps=10))
    return case_of(save_checkpoint(tmp_path / "s0.pt"), None, PLAIN, seed=1, device="cpu")


def _judge(case, output, **changes):
    output.mkdir(exist_ok=True)
    judge([case], output=output, console=Console(quiet=True), **changes)
    return json.loads((output / "results.json").read_text())


@pytest.mark.parametrize("then", ["replaced", "removed"])
def test_a_training_may_replace_the_checkpoint_meanwhile(tmp_path, monkeypatch, case, then):
    """Results are of what was read in the beginning, and say so."""
    digest = hashlib.sha256(case.path.read_bytes()).hexdigest()
    undisturbed = _judge(case, tmp_path / "undisturbed")
    random_returns = judging.random_returns

    def meanwhile(*arguments, **more):
        case.path.unlink()
        if then == "replaced":
            save_checkpoint(case.path, seed=1)
        return random_returns(*arguments, **more)

    monkeypatch.setattr(judging, "random_returns", meanwhile)
    disturbed = _judge(case, tmp_path / "disturbed")
    assert disturbed["cases"] == undisturbed["cases"]
    assert disturbed["cases"][0]["checkpoint"] == digest
    assert disturbed["results"] == undisturbed["results"]


def test_one_evaluation_at_a_time_in_a_folder(tmp_path, case):
    with (
        locked(tmp_path, lambda: None),
        pytest.raises(ValueError, match=f"output: {tmp_path} is in use by another evaluation"),
    ):
        _judge(case, tmp_path)
    assert not (tmp_path / "unfinished").exists()
    _judge(case, tmp_path)


def _command(case, output, **changes):
    """What `agentic-evaluate` does."""
    values = {"checkpoint": str(case.path), "contexts": 1, "trials": 2, "target": 1.0}
    command(values | {"device": "cpu", "seed": 1, "output": str(output)} | changes)
    return json.loads((output / "results.json").read_text())


@pytest.mark.parametrize("output", ["out", None])
def test_a_refused_evaluation_leaves_no_folder(tmp_path, monkeypatch, case, output):
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(judging, "machine_bytes", lambda device: 1)
    values = {"checkpoint": str(case.path), "contexts": 1, "trials": 2, "target": 1.0, "seed": 1}
    values |= {"device": "cpu", "output": output and str(tmp_path / output)}
    with pytest.raises(ValueError, match="batch: got 64, whose keys and values take"):
        command(values)
    assert sorted(tmp_path.rglob("*")) == before


def test_killed_while_the_results_were_written_it_leaves_nothing_half(tmp_path, monkeypatch, case):
    def killed(path, content):
        path.with_name(f".{path.name}.{32 * 'a'}.tmp").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        _judge(case, tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(TASKS, "walker_walk", replace(TASKS["walker_walk"], episode_steps=10))
    _judge(case, tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))
    assert len(list(tmp_path.glob("events.out.tfevents.*.curves"))) == 1


def test_killed_after_the_results_were_written_it_is_tidied_up(tmp_path, monkeypatch, case):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(judging.Journal, "close", lambda journal: None)
        results = _command(case, output)
    assert len(list((output / "unfinished").glob("*/*.pt"))) == 2
    with pytest.raises(ValueError, match="output: .* has a results.json already"):
        _command(case, output, seed=2)
    assert _command(case, output) == results
    assert not (output / "unfinished").exists()
    with pytest.raises(ValueError, match="output: .* has a results.json already"):
        _command(case, output)


def test_the_same_model_is_not_judged_twice(tmp_path, case):
    copy = tmp_path / "copy.pt"
    copy.write_bytes(case.path.read_bytes())
    twice = [str(case.path), str(copy)]
    with pytest.raises(ValueError, match="checkpoint: got .*s0.pt and .*copy.pt, which are the s"):
        _command(case, tmp_path / "out", checkpoint=twice)
    assert not (tmp_path / "out").exists()


def test_the_environments_are_those_of_the_evaluation(tmp_path, case):
    (entry,) = _judge(case, tmp_path)["results"]
    assert entry["kept"]["seeds"] == trial_seeds(1, EVALUATION, 2, 2).tolist()


def test_every_task_has_targets_of_its_own():
    returns = torch.tensor([[1.0, 3.0], [10.0, 30.0]])
    best = [{"max": 3.0}, {"max": 30.0}]
    state = {"spec": {"tasks": ("a", "b")}, "data": {"quantiles": best, "returns": returns}}
    asked = ("a", 2.0), ("b", 2.0), ("a", "quantile:0.5"), ("b", "quantile:0.5")
    assert [judging._target(state, *a) for a in asked] == [6.0, 60.0, 2.0, 20.0]


def test_runs_that_differ_in_more_than_their_seed_are_not_pooled(tmp_path, case):
    other_seed = save_checkpoint(tmp_path / "s1.pt", seed=1)
    state = torch.load(other_seed, weights_only=True)
    state["config"]["steps"] += 1
    checkpoint.save(tmp_path / "longer.pt", state)
    cases = [
        case_of(path, None, PLAIN, seed=1, device="cpu")
        for path in (case.path, other_seed, tmp_path / "longer.pt")
    ]
    (tmp_path / "out").mkdir()
    judge(cases, output=tmp_path / "out", console=Console(quiet=True))
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["seeds"]["walker_walk"] for row in document["over_seeds"]] == [[0, 1], [1]]


def test_a_checkpoint_of_an_older_recipe_of_windows_is_judged(tmp_path, case):
    state = torch.load(case.path, weights_only=True)
    state["version"], chain = 1, state["config"]["chain"]
    del chain["window_batch"], chain["top"], state["config"]["context_steps"]
    told = []
    for fraction in (0.5, 0.9):
        chain["window_fraction"] = fraction
        torch.save(state, case.path)  # without a checksum
        older = case_of(case.path, None, PLAIN, seed=1, device="cpu")
        (entry,) = _judge(older, tmp_path / str(fraction))["results"]
        assert (entry["method"], entry["context_steps"]) == ("at", None)
        told.append(entry["train_settings"])
    assert told[0] != told[1]


def test_methods_side_by_side(tmp_path, case):
    """The baselines keep nothing: whatever is asked, their trials are independent."""
    paths = [case.path]
    for method in ("dt", "bc"):
        changes = {"method": method, "context_steps": 3}
        path = save_checkpoint(tmp_path / f"{method}.pt", trajectories=1, **changes)
        state = torch.load(path, weights_only=True)
        state["config"] |= changes
        checkpoint.save(path, state)
        paths.append(path)
    plain = replace(PLAIN, target=(0.0, 1.0), context="both", trials=3)
    asked = replace(plain, stop=True, remember=1)
    told = []
    for number, config in enumerate((plain, asked)):
        cases = [case_of(path, None, config, seed=1, device="cpu") for path in paths]
        output = tmp_path / f"out{number}"
        output.mkdir()
        judge(cases, output=output, console=Console(quiet=True))
        told.append(json.loads((output / "results.json").read_text()))
    entries = told[0]["results"]
    assert [(e["method"], e["target"]["asked"]) for e in entries] == [
        (method, target) for method in ("at", "dt", "bc") for target in ("0x", "1x")
    ]
    assert [e["kept"] is None for e in entries] == [False] * 2 + [True] * 4
    assert [e["context_steps"] for e in entries] == [None] * 2 + [3] * 4
    assert len(told[0]["over_seeds"]) == 6
    for one, other in zip(entries, told[1]["results"], strict=True):
        assert one["reset"] == other["reset"]
    dt, bc = entries[2:4], entries[4:]
    assert dt[0]["reset"]["returns"] != dt[1]["reset"]["returns"]  # told another return
    assert bc[0]["reset"]["returns"] == bc[1]["reset"]["returns"]


@pytest.mark.parametrize(
    ("target", "warned"),
    [(1.0, []), ("return:10", []), (1000.0, ["1000x"]), ((0.1, "return:11"), ["return:11"])],
)
def test_a_target_in_other_units_than_the_tasks_is_warned_of(
    tmp_path, case, capsys, target, warned
):
    returns = (1.0, 5.0, 9.0)  # of at most 10
    save_checkpoint(case.path, returns=returns)
    _command(case, tmp_path / "out", target=target, context="keep")
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning: target" in line]
    assert [line.split()[2] for line in lines] == warned
    assert all("more than an episode of walker_walk can earn (10)" in line for line in lines)


def test_targets_are_shown_as_they_are(tmp_path, case, capsys):
    other = str(save_checkpoint(tmp_path / "s1.pt", seed=1))
    checkpoints = [str(case.path), other]
    _command(case, tmp_path / "out", checkpoint=checkpoints, target=["return:100", 1.0])
    assert "target return:100: " in capsys.readouterr().out
