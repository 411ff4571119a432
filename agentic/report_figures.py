"""A report's figures: returns by number of trajectories, improvement over trials, learning curves.

Colours are Okabe and Ito's, which the colour-blind tell apart; markers and line styles tell the
same in grey.
"""

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentic.report_numbers import returns
from agentic.report_runs import Run
from agentic.statistics import over_seeds_and_contexts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES: dict[str, Any] = {"bc": ":", "dt": "-."}
LINES = ("-", "--", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
POINTS = 100  # most in a learning curve
FEW = 20  # points of a curve that are marked


def figures(section: str, found: dict[str, Any], runs: Sequence[Run]) -> dict[str, bytes]:
    """PNGs by name; what there are no numbers for is left out.

    Args:
        section: its name.
        found: its numbers, see `report_numbers.numbers`.
        runs: all of its runs.
    """
    drawn = {}
    if any(cell["method"] == "at" for cell in found["cells"]):
        drawn["trajectories"] = by_trajectories(section, found)
    if any(cell["context"] == "kept" for cell in found["cells"]):
        drawn["trials"] = by_trial(section, found, runs)
    if any(run.metrics for run in runs):
        drawn["learning"] = learning(section, found, runs)
    return {name: _png(figure) for name, figure in drawn.items()}


def by_trajectories(section: str, found: dict[str, Any]) -> "Figure":
    """Last trial, normalised: a line a task, their mean, and the other methods as levels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = _axis(figure.subplots())
    for task, colour, marker in zip(found["tasks"], _cycle(COLOURS), _cycle(MARKERS), strict=False):
        points = sorted(
            (cell["trajectories"], cell["last"]["normalised"]["mean"])
            for cell in found["cells"]
            if cell["task"] == task and cell["method"] == "at" and cell["last"]["normalised"]
        )
        axis.plot(
            [n for n, _ in points],
            [mean for _, mean in points],
            color=colour,
            marker=marker,
            linewidth=1,
            label=task,
        )
    methods = {cell["row"]: (cell["method"], cell["trajectories"]) for cell in found["cells"]}
    if found["averages"]:
        rows = found["averages"][0]["rows"]
        known = [(methods[row], row, told["last"]) for row, told in rows.items() if told["last"]]
        several = [(n, told) for (method, n), _, told in known if method == "at"]
        mean = sorted(several, key=lambda point: point[0])
        _errorbar(
            axis,
            np.array([n for n, _ in mean]),
            [(told["mean"], told["interval_over_seeds"]) for _, told in mean],
            color="black",
            linewidth=3,
            marker="o",
            label=f"mean of {len(found['averages'][0]['tasks'])} tasks",
        )
        for (method, _), row, told in known:
            if method != "at":
                style = STYLES.get(method, "--")
                label = _literal(f"{row}, mean")
                axis.axhline(told["mean"], color="black", linestyle=style, label=label)
    counts = sorted({n for method, n in methods.values() if method == "at"})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, labels=list(map(str, counts)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.axhline(1, color="0.7", linewidth=1, zorder=0)
    axis.set_xlabel("trajectories in a training context")
    axis.set_ylabel("last trial (0 random, 1 dataset's best)")
    axis.set_title(_literal(section))
    _legend(figure)
    return figure


def by_trial(section: str, found: dict[str, Any], runs: Sequence[Run]) -> "Figure":
    """A panel a task: returns trial by trial, with the context kept and reset."""
    from matplotlib.ticker import MaxNLocator

    kept = {cell["row"] for cell in found["cells"] if cell["context"] == "kept"}
    rows = [row for row in found["rows"] if row in kept]
    tasks = [t for t in found["tasks"] if any(run.task == t and run.row in rows for run in runs)]
    figure, axes = _panels(len(tasks), 1)
    for task, axis in zip(tasks, axes[:, 0], strict=True):
        for k, row in enumerate(rows):
            group = [run for run in runs if (run.task, run.row) == (task, row)]
            # Shifted, so that intervals don't hide each other.
            middle = 0.08 * (k - (len(rows) - 1) / 2)
            for context, style, fill, shift in (
                ("kept", "-", None, middle - 0.015),
                ("reset", ":", "white", middle + 0.015),
            ):
                trials = _trial_means(group, context)
                if trials:
                    _errorbar(
                        axis,
                        np.arange(1, len(trials) + 1) + shift,
                        trials,
                        color=_colour(found, row),
                        marker=MARKERS[k % len(MARKERS)],
                        markersize=5,
                        markerfacecolor=fill,
                        linestyle=style,
                        label=_literal(f"{row}, {context}"),
                    )
        cell = next(c for c in found["cells"] if c["task"] == task)
        for level, style in (("max", "--"), ("p90", "-.")):
            axis.axhline(
                cell["dataset"][level],
                color="0.6",
                linewidth=1,
                linestyle=style,
                zorder=0,
                label=f"dataset {'best' if level == 'max' else level}",
            )
        axis.set_title(_literal(f"{section}: {task}"))
        axis.set_ylabel("return")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1, 0].set_xlabel("trial")
    _legend(figure)
    return figure


def learning(section: str, found: dict[str, Any], runs: Sequence[Run]) -> "Figure":
    """Training loss, validation loss and rollouts over updates; a thin line a run."""
    figure, axes = _panels(len(found["tasks"]), 3)
    names = ("training loss", "validation loss", "rollout, last trial")
    for task, row_axes in zip(found["tasks"], axes, strict=True):
        for k, row in enumerate(found["rows"]):
            for run in (run for run in runs if (run.task, run.row) == (task, row)):
                for axis, points in zip(row_axes, _curves(run), strict=True):
                    axis.plot(
                        *_thinned(points),
                        color=_colour(found, row),
                        linestyle=STYLES.get(run.method, LINES[k % len(LINES)]),
                        linewidth=1,
                        marker="." if len(points) < FEW else None,
                        label=_literal(row),
                    )
        for axis, name in zip(row_axes, names, strict=True):
            axis.set_title(f"{task}: {name}", fontsize=9)
            axis.set_xlabel("updates", fontsize=8)
        for axis in row_axes[:2]:
            if axis.has_data():
                axis.set_yscale("log")
    figure.suptitle(_literal(section))
    _legend(figure)
    return figure


def _trial_means(group: Sequence[Run], context: str) -> list[tuple[float, Sequence[float] | None]]:
    """Mean of every trial and its interval over seeds and contexts; nothing where none was run."""
    by_seed = []
    for run in group:
        played = [returns(entry, context) for entry in run.entries]
        if any(values is None for values in played):
            return []
        by_seed.append(np.mean(played, axis=0))  # type: ignore[arg-type]
    if not by_seed:
        return []
    told: list[tuple[float, Sequence[float] | None]] = []
    for k in range(by_seed[0].shape[1]):
        values = [seed_CN[np.isfinite(seed_CN[:, k]), k] for seed_CN in by_seed]
        if not all(map(len, values)):
            return told  # so many trials were not run by all
        found = over_seeds_and_contexts([values])
        assert found.mean is not None
        told.append((found.mean, found.interval))
    return told


def _curves(run: Run) -> list[list[tuple[float, float]]]:
    """(updates, value) of the training loss, the validation loss and rollouts' last trials."""
    rollouts = []
    for line in run.metrics:
        last: dict[str, tuple[int, float]] = {}
        for name, value in line.items():
            prefix, _, number = name.rpartition("/trial_")
            if prefix.startswith("rollout/") and number.isdigit():
                place, _ = last.get(prefix, (0, 0.0))
                if int(number) > place:
                    last[prefix] = (int(number), value)
        if last:
            rollouts.append((line["step"], float(np.mean([value for _, value in last.values()]))))
    # Tasks that one run learns together are logged in lines of their own.
    steps = sorted({step for step, _ in rollouts})
    merged = [(step, float(np.mean([v for s, v in rollouts if s == step]))) for step in steps]
    return [
        *(
            [(line["step"], line[name]) for line in run.metrics if name in line]
            for name in ("train/loss", "validation/loss")
        ),
        merged,
    ]


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """At most so many points, each the mean of its neighbours."""
    if not points:
        return [], []
    parts = np.array_split(np.array(points), min(POINTS, len(points)))
    return [float(p[:, 0].mean()) for p in parts], [float(p[:, 1].mean()) for p in parts]


def _literal(text: str) -> str:
    """As it is: matplotlib sets what stands between dollars, and hides labels that begin so."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _colour(found: dict[str, Any], row: str) -> str:
    """The row's own, in all figures of a section."""
    return COLOURS[found["rows"].index(row) % len(COLOURS)]


def _legend(figure: "Figure") -> None:
    """One beside all panels, each name once."""
    named: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        named.values(), named.keys(), loc="outside right upper", frameon=False, fontsize=8
    )


def _errorbar(
    axis: "Axes",
    x: np.ndarray,
    told: Sequence[tuple[float, Sequence[float] | None]],
    **style: Any,
) -> None:
    mean = np.array([value for value, _ in told])
    ends = np.array([interval or (value, value) for value, interval in told]).reshape(-1, 2).T
    axis.errorbar(x, mean, yerr=np.abs(ends - mean), capsize=2, **style)


def _panels(rows: int, columns: int) -> tuple["Figure", np.ndarray]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8 if columns == 1 else 11, 3 * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        _axis(axis)
    return figure, axes


def _axis(axis: "Axes") -> "Axes":
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
    return axis


def _cycle(values: Sequence[str]) -> Iterator[str]:
    while True:
        yield from values


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    # Without matplotlib's own note the same numbers make the same file.
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
