"""What numbers say and how surely: means, intervals, maxima and slopes of trials.

Kinds of intervals are never mixed: over contexts (rollouts of one trained model), over training
seeds (several trained models, each one number), and over both (several models, each with contexts).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000
QUARTER = 0.25  # cut from either end for the interquartile mean


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean of n values and its 95 % interval.

    Attributes:
        mean: None of no values.
        interval: low and high end, percentile bootstrap; None for fewer than two values.
        count: n.
    """

    mean: float | None
    interval: tuple[float, float] | None
    count: int


@dataclass(frozen=True, kw_only=True)
class SeedEstimate:
    """Mean and interquartile mean of all runs, with 95 % intervals over training seeds.

    Attributes:
        mean: of all runs of all tasks.
        mean_interval: stratified bootstrap; None where a task has fewer than two seeds.
        iqm: mean of the middle half of all runs.
        iqm_interval: as `mean_interval`.
    """

    mean: float
    mean_interval: tuple[float, float] | None
    iqm: float
    iqm_interval: tuple[float, float] | None


def estimate(values: np.ndarray) -> Estimate:
    """Mean and interval of `values` (n,), finite."""
    return Estimate(
        mean=float(np.mean(values)) if len(values) else None,
        interval=_bootstrap([values], np.mean),
        count=len(values),
    )


def iqm(values: np.ndarray, axis: int | None = None) -> Any:
    """Interquartile mean: a quarter of the values, rounded down, is cut from either end."""
    return stats.trim_mean(values, QUARTER, axis=axis)


def over_seeds(scores: Sequence[np.ndarray]) -> SeedEstimate:
    """Mean and interquartile mean over all runs; `scores[k]` (S_k,) are the seeds of task k.

    The intervals resample the seeds within each task (Agarwal et al. 2021, "Deep Reinforcement
    Learning at the Edge of the Statistical Precipice", section 4.1).
    """

    def mean_of_all(*samples: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(np.concatenate(samples, axis=axis), axis=axis)

    def iqm_of_all(*samples: np.ndarray, axis: int) -> np.ndarray:
        return iqm(np.concatenate(samples, axis=axis), axis=axis)

    runs = np.concatenate(scores)
    return SeedEstimate(
        mean=float(np.mean(runs)),
        mean_interval=_bootstrap(scores, mean_of_all),
        iqm=float(iqm(runs)),
        iqm_interval=_bootstrap(scores, iqm_of_all),
    )


def over_seeds_and_contexts(values: Sequence[Sequence[np.ndarray]]) -> Estimate:
    """Mean over tasks of means over seeds of means over contexts, with a hierarchical bootstrap.

    Contexts of one model say nothing about other models: every resample draws seeds within each
    task, and then contexts within each drawn seed (Davison & Hinkley 1997, "Bootstrap Methods and
    their Application", section 3.8). Pooled contexts alone would make too narrow an interval,
    means of seeds alone would leave out how surely each is known.

    Args:
        values: `values[k][s]` (C,) are the contexts of seed s of task k, at least one.

    Returns:
        With the number of contexts of all; no interval where a task has fewer than two seeds.
    """
    means = [[float(np.mean(values_C)) for values_C in seeds] for seeds in values]
    interval = None
    if min(len(seeds) for seeds in values) >= 2:
        rng = np.random.default_rng(0)
        resampled_R = np.mean([_resample(seeds, rng) for seeds in values], axis=0)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled_R, [tail, 1 - tail])
        interval = (float(low), float(high))
    return Estimate(
        mean=float(np.mean([np.mean(of_task) for of_task in means])),
        interval=interval,
        count=sum(len(values_C) for seeds in values for values_C in seeds),
    )


def _resample(seeds: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """(RESAMPLES,) means over drawn seeds of means over their drawn contexts."""
    drawn_RS = rng.integers(len(seeds), size=(RESAMPLES, len(seeds)))
    mean_RS = np.empty(drawn_RS.shape)
    for s, values_C in enumerate(seeds):
        here_RS = drawn_RS == s  # a seed drawn twice gets contexts of its own each time
        contexts = rng.integers(len(values_C), size=(int(here_RS.sum()), len(values_C)))
        mean_RS[here_RS] = values_C[contexts].mean(axis=1)
    return mean_RS.mean(axis=1)


def expected_max(values: np.ndarray, n: int) -> float | None:
    """Expectation of the largest of n of the `values`, drawn without replacement.

    Of m sorted values, the k-th (from 1) is the largest with probability C(k-1, n-1) / C(m, n).
    None for more draws than values.
    """
    assert n >= 1, n
    m = len(values)
    if n > m:
        return None
    # From the largest down: n/m first, then times (k-n)/(k-1) from the k-th value to the one below.
    k = np.arange(m, 1, -1)
    probability = n / m * np.cumprod(np.concatenate([[1.0], (k - n) / (k - 1)]))
    return float(probability @ np.sort(values)[::-1])


def slopes(returns_CN: np.ndarray) -> np.ndarray:
    """Least-squares slope over the trials of every context, in return per trial.

    Trials that were not run (NaN) and contexts of fewer than two trials are left out.
    """
    rows = []
    for row_N in returns_CN:
        trial = np.flatnonzero(np.isfinite(row_N))
        if len(trial) > 1:
            centred = trial - trial.mean()
            rows.append(centred @ row_N[trial] / (centred @ centred))
    return np.array(rows)


def _bootstrap(samples: Sequence[np.ndarray], statistic: Any) -> tuple[float, float] | None:
    """Percentile interval of `statistic`, every sample resampled by itself."""
    if min(len(sample) for sample in samples) < 2:
        return None
    low, high = stats.bootstrap(
        samples,
        statistic,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(low), float(high)
