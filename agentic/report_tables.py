"""A report's numbers as tables of text: for the console, in markdown and in html alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from agentic.budget import gib

NONE = "–"
MAXIMA = ("max of n", "max of n, independent")
MAXIMUM = (
    "The largest of n trials is no skill by itself: read it beside that of n trials that know "
    "nothing of each other"
)
FRAME = 3  # characters that a column has beside its content
LONG = 100.0  # from here on an interval's ends need no decimals
NORMALISED = "normalised: 0 for random actions, 1 for the dataset's best trajectory"
SEEDS = "95 % intervals over training seeds"
UNITS = (("raw", 1), ("normalised", 3))  # and their decimals
BOTH = "kept - reset and gain: 95 % intervals over seeds and their contexts"


Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table.

    Attributes:
        title: what it shows.
        columns: headings; the first is of words, the others of numbers.
        blocks: (name, rows) of what belongs together, without a name where there is but one.
        caption: how to read it.
    """

    title: str
    columns: Row
    blocks: list[tuple[str, list[Row]]]
    caption: str


def sheets(section: str, found: dict[str, Any]) -> list[Sheet]:
    """The tables of one section; see `report_numbers.numbers`."""
    shown = [_averages(section, found, average) for average in found["averages"]]
    if found["differences"]:
        shown.append(_differences(section, found["differences"]))
    several = [_returns(section, found), _context(section, found), _data(section, found)]
    return [sheet for sheet in (*shown, *several, _cost(section, found)) if sheet.blocks]


def _averages(section: str, found: dict[str, Any], average: dict[str, Any]) -> Sheet:
    rows: list[Row] = []
    for row, cell in average["rows"].items():
        numbers = [spell(cell[name], 2) for name in ("last", "first", "mean")]
        gained = [spell(cell[name], 3) for name in ("kept_minus_reset", "gain_per_trial")]
        largest = [spell(cell[name], 2) for name in ("max", "independent")]
        rows.append((row, str(len(average["seeds"])), *numbers, *gained, *largest))
    tasks = average["tasks"]
    return Sheet(
        title=f"{section}: average over {len(tasks)} task{'s' if len(tasks) > 1 else ''}, "
        "normalised",
        columns=(
            *("row", "seeds", "last trial", "first trial", "mean of trials"),
            *("kept - reset, last", "gain per trial", *MAXIMA),
        ),
        blocks=[("", rows)],
        caption=f"{', '.join(tasks)}. {SEEDS}, resampled within each task. {BOTH}. {NORMALISED}. "
        f"{_trials(found)}. {MAXIMUM}.",
    )


def _differences(section: str, differences: Sequence[dict[str, Any]]) -> Sheet:
    rows: list[Row] = [
        (f"{d['row']} - {d['less']}", str(len(d["seeds"])), spell(d["last"], 3))
        for d in differences
    ]
    return Sheet(
        title=f"{section}: differences between rows, last trial, normalised",
        columns=("rows", "seeds", "difference"),
        blocks=[("", rows)],
        caption=f"Of the same task and seed, over {', '.join(differences[0]['tasks'])}. {SEEDS}.",
    )


def _returns(section: str, found: dict[str, Any]) -> Sheet:
    columns = (
        *("row", "seeds", "last trial", "first trial", "mean of trials", "last, normalised"),
        *("last / best", *MAXIMA),
    )
    blocks = []
    for task, cells in _by_task(found):
        rows: list[Row] = []
        for row in found["rows"]:
            if row not in cells:
                rows.append((row, "0", *[NONE] * (len(columns) - 2)))
                continue
            cell = cells[row]
            share = cell["last_over_best"]
            rows.append(
                (
                    *(row, str(len(cell["seeds"]))),
                    *(spell(cell[name]["raw"]) for name in ("last", "first", "mean")),
                    spell(cell["last"]["normalised"], 2),
                    NONE if share is None else f"{share:.0%}",
                    *(spell(cell[name]["raw"]) for name in ("max", "independent")),
                )
            )
        blocks.append((task, rows))
    return Sheet(
        title=f"{section}: returns",
        columns=columns,
        blocks=blocks,
        caption=f"{SEEDS}. {NORMALISED}. {_trials(found)}. {MAXIMUM}. {NONE}: no such run yet.",
    )


def _context(section: str, found: dict[str, Any]) -> Sheet:
    blocks = []
    for task, cells in _by_task(found):
        rows: list[Row] = [
            (
                *(row, str(len(cell["seeds"]))),
                *(spell(cell["kept_minus_reset"][unit], digits) for unit, digits in UNITS),
                *(spell(cell["gain_per_trial"][unit], digits) for unit, digits in UNITS),
            )
            for row, cell in cells.items()
            if cell["context"] == "kept"
        ]
        if rows:
            blocks.append((task, rows))
    return Sheet(
        title=f"{section}: what the context adds",
        columns=(
            *("row", "seeds", "kept - reset, last trial", "kept - reset, normalised"),
            *("gain per trial", "gain, normalised"),
        ),
        blocks=blocks,
        caption="The same model with its context kept, and emptied before every trial, in the same "
        "environments. 95 % intervals over seeds and their contexts: seeds are resampled, then "
        "the contexts of each.",
    )


def _data(section: str, found: dict[str, Any]) -> Sheet:
    rows: list[Row] = []
    for task, cells in _by_task(found):
        cell = max(cells.values(), key=lambda cell: cell["trials"])
        levels = [cell["random"], *(cell["dataset"][name] for name in ("median", "p90", "max"))]
        rows.append((task, *map(number, (*levels, cell["max_of_dataset"]))))
    return Sheet(
        title=f"{section}: what the returns are read beside",
        columns=("task", "random actions", "dataset median", "p90", "best", "max of n, dataset"),
        blocks=[("", rows)],
        caption="max of n, dataset: the expected largest of n trajectories drawn from the data, "
        f"for the most trials of a row. {_trials(found)}.",
    )


