"""A report's numbers: cells of a row on a task, averages over tasks, differences between rows."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from agentic.report_runs import Run, order
from agentic.results import STATISTICS
from agentic.statistics import over_seeds, over_seeds_and_contexts, slopes

UNITS = ("raw", "normalised")
INTERVALS = {
    "interval_over_seeds": "95 % bootstrap over training seeds, each the mean of its contexts, "
    "resampled within each task; null for fewer than two seeds",
    "interval_over_seeds_and_contexts": "95 % hierarchical bootstrap: training seeds are resampled "
    "within each task, then the contexts of each; null for fewer than two seeds",
    "normalised": "0 for random actions, 1 for the dataset's best trajectory",
    "few seeds": "a bootstrap over three seeds is rough, and tends to be too narrow",
}

Cell = dict[str, Any]


def numbers(runs: Sequence[Run], tasks: Sequence[str]) -> dict[str, Any]:
    """All tables of a report by section, of plain values.

    Args:
        runs: see `report_runs.find_runs`.
        tasks: the order in which they are shown.
    """
    sections = dict.fromkeys(run.section for run in runs)
    return {
        section: _section([run for run in runs if run.section == section], tasks)
        for section in sections
    }


def _section(runs: Sequence[Run], listed: Sequence[str]) -> dict[str, Any]:
    tasks, rows = order(runs, listed)
    by_place = {
        (task, row): [run for run in runs if (run.task, run.row) == (task, row)]
        for task in tasks
        for row in rows
    }
    found = {place: group for place, group in by_place.items() if group}
    whole = [row for row in rows if all((task, row) in found for task in tasks)]
    shared = [task for task in tasks if all((task, row) in found for row in rows)]
    averages = [_average(found, tasks, whole)] if whole else []
    if shared and whole != rows:
        averages.append(_average(found, shared, rows))
    return {
        "tasks": tasks,
        "rows": rows,
        "cells": [_cell(task, row, group) for (task, row), group in found.items()],
        "averages": averages,
        "differences": [
            _difference(found, tasks, better, worse) for worse, better in combinations(whole, 2)
        ],
    }


def score(run: Run, statistic: str, unit: str) -> float | None:
    """One number of a run: the mean over its tasks of their means over contexts.

    `statistic` is over trials, with the context kept where it is; `independent` the largest of as
    many trials that know nothing of each other. None where it was not measured.
    """
    if statistic == "independent":
        found = [entry["max_beside"]["independent"] for entry in run.entries]
    else:
        found = [(entry["kept"] or entry["reset"])[statistic] for entry in run.entries]
    if unit == "normalised":
        found = [part and part["normalised"] for part in found]
    if None in found:
        return None
    return float(np.mean([part["mean"] for part in found]))


def gains(run: Run, unit: str) -> np.ndarray | None:
    """(C,) return per trial in every kept context; None where there are none, or of one trial."""
    return _by_context(run, unit, lambda kept_CN, reset_CN: _slope(kept_CN))


def kept_minus_reset(run: Run, unit: str) -> np.ndarray | None:
    """(C,) last trial with the context kept less the same emptied; None where either is missing."""
    return _by_context(run, unit, lambda kept_CN, reset_CN: _last_difference(kept_CN, reset_CN))


def returns(entry: dict[str, Any], context: str) -> np.ndarray | None:
    """(C, n) of an entry; NaN where a trial was not run."""
    if entry[context] is None:
        return None
    return np.array(entry[context]["returns"], float)


def _by_context(
    run: Run,
    unit: str,
    measure: Callable[[np.ndarray | None, np.ndarray | None], np.ndarray | None],
) -> np.ndarray | None:
    """A measure of every context, its mean over tasks: contexts of one number share their seeds."""
    measured = []
    for entry in run.entries:
        values_C = measure(returns(entry, "kept"), returns(entry, "reset"))
        width = entry["dataset"]["max"] - entry["random"]["mean"]
        if values_C is None or (unit == "normalised" and width <= 0):
            return None
        measured.append(values_C / width if unit == "normalised" else values_C)
    mean_C = np.mean(measured, axis=0)
    mean_C = mean_C[np.isfinite(mean_C)]
    return mean_C if len(mean_C) else None


def _slope(kept_CN: np.ndarray | None) -> np.ndarray | None:
    if kept_CN is None:
        return None
    return np.array([(list(slopes(row_N[None])) or [np.nan])[0] for row_N in kept_CN])


def _last_difference(kept_CN: np.ndarray | None, reset_CN: np.ndarray | None) -> np.ndarray | None:
    if kept_CN is None or reset_CN is None:
        return None
    row, last = np.arange(len(kept_CN)), np.isfinite(kept_CN).sum(axis=1) - 1
    return kept_CN[row, last] - reset_CN[row, last]


def _cell(task: str, row: str, group: Sequence[Run]) -> Cell:
    first = group[0]
    best = _mean_of(entry["dataset"]["max"] for run in group for entry in run.entries)
    last = _over_seeds([[score(run, "last", "raw") for run in group]])
    return {
        "task": task,
        "row": row,
        "method": first.method,
        "trajectories": first.trajectories,
        "seeds": [run.seed for run in group],
        "contexts": first.entries[0]["contexts"],
        "trials": first.entries[0]["trials"],
        "context": "reset" if first.entries[0]["kept"] is None else "kept",
        **{
            name: {unit: _over_seeds([[score(run, name, unit) for run in group]]) for unit in UNITS}
            for name in (*STATISTICS, "independent")
        },
        "kept_minus_reset": {unit: _both([group], kept_minus_reset, unit) for unit in UNITS},
        "gain_per_trial": {unit: _both([group], gains, unit) for unit in UNITS},
        "random": _mean_of(entry["random"]["mean"] for run in group for entry in run.entries),
        "dataset": {
            name: _mean_of(entry["dataset"][name] for run in group for entry in run.entries)
            for name in ("median", "p90", "max")
        },
        "max_of_dataset": _mean_of(e["max_beside"]["dataset"] for r in group for e in r.entries),
        "last_over_best": last["mean"] / best if last and best and best > 0 else None,
        "updates": _mean_of(run.updates for run in group),
        "tokens": _mean_of(run.tokens for run in group),
        "seconds": _mean_of(run.seconds for run in group),
        "peak_bytes": _largest(run.peak_bytes for run in group),
    }


def _average(
    found: dict[tuple[str, str], list[Run]], tasks: Sequence[str], rows: Sequence[str]
) -> dict[str, Any]:
    """Over tasks, normalised, of the seeds that all of these rows have on all of these tasks."""
    groups = [found[task, row] for task in tasks for row in rows]
    seeds = _common_seeds(groups)
    of_rows = {}
    for row in rows:
        strata = [[run for run in found[task, row] if run.seed in seeds] for task in tasks]
        of_rows[row] = {
            name: _over_seeds([[score(run, name, "normalised") for run in g] for g in strata])
            for name in (*STATISTICS, "independent")
        } | {
            "kept_minus_reset": _both(strata, kept_minus_reset, "normalised"),
            "gain_per_trial": _both(strata, gains, "normalised"),
        }
    return {"tasks": list(tasks), "seeds": seeds, "rows": of_rows}


def _difference(
    found: dict[tuple[str, str], list[Run]], tasks: Sequence[str], better: str, worse: str
) -> dict[str, Any]:
    """Last trials, normalised: one row less the other, of the same task and seed."""
    seeds = _common_seeds([found[task, row] for task in tasks for row in (better, worse)])
    strata: list[list[float | None]] = []
    for task in tasks:
        last = {
            (row, run.seed): score(run, "last", "normalised")
            for row in (better, worse)
            for run in found[task, row]
        }
        pairs = [(last[better, seed], last[worse, seed]) for seed in seeds]
        strata.append([None if a is None or b is None else a - b for a, b in pairs])
    told = _over_seeds(strata)
    return {"row": better, "less": worse, "tasks": list(tasks), "seeds": seeds, "last": told}


def _common_seeds(groups: Sequence[Sequence[Run]]) -> list[int]:
    """Seeds that all have: every task weighs the same, in every row."""
    return sorted(set.intersection(*({run.seed for run in group} for group in groups)))


def _over_seeds(strata: Sequence[Sequence[float | None]]) -> dict[str, Any] | None:
    """Mean with its interval over the seeds of every task; None where a number is missing."""
    if any(not scores or None in scores for scores in strata):
        return None
    told = over_seeds([np.array(scores, float) for scores in strata])
    return {"mean": told.mean, "interval_over_seeds": _ends(told.mean_interval)}


def _both(
    strata: Sequence[Sequence[Run]], measure: Callable[[Run, str], np.ndarray | None], unit: str
) -> dict[str, Any] | None:
    """Mean with its interval over seeds and contexts; None where a run was not measured so."""
    measured = [[measure(run, unit) for run in group] for group in strata]
    values = [[values_C for values_C in group if values_C is not None] for group in measured]
    if [len(group) for group in values] != [len(group) for group in measured]:
        return None
    if not all(values):
        return None
    told = over_seeds_and_contexts(values)
    return {"mean": told.mean, "interval_over_seeds_and_contexts": _ends(told.interval)}


def _ends(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _mean_of(values: Iterable[float | None]) -> float | None:
    """None where one is missing."""
    known = list(values)
    return None if None in known else float(np.mean(known))  # type: ignore[arg-type]


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
