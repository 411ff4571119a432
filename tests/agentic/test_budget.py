import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from agentic.budget import budget_of, cgroup_limits, gib, machine_bytes
from agentic.runs import model_spec, print_start
from agentic.sampler import ChainSampler
from agentic.train import build_model
from agentic.trainer import Trainer
from benchmarks.memory_plan import random_store, train_config
from parallel import LAYERS

GIB = 2**30


def _budget(machine=None, episodes=4, steps=1000, **settings):
    config = train_config(device="cpu", **settings)
    store = random_store(episodes, steps)
    budget = budget_of(config, model_spec(config, store), store, torch.device("cpu"))
    return budget if machine is None else dataclasses.replace(budget, machine=machine)


def test_a_run_that_fits_is_not_refused():
    _budget(machine=4 * GIB).check()


def test_refusal_names_the_numbers_and_what_fits():
    settings = {"layer": "vanilla", "tokens.layout": "interleaved", "chain.trajectories": 32}
    budget = _budget(machine=8 * GIB, **settings)
    with pytest.raises(ValueError, match=r"layer.kind: got 'vanilla'") as refused:
        budget.check()
    told = str(refused.value)
    assert f"needing {gib(budget.beside + budget.plan().total)}" in told
    assert "1 x 128,000 tokens" in told
    assert "the 8.0 GiB of this machine" in told
    for kind in LAYERS:
        assert f"layer={kind}" in told
    assert f"layer=blockwise layer.recompute=True up to {budget.what_fits('blockwise', True)}" in (
        told
    )


def test_rollouts_that_do_not_fit_are_refused():
    budget = _budget(machine=2 * GIB, **{"evaluation.trials": 400})
    with pytest.raises(ValueError, match=r"evaluation.batch: rollouts need .* GiB"):
        budget.check()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_longest_chain_is_the_last_that_fits(kind, recompute):
    budget = _budget(machine=2 * GIB, **{"chain.loss_on": "all"})
    steps = budget.longest_chain(kind, recompute)
    for length, fits in ((steps, True), (steps + 1, False)):
        needed = budget._plan(kind, recompute, budget._tokens(1, length, 0)).total
        assert (budget.beside + needed <= budget.machine) == fits


def test_nothing_fits_beside_the_process():
    assert _budget(machine=GIB // 2).longest_chain("blockwise", False) == 0


@pytest.mark.parametrize("count", ["fixed", "uniform"])
@pytest.mark.parametrize(
    ("batch_steps", "window_steps", "filled"),
    [(500, 100, 60), (1, 7, 30), (90, 400, 400), (1, 100, 130)],
)
def test_no_drawn_micro_batch_is_larger_than_planned(count, batch_steps, window_steps, filled):
    settings = {
        "chain.count": count,
        "chain.trajectories": 3,
        "chain.window_steps": window_steps,
        "chain.window_batch": filled,
        "chain.window_share": 0.5,
    }
    budget = _budget(episodes=6, steps=50, batch_steps=batch_steps, **settings)
    sampler = ChainSampler(
        random_store(6, 50),
        np.arange(6),
        budget.config.chain,
        batch_steps=batch_steps,
        seed=0,
    )
    most = max(batch.sequences * batch.tokens for batch in budget.batches())
    longest = max(batch.tokens for batch in budget.batches())
    drawn = [sampler.batch(i)[1].shape for i in range(120)]
    assert max(B * L for B, L in drawn) <= most
    assert max(L for _, L in drawn) == longest


def test_start_table_tells_the_plan(tmp_path):
    config = train_config(device="cpu", layer="blockwise")
    store = random_store(4, 100)
    spec = model_spec(config, store)
    budget = budget_of(config, spec, store, torch.device("cpu"))
    trainer = Trainer(config, build_model(spec, store), store, np.arange(4), np.arange(0), tmp_path)
    console = Console(record=True, width=120)
    print_start(config, tmp_path, trainer, budget, console)
    told = console.export_text()
    memory = budget.plan()
    for size in (memory.parameters, memory.activations, budget.machine):
        assert gib(size) in told
    assert "up to 1,500, in windows (accumulated 1 times)" in told
    for word in ("cpu flash", "queries", "blockwise, recompute", "trajectories"):
        assert word in told
    assert budget.parameters == trainer.model.parameter_count()


def test_machine_bytes_are_no_more_than_physical():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < machine_bytes(torch.device("cpu")) <= total


def test_limits_of_control_groups(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("9:cpu,cpuacct:/a\n4:memory:/a/b\n0::/c/d\n")
    for path, text in {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/a/memory.limit_in_bytes": "5000\n",
        "c/memory.max": "7000\n",
        "c/d/memory.max": "max\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert sorted(cgroup_limits(groups, tmp_path)) == [5000, 7000, 9223372036854771712]
    assert list(cgroup_limits(tmp_path / "none", tmp_path)) == []