def _cost(section: str, found: dict[str, Any]) -> Sheet:
    blocks = []
    for task, cells in _by_task(found):
        rows: list[Row] = [
            (
                *(row, str(len(cell["seeds"])), f"{cell['updates']:,.0f}"),
                NONE if cell["tokens"] is None else f"{cell['tokens'] / 1e6:,.1f}",
                NONE if cell["seconds"] is None else f"{cell['seconds'] / 60:.1f}",
                NONE if cell["peak_bytes"] is None else gib(int(cell["peak_bytes"])),
            )
            for row, cell in cells.items()
        ]
        blocks.append((task, rows))
    return Sheet(
        title=f"{section}: cost of a run",
        columns=("row", "seeds", "updates", "million tokens", "minutes", "peak memory"),
        blocks=blocks,
        caption="Means over seeds; the largest memory of any process. Minutes are wall-clock time "
        "of training and evaluation, beside other jobs.",
    )


def _by_task(found: dict[str, Any]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Every task with its cells by row, rows in order."""
    cells = {(cell["task"], cell["row"]): cell for cell in found["cells"]}
    return [
        (task, {row: cells[task, row] for row in found["rows"] if (task, row) in cells})
        for task in found["tasks"]
    ]


def _trials(found: dict[str, Any]) -> str:
    """What n is, row by row where it is not the same for all."""
    rows: dict[tuple[int, int], dict[str, None]] = {}
    for cell in sorted(found["cells"], key=lambda cell: found["rows"].index(cell["row"])):
        rows.setdefault((cell["trials"], cell["contexts"]), {})[cell["row"]] = None
    told = [
        f"{n} trials in each of {c} contexts" + (f" ({', '.join(names)})" if len(rows) > 1 else "")
        for (n, c), names in rows.items()
    ]
    return "n: " + ", ".join(told)


def spell(told: dict[str, Any] | None, digits: int = 1) -> str:
    """A mean with its interval."""
    if told is None:
        return NONE
    mean, interval = told["mean"], next(v for name, v in told.items() if name != "mean")
    if interval is None:
        return f"{mean:.{digits}f} ({NONE})"
    ends = 0 if max(map(abs, interval)) >= LONG else digits
    return f"{mean:.{digits}f} ({interval[0]:.{ends}f} to {interval[1]:.{ends}f})"


def number(value: float | None) -> str:
    """A number, or that there is none."""
    return NONE if value is None else f"{value:.1f}"


def print_sheet(sheet: Sheet, console: Console) -> None:
    """Prints it; columns that the console is too narrow for come in further tables."""
    names = [sheet.columns[0], *(block for block, _ in sheet.blocks)]
    names += [row[0] for _, rows in sheet.blocks for row in rows]
    room = console.width - max(map(len, names)) - FRAME - 1
    numbers = list(range(1, len(sheet.columns)))
    parts: list[list[int]] = [[]]
    while numbers:
        # The two maxima are never parted.
        taken = numbers[: 2 if sheet.columns[numbers[0]] == MAXIMA[0] else 1]
        del numbers[: len(taken)]
        if parts[-1] and sum(_width(sheet, k) for k in parts[-1] + taken) > room:
            parts.append([])
        parts[-1] += taken
    console.print(f"\n{sheet.title}", style="bold", highlight=False)
    for part in parts:
        table = Table()
        table.add_column(sheet.columns[0], no_wrap=True)
        for k in part:
            width = _width(sheet, k) - FRAME
            table.add_column(sheet.columns[k], justify="right", width=width)
        for block, rows in sheet.blocks:
            if block:
                table.add_row(block)
            for n, row in enumerate(rows, start=1):
                table.add_row(row[0], *(row[k] for k in part), end_section=n == len(rows))
        console.print(table)
    console.print(sheet.caption, highlight=False)


def _width(sheet: Sheet, column: int) -> int:
    """Of its cells and the longest word of its heading."""
    cells = [row[column] for _, rows in sheet.blocks for row in rows]
    return FRAME + max(map(len, [*cells, *sheet.columns[column].split()]))


def markdown(sheet: Sheet) -> str:
    """A heading, the table, and its caption."""
    ruler = ["---", *["---:"] * (len(sheet.columns) - 1)]
    rows: list[Sequence[str]] = [sheet.columns, ruler]
    for block, members in sheet.blocks:
        if block:
            rows.append((f"**{block}**", *[""] * (len(sheet.columns) - 1)))
        rows += members
    escaped = [[cell.replace("|", r"\|") for cell in cells] for cells in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in escaped]
    return "\n".join([f"### {sheet.title}", "", *lines, "", sheet.caption, ""])


def html(sheet: Sheet) -> str:
    """A table that scrolls sideways where it is too wide."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.columns)
    body = []
    for block, rows in sheet.blocks:
        lines = []
        if block:
            span = len(sheet.columns)
            lines.append(f'<tr><th scope="rowgroup" colspan="{span}">{escape(block)}</th></tr>')
        for name, *cells in rows:
            numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>')
        body.append(f"<tbody>{''.join(lines)}</tbody>")
    return (
        f'<h3>{escape(sheet.title)}</h3>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>'
        f"\n{''.join(body)}\n</table></div>\n<p>{escape(sheet.caption)}</p>\n"
    )
