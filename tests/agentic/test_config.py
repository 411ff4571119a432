from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from agentic.config import ChainConfig, ModelConfig, OptimizerConfig, TaskConfig, build
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
        (ChainConfig, {"window_fraction": float("nan")}, "chain.window_fraction"),
        (ModelConfig, {"heads": 3}, "model.heads"),
        (ModelConfig, {"dropout": 1.0}, "model.dropout"),
        (OptimizerConfig, {"learning_rate": float("nan")}, "optimizer.learning_rate"),
        (OptimizerConfig, {"betas": (0.9,)}, "optimizer.betas"),
        (OptimizerConfig, {"clip_norm": 0.0}, "optimizer.clip_norm"),
    ],
)
def test_ranges_are_checked(cls, values, field):
    sound = {
        ChainConfig: {
            "trajectories": 2,
            "count": "fixed",
            "window_fraction": 0.0,
            "window_steps": 100,
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
    }[cls]
    cls(**sound)
    with pytest.raises(ValueError, match=field):
        cls(**(sound | values))


def test_every_task_has_its_settings():
    files = (Path(__file__).parents[2] / "configs" / "task").glob("*.yaml")
    configs = {path.stem: build(TaskConfig, dict(OmegaConf.load(path))) for path in files}
    assert set(configs) == {*TASKS, "jaco_reach"}
    assert all(config.name == name for name, config in configs.items())
