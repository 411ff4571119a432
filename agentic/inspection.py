"""What a domain's stored episodes are: amounts, returns, ranges, duplicates and where from."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from agentic.episodes import write_atomically
from agentic.flat import ARRAYS, FlatStore
from agentic.sources import find_source
from agentic.store import QUANTILES, EpisodeStore, Part
from agentic.texts import parse_json

BATCH_BYTES = 2**22  # of a stored array in memory at once
AT_BOUND = 1 - 1e-6  # actions beyond it are at the bound
NAMED = 3  # named in a list before it says how many more there are
BINS = 40  # of a histogram


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Statistics of every entry (D,) of an array, over all episodes and steps.

    Attributes:
        least: (D,) smallest value.
        mean: (D,).
        std: (D,) standard deviation.
        most: (D,) largest value.
        at_bound: (D,) share of the values that are -1 or 1 or beyond.
    """

    least: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    most: np.ndarray
    at_bound: np.ndarray


def inspect(store: EpisodeStore, data_dir: Path, figure: Path, console: Console) -> None:
    """Prints all that this module knows of a loaded store, and draws the returns."""
    print_amounts(store, data_dir, console)
    print_duplicates(store, console)
    print_returns(store, console)
    draw_returns(store, figure)
    console.print(f"histograms of the returns: {figure}", soft_wrap=True)
    print_ranges(store, console)


def flats(store: EpisodeStore) -> list[tuple[Part, FlatStore]]:
    """The parts of a store that was loaded, with their arrays on disk."""
    return [(part, part.flat) for part in store.parts if part.flat is not None]


def ranges(store: EpisodeStore, name: str) -> Ranges:
    """Statistics of "action" (as taken, without the reset's row) or "observation"; memory flat."""
    first = next(_batches(store, name))
    count, total, at_bound = 0, np.zeros_like(first[0]), np.zeros_like(first[0])
    least, most = first[0], first[0]
    for x_ND in _batches(store, name):
        count += len(x_ND)
        total += x_ND.sum(axis=0)
        at_bound += (np.abs(x_ND) >= AT_BOUND).sum(axis=0)
        least = np.minimum(least, x_ND.min(axis=0))
        most = np.maximum(most, x_ND.max(axis=0))
    mean = total / count
    # A second pass, about the mean: a small spread around a large value would be lost in one.
    squares = sum(np.square(x_ND - mean).sum(axis=0) for x_ND in _batches(store, name))
    return Ranges(
        least=least,
        mean=mean,
        std=np.sqrt(squares / count),
        most=most,
        at_bound=at_bound / count,
    )


