"""What was measured, on which machine: markdown tables on stdout, and a JSON file.

Every case is printed and written as soon as it is there: a run that is killed loses only the case
that it was at.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table

# What changes how memory is handed out or threads are run.
_TELLING = ("OMP_", "MKL_", "KMP_", "MALLOC_", "LD_PRELOAD", "PYTORCH_", "THP_", "XLA_")


class Report:
    """Prints the header at once.

    Args:
        path: of the JSON file; None: no file.
        about: what the run was told, and what else belongs in the header.

    Raises:
        FileExistsError: the file is there; nothing measured is ever overwritten.
    """

    def __init__(self, path: str | None, **about: Any) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(exist_ok=False)
        self.content: dict[str, Any] = {"header": machine() | about, "cases": []}
        self._console = Console(width=400, highlight=False)  # a table is as wide as it has to be
        for name, value in self.content["header"].items():
            self._console.print(f"- {name}: {value}", markup=False, soft_wrap=True)
        self._write()

    def case(
        self, title: str, rows: Sequence[Mapping[str, str]], measured: Mapping[str, Any]
    ) -> None:
        """Prints `rows` (column: text) under a title and saves what was measured for them."""
        table = Table(box=rich.box.MARKDOWN)
        for i, column in enumerate(rows[0]):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row.values())
        self._console.print(f"\n#### {title}\n", markup=False)
        with self._console.capture() as capture:
            self._console.print(table)
        lines = (line.strip() for line in capture.get().splitlines())
        print("\n".join(line for line in lines if line))
        sys.stdout.flush()
        self.content["cases"].append({"title": title, **measured})
        self._write()

    def note(self, text: str) -> None:
        """Prints a line, and saves it."""
        self._console.print(f"\n{text}", markup=False, soft_wrap=True)
        sys.stdout.flush()
        self.content.setdefault("notes", []).append(text)
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps(self.content, indent=1) + "\n")
            part.replace(self.path)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    about: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TELLING)},
    }
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
        about["cuda"] = torch.version.cuda
    return about


def _cpu() -> str:
    """Its name: hypervisors hide it in part, and the instruction set says the rest."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str:
    """Of the source tree, marked where it holds changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def mb(size: float | None) -> str:
    """Megabytes (10^6), as memory is sold."""
    return "" if size is None else f"{size / 1e6:.1f}" if size < 1e7 else f"{size / 1e6:,.0f}"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant ones, and nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"
