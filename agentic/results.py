"""results.json: every trial's return with what it must be read beside, and the table of it."""

import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from agentic.episodes import write_atomically
from agentic.evaluator import Trials

SCHEMA_VERSION = 1
PACKAGES = ("torch", "numpy", "mujoco", "dm_control", "gymnasium")


def summary(returns_CN: np.ndarray) -> dict[str, dict[str, Any]]:
    """First, last, mean and max over the trials of a context; each with mean and 95 % interval.

    The interval is a bootstrap over contexts, and null where there is only one: it says nothing
    about other training seeds.
    """
    per_context = {
        "first": returns_CN[:, 0],
        "last": returns_CN[:, -1],
        "mean": returns_CN.mean(axis=1),
        "max": returns_CN.max(axis=1),
    }
    return {
        name: {"mean": float(values_C.mean()), "interval": interval(values_C)}
        for name, values_C in per_context.items()
    }


def interval(values: np.ndarray) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    low, high = stats.bootstrap(
        (values,),
        np.mean,
        method="percentile",
        n_resamples=2000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [float(low), float(high)]


def task_result(
    *,
    task: str,
    target: float,
    kept: Trials,
    reset: Trials,
    random: np.ndarray,
    dataset: dict[str, float],
) -> dict[str, Any]:
    """One task's entry. `normalised` is 0 for random actions and 1 for the dataset's best."""
    floor, best = float(random.mean()), dataset["max"]
    statistics = summary(kept.returns)
    scale = best - floor
    return {
        "task": task,
        "target_return": target,
        "contexts": kept.returns.shape[0],
        "trials": kept.returns.shape[1],
        "returns": kept.returns.tolist(),
        "failed": int(kept.failed.sum()),
        "failed_trials": np.argwhere(kept.failed).tolist(),
        "seeds": kept.seeds.tolist(),
        **statistics,
        "trial_means": kept.returns.mean(axis=0).tolist(),
        "normalised": {
            name: (row["mean"] - floor) / scale if scale > 0 else None
            for name, row in statistics.items()
        },
        "context_reset": {
            "returns": reset.returns.tolist(),
            "failed": int(reset.failed.sum()),
            **summary(reset.returns),
        },
        "kept_minus_reset": {
            "mean": float((kept.returns - reset.returns)[:, -1].mean()),
            "interval": interval((kept.returns - reset.returns)[:, -1]),
        },
        "random": {"mean": floor, "returns": random.tolist()},
        "dataset": dataset,
    }


def document(entries: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """The whole file: `about` says which model and seeds; versions and commit are added."""
    return {
        "schema_version": SCHEMA_VERSION,
        **about,
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "git_commit": _git_commit(),
        "results": entries,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes results.json, whole or not at all; NaN is refused, not written."""
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def _git_commit() -> str | None:
    """The commit of this source tree; None where it is not a checkout of it, or git is missing."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not another project's checkout
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def print_table(entries: list[dict[str, Any]], console: Console) -> None:
    """One column a task, and their average where there are several."""
    table = Table(title="Returns (95 % interval over contexts)")
    table.add_column("")
    names = [entry["task"] for entry in entries] + ["average"] * (len(entries) > 1)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    context, reset = (lambda e: e), (lambda e: e["context_reset"])
    for label, part, name in (
        ("first trial", context, "first"),
        ("last trial", context, "last"),
        ("mean of trials", context, "mean"),
        ("max of trials", context, "max"),
        ("last trial, context reset", reset, "last"),
        ("max of trials, context reset", reset, "max"),
    ):
        rows = [part(entry)[name] for entry in entries]
        table.add_row(label, *(_spell(row) for row in rows), *_average(row["mean"] for row in rows))
    table.add_section()
    random = [entry["random"]["mean"] for entry in entries]
    table.add_row("random policy", *(f"{r:.1f}" for r in random), *_average(random))
    for name in ("median", "p90", "max"):
        column = [entry["dataset"][name] for entry in entries]
        table.add_row(f"dataset {name}", *(f"{v:.1f}" for v in column), *_average(column))
    ratios = [_ratio(entry["last"]["mean"], entry["dataset"]["max"]) for entry in entries]
    table.add_row("last trial / dataset max", *ratios)
    console.print(table)
    for entry in entries:
        trials = "  ".join(f"{m:.1f}" for m in entry["trial_means"])
        console.print(
            f"{entry['task']}: trial by trial {trials}, target {entry['target_return']:.1f}",
            soft_wrap=True,
        )
        if entry["failed"]:
            console.print(f"{entry['task']}: {entry['failed']} trials failed, see results.json")


def _average(values: Iterable[float]) -> list[str]:
    """One more cell where there are several tasks."""
    listed = list(values)
    return [f"{np.mean(listed):.1f}"] if len(listed) > 1 else []


def _ratio(value: float, best: float) -> str:
    return f"{value / best:.0%}" if best > 0 else "n/a"


def _spell(row: dict[str, Any]) -> str:
    if row["interval"] is None:
        return f"{row['mean']:.1f} (n/a)"
    return "{:.1f} ({:.0f} to {:.0f})".format(row["mean"], *row["interval"])