def _batches(store: EpisodeStore, name: str) -> Iterator[np.ndarray]:
    """All steps (N, D) float64 of the chosen rows, a bounded number at once."""
    for part, flat in flats(store):
        array = flat.arrays[name]
        rows = max(1, BATCH_BYTES // array[:1].nbytes)
        for begin in range(0, len(part.rows), rows):
            chosen = array[part.rows[begin : begin + rows], 1 if name == "action" else 0 :]
            yield chosen.reshape(-1, array.shape[-1]).astype(np.float64)
            flat.release()


def duplicates(store: EpisodeStore) -> list[list[str]]:
    """Groups of episodes with equal content, as `<algorithm>/<file>`."""
    parts = flats(store)
    places: dict[int, list[tuple[int, int]]] = {}
    for p, (part, flat) in enumerate(parts):
        for row in part.rows.tolist():
            places.setdefault(flat.index.checksums[row], []).append((p, row))

    def equal(a: tuple[int, int], b: tuple[int, int]) -> bool:
        one, other = (parts[p][1] for p, _ in (a, b))
        try:
            return all(
                np.array_equal(one.arrays[name][a[1]], other.arrays[name][b[1]]) for name in ARRAYS
            )
        finally:
            one.release()
            other.release()

    groups = []
    for candidates in places.values():
        # Among ten thousand episodes two different ones may well share their 32 bits.
        while len(candidates) > 1:
            same = {place for place in candidates if equal(candidates[0], place)}
            candidates = [place for place in candidates if place not in same]
            if len(same) > 1:
                named = [(parts[p][1].index, row) for p, row in sorted(same)]
                groups.append([f"{index.algorithm}/{index.names[row]}" for index, row in named])
    return groups


def print_amounts(store: EpisodeStore, data_dir: Path, console: Console) -> None:
    """Episodes, steps, bytes on disk, and where each algorithm's data come from."""
    domain, steps = store.specs[0].domain, store.steps
    table = Table(title=f"{domain}: episodes of {steps} steps")
    for heading in ("algorithm", "episodes", "steps", "files", "store"):
        table.add_column(
            heading, justify="left" if heading == "algorithm" else "right", overflow="fold"
        )
    for part, flat in flats(store):
        source = find_source(data_dir, domain, part.name)
        table.add_row(
            part.name,
            f"{len(part.rows):,}",
            f"{len(part.rows) * steps:,}",
            _megabytes(sum(file.size for file in source.files)) if source else "none",
            _megabytes(sum(p.stat().st_size for p in flat.path.rglob("*") if p.is_file())),
        )
    console.print(table)
    for part, flat in flats(store):
        lines = [f"{part.name}: {provenance(part, flat)}"]
        lines += [f"  rejected: {reason}" for reason in part.rejected[:NAMED]]
        if len(part.rejected) > NAMED:
            lines.append(f"  and {len(part.rejected) - NAMED:,} more")
        for length, count in part.other_lengths.items():
            lines.append(f"  left out: {count:,} files of {length} steps")
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def provenance(part: Part, flat: FlatStore) -> str:
    """Where one algorithm's episodes come from, and the names of their files."""
    try:
        note = parse_json(flat.index.note or "null")
    except ValueError:
        note = {"recipe": "unknown: collect.json is damaged"}
    if isinstance(note, dict):
        told = [
            f"{'last ' * (k == 'seed')}{k} {note[k]}"
            for k in ("recipe", "reward_task", "sessions", "seed")
            if k in note
        ]
        if isinstance(note.get("simulators"), list):
            told += map(str, note["simulators"])
        origin = f"collected here ({', '.join(told)})"
    else:
        origin = "not collected here (no collect.json)"
    names = [flat.index.names[row] for row in part.rows]
    return f"{origin} from {flat.index.source}, {names[0]} to {names[-1]}"


def print_returns(store: EpisodeStore, console: Console) -> None:
    """Quantiles of the episodes' returns, task by task."""
    table = Table(title="returns by task")
    for heading in ("task", *QUANTILES, "mean"):
        table.add_column(heading, justify="left" if heading == "task" else "right", overflow="fold")
    for spec, quantiles in zip(store.specs, store.return_quantiles(), strict=True):
        table.add_row(spec.name, *(f"{value:.1f}" for value in quantiles.values()))
    console.print(table)


def print_ranges(store: EpisodeStore, console: Console) -> None:
    """Ranges of actions and observations, one line per entry."""
    table = Table(title="ranges of actions and observations")
    for heading in ("entry", "min", "mean", "std", "max", "at bounds"):
        table.add_column(
            heading, justify="left" if heading == "entry" else "right", overflow="fold"
        )
    for name in ("action", "observation"):
        found = ranges(store, name)
        for d, values in enumerate(
            zip(found.least, found.mean, found.std, found.most, strict=True)
        ):
            bound = f"{found.at_bound[d]:.1%}" if name == "action" else ""
            table.add_row(f"{name} {d}", *(f"{v:.3g}" for v in values), bound)
        table.add_section()
    console.print(table)


def print_duplicates(store: EpisodeStore, console: Console) -> None:
    """How many episodes are copies of another one, and the first groups of them."""
    groups = duplicates(store)
    lines = [f"duplicates: {sum(len(group) - 1 for group in groups):,} episodes copy another one"]
    for group in groups[:NAMED]:
        more = f" and {len(group) - NAMED:,} more" if len(group) > NAMED else ""
        lines.append(f"  {' = '.join(group[:NAMED])}{more}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def draw_returns(store: EpisodeStore, path: Path) -> None:
    """Writes a PNG with one histogram of the returns per task, stacked by algorithm.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # here, since it is slow to load and keeps a font cache

    figure = Figure(figsize=(6, 2.4 * len(store.specs)), layout="constrained")
    axes = figure.subplots(len(store.specs), squeeze=False)[:, 0]
    for k, (axis, spec) in enumerate(zip(axes, store.specs, strict=True)):
        axis.hist(
            [part.rewards[k].returns[part.rows] for part in store.parts],
            bins=BINS,
            stacked=True,
            label=[part.name for part in store.parts],
        )
        axis.set_title(spec.name)
        axis.set_xlabel("return")
        axis.set_ylabel("episodes")
    axes[0].legend()
    drawn = io.BytesIO()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(drawn, format="png", dpi=100)
        write_atomically(path, drawn.getvalue())
    except OSError as error:
        raise ValueError(f"output: cannot write {path} ({error.strerror})") from error


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
