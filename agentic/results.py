"""results.json: every trial's return with what it must be read beside."""

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from agentic.entries import check, check_entries
from agentic.episodes import write_atomically
from agentic.evaluator import Trials
from agentic.statistics import SeedEstimate, estimate, expected_max, over_seeds, slopes
from agentic.texts import read_json

SCHEMA_VERSION = 1
PACKAGES = ("torch", "numpy", "mujoco", "dm_control", "gymnasium")
STATISTICS = ("first", "last", "mean", "max")  # over the trials of a context
CONTEXTS = ("kept", "reset")
INTERVALS = {
    "interval_over_contexts": "95 % percentile bootstrap over contexts of one trained model; it "
    "says nothing about other training seeds; null for fewer than two contexts",
    "interval_over_seeds": "95 % bootstrap over training seeds, resampled within each task; null "
    "where a task has fewer than two seeds",
}
# What may differ between the runs that one over-seeds row is made of; all else must be equal.
_OF_A_RUN = {"checkpoint", "checkpoint_step", "train_seed"}


class _Scale:
    """Means with intervals, raw and normalised: 0 for random's mean, 1 for the dataset's best."""

    def __init__(self, random: float, best: float) -> None:
        self.random, self.width = random, best - random

    def returns(self, values: np.ndarray) -> dict[str, Any]:
        """The statistic of returns, one a context."""
        return self._statistic(values, self.random)

    def differences(self, values: np.ndarray) -> dict[str, Any]:
        """The statistic of differences of returns."""
        return self._statistic(values, 0.0)

    def _statistic(self, values: np.ndarray, zero: float) -> dict[str, Any]:
        raw = _spell(values)
        normalised = _spell((values - zero) / self.width) if self.width > 0 else None
        return raw | {"contexts": len(values), "normalised": normalised}


def task_result(
    *,
    about: dict[str, Any],
    task: str,
    target: dict[str, Any],
    kept: Trials | None,
    reset: Trials | None,
    random: np.ndarray,
    dataset: dict[str, float],
    dataset_returns: np.ndarray | None,
) -> dict[str, Any]:
    """One model's entry for one task and target, of plain values.

    Args:
        about: which model: checkpoint, checkpoint_step, method, train_seed and so on.
        task: its name.
        target: "asked", as the user spelled it, and "return", in the task's own units.
        kept: C contexts of n trials each, nothing forgotten between them; or None.
        reset: the same with the context emptied before every trial; or None, but not both.
        random: (R,) returns of uniformly random actions.
        dataset: quantiles of the dataset's returns by name, and "mean".
        dataset_returns: (E,) all of them; None where they are not known.
    """
    given = kept if kept is not None else reset
    assert given is not None, "one of kept and reset is given"
    contexts, trials = given.returns.shape
    scale = _Scale(float(random.mean()), dataset["max"])
    entry = {
        "task": task,
        "target": target,
        "contexts": contexts,
        "trials": trials,
        "kept": None if kept is None else _trials(kept, scale, target["return"]),
        "reset": None if reset is None else _trials(reset, scale, target["return"]),
        "kept_minus_reset": None,
        # The largest of n is no skill by itself: the same of n that know nothing of each other.
        "max_beside": {
            "of": trials,
            "kept": None if kept is None else scale.returns(_over_trials(kept)["max"]),
            "independent": None if reset is None else scale.returns(_over_trials(reset)["max"]),
            "dataset": None if dataset_returns is None else expected_max(dataset_returns, trials),
        },
        "random": {"mean": float(random.mean()), "returns": random.tolist()},
        "dataset": dataset,
    }
    if kept is not None and reset is not None:
        row, last = np.arange(contexts), _runs(kept) - 1  # the same environment seeds in both
        difference = kept.returns[row, last] - reset.returns[row, last]
        entry["kept_minus_reset"] = {"last": scale.differences(difference[~np.isnan(difference)])}
    assert not about.keys() & entry.keys(), "one meaning a name"
    return about | entry


