"""The table of an evaluation: every number beside what it must be read with."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentic.results import CONTEXTS, STATISTICS

# Sections of (label, path into an entry); rows that no entry has are left out.
SECTIONS = (
    (
        ("first trial", "kept.first"),
        ("last trial", "kept.last"),
        ("mean of trials", "kept.mean"),
        ("gain per trial", "kept.slope"),
        ("reached the target", "kept.reached"),
    ),
    (
        ("first trial, reset", "reset.first"),
        ("last trial, reset", "reset.last"),
        ("mean of trials, reset", "reset.mean"),
        ("kept - reset, last", "kept_minus_reset.last"),
    ),
    (
        ("max of {n}, kept", "max_beside.kept"),
        ("max of {n}, reset", "max_beside.independent"),
        ("max of {n}, dataset", "max_beside.dataset"),
    ),
    (
        ("random policy", "random.mean"),
        ("dataset median", "dataset.median"),
        ("dataset p90", "dataset.p90"),
        ("dataset max", "dataset.max"),
        ("last / dataset max", "last / max"),
    ),
)
NAMES = {"kept": "", "reset": ", reset"}
RESET = "reset: the context is emptied before every trial"
NORMALISED = "normalised: 0 for random actions, 1 for the dataset's best"
LONG = 100.0  # from here on an interval's ends need no decimals
FRAME = 3  # characters that a column has beside its content


def print_table(
    entries: Sequence[dict[str, Any]], summary: Sequence[dict[str, Any]], console: Console
) -> None:
    """Prints the entries of results.json, and what they say over training seeds.

    Args:
        entries: one for each model, task and target; see `results.task_result`.
        summary: of the same; see `results.summarise`.
        console: to print on; tables are split where it is too narrow for all tasks.
    """
    judged: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        judged.setdefault((entry["checkpoint"], entry["target"]["asked"]), []).append(entry)
    for (checkpoint, asked), shown in judged.items():
        if len(judged) > 1:
            console.print(f"\n{checkpoint}, target {asked}", soft_wrap=True)
        _print_returns(shown, console)
        for entry in shown:
            _print_trials(entry, console)
    several = [row for row in summary if max(map(len, row["seeds"].values())) > 1]
    for row in several:
        _print_seeds(row, console)
    if not several:
        console.print(
            "Intervals are over contexts of one model; over training seeds: n/a (one seed)",
            soft_wrap=True,
        )


def _print_returns(entries: list[dict[str, Any]], console: Console) -> None:
    """One column a task, and their average where there are several."""
    sections = [
        [row for row in section if any(_find(entry, row[1]) is not None for entry in entries)]
        for section in SECTIONS
    ]
    paths = [path for section in sections for _, path in section]
    labels = [label.format(n=entries[0]["trials"]) for section in sections for label, _ in section]
    ends = np.cumsum([len(section) for section in sections]) - 1
    columns = [
        _column(entry["task"], [_spell(_find(entry, path), path) for path in paths])
        for entry in entries
    ]
    if len(entries) > 1:
        columns.append(_column("average", [_average(entries, path) for path in paths]))
    caption = RESET if any(entry["reset"] is not None for entry in entries) else None
    while columns:
        table = Table(title="Returns (95 % interval over contexts)", caption=caption)
        table.add_column("", no_wrap=True)
        left = console.width - max(map(len, labels)) - FRAME - 1
        shown: list[list[str]] = []
        while columns and (not shown or columns[0][2] + FRAME <= left):
            heading, cells, width = columns.pop(0)
            table.add_column(heading, justify="right", no_wrap=True)
            shown.append(cells)
            left -= width + FRAME
        for k, label in enumerate(labels):
            table.add_row(label, *(cells[k] for cells in shown), end_section=k in ends)
        console.print(table)


def _column(name: str, cells: list[str]) -> tuple[str, list[str], int]:
    """Heading, cells and width; a name longer than the cells goes on several lines."""
    width, lines = max(map(len, cells)), [""]
    for part in re.findall("[^_]*_|[^_]+$", name):
        if len(lines[-1]) + len(part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines), cells, max(width, *map(len, lines))


def _print_trials(entry: dict[str, Any], console: Console) -> None:
    """Trial by trial, and which ones failed."""
    for context in CONTEXTS:
        part = entry[context]
        if part is None:
            continue
        trials = "  ".join(_trial(row, entry["contexts"]) for row in part["by_trial"])
        target = f", target {entry['target']['return']:.1f}"
        console.print(
            f"{entry['task']}{NAMES[context]}: trial by trial {trials}{target}", soft_wrap=True
        )
        if part["failed"]["count"]:
            console.print(
                f"{entry['task']}{NAMES[context]}: {part['failed']['count']} of "
                f"{sum(row['contexts'] for row in part['by_trial'])} trials failed, "
                "see results.json",
                soft_wrap=True,
            )


def _trial(row: dict[str, Any], contexts: int) -> str:
    if row["mean"] is None:
        return "not run"
    some = f" ({row['contexts']} of {contexts})" if row["contexts"] < contexts else ""
    return f"{row['mean']:.1f}{some}"


def _print_seeds(row: dict[str, Any], console: Console) -> None:
    """Mean and interquartile mean over training seeds, task by task and normalised over all."""
    group, seeds = row["group"], row["seeds"]
    name = f"{group.get('method', 'model')}, target {group['target']}"
    if row["statistics"] is None:
        console.print(f"{name}: over training seeds n/a, one of them is there twice")
        return
    table = Table(
        title=f"{name}: over training seeds (95 % interval over seeds)", caption=NORMALISED
    )
    table.add_column("")
    for heading in ("seeds", "mean", "interquartile mean"):
        table.add_column(heading, justify="right", overflow="fold")
    raw, normalised = row["statistics"]["raw"], row["statistics"]["normalised"]
    blocks = [(task, str(len(listed)), raw[task], 1) for task, listed in seeds.items()]
    runs = " + ".join(count for _, count, _, _ in blocks)
    for title, count, block, digits in [*blocks, ("normalised", runs, normalised, 2)]:
        table.add_row(title, count)
        for context in CONTEXTS:
            for statistic in STATISTICS:
                told = block[context][statistic]
                if told is None:
                    continue
                cells = [
                    _interval(told[key]["value"], told[key]["interval_over_seeds"], digits)
                    for key in ("mean", "iqm")
                ]
                table.add_row(f"  {statistic}{NAMES[context]}", "", *cells)
        table.add_section()
    console.print(table)


def _find(entry: dict[str, Any], path: str) -> Any:
    """What the entry has at a dotted path; None where it has nothing there."""
    if path == "last / max":
        last, best = (entry["kept"] or entry["reset"])["last"], entry["dataset"]["max"]
        return last["mean"] / best if best > 0 else None
    found: Any = entry
    for key in path.split("."):
        found = found and found[key]
    return found


def _average(entries: list[dict[str, Any]], path: str) -> str:
    """The mean over tasks, where every task has the number."""
    found = [_find(entry, path) for entry in entries]
    if path == "kept.reached":
        counts = [value["contexts"] if value else 0 for value in found]
        return f"{sum(counts)} of {sum(entry['contexts'] for entry in entries)}"
    means = [value["mean"] if isinstance(value, dict) else value for value in found]
    return "n/a" if None in means else _spell(float(np.mean(means)), path)


def _spell(value: Any, path: str) -> str:
    """A number, or a mean with its interval."""
    if value is None:
        return "n/a"
    if path == "last / max":
        return f"{value:.0%}"
    if path == "kept.reached":
        return f"{value['contexts']} of {len(value['trial'])}"
    if isinstance(value, dict):
        return _interval(value["mean"], value["interval_over_contexts"])
    return f"{value:.1f}"


def _interval(mean: float | None, interval: list[float] | None, digits: int = 1) -> str:
    if mean is None:
        return "n/a"
    if interval is None:
        return f"{mean:.{digits}f} (n/a)"
    low, high = interval
    ends = 0 if max(abs(low), abs(high)) >= LONG else digits
    return f"{mean:.{digits}f} ({low:.{ends}f} to {high:.{ends}f})"
