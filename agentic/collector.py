"""Collection: a recipe's episodes into ExoRL's files, with a bar that says what they are worth."""

import json
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agentic.collect_config import CollectConfig
from agentic.entries import check
from agentic.episodes import (
    FILE_NAME,
    buffer_dir,
    episode_files,
    read_episode,
    sweep,
    write_atomically,
    write_episode,
)
from agentic.explore import RECIPES, stream
from agentic.locks import locked
from agentic.relabel import relabel
from agentic.sources import check_level, find_source
from agentic.store import QUANTILES, quantiles
from agentic.strict import at_least
from agentic.texts import read_json
from agentic.within import within
from envs import TaskSpec, domain_tasks, expand

NOTE = "collect.json"
SIMULATOR = ("dm_control", "mujoco")  # whose versions differ in their dynamics
NOTE_SECONDS = 5.0  # between two notes: a kill loses so much of the time that was spent


def record_path(data_dir: Path, domain: str, recipe: str) -> Path:
    """The note beside a buffer that says how it was collected, and whether that was finished."""
    return buffer_dir(data_dir, domain, recipe).parent / NOTE


@dataclass(frozen=True, kw_only=True)
class Round:
    """One request for episodes, over all the sessions that it takes."""

    finished: bool
    sessions: int  # of the folder's whole life; each has its own seed
    seconds: float  # spent on this round
    first: int  # episodes that were there before this round
    simulators: tuple[str, ...]  # versions that any session of the folder's life was played with


def read_record(path: Path) -> Round | None:
    """The folder's last round, None where there is none (a download).

    Raises:
        ValueError: the note is damaged.
    """
    if not path.is_file():
        return None
    try:
        record = read_json(path)
        form = {"finished": bool, "sessions": int, "seconds": float, "first": int}
        check("file", record, form)
        simulators = record.get("simulators", [])  # older notes do not know them
        check("file.simulators", simulators, [str])
        for name in ("sessions", "seconds", "first"):
            at_least(name, record[name], 0)
        return Round(**{name: record[name] for name in form}, simulators=tuple(simulators))
    except ValueError as error:
        raise ValueError(
            f"data_dir: {path} is damaged ({error}), expected what agentic-collect writes there; "
            "collect into another data_dir"
        ) from error


def _in_use(directory: Path) -> None:
    raise ValueError(
        f"data_dir: another process is collecting into {directory}; expected one at a time"
    )


def unfinished(config: CollectConfig, data_dir: Path) -> bool:
    """Whether the recipe's folder holds no episodes yet, or an interrupted collection."""
    (spec,) = expand(config.reward_task)
    last = read_record(record_path(data_dir, spec.domain, config.recipe))
    if last is None:  # a download, or nothing
        return find_source(data_dir, spec.domain, config.recipe) is None
    return not last.finished


