"""Which finished runs there are in a directory, and which row of a report each belongs to."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentic.entries import check
from agentic.launch import read_record
from agentic.metrics import SKIPPED_CHAINS
from agentic.results import CONTEXTS, read_document
from agentic.runs import CONFIG_FILE
from agentic.texts import parse_json, read_yaml

METHODS = ("bc", "dt", "at")
_CONFIG = {"task": {"name": str, "collect": {"recipe": str}}, "chain": {}}  # what is read of it
# Seeds of one row on one task differ in nothing of this.
_SETTINGS = (
    "train_settings",
    "contexts",
    "trials",
    "relabel_mode",
    "stop",
    "remember",
    "cache",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished training with its evaluation.

    Attributes:
        section: the table that it belongs to.
        task: what it was trained on; jaco_reach is four tasks.
        row: of the table.
        seed: of the training.
        method: bc, dt or at.
        trajectories: most in a training chain.
        place: its directory, below the one that was searched.
        entries: of its results.json, one a task, all with the same target.
        source: versions and commit that evaluated it.
        metrics: lines of metrics.jsonl.
        seconds: wall-clock time of all its sessions; None for a run that no launcher began, or
            whose launcher was killed.
        cpu_seconds: of all its sessions.
        peak_bytes: largest resident memory of one of its processes, or on a GPU allocated.
    """

    section: str
    task: str
    row: str
    seed: int
    method: str
    trajectories: int
    place: str
    entries: list[dict[str, Any]]
    source: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_bytes: float | None = None

    @property
    def settings(self) -> str:
        """What other seeds of the row must have in common with it."""
        entry = self.entries[0]
        common = {key: entry.get(key) for key in _SETTINGS}
        return json.dumps(common | {"target": entry["target"]["asked"]}, sort_keys=True)

    @property
    def updates(self) -> int:
        """Optimiser steps."""
        return self.entries[0]["train_steps"]

    @property
    def tokens(self) -> float | None:
        """Tokens that it was trained on; None where they were not counted."""
        counts = [line["train/tokens"] for line in self.metrics if "train/tokens" in line]
        return float(np.sum(counts)) if counts else None


def find_runs(directory: Path) -> tuple[list[Run], list[str]]:
    """All finished runs below `directory`, and remarks on what was left out, and why.

    A run at `<section>/<task>/<row>/seed<k>` is placed by its path, another one by its settings.
    """
    runs, remarks = [], []
    for path in sorted(directory.rglob("results.json")):
        if not (path.parent / CONFIG_FILE).is_file():
            continue  # another evaluation of a run
        try:
            runs.append(_read(path, directory))
        except ValueError as error:
            remarks.append(f"left out: {error}".replace(f"{directory}/", ""))
    kept: list[Run] = []
    for group in _grouped(runs).values():
        chosen, said = _alike(group)
        kept += chosen
        remarks += said
    return kept, remarks + _other_data(kept) + _other_versions(kept) + _failed_trials(kept)


