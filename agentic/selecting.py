"""Which checkpoint acts best: rollouts in the course of a training."""

from collections.abc import Callable

import numpy as np

from agentic.config import TrainConfig
from agentic.evaluator import SELECTION, Context, kept_trials, trial_seeds
from agentic.model import InUnits
from agentic.protocol import target_return
from agentic.statistics import estimate
from agentic.store import EpisodeStore


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