def collect(config: CollectConfig, data_dir: Path, seed: int) -> dict[str, np.ndarray]:
    """Explores until a limit is reached; adds to what the folder already holds.

    An interrupted collection goes on where it stopped: the limits count what it had collected, and
    the seed is another one. The learner of rnd goes on; that of td3 starts anew.

    Returns:
        What the round is worth, see `worth`.

    Raises:
        ValueError: an unknown recipe, a folder that cannot be written, is in use or holds a
            download.
    """
    if config.recipe not in RECIPES:
        raise ValueError(f"recipe: got {config.recipe!r}, expected one of {list(RECIPES)}")
    (spec,) = expand(config.reward_task)
    directory = within(buffer_dir(data_dir, spec.domain, config.recipe), data_dir, "data_dir")
    check_level(data_dir)
    ours = record_path(data_dir, spec.domain, config.recipe).exists()
    if not ours and (found := find_source(data_dir, spec.domain, config.recipe)):
        raise ValueError(
            f"data_dir: {found.place} holds episodes that were not collected here (a download), "
            "expected another data_dir"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data_dir: cannot make {directory} ({error.strerror})") from error
    with locked(directory.parent, partial(_in_use, directory.parent)) as alone:
        if alone:
            sweep(directory)
            sweep(directory.parent, NOTE)
        _collect(config, data_dir, directory, spec, seed)
    return worth(config, data_dir)


def _collect(
    config: CollectConfig, data_dir: Path, directory: Path, spec: TaskSpec, seed: int
) -> None:
    note = record_path(data_dir, spec.domain, config.recipe)
    existing = episode_files(directory)
    before = read_record(note) or Round(
        finished=True, sessions=0, seconds=0.0, first=0, simulators=()
    )
    if before.finished:  # else complete that round
        before = replace(before, seconds=0.0, first=len(existing))
    episodes = max(1, config.episodes - (len(existing) - before.first))
    seconds = max(0.0, config.seconds - before.seconds)

    ours = ", ".join(f"{name} {version(name)}" for name in SIMULATOR)
    simulators = list(dict.fromkeys((*before.simulators, ours)))

    def write_note(finished: bool, spent: float) -> None:
        content = {
            "finished": finished,
            "sessions": before.sessions + 1,
            "seconds": before.seconds + spent,
            "first": before.first,
            "recipe": config.recipe,
            "reward_task": spec.name,
            "seed": seed,
            "simulators": simulators,
        }
        write_atomically(note, (json.dumps(content, indent=1) + "\n").encode())

    session_seed = int(np.random.SeedSequence([seed, before.sessions]).generate_state(1)[0])
    # Before the note: a learner that does not fit is refused, and nothing has begun.
    exploring = stream(config.recipe, spec, session_seed, config.workers, config.rnd, note.parent)
    write_note(False, 0.0)
    specs = domain_tasks(spec.domain)
    returns: list[list[float]] = []
    index = 1 + max((int(_index(path)) for path in existing), default=-1)
    began = noted = time.monotonic()
    finished = False
    with (
        closing(exploring) as arriving,
        tqdm(total=episodes, desc=f"collecting {spec.domain}", unit="ep", disable=None) as bar,
    ):
        try:
            for episode in arriving:
                write_episode(directory / f"episode_{index:06d}_{episode.steps}.npz", episode)
                index += 1
                returns.append([float(relabel(s, episode).sum()) for s in specs])
                spent = time.monotonic() - began
                _show(bar, returns, specs, spec, episode.steps * len(returns) / spent)
                if began + spent - noted > NOTE_SECONDS:
                    write_note(False, spent)
                    noted = began + spent
                if len(returns) >= episodes or spent >= seconds:
                    finished = True
                    break
        finally:
            write_note(finished, time.monotonic() - began)


def _index(path: Path) -> str:
    match = FILE_NAME.fullmatch(path.name)
    assert match, "episode_files yields such names only"
    return match[1]


def _show(
    bar: tqdm, returns: list[list[float]], specs: tuple[TaskSpec, ...], spec: TaskSpec, speed: float
) -> None:
    own = np.array(returns)[:, specs.index(spec)]
    low, median, high = np.quantile(own, [0, 0.5, 1])
    bar.set_postfix_str(
        f"{speed:.0f} steps/s, {spec.name} return {low:.1f} / {median:.1f} / {high:.1f}",
        refresh=False,
    )
    bar.update()


def worth(config: CollectConfig, data_dir: Path) -> dict[str, np.ndarray]:
    """Returns of the folder's last round, all its sessions', for every task of the domain.

    Raises:
        ValueError: a file or the note is damaged.
    """
    (spec,) = expand(config.reward_task)
    last = read_record(record_path(data_dir, spec.domain, config.recipe))
    files = episode_files(buffer_dir(data_dir, spec.domain, config.recipe))
    returns: dict[str, list[float]] = {s.name: [] for s in domain_tasks(spec.domain)}
    for path in files[last.first if last else 0 :]:
        episode = read_episode(path, spec)
        for s in domain_tasks(spec.domain):
            returns[s.name].append(float(relabel(s, episode).sum()))
    return {name: np.array(values) for name, values in returns.items()}


def print_worth(returns: dict[str, np.ndarray], console: Console) -> None:
    """What the collected episodes are worth for each task of the domain; nothing for none."""
    episodes = len(next(iter(returns.values())))
    if episodes == 0:
        return
    table = Table(title=f"{episodes} episodes: returns by task")
    for heading in ("task", *QUANTILES):
        table.add_column(heading, justify="left" if heading == "task" else "right", overflow="fold")
    for task, values in returns.items():
        table.add_row(task, *(f"{q:.1f}" for q in quantiles(values).values()))
    console.print(table)
