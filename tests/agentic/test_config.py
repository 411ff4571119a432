from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from agentic.collect_config import CollectConfig, RndConfig, TaskConfig, small_rnd
from agentic.config import (
    ChainConfig,
    ModelConfig,
    OptimizerConfig,
)
from agentic.strict import build
from envs import TASKS


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    count: int
    flag: bool
    place: str | None


GOOD = {"inner": {"rate": 1, "names": ["a", "b"]}, "count": 2, "flag": True, "place": None}


def test_build_fills_nested_settings():
    assert build(Outer, GOOD) == Outer(
        inner=Inner(rate=1.0, names=("a", "b")), count=2, flag=True, place=None
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": "x"}, "count: got 'x', expected int"),
        ({"count": 2.5}, "count: got 2.5, expected int"),
        ({"count": True}, "count: got True, expected int"),
        ({"flag": 1}, "flag: got 1, expected bool"),
        ({"place": 3}, "place: got 3, expected str"),
        ({"inner": {"rate": float("inf"), "names": []}}, "inner.rate: got inf, expected float"),
        ({"inner": 3}, "inner: got 3, expected a mapping"),
        ({"inner": {"rate": "high", "names": []}}, "inner.rate: got 'high', expected float"),
        ({"inner": {"rate": 1.0, "names": [1]}}, "inner.names: got 1, expected str"),
        ({"inner": {"names": []}}, "inner.rate: missing"),
        ({"extra": 1}, "extra: unknown setting"),
    ],
)
def test_build_names_the_field(change, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        build(Outer, GOOD | change)


@pytest.mark.parametrize(
    ("cls", "values", "field"),
    [
        (ChainConfig, {"trajectories": 0}, "chain.trajectories"),
        (ChainConfig, {"count": "some"}, "chain.count"),
        (ChainConfig, {"best_from": 1.5}, "chain.best_from"),
        (ChainConfig, {"window_share": float("nan")}, "chain.window_share"),
        (ModelConfig, {"heads": 3}, "model.heads"),
        (ModelConfig, {"dropout": 1.0}, "model.dropout"),
        (OptimizerConfig, {"learning_rate": float("nan")}, "optimizer.learning_rate"),
        (OptimizerConfig, {"betas": (0.9,)}, "optimizer.betas"),
        (OptimizerConfig, {"clip_norm": 0.0}, "optimizer.clip_norm"),
        (RndConfig, {"environments": 0}, "rnd.environments: got 0, expected at least 1"),
        (RndConfig, {"seed_steps": -1}, "rnd.seed_steps"),
        (RndConfig, {"hidden": 0}, "rnd.hidden"),
        (RndConfig, {"novelty_hidden": 0}, "rnd.novelty_hidden"),
        (RndConfig, {"novelty_size": 0}, "rnd.novelty_size"),
        (RndConfig, {"batch": 1}, "rnd.batch"),
        (RndConfig, {"updates_per_step": -0.1}, "rnd.updates_per_step"),
        (RndConfig, {"learning_rate": 0.0}, "rnd.learning_rate"),
        (RndConfig, {"gamma": 1.1}, "rnd.gamma"),
        (RndConfig, {"n_steps": 251}, "rnd.n_steps"),
        (RndConfig, {"tau": -0.1}, "rnd.tau"),
        (RndConfig, {"noise": -0.1}, "rnd.noise"),
        (RndConfig, {"noise_clip": -0.1}, "rnd.noise_clip"),
        (RndConfig, {"replay_capacity": 999}, "rnd.replay_capacity"),
    ],
)
def test_ranges_are_checked(cls, values, field):
    sound = {
        ChainConfig: {
            "trajectories": 2,
            "count": "fixed",
            "window_steps": 100,
            "window_batch": 100,
            "window_share": 0.0,
            "best_from": 1.0,
            "spread": "full",
            "loss_on": "last",
        },
        ModelConfig: {"layers": 1, "width": 8, "heads": 1, "feed_forward": 4, "dropout": 0.0},
        OptimizerConfig: {
            "learning_rate": 1e-3,
            "final_fraction": 0.0,
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "betas": (0.9, 0.999),
            "clip_norm": 1.0,
            "average": 0.0,
            "accumulate": 1,
        },
        RndConfig: asdict(small_rnd()),
    }[cls]
    cls(**sound)
    with pytest.raises(ValueError, match=field):
        cls(**(sound | values))


def test_every_task_has_its_settings():
    files = (Path(__file__).parents[2] / "configs" / "task").glob("*.yaml")
    configs = {path.stem: build(TaskConfig, dict(OmegaConf.load(path))) for path in files}
    assert set(configs) == {*TASKS, "jaco_reach", "walker_all", "cheetah_all"}
    assert all(config.name == name for name, config in configs.items())


def _group(name):
    text = (resources.files("configs") / "rnd" / f"{name}.yaml").read_text()
    return build(RndConfig, yaml.safe_load(text), "rnd")


def test_rnd_is_small_by_default_and_the_papers_where_asked_for():
    limits = {"recipe": "rnd", "reward_task": "walker_stand", "episodes": 1, "seconds": 1.0}
    assert build(CollectConfig, limits | {"workers": 0}).rnd == _group("small")
    assert _group("paper") == RndConfig(
        environments=1,
        seed_steps=4000,
        hidden=1024,
        novelty_hidden=1024,
        novelty_size=512,
        batch=1024,
        updates_per_step=0.5,
        learning_rate=1e-4,
        gamma=0.99,
        n_steps=3,
        tau=0.01,
        noise=0.2,
        noise_clip=0.3,
        replay_capacity=1_000_000,
    )
