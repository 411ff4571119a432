"""The report of a reproduction: numbers, tables, figures and one page that holds them all."""

import base64
import json
import os
import platform
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agentic.budget import machine_bytes
from agentic.episodes import write_atomically
from agentic.report_figures import figures
from agentic.report_numbers import INTERVALS, numbers, returns
from agentic.report_runs import Run, find_runs
from agentic.report_tables import Sheet, html, markdown, print_sheet, sheets

SCHEMA_VERSION = 1
TITLE = "Agentic Transformer: reproduction"
STYLE = """
:root { color-scheme: light dark }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap }
th:first-child { text-align: left }
th[scope=row] { font-weight: normal }
thead th { white-space: normal; vertical-align: bottom; border-bottom: 1px solid }
tbody + tbody { border-top: 1px solid #8888 }
p { max-width: 45rem; font-size: .9rem }
img { max-width: 100%; height: auto; background: white; border-radius: .3rem }
"""


def write_report(output: Path, tasks: Sequence[str], console: Console) -> None:
    """Writes `output`/report/ about the finished runs below `output`/runs, and prints its tables.

    Args:
        output: of a reproduction.
        tasks: the order in which they are shown.
        console: to print on.

    Raises:
        ValueError: there are no finished runs.
    """
    runs, remarks = find_runs(output / "runs")
    if not runs:
        told = "".join(f"; {remark}" for remark in remarks)
        raise ValueError(f"output: no finished runs below {output / 'runs'}{told}")
    sections = numbers(runs, tasks)
    folder = output / "report"
    folder.mkdir(exist_ok=True)
    parts: list[tuple[str, list[Sheet], dict[str, bytes]]] = []
    for section, found in sections.items():
        drawn = figures(section, found, [run for run in runs if run.section == section])
        plain = re.sub(r"[^\w.%+-]", "_", section)  # a name of anyone's, which must not be a path
        named = {f"{plain}_{name}.png": png for name, png in drawn.items()}
        for name, png in named.items():
            write_atomically(folder / name, png)
        parts.append((section, sheets(section, found), named))
    content = document(runs, sections, remarks)
    write_atomically(folder / "results.json", spell_json(content).encode())
    text = "\n".join(markdown(sheet) for _, shown, _ in parts for sheet in shown)
    write_atomically(folder / "table.md", (text + _remarks_text(remarks)).encode())
    write_atomically(folder / "report.html", page(parts, content).encode())
    for _, shown, _ in parts:
        for sheet in shown:
            print_sheet(sheet, console)
    for remark in remarks:
        console.print(remark, soft_wrap=True, highlight=False)
    console.print(f"{len(runs)} runs: {folder / 'report.html'}", soft_wrap=True, highlight=False)


def document(
    runs: Sequence[Run], sections: dict[str, Any], remarks: Sequence[str]
) -> dict[str, Any]:
    """All that the report says, in plain values; places are relative to the runs' folder."""
    sources = {json.dumps(run.source, sort_keys=True): run.source for run in runs}
    return {
        "schema_version": SCHEMA_VERSION,
        "intervals": INTERVALS,
        "machine": machine(),
        "evaluated_by": list(sources.values()),
        "remarks": list(remarks),
        "sections": sections,
        "runs": [_run(run) for run in runs],
    }


def machine() -> dict[str, Any]:
    """Of this report, which the runs have shared unless a cluster ran them."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text() if info.is_file() else "")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": machine_bytes(torch.device("cpu")),
        "gpu": gpu,
    }


def spell_json(content: dict[str, Any]) -> str:
    """Indented, with every innermost list on a line of its own."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s*\n\s*", " ", m[0]), text) + "\n"


def page(
    parts: Sequence[tuple[str, list[Sheet], dict[str, bytes]]], content: dict[str, Any]
) -> str:
    """One html file that needs no other."""
    body = [f"<h1>{TITLE}</h1>", f"<p>{escape(_about(content))}</p>"]
    for section, shown, drawn in parts:
        body.append(f"<h2>{escape(section)}</h2>")
        body += [html(sheet) for sheet in shown]
        for name, png in drawn.items():
            data = base64.b64encode(png).decode()
            alt = escape(name.removesuffix(".png").replace("_", " "))
            body.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
    body += ["<h2>How to read the intervals</h2>"]
    body += [f"<p>{escape(name)}: {escape(told)}.</p>" for name, told in INTERVALS.items()]
    if content["remarks"]:
        body += ["<h2>Remarks</h2>", *(f"<p>{escape(r)}</p>" for r in content["remarks"])]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _about(content: dict[str, Any]) -> str:
    """How many runs, on what, by which versions."""
    where, sources = content["machine"], content["evaluated_by"]
    versions = sources[0]["versions"] or {}
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    processor = [where["cpu"], f"{where['cores']} cores"]
    processor += [
        f"{where['memory_bytes'] / 2**30:.1f} GiB",
        *([where["gpu"]] if where["gpu"] else []),
    ]
    commits = sorted({source["git_commit"] or "unknown" for source in sources})
    return (
        f"{len(content['runs'])} finished runs. This machine: {', '.join(processor)}. "
        f"Versions: {told}. Commit: {', '.join(commits)}."
    )


def _remarks_text(remarks: Sequence[str]) -> str:
    return "".join(f"\n{remark}\n" for remark in remarks)


def _run(run: Run) -> dict[str, Any]:
    """One run's facts, with the return of every trial."""
    first = run.entries[0]
    return {
        "section": run.section,
        "task": run.task,
        "row": run.row,
        "seed": run.seed,
        "place": run.place,
        "method": run.method,
        "train_trajectories": run.trajectories,
        "layout": first["layout"],
        "train_settings": first["train_settings"],
        "evaluation_seed": first["evaluation_seed"],
        "updates": run.updates,
        "checkpoint_step": first["checkpoint_step"],
        "tokens": run.tokens,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_bytes": run.peak_bytes,
        "results": [
            {
                "task": entry["task"],
                "target": entry["target"],
                "random": entry["random"]["mean"],
                "dataset": entry["dataset"],
                "returns_kept": _rounded(entry, "kept"),
                "returns_reset": _rounded(entry, "reset"),
            }
            for entry in run.entries
        ],
    }


def _rounded(entry: dict[str, Any], context: str) -> list[list[float | None]] | None:
    """A list a context, to a thousandth; None where a trial was not run."""
    played = returns(entry, context)
    if played is None:
        return None
    return [[round(v, 3) if v == v else None for v in row] for row in played.tolist()]
