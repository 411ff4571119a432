"""A small training on made-up data, for tests of the trainer and of what runs beside it."""

import json
from dataclasses import asdict, replace

import numpy as np
import torch
from conftest import make_model, make_store

from agentic import checkpoint
from agentic.collect_config import CollectConfig, TaskConfig
from agentic.config import (
    ChainConfig,
    ClockConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from agentic.metrics import MetricLog
from agentic.trainer import Trainer
from envs import TASKS


def make_config(model, **changes):
    """Twelve steps on chains of two; `changes` replace fields."""
    collect = CollectConfig(
        recipe="td3", reward_task="cartpole_swingup", episodes=1, seconds=1.0, workers=0
    )
    rolling = RolloutConfig(contexts=1, trials=1, target=1.0)
    config = TrainConfig(
        task=TaskConfig(name="cartpole_swingup", collect=collect),
        data_dir="data",
        algorithms=None,
        holdout=0.2,
        method="at",
        chain=ChainConfig(
            trajectories=2,
            count="uniform",
            window_steps=10,
            window_batch=10,
            window_share=0.5,
            best_from=0.5,
            spread="drawn",
            loss_on="last",
        ),
        tokens=model.spec.tokens,
        model=model.spec.model,
        layer=model.spec.layer,
        optimizer=OptimizerConfig(
            learning_rate=1e-2,
            final_fraction=0.1,
            warmup_steps=3,
            weight_decay=1e-4,
            betas=(0.9, 0.999),
            clip_norm=0.25,
            average=0.9,
            accumulate=2,
        ),
        steps=12,
        batch_steps=20,
        clocks=ClockConfig(
            log_steps=1,
            validate_steps=4,
            rollout_steps=0,
            rollout_from=0.0,
            checkpoint_steps=5,
            histogram_steps=6,
        ),
        rollout=rolling,
        evaluation=rolling,
        precision="fp32",
        device="cpu",
        keep_checkpoints=2,
        seed=0,
        run_dir=None,
        resume=None,
    )
    return replace(config, **changes)


def make_trainer(run_dir, *, method="at", **changes):
    """A trainer in `run_dir`, with ten episodes of five steps, of which baselines see three."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    # Dropout everywhere, so that a lost random state would show.
    shown = {"past_action": "dropout", "dropout": 0.5, "trajectories": 2}
    if method != "at":
        shown |= {"layer_dropout": 0.1, "trajectories": 1, "method": method, "context_steps": 3}
    model = make_model(**shown)
    if method != "at":
        chain = replace(make_config(model).chain, trajectories=1, best_from=1.0, spread="full")
        changes = {"method": method, "context_steps": 3, "chain": chain} | changes
    store = make_store([float(r) for r in range(10)], steps=5)
    torch.manual_seed(7)
    config = make_config(model, **changes)
    return Trainer(config, model, store, np.arange(8), np.arange(8, 10), run_dir)


def run_trainer(trainer):
    """Trains to the end; returns what ended it earlier."""
    with MetricLog(trainer.run_dir, trainer.step, lines=trainer.logged) as log:
        return trainer.train(log, progress=False)


def scalars(run_dir):
    """The logged lines, less what may differ from run to run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("train/tokens_per_second", "train/memory_bytes"):
            line.pop(name, None)
    return lines


def plain_state(model):
    """What a checkpoint holds of an untrained model, all of it valid."""
    return {
        "step": 0,
        "spec": model.spec.to_dict(),
        "config": asdict(make_config(model)),
        "data": {
            "episodes": 3,
            "quantiles": make_store([1.0, 2.0, 3.0]).return_quantiles(),
            "returns": torch.tensor([[1.0, 2.0, 3.0]]),
        },
        "model": model.state_dict(),
        "averaged": model.state_dict(),
        "optimizer": {"state": {}, "param_groups": []},
        "stream": {"position": 0},
        "best": None,
        "rolled": 0,
        "spent": [0.0, 0.0, 0.0],
        "updated": [0.0, 0],
        "skipped": [0, 0],
        "logged": 0,
    }


def save_checkpoint(path, task="walker_walk", returns=(1.0, 50.0, 90.0), **changes):
    """The checkpoint of an untrained model of a real task; `changes` go to the model."""
    spec = TASKS[task]
    model = make_model(
        tasks=(task,),
        observation_size=spec.observation_size,
        action_size=spec.action_size,
        episode_steps=spec.episode_steps,
        **changes,
    )
    collect = CollectConfig(recipe="td3", reward_task=task, episodes=1, seconds=1.0, workers=0)
    config = make_config(
        model, task=TaskConfig(name=task, collect=collect), seed=changes.get("seed", 0)
    )
    config = replace(config, chain=replace(config.chain, trajectories=1))
    store = make_store(list(returns), steps=5)
    episodes = np.arange(len(returns))
    trainer = Trainer(config, model, store, episodes, episodes[:0], path.parent)
    checkpoint.save(path, trainer.state())
    return path


def assert_same(ours, theirs, place=""):
    """Nested states are equal to the last bit; a failure names the first place that is not."""
    assert type(ours) is type(theirs), place
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for key in ours:
            assert_same(ours[key], theirs[key], f"{place}/{key}")
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), place
    else:
        assert ours == theirs, place