def order(runs: Sequence[Run], tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tasks and rows of a section: tasks as listed, rows by method and trajectories."""
    found = {run.task for run in runs}
    known = [task for task in tasks if task in found]
    ranks = {(_rank(run.method), run.trajectories, run.row) for run in runs}
    rows = list(dict.fromkeys(row for _, _, row in sorted(ranks)))
    return known + sorted(found - set(known)), rows


def _rank(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)


def _read(path: Path, directory: Path) -> Run:
    run_dir = path.parent
    content = read_document(path)
    entries = content["results"]
    if not entries:
        raise ValueError(f"{path}: got no results, expected at least one")
    first = entries[0]
    asked = first["target"]["asked"]
    for entry in entries:
        for name in ("contexts", "trials"):
            if entry[name] != first[name]:
                raise ValueError(f"{path}: got entries of different {name}, expected equal ones")
    try:
        config = read_yaml(run_dir / CONFIG_FILE)
        check("config", config, _CONFIG)
        section, row = _named(run_dir.relative_to(directory).parts, first, config)
    except ValueError as error:
        raise ValueError(f"{run_dir / CONFIG_FILE}: damaged ({error})") from error
    task = config["task"]["name"]
    metrics = _metrics(run_dir / "metrics.jsonl")
    sessions = read_record(run_dir.with_name(f"{run_dir.name}.json"))
    peaks = [line["train/memory_bytes"] for line in metrics if "train/memory_bytes" in line]
    peaks += [session["peak_bytes"] for session in sessions if session["peak_bytes"] is not None]
    return Run(
        section=section,
        task=task,
        row=row,
        seed=first["train_seed"],
        method=first["method"],
        trajectories=first["train_trajectories"],
        place=run_dir.relative_to(directory).as_posix(),
        entries=[entry for entry in entries if entry["target"]["asked"] == asked],
        source={key: content.get(key) for key in ("versions", "git_commit")},
        metrics=metrics,
        seconds=_sum([session["seconds"] for session in sessions]),
        cpu_seconds=_sum([session["cpu_seconds"] for session in sessions]),
        peak_bytes=max(peaks, default=None),
    )


def _failed_trials(runs: Sequence[Run]) -> list[str]:
    """Remarks on runs with trials that ended early, whose returns are too low."""
    counts = {
        run.place: sum(
            entry[context]["failed"]["count"]
            for entry in run.entries
            for context in CONTEXTS
            if entry[context] is not None
        )
        for run in runs
    }
    return [
        f"{place}: failed trials, which count with what they had earned before: {count}"
        for place, count in counts.items()
        if count
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    """None of none, and where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def _named(
    parts: tuple[str, ...], entry: dict[str, Any], config: dict[str, Any]
) -> tuple[str, str]:
    """Section and row."""
    task = config["task"]["name"]
    if len(parts) == 4 and parts[1] == task and parts[3] == f"seed{entry['train_seed']}":
        return parts[0], parts[2]
    data = config.get("algorithms") or [config["task"]["collect"]["recipe"]]
    check("algorithms", data, [str])
    section = " ".join([entry["layout"], *data])
    if entry["method"] == "at":
        return section, f"AT-{entry['train_trajectories']}"
    top = config["chain"].get("top", 1.0)
    check("chain.top", top, float)
    return section, entry["method"].upper() + (f"-{top:.0%}" if top < 1 else "")


def _metrics(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        lines = [parse_json(line, finite=False) for line in text.splitlines()]
        for line in lines:
            check("line", line, {"step": int})
        return [{k: v for k, v in line.items() if _is_number(k, v)} for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error


def _is_number(name: str, value: Any) -> bool:
    """Whether it can be drawn: a step that was left out has no finite loss, and names its chains.

    Raises:
        ValueError: it is nothing that a training logs.
    """
    if type(value) is float and not math.isfinite(value):
        return False
    if name == SKIPPED_CHAINS:
        check(name, value, [{}])
        return False
    check(name, value, float)
    return True


def _grouped(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[Run]]:
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.section, run.task, run.row), []).append(run)
    return groups


def _alike(group: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs of the commonest settings, each seed once; what is left out."""
    counts = {run.settings: 0 for run in group}
    for run in group:
        counts[run.settings] += 1
    common = max(counts, key=lambda settings: counts[settings])
    kept: dict[int, Run] = {}
    remarks = []
    for run in sorted(group, key=lambda run: run.seed):
        if run.settings != common:
            remarks.append(f"left out: {run.place}, whose settings are not those of other seeds")
        elif run.seed in kept:
            remarks.append(f"left out: {run.place}, the same seed as {kept[run.seed].place}")
        else:
            kept[run.seed] = run
    return list(kept.values()), remarks


def _other_versions(runs: Sequence[Run]) -> list[str]:
    """Remarks on packages of which not all runs were judged by the same version."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, number in (run.source.get("versions") or {}).items():
            found.setdefault(name, set()).add(str(number))
    return [
        f"not all runs were judged by the same {name}: {', '.join(sorted(numbers))}"
        for name, numbers in found.items()
        if len(numbers) > 1
    ]


def _other_data(runs: Sequence[Run]) -> list[str]:
    """Remarks on tasks whose runs did not learn from the same data."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        told = json.dumps([entry["dataset"] for entry in run.entries], sort_keys=True)
        found.setdefault((run.section, run.task), set()).add(told)
    return [
        f"{section}, {task}: not all runs learned from the same data"
        for (section, task), data in found.items()
        if len(data) > 1
    ]
