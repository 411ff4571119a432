"""Curves of return by trial, beside the data and random actions: as PNG and in TensorBoard."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from agentic.results import CONTEXTS
from agentic.within import within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIX = ".curves"  # of the file of events
LABELS = {"kept": "context kept", "reset": "context reset"}
OFFSET = {"kept": 0.0, "reset": 0.08}  # trials, so that two intervals don't hide each other
CALIBRATION = (
    ("target", (0, (1, 3))),
    ("dataset max", "--"),
    ("dataset p90", "-."),
    ("random", ":"),
)


def write_curves(entries: Sequence[dict[str, Any]], output: Path) -> list[Path]:
    """Writes `output`/curves/<task>.png, and the same as TensorBoard events into `output`.

    Where a task was judged several times, seed, step and target that differ are in the name.

    Args:
        entries: see `results.task_result`.
        output: existing directory.

    Returns:
        The images, one an entry.

    Raises:
        ValueError: an image cannot be written, or a link leads out of `output`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: it is slow to load

    for former in output.glob(f"events.out.tfevents.*{_SUFFIX}"):  # of a killed evaluation
        former.unlink()
    paths = []
    with SummaryWriter(str(output), filename_suffix=_SUFFIX) as board:
        for name, entry in zip(names(entries), entries, strict=True):
            path = within(output / "curves" / f"{name}.png", output, "output")
            canvas = FigureCanvasAgg(draw(entry, name))
            canvas.draw()
            try:
                path.parent.mkdir(exist_ok=True)
                canvas.print_png(path)
            except OSError as error:
                raise ValueError(f"output: cannot write {path} ({error.strerror})") from error
            pixels = np.asarray(canvas.buffer_rgba())[..., :3]
            board.add_image(f"evaluation/{name}", pixels, dataformats="HWC")
            for tag, trial, value in _scalars(entry):
                board.add_scalar(f"evaluation/{name}/{tag}", value, trial)
            paths.append(path)
    return paths


def names(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A name for every entry: its task, and what tells it from others of the same task."""
    named = []
    for entry in entries:
        described = [_described(other) for other in entries if other["task"] == entry["task"]]
        differ = [len(set(column)) > 1 for column in zip(*described, strict=True)]
        parts = [p for p, d in zip(_described(entry), differ, strict=True) if d]
        named.append("_".join([entry["task"], *parts]))
    repeated, seen = Counter(named), Counter[str]()
    for k, name in enumerate(named):
        if repeated[name] > 1:
            seen[name] += 1
            named[k] = f"{name}_{seen[name]}"
    return named


def draw(entry: dict[str, Any], title: str) -> "Figure":
    """Mean return by trial with its interval over contexts; levels of the data as lines."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for context in CONTEXTS:
        if entry[context] is None:
            continue
        rows = [(k, row) for k, row in _rows(entry, context) if row["mean"] is not None]
        mean = np.array([row["mean"] for _, row in rows])
        ends = np.array([row["interval_over_contexts"] or [row["mean"]] * 2 for _, row in rows]).T
        axis.errorbar(
            np.array([k for k, _ in rows]) + OFFSET[context],
            mean,
            yerr=np.abs(ends - mean),
            marker="o",
            capsize=3,
            label=LABELS[context],
        )
    levels = (
        entry["target"]["return"],
        entry["dataset"]["max"],
        entry["dataset"]["p90"],
        entry["random"]["mean"],
    )
    for (label, style), level in zip(CALIBRATION, levels, strict=True):
        axis.axhline(level, linestyle=style, color="gray", label=label)
    axis.set_title(title)
    axis.set_xlim(0.5, entry["trials"] + 0.5)
    axis.set_xlabel("trial")
    axis.set_ylabel("return (95 % interval over contexts)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    return figure


def _rows(entry: dict[str, Any], context: str) -> list[tuple[int, dict[str, Any]]]:
    """Trials from 1 with their statistics."""
    return list(enumerate(entry[context]["by_trial"], start=1))


def _scalars(entry: dict[str, Any]) -> list[tuple[str, int, float]]:
    """(tag, trial, value) of all that is known."""
    told = []
    for context in CONTEXTS:
        if entry[context] is None:
            continue
        for trial, row in _rows(entry, context):
            low, high = row["interval_over_contexts"] or (None, None)
            for name, value in (("mean", row["mean"]), ("low", low), ("high", high)):
                if value is not None:
                    told.append((f"{context}/{name}", trial, value))
    return told


def _described(entry: dict[str, Any]) -> list[str]:
    asked = entry["target"]["asked"].replace(":", "-")
    return [f"seed{entry['train_seed']}", f"step{entry['checkpoint_step']}", f"target{asked}"]