def summarise(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over training seeds: one row per group of entries that differ in the run and task only.

    A run counts with its mean over contexts. `statistics` is null where a task has one seed twice
    (two checkpoints of one run are not two seeds).
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(json.dumps(_group(entry), sort_keys=True), []).append(entry)
    return [_summary(_group(members[0]), members) for members in groups.values()]


def document(entries: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """The whole file: `about` says which evaluation; versions, commit and seeds are added."""
    return {
        "schema_version": SCHEMA_VERSION,
        **about,
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "git_commit": _git_commit(),
        "intervals": INTERVALS,
        "results": list(entries),
        "over_seeds": summarise(entries),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes results.json, whole or not at all; NaN is refused, not written."""
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of an existing results.json.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    return read_document(path)["results"]


def read_document(path: Path) -> dict[str, Any]:
    """All of an existing results.json; what it says of versions is a mapping of texts or null.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    try:
        content = read_json(path)
        check("file", content, {"schema_version": int})
        found = content["schema_version"]
        if found == SCHEMA_VERSION:
            check_entries(content.get("results"))
            check("git_commit", content.get("git_commit"), (None, str))
            check("versions", content.get("versions"), (None, {}))
            for name, number in (content.get("versions") or {}).items():
                check(f"versions.{name}", number, str)
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}), expected what an evaluation wrote") from error
    if found != SCHEMA_VERSION:
        raise ValueError(f"{path}: got version {found}, expected {SCHEMA_VERSION}")
    return content


def last_return(entries: Sequence[dict[str, Any]]) -> float:
    """The mean over entries of their last trial's return: with the context kept, where it is."""
    return float(np.mean([(e["kept"] or e["reset"])["last"]["mean"] for e in entries]))


def _trials(trials: Trials, scale: _Scale, target: float) -> dict[str, Any]:
    """All of the contexts' trials, and their statistics."""
    returns_CN = trials.returns
    reached_CN = returns_CN >= target
    return {
        "returns": [[None if np.isnan(r) else r for r in row] for row in returns_CN.tolist()],
        "seeds": trials.seeds.tolist(),
        "failed": {
            "count": int(trials.failed.sum()),
            "trials": np.argwhere(trials.failed).tolist(),  # [context, trial], from 0
        },
        "reached": {  # the target: by how many contexts, and in which trial first, from 1
            "contexts": int(reached_CN.any(axis=1).sum()),
            "trial": [int(row.argmax()) + 1 if row.any() else None for row in reached_CN],
        },
        **{name: scale.returns(values_C) for name, values_C in _over_trials(trials).items()},
        "by_trial": [scale.returns(column[~np.isnan(column)]) for column in returns_CN.T],
        "slope": scale.differences(slopes(returns_CN)),
    }


def _over_trials(trials: Trials) -> dict[str, np.ndarray]:
    """Each of `STATISTICS` (C,) over the trials that a context has run."""
    returns_CN = trials.returns
    return {
        "first": returns_CN[:, 0],
        "last": returns_CN[np.arange(len(returns_CN)), _runs(trials) - 1],
        "mean": np.nanmean(returns_CN, axis=1),
        "max": np.nanmax(returns_CN, axis=1),
    }


def _runs(trials: Trials) -> np.ndarray:
    """(C,) how many trials every context has run."""
    ran_CN = ~np.isnan(trials.returns)
    runs_C = ran_CN.sum(axis=1)
    first_CN = np.arange(ran_CN.shape[1]) < runs_C[:, None]
    assert runs_C.all(), "every context runs a trial"
    assert (ran_CN == first_CN).all(), "none is left out before the last one"
    return runs_C


def _spell(values: np.ndarray) -> dict[str, Any]:
    told = estimate(values)
    interval = None if told.interval is None else list(told.interval)
    return {"mean": told.mean, "interval_over_contexts": interval}


def _group(entry: dict[str, Any]) -> dict[str, Any]:
    """What entries of one row over seeds have in common."""
    measured = {"task", "kept", "reset", "kept_minus_reset", "max_beside", "random", "dataset"}
    common = {k: v for k, v in entry.items() if k not in measured | _OF_A_RUN}
    return common | {"target": entry["target"]["asked"]}


def _summary(group: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    by_task: dict[str, list[dict[str, Any]]] = {}
    for member in members:
        by_task.setdefault(member["task"], []).append(member)
    seeds = {task: [e["train_seed"] for e in entries] for task, entries in by_task.items()}
    row = {"group": group, "seeds": seeds, "statistics": None}
    if all(len(set(listed)) == len(listed) for listed in seeds.values()):
        row["statistics"] = {
            "raw": {task: _over_seeds([entries], None) for task, entries in by_task.items()},
            "normalised": _over_seeds(list(by_task.values()), "normalised"),
        }
    return row


def _over_seeds(strata: list[list[dict[str, Any]]], unit: str | None) -> dict[str, Any]:
    """Every statistic over the runs of some tasks; null where not all of the runs have it."""

    def spell(context: str, name: str) -> dict[str, Any] | None:
        scores = []
        for entries in strata:
            found = [entry[context] and entry[context][name] for entry in entries]
            if unit is not None:
                found = [statistic and statistic[unit] for statistic in found]
            if None in found:
                return None
            scores.append(np.array([statistic["mean"] for statistic in found]))
        return _spell_seeds(over_seeds(scores))

    return {context: {name: spell(context, name) for name in STATISTICS} for context in CONTEXTS}


def _spell_seeds(told: SeedEstimate) -> dict[str, Any]:
    return {
        name: {
            "value": value,
            "interval_over_seeds": None if interval is None else list(interval),
        }
        for name, value, interval in (
            ("mean", told.mean, told.mean_interval),
            ("iqm", told.iqm, told.iqm_interval),
        )
    }


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
