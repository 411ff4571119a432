"""What a checkpoint's state consists of, and that its tensors are those of its model."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentic.config import TrainConfig
from agentic.layout import WEIGHTS
from agentic.methods import fresh_model
from agentic.model import ModelSpec
from agentic.store import QUANTILES
from agentic.strict import at_least, build

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best rollout so far."""

    score: float
    step: int


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Where the order of the data stands."""

    position: int  # micro-batches that were taken


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The trainer's numbers; see `Trainer`."""

    step: int
    best: Best | None
    stream: Stream
    rolled: int
    spent: tuple[float, ...]
    updated: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("step", "rolled"):
            at_least(name, getattr(self, name), 0)
        at_least("stream.position", self.stream.position, 0)
        for name, count in (("spent", 3), ("updated", 2)):
            given = getattr(self, name)
            if len(given) != count or min(given) < 0:
                raise ValueError(f"{name}: got {list(given)}, expected {count} numbers from 0")


NUMBERS = tuple(Progress.__dataclass_fields__)
KEYS = (*NUMBERS, "spec", "config", "data", *WEIGHTS)


def check(state: dict[str, Any]) -> dict[str, Any]:
    """The same state, its settings with today's defaults.

    Args:
        state: of plain types, with all of `KEYS`; others are left alone.

    Raises:
        ValueError: a value is not of its key's type or range; the message begins with the key.
    """
    build(Progress, {key: state[key] for key in NUMBERS})
    spec = build(ModelSpec, state["spec"], "spec")
    for name in ("observation_size", "action_size", "episode_steps", "trajectories"):
        at_least(f"spec.{name}", getattr(spec, name), 1)
    config = build(TrainConfig, state["config"], "config")
    _check_data(state["data"], len(spec.tasks))
    for key in ("model", "averaged"):
        _expect(key, state[key], dict)
        for name, value in state[key].items():
            _expect(f"a name in {key}", name, str)
            _expect(f"{key}.{name}", value, Tensor)
    _check_optimizer(state["optimizer"])
    return state | {"spec": spec.to_dict(), "config": asdict(config)}


def check_fit(state: dict[str, Any], model: nn.Module) -> None:
    """Raises ValueError where weights or moments are not of the model's names and shapes.

    Args:
        state: that `check` has found good; with the same parts of tensors as the model.
        model: on any device, "meta" among them.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for key in ("model", "averaged"):
        found = {name: tuple(value.shape) for name, value in state[key].items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"parameters of another size: {key}.{name} is {found.get(name)}, expected "
                    f"{expected.get(name)}"
                )
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    for number, moments in state["optimizer"]["state"].items():
        if not 0 <= number < len(shapes):
            raise ValueError(f"optimizer.state: got {number}, expected {len(shapes)} parameters")
        for name in MOMENTS:
            found_shape = tuple(moments[name].shape)
            if found_shape != shapes[number]:
                raise ValueError(
                    f"optimizer.state.{number}.{name}: got {found_shape}, expected {shapes[number]}"
                )


def empty_model(state: dict[str, Any]) -> nn.Module:
    """The model of the state's specification, without values: it takes no memory.

    Raises:
        ValueError: the specification is not of the weights beside it, or of no model at all.
    """
    spec = build(ModelSpec, state["spec"], "spec")
    if spec.model.layers > len(state["averaged"]):  # so many would take hours to make
        raise ValueError(
            f"spec.model.layers: got {spec.model.layers} with {len(state['averaged'])} parameters"
        )
    try:
        with torch.device("meta"):
            return fresh_model(spec)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"spec: no model can be so large ({type(error).__name__})") from error


def _check_data(data: Any, tasks: int) -> None:
    _expect("data", data, dict)
    for name in ("episodes", "quantiles", "returns"):
        if name not in data:
            raise ValueError(f"data.{name}: missing")
    _expect("data.episodes", data["episodes"], int)
    _expect("data.quantiles", data["quantiles"], list, tuple)
    if len(data["quantiles"]) != tasks:
        raise ValueError(f"data.quantiles: got {len(data['quantiles'])}, expected {tasks} tasks")
    for row in data["quantiles"]:
        _expect("data.quantiles", row, dict)
        for name in QUANTILES:
            _expect(f"data.quantiles.{name}", row.get(name), float)
    if data["returns"] is not None:
        _expect("data.returns", data["returns"], Tensor)
        shape = tuple(data["returns"].shape)
        if len(shape) != 2 or shape[0] != tasks or data["returns"].is_meta:
            raise ValueError(f"data.returns: got {shape}, expected ({tasks}, episodes)")


def _check_optimizer(optimizer: Any) -> None:
    _expect("optimizer", optimizer, dict)
    _expect("optimizer.state", optimizer.get("state"), dict)
    for number, moments in optimizer["state"].items():
        _expect("optimizer.state", number, int)
        _expect(f"optimizer.state.{number}", moments, dict)
        for name in ("step", *MOMENTS):
            _expect(f"optimizer.state.{number}.{name}", moments.get(name), Tensor)
        count = moments["step"]
        if count.ndim or count.is_meta or not 0 <= float(count) < float("inf"):
            raise ValueError(f"optimizer.state.{number}.step: expected a number from 0")


def _expect(field: str, value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{field}: got a {type(value).__name__}, expected a {names}")
