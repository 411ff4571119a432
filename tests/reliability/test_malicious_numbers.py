"""Numbers beyond all reason are refused by name before anything is made of their size."""

from dataclasses import fields

import pytest
from hydra import compose, initialize_config_module

from agentic.collect import CollectCommand
from agentic.collect_config import CollectConfig
from agentic.config import EvaluateConfig
from agentic.foreign_config import LONGEST, check_override
from agentic.interpolation import plain
from agentic.jobs import ReproduceConfig
from agentic.runs import settings
from agentic.strict import build

HUGE = 10**18


def train(values):
    return settings(values, [])


def collect(values):
    asked = build(CollectCommand, values)
    return CollectConfig(**{f.name: getattr(asked, f.name) for f in fields(CollectConfig)})


def evaluate(values):
    return build(EvaluateConfig, values)


def reproduce(values):
    return build(ReproduceConfig, values)


@pytest.fixture(scope="module")
def hydra():
    with initialize_config_module("configs", version_base="1.3"):
        yield


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (train, "steps"),
        (train, "batch_steps"),
        (train, "keep_checkpoints"),
        (train, "model.layers"),
        (train, "model.width"),
        (train, "model.heads"),
        (train, "model.feed_forward"),
        (train, "chain.trajectories"),
        (train, "chain.window_steps"),
        (train, "chain.window_batch"),
        (train, "optimizer.accumulate"),
        (train, "optimizer.warmup_steps"),
        (train, "clocks.log_steps"),
        (train, "data.workers"),
        (train, "data.prefetch"),
        (train, "rollout.contexts"),
        (train, "evaluation.trials"),
        (train, "evaluation.threads"),
        (collect, "workers"),
        (collect, "episodes"),
        (collect, "rnd.hidden"),
        (collect, "rnd.batch"),
        (collect, "rnd.updates_per_step"),
        (collect, "rnd.replay_capacity"),
        (evaluate, "contexts"),
        (evaluate, "trials"),
        (evaluate, "workers"),
        (reproduce, "jobs"),
        (reproduce, "threads"),
    ],
)
def test_an_absurd_number_is_refused_by_name(hydra, reader, name):
    more = ["checkpoint=x"] if reader is evaluate else []
    values = plain(compose(reader.__name__, [f"{name}={HUGE}", *more]))
    with pytest.raises(ValueError, match=rf"^{name}: got .*, expected (at most|a value in) "):
        reader(values)


@pytest.mark.parametrize("text", ["1e18", "1e999", "nan", "-1", "1" * 4000])
def test_other_absurd_steps(hydra, text):
    with pytest.raises(ValueError, match="^steps: got "):
        train(plain(compose("train", [f"steps={text}"])))


def test_all_trials_together_are_limited(hydra):
    values = plain(compose("evaluate", ["checkpoint=x", "contexts=100000", "trials=100000"]))
    with pytest.raises(ValueError, match="^contexts x trials: got 10000000000"):
        evaluate(values)


def test_a_long_setting_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="longer than 20,000 characters"):
        check_override("a=[" + "1," * LONGEST + "1]")
