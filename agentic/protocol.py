"""How trials in context are run: what an evaluation is told, and what target it aims at."""

from dataclasses import dataclass

import numpy as np

from agentic.store import QUANTILES
from agentic.strict import at_least, between, one_of

Asked = float | str  # a target as the user writes it
_LARGEST = 1e6  # beyond any return and any sensible multiple
_FORMS = "a multiple of the dataset's best return, return:<value> or quantile:<value in [0, 1]>"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Trials in one context."""

    contexts: int  # of each task and target, each with its own seeds
    trials: int  # episodes in one context
    target: float | str | tuple[float | str, ...]  # one or several, see `target_return`
    context: str = "keep"  # between trials: keep, reset (emptied), both (one after the other)
    stop: bool = False  # a kept context ends with the first trial that reaches its target
    remember: int | None = None  # most trials that a context holds; none: all of them
    cache: str = "fp32"  # numbers of the keys and values: fp32 | bf16
    batch: int = 64  # most contexts at once
    threads: int | None = None  # of PyTorch, on a CPU; none: half of the cores
    workers: int | None = None  # processes that step environments; none: as many as pay

    def check(self, prefix: str = "") -> None:
        """Raises ValueError for a value out of range; `prefix` is the group's name."""
        at_least(f"{prefix}contexts", self.contexts, 1, 10**5)
        at_least(f"{prefix}trials", self.trials, 1, 10**5)
        at_least(f"{prefix}contexts x trials", self.contexts * self.trials, 1, 10**6)
        if not self.targets:
            raise ValueError(f"{prefix}target: got an empty list, expected {_FORMS}")
        for asked in self.targets:
            _parse(f"{prefix}target", asked)
        spelled = [spell(asked) for asked in self.targets]
        for name in spelled:
            if spelled.count(name) > 1:
                raise ValueError(f"{prefix}target: got {name} twice, expected different ones")
        one_of(f"{prefix}context", self.context, ("keep", "reset", "both"))
        if self.stop and self.context == "reset":
            raise ValueError(
                f"{prefix}stop: got true with context=reset, expected context=keep or both: only "
                "a kept context ends"
            )
        if self.remember is not None:
            at_least(f"{prefix}remember", self.remember, 1)
        one_of(f"{prefix}cache", self.cache, ("fp32", "bf16"))
        at_least(f"{prefix}batch", self.batch, 1)
        for name in ("threads", "workers"):
            count = getattr(self, name)
            if count is not None:
                at_least(f"{prefix}{name}", count, 1, 10_000)

    @property
    def targets(self) -> tuple[Asked, ...]:
        """One or several, as asked."""
        return self.target if isinstance(self.target, tuple) else (self.target,)

    @property
    def held(self) -> int:
        """Most trials that a context holds at a time."""
        return min(self.trials, self.remember or self.trials)

    def cached(self, goals: int) -> int:
        """Most trials whose keys and values are held at once, of `goals` tasks and targets."""
        return min(self.batch, goals * self.contexts) * self.held


def spell(asked: Asked) -> str:
    """A target as it is shown."""
    return asked if isinstance(asked, str) else f"{asked:g}x"


def target_return(
    asked: Asked, dataset: dict[str, float], returns: np.ndarray | None = None
) -> float:
    """The target in the task's own units.

    Args:
        asked: a multiple of the dataset's best return, `return:<value>`, or `quantile:<q>` of the
            dataset's returns.
        dataset: the quantiles of `agentic.store.QUANTILES`.
        returns: (E,) all returns of the dataset; None where only the quantiles are known.

    Raises:
        ValueError: another form, or a quantile that is not known.
    """
    kind, value = _parse("target", asked)
    if kind == "return":
        return value
    if kind == "multiple":
        return value * dataset["max"]
    if returns is not None:
        return float(np.quantile(returns, value))
    for name, known in QUANTILES.items():
        if known == value:
            return dataset[name]
    raise ValueError(
        f"target: got {asked}, expected one of the quantiles {list(QUANTILES.values())}: an older "
        "checkpoint knows no others"
    )


def _parse(field: str, asked: Asked) -> tuple[str, float]:
    """Which form, and its number."""
    if not isinstance(asked, str):
        kind, value = "multiple", asked
    else:
        kind, _, text = asked.partition(":")
        try:
            value = float(text)
        except ValueError as error:
            raise ValueError(f"{field}: got {asked!r}, expected {_FORMS}") from error
        if kind not in ("return", "quantile"):
            raise ValueError(f"{field}: got {asked!r}, expected {_FORMS}")
    between(field, value, 0, 1 if kind == "quantile" else _LARGEST)
    return kind, value
