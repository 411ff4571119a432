"""agentic-data: looks at stored episodes, verifies them, and exchanges them with Minari."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from agentic.collect_config import TaskConfig
from agentic.config import DataConfig
from agentic.entry import run
from agentic.flat import FlatStore, store_path
from agentic.inspection import inspect
from agentic.loading import load_store
from agentic.replay import MEANING, verify
from agentic.selection import parse_all
from agentic.sources import find_algorithms
from agentic.strict import build
from agentic.within import within
from envs import domain_tasks, expand, without_rendering

ACTIONS = ("inspect", "verify", "import", "export")


@dataclass(frozen=True, kw_only=True)
class DataCommand:
    """Everything that `agentic-data` is told."""

    action: str | None  # one of ACTIONS; the first word of the command line
    task: TaskConfig
    data_dir: str
    algorithms: tuple[str, ...] | None  # see agentic.selection; none: all that are there
    data: DataConfig
    episodes: int  # verify: how many of each algorithm are played again
    output: str | None  # inspect: the figure; export: Minari's folder of datasets
    source: str | None  # import: a Minari dataset, by its folder or id
    name: str  # import: the new folder of data_dir/<domain>

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action: got {self.action}, expected one of {list(ACTIONS)}")
        if self.episodes < 0:
            raise ValueError(f"episodes: got {self.episodes}, expected at least 0")
        if self.name[:1] in ("", ".") or Path(self.name).name != self.name:
            raise ValueError(f"name: got {self.name!r}, expected the name of one folder")
        if (self.action == "import") != (self.source is not None):
            raise ValueError(
                f"source: got {self.source}, expected a Minari dataset's folder or id for import, "
                "null for other actions"
            )


def command(values: dict[str, Any]) -> None:
    """Does what the first word says."""
    without_rendering()
    told = build(DataCommand, values)
    tasks, data_dir, console = (
        expand(told.task.name),
        Path(told.data_dir),
        Console(markup=False, emoji=False),
    )
    if told.source is not None:
        files = _exchange().import_dataset(told.source, tasks[0], data_dir, told.name)
        console.print(f"{len(files):,} episodes in {files[0].parent}", soft_wrap=True)
        return
    domain, output = tasks[0].domain, None if told.output is None else Path(told.output)
    names = told.algorithms or tuple(find_algorithms(data_dir, domain))
    if not names:
        place = data_dir / domain / "<algorithm>"
        raise ValueError(f"data_dir: looked for {place}/buffer/*.npz, expected episodes, got none")
    if told.action == "inspect":
        store = load_store(data_dir, domain_tasks(domain), names, told.data, console.print)
        beside = within(data_dir / domain, data_dir, "data_dir") / "inspect.png"
        inspect(store, data_dir, output or beside, console)
    elif told.action == "verify":
        place = Path(told.data.store_dir or data_dir)
        paths = [store_path(place, domain, choice.algorithm) for choice in parse_all(names)]
        stores = [FlatStore.open(path, tasks[0]) for path in paths]
        sound = [verify(store, told.episodes, console) for store in stores]
        console.print(MEANING, highlight=False)
        sys.exit(0 if all(sound) else 1)
    else:
        store = load_store(data_dir, tasks, names, told.data, console.print)
        for made in _exchange().export(store, output, told.data.relabel):
            console.print(f"{made}", soft_wrap=True)


def _exchange() -> ModuleType:
    """The module that needs Minari.

    Raises:
        ValueError: Minari is not installed.
    """
    try:
        from agentic import exchange
    except ImportError as error:
        raise ValueError(f"action: {error}; expected `pip install '.[minari]'` before") from error
    return exchange


def main() -> None:
    """The console script."""
    if len(sys.argv) > 1 and "=" not in sys.argv[1] and not sys.argv[1].startswith("-"):
        sys.argv[1] = f"action={sys.argv[1]}"
    run("agentic-data", "data", command)


if __name__ == "__main__":
    main()
