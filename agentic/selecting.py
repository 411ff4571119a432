"""Which checkpoint acts best: rollouts in the course of a training."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agentic.config import TrainConfig
from agentic.console import say
from agentic.evaluator import SELECTION, Context, Interrupted, kept_trials, trial_seeds
from agentic.metrics import MetricLog
from agentic.model import InUnits
from agentic.protocol import target_return
from agentic.statistics import estimate
from agentic.store import EpisodeStore


class Rollouts:
    """When a training acts in the simulator, within which share of its time, and the best so far.

    Attributes:
        best: score and step of the rollouts that the best checkpoint was chosen by.
        done: the last step whose rollouts are done, or were left out.
        spent: seconds of all rollouts so far.
        last: seconds of the last ones.
    """

    def __init__(self, config: TrainConfig, store: EpisodeStore) -> None:
        self.config, self.store = config, store
        self.best: dict[str, Any] | None = None
        self.done = 0
        self.spent = 0.0
        self.last = 0.0

    def due(self, step: int) -> bool:
        """Whether the rollouts of a step are still to be done."""
        clocks, steps = self.config.clocks, self.config.steps
        return (
            clocks.rollout_steps > 0
            and step >= clocks.rollout_from * steps
            and step > self.done
            and (step % clocks.rollout_steps == 0 or step == steps)
        )

    def beats(self, score: float) -> bool:
        """Whether a score is the best so far; of two alike the later one."""
        return self.best is None or score >= self.best["score"]

    def act(
        self,
        step: int,
        model: InUnits,
        spent: float,
        log: MetricLog | None,
        interrupted: Callable[[], bool],
    ) -> float | str | None:
        """The score of a step's model; None where it was left out, or "interrupted".

        Left out is what would take more than its share of the time so far, but never the first and
        the last step's.

        Args:
            step: of the training.
            model: in evaluation mode.
            spent: seconds of the training, rollouts among them.
            log: where returns go.
            interrupted: asked at every step of the simulator.
        """
        share = (self.spent + self.last) / (spent + self.last)
        most = self.config.clocks.rollout_share
        if share > most and step < self.config.steps:
            say(
                f"step {step}: no rollouts, they would take {share:.0%} of the time so far "
                f"(clocks.rollout_share={most})"
            )
            return None
        began = time.monotonic()
        try:
            score, by_task = score_of(model, self.store, self.config, interrupted)
        except Interrupted:
            return "interrupted"
        for name, returns_CN in by_task.items():
            if log is not None:
                log.scalars(step, trial_scalars(f"rollout/{name}", returns_CN))
            told = "  ".join(f"{m:.1f}" for m in returns_CN.mean(axis=0))
            say(f"step {step}: {name} trial by trial {told}")
        self.last = time.monotonic() - began
        self.spent += self.last
        return score


def score_of(
    model: InUnits,
    store: EpisodeStore,
    config: TrainConfig,
    interrupted: Callable[[], bool],
) -> tuple[float, dict[str, np.ndarray]]:
    """The last trial's return over the dataset's best, and every task's returns (C, n).

    The environments are the same ones every time, and others than those that judge the result.

    Raises:
        Interrupted: `interrupted` said so.
    """
    rolling, known = config.rollout, store.return_quantiles()
    seeds_CN = trial_seeds(config.seed, SELECTION, rolling.contexts, rolling.trials)
    contexts = [
        Context(
            spec=spec,
            target=target_return(rolling.targets[0], quantiles, returns),
            seeds=tuple(row),
        )
        for spec, quantiles, returns in zip(store.specs, known, store.returns, strict=True)
        for row in seeds_CN.tolist()
    ]
    trials = kept_trials(model, contexts, rolling, interrupted=interrupted)
    returns_KCN = trials.returns.reshape(len(store.specs), *seeds_CN.shape)
    ratios = [
        returns_CN[:, -1].mean() / max(quantiles["max"], 1e-9)
        for returns_CN, quantiles in zip(returns_KCN, known, strict=True)
    ]
    by_task = {spec.name: r for spec, r in zip(store.specs, returns_KCN, strict=True)}
    return float(np.mean(ratios)), by_task


def trial_scalars(prefix: str, returns_CN: np.ndarray) -> dict[str, float]:
    """Each trial's mean, with the 95 % interval where there are several contexts; the maximum."""
    values = {f"{prefix}/max": float(returns_CN.max(axis=1).mean())}
    for k, returns_C in enumerate(returns_CN.T, start=1):
        values[f"{prefix}/trial_{k}"] = float(returns_C.mean())
        interval = estimate(returns_C).interval
        if interval is not None:
            values[f"{prefix}/trial_{k}_low"], values[f"{prefix}/trial_{k}_high"] = interval
    return values
