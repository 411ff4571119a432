"""The baselines through the one trainer, and every method with every experiment's settings."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_store
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from training import make_trainer, run_trainer, scalars

from agentic import checkpoint
from agentic.budget import budget_of
from agentic.cloning import BehaviourCloning
from agentic.imitation import seed_micro_batch
from agentic.model import AgenticTransformer
from agentic.runs import config_text, model_spec, read_config, settings
from benchmarks.memory_plan import random_store

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = ("at", "dt", "bc")


def _settings(*overrides):
    with initialize_config_module("configs", version_base="1.3"):
        values = OmegaConf.to_container(compose("train", list(overrides)), resolve=True)
    return settings(values, list(overrides))


def test_all_methods_and_experiments_are_tried_here():
    assert {path.stem for path in (CONFIGS / "method").glob("*.yaml")} == set(METHODS)
    assert {path.stem for path in (CONFIGS / "experiment").glob("*.yaml")} == {"small", "paper"}


@pytest.mark.parametrize("method", METHODS)
def test_the_small_experiment_learns_as_by_default_and_chooses_nothing_by_acting(method):
    small, default = (
        _settings(f"method={method}", "+experiment=small"),
        _settings(f"method={method}"),
    )
    assert small.clocks.rollout_steps == 0
    same = {"clocks": default.clocks, "evaluation": default.evaluation}
    assert dataclasses.replace(small, **same) == default


@pytest.mark.parametrize("experiment", [[], ["+experiment=paper"]])
@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_needs_stands_in_every_experiment(method, experiment, tmp_path):
    config = _settings(f"method={method}", *experiment)
    chain = config.chain
    assert config.method == method
    if method == "at":
        assert (config.context_steps, chain.trajectories, chain.top) == (None, 4, 1.0)
        assert config.optimizer.accumulate == (64 if experiment else 1)
        assert config.evaluation.context == "both"
    else:
        assert (config.context_steps, chain.trajectories) == (20, 1)
        assert chain.top == (0.1 if method == "bc" else 1.0)
        assert config.optimizer.accumulate * (chain.window_batch // 20) == 64
        assert (chain.best_from, chain.spread) == (1.0, "full")
        assert config.evaluation.context == "reset"
    if experiment:
        assert (config.steps, config.precision) == (100_000, "fp32")
        assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-4, 10_000)
        assert (config.optimizer.final_fraction, config.optimizer.average) == (1.0, 0.0)
        assert (config.model.dropout, config.layer.kind) == (0.1, "blockwise")
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert read_config(tmp_path) == config


def test_the_papers_micro_batch_is_one_chain_of_any_length():
    config = _settings("task=jaco_reach", "+experiment=paper", "trajectories=2")
    trainer_store = random_store(4, 250)
    spec = model_spec(config, trainer_store)
    budget = budget_of(config, spec, trainer_store, torch.device("cpu"))
    assert [(b.sequences, b.tokens) for b in budget.batches()] == [(1, 2 * 250 * 4)]


def test_short_names_say_what_longer_ones_do():
    short = _settings("trajectories=32", "trials=16", "chains=8")
    long = _settings("chain.trajectories=32", "evaluation.trials=16", "optimizer.accumulate=8")
    assert short == long
    assert _settings("method=bc", "chain.top=0.5", "context_steps=4").context_steps == 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["context_steps=20"], "context_steps: got 20, expected null with method=at"),
        (["method=dt", "context_steps=null"], "context_steps: got None, expected 1 to 1000 steps"),
        (["method=bc", "context_steps=1001"], "context_steps: got 1001, expected 1 to 1000"),
        (["method=bc", "context_steps=0"], "context_steps: got 0, expected 1 to 1000"),
        (["method=dt", "trajectories=4"], "chain.trajectories: got 4, expected 1 with method=dt"),
        (["method=bc", "parallel=ring"], "parallel: got ring, expected none or data"),
        (["method=dt", "parallel=cube"], "parallel: got cube, expected none or data"),
        (["chain.top=1.5"], "chain.top: got 1.5"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, words):
    with pytest.raises(ValueError, match=words):
        _settings(*overrides)


def test_the_baselines_number_no_trials():
    numbered = ["tokens.trajectory_embedding=true", "trials=4"]
    assert _settings("method=dt", *numbered).evaluation.trials == 4
    with pytest.raises(ValueError, match="evaluation.trials: got 4, expected at most"):
        _settings("method=at", "trajectories=2", *numbered)


@pytest.mark.parametrize(("method", "cls"), [("bc", BehaviourCloning), ("dt", AgenticTransformer)])
def test_a_checkpoint_gives_the_model_back(method, cls, tmp_path, random_steps):
    trainer = make_trainer(tmp_path, method=method, steps=6)
    run_trainer(trainer)
    state = checkpoint.load(checkpoint.newest(tmp_path))
    model = checkpoint.restore_model(state, torch.device("cpu"))
    assert type(model) is cls
    assert (model.spec.method, model.spec.context_steps) == (method, 3)
    steps = random_steps(2, 1, 3)
    assert torch.equal(model(steps), trainer.acting()(steps))


def test_a_checkpoint_from_before_there_were_methods_is_an_agentic_transformer(tmp_path):
    state = make_trainer(tmp_path).state()
    del state["spec"]["method"], state["spec"]["context_steps"]
    del state["config"]["context_steps"], state["config"]["chain"]["top"]
    model = checkpoint.restore_model(state, torch.device("cpu"))
    assert type(model) is AgenticTransformer
    assert (model.spec.method, model.spec.context_steps) == ("at", None)
    make_trainer(tmp_path).load_state(state)


@pytest.mark.parametrize("method", ["bc", "dt"])
def test_the_loss_falls_on_what_can_be_learned(method, tmp_path):
    trainer = make_trainer(tmp_path, method=method, steps=80)
    before = trainer.validate()
    run_trainer(trainer)
    assert trainer.validate() < 0.5 * before


def test_cloning_needs_no_plan_and_a_window_is_all_that_dt_plans_for():
    store = random_store(4, 1000)
    cpu = torch.device("cpu")
    config = _settings("method=bc")
    assert budget_of(config, model_spec(config, store), store, cpu) is None
    config = _settings("method=dt", "tokens.layout=interleaved")
    budget = budget_of(config, model_spec(config, store), store, cpu)
    assert [(b.sequences, b.tokens) for b in budget.batches()] == [(64, 80)]
    assert budget.caches() == 0
    budget.check()
    with pytest.raises(ValueError, match=r"chain.window_batch: got 1280, .* in windows of 20"):
        replace(budget, machine=2**20).check()


def test_validation_sees_windows_of_held_out_episodes(tmp_path):
    trainer = make_trainer(tmp_path, method="dt")
    store = make_store([float(r) for r in range(10)], steps=5)
    steps, weight_BL = trainer.validation.batch(0)
    assert steps.timestep.shape == weight_BL.shape == (3, 3)
    held_out = store.observation(np.arange(8, 10)).reshape(-1, 3)
    rows = {tuple(row) for row in held_out.tolist()}
    assert {tuple(row) for row in steps.observation.reshape(-1, 3).tolist()} <= rows


def test_tokens_are_counted_across_an_interruption(tmp_path):
    clocks = replace(make_trainer(tmp_path / "any").config.clocks, log_steps=4, checkpoint_steps=5)
    run_trainer(make_trainer(tmp_path / "run", clocks=clocks))
    whole = [line.get("train/tokens") for line in scalars(tmp_path / "run")]
    for later in checkpoint.step_files(tmp_path / "run")[1:]:
        later.unlink()
    resumed = make_trainer(tmp_path / "run", clocks=clocks)
    resumed.resume()
    assert resumed.step == 10  # two steps after the last line
    run_trainer(resumed)
    assert [line.get("train/tokens") for line in scalars(tmp_path / "run")] == whole


def test_every_micro_batch_draws_its_own_and_again_the_same():
    drawn = []
    for seed, index in ((0, 1), (0, 2), (1, 1), (0, 1)):
        seed_micro_batch(seed, index)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
