"""Data at scale: ingest, rewards and random chains, beside the ways without an ingest.

    python -m benchmarks.data --data full --algorithm synthetic --episodes 2000 --json results.json

*Ingest* reads, checks and stores the first --episodes files, beside `np.load` of every array of
the same files in one process, which checks and keeps nothing. Every contender is a process of its
own on files that are in the page cache; memory is the peak of what its processes hold for
themselves (anonymous, not the page cache), their start included.

*Rewards* are those of `python -m benchmarks.relabel`, of a million states.

*Chains* are --trajectories whole episodes, drawn at random. `ours` reads them from the store,
`ours, whole batch` is everything up to the tensors that training takes (chains drawn, relabelled
to their best, return-to-go, masks). `ExoRL's way` holds all episodes as arrays in memory, as its
replay buffer does (spread over its workers), and joins them; `np.load` opens the chain's files.

*Share of a training step* is the time in which the trainer waits for its next micro-batch / the
time of the whole step, for a model that is far smaller than one would train.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentic.config import ChainConfig, DataConfig
from agentic.episodes import buffer_dir, episode_files
from agentic.loading import load_store
from agentic.runs import model_spec
from agentic.sampler import ChainSampler
from agentic.store import EpisodeStore
from agentic.train import build_model
from agentic.trainer import Trainer
from benchmarks import measure
from benchmarks.memory_plan import train_config
from benchmarks.relabel import TASKS_SHOWN, relabel
from benchmarks.report import Report, mb, number
from envs import TASKS, domain_tasks, quiet_simulator

DEVICE = torch.device("cpu")

# Run by `python -c`; arguments: data_dir, domain, algorithm, episodes, workers, store_dir.
INGEST = """
import sys
from pathlib import Path
from agentic.flat import store_path
from agentic.ingest import ingest
from agentic.sources import find_source
from envs import domain_tasks
data, domain, algorithm, episodes, workers, store = sys.argv[1:]
source = find_source(Path(data), domain, algorithm)
ingest(source, source.files[:int(episodes)], store_path(Path(store), domain, algorithm),
       domain_tasks(domain)[0], on_bad_file="error", workers=int(workers), tell=lambda text: None)
"""
NUMPY = """
import sys
from pathlib import Path
import numpy as np
data, domain, algorithm, episodes, workers, store = sys.argv[1:]
files = sorted((Path(data) / domain / algorithm / "buffer").iterdir())
for path in files[:int(episodes)]:
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
"""


def processes(
    script: str, arguments: Sequence[str], found: dict[str, list[int]], name: str
) -> float:
    """Seconds of a Python process with its children; notes their peak memory under `name`."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], start_new_session=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_anonymous_bytes, _session(process.pid))))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}")
    found.setdefault(name, []).append(peak)
    return time.perf_counter() - began


def _session(leader: int) -> list[int]:
    """Its processes."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) == leader:
                found.append(int(pid))
        except ProcessLookupError:
            continue
    return found


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def ingest(settings: argparse.Namespace) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of reading files once."""
    files = episode_files(buffer_dir(settings.data, settings.domain, settings.algorithm))
    size = sum(path.stat().st_size for path in files[: settings.episodes])
    title = f"Ingest of {settings.episodes:,} files of {settings.domain}, {mb(size)} MB"
    measure.log(title)
    memory: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(dir=settings.data) as folder:
        count = iter(range(10**6))

        def contender(script: str, workers: int, name: str) -> Callable[[], float]:
            def turn() -> float:
                arguments = (settings.data, settings.domain, settings.algorithm, settings.episodes)
                store = Path(folder) / str(next(count))
                return processes(
                    script, [*map(str, arguments), str(workers), str(store)], memory, name
                )

            return turn

        contenders = {
            f"ours, {n} process{'es' * (n > 1)}": contender(
                INGEST, n, f"ours, {n} process{'es' * (n > 1)}"
            )
            for n in (1, 2)
        }
        contenders["np.load, 1 process"] = contender(NUMPY, 1, "np.load, 1 process")
        contenders["np.load, 1 process"]()  # the files are in the page cache from here on
        taken = measure.interleave(contenders, settings.rounds)
    rows, measured = [], []
    for name, times in taken.items():
        middle = statistics.median(times)
        peak = max(memory[name])
        rows.append(
            {
                "ingest": name,
                "seconds": number(middle),
                "episodes/s": number(settings.episodes / middle),
                "MB/s": number(size / middle / 1e6),
                "peak MB": mb(peak),
                "x np.load": number(measure.ratio(taken["np.load, 1 process"], times)),
            }
        )
        measured.append({"contender": name, "rounds": times, "peak_bytes": peak})
    return title, rows, {"episodes": settings.episodes, "bytes": size, "contenders": measured}


def chains(
    store: EpisodeStore, settings: argparse.Namespace
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of random chains."""
    N, T, E = settings.trajectories, store.steps, store.episodes
    title = f"Random chains of {N} x {T:,} steps from {E:,} episodes of {settings.domain}"
    measure.log(title)
    files = episode_files(buffer_dir(settings.data, settings.domain, settings.algorithm))[:E]
    memory = [_arrays(path) for path in files]
    held = sum(array.nbytes for episode in memory for array in episode.values())
    rng = np.random.default_rng(0)
    sampler = ChainSampler(store, np.arange(E), chain_config(N), batch_steps=N * T, seed=0)
    index = iter(range(10**9))

    def ours() -> object:
        e_N = rng.integers(E, size=N)
        return store.observation(e_N), store.action(e_N), store.reward(0, e_N)

    def joined(episode: Callable[[int], dict[str, np.ndarray]]) -> object:
        drawn = [episode(e) for e in rng.integers(E, size=N)]
        keys = ("observation", "action", "reward")
        return [np.concatenate([one[key] for one in drawn]) for key in keys]

    ways = {
        "ours": (ours, store.held_bytes),
        "ours, whole batch": (lambda: sampler.batch(next(index)), store.held_bytes),
        "ExoRL's way, in memory": (partial(joined, memory.__getitem__), held),
        "np.load": (partial(joined, lambda e: _arrays(files[e])), 0),
    }
    contenders = {}
    for name, (way, _) in ways.items():
        way()
        repeats = max(round(settings.turn / measure.seconds(way, DEVICE)), 1)

        def turn(way: Callable[[], object] = way, repeats: int = repeats) -> float:
            return measure.seconds(lambda: [way() for _ in range(repeats)], DEVICE) / repeats

        contenders[name] = turn
    taken = measure.interleave(contenders, settings.rounds)
    rows = [
        {
            "chains": name,
            "ms": number(1e3 * statistics.median(times)),
            "steps/s": number(N * T / statistics.median(times)),
            "memory MB": mb(ways[name][1]),
            "x ours": number(measure.ratio(times, taken["ours"])),
        }
        for name, times in taken.items()
    ]
    return title, rows, {"episodes": E, "trajectories": N, "rounds": taken, "memory_bytes": held}


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def chain_config(trajectories: int) -> ChainConfig:
    """Any chains of whole trajectories, the paper's."""
    return ChainConfig(
        trajectories=trajectories,
        count="fixed",
        window_share=0.0,
        window_steps=1,
        window_batch=1,
        best_from=1.0,
        spread="full",
        loss_on="last",
    )


def share(
    store: EpisodeStore, settings: argparse.Namespace
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of waiting for data while a small model trains."""
    N = settings.trajectories
    title = f"Waiting for chains of {N} x {store.steps:,} steps while training, 2 threads"
    measure.log(title)
    rows, measured = [], []
    measure.pin(min(2, os.cpu_count() or 1))
    for width, layers in ((32, 1), (128, 3)):
        for prefetch in (0, 1):
            config = train_config(
                **{
                    "task": f"{store.specs[0].name}",
                    "chain.trajectories": N,
                    "chain.count": "fixed",
                    "chain.window_share": 0,
                    "batch_steps": N * store.steps,
                    "model.width": width,
                    "model.layers": layers,
                    "data.prefetch": prefetch,
                    "device": "cpu",
                }
            )
            model = build_model(model_spec(config, store), store)
            with tempfile.TemporaryDirectory() as folder:
                every = np.arange(store.episodes)
                trainer = Trainer(config, model, store, every, every[:0], Path(folder))
                waited, whole = _waits(trainer, settings.steps)
            rows.append(
                {
                    "model": f"{layers} layers of {width}",
                    "prefetch": str(prefetch),
                    "step, s": number(whole),
                    "waiting, ms": number(1e3 * waited),
                    "share": f"{100 * waited / whole:.2f} %",
                }
            )
            measured.append(
                {
                    "width": width,
                    "layers": layers,
                    "prefetch": prefetch,
                    "waited": waited,
                    "step": whole,
                }
            )
    return title, rows, {"steps": settings.steps, "models": measured}


def _waits(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Median seconds of waiting for a micro-batch, and of a whole step."""
    waits: list[float] = []
    stream = trainer.stream

    class Timed:
        position = 0

        def __next__(self) -> Any:
            began = time.perf_counter()
            batch = next(stream)
            waits.append(time.perf_counter() - began)
            return batch

    trainer.stream = Timed()  # type: ignore[assignment]
    trainer.update()
    wholes = [measure.seconds(trainer.update, DEVICE) for _ in range(steps)]
    stream.close()
    return statistics.median(waits[1:]), statistics.median(wholes)


def main(argv: Sequence[str] | None = None) -> None:
    """All tables."""
    parser = measure.arguments(__doc__, rounds=3)
    parser.add_argument("--data", type=Path, required=True, help="data_dir")
    parser.add_argument("--domain", default="walker")
    parser.add_argument("--algorithm", default="synthetic")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="training steps for the share")
    parser.add_argument("--turn", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--asked", type=int, default=1000, help="states of the simulator, a turn")
    parser.add_argument("--tasks", nargs="+", default=TASKS_SHOWN, choices=TASKS, metavar="TASK")
    settings = parser.parse_args(argv)
    packages = {name: version(name) for name in ("numpy", "mujoco", "dm-control")}
    report = Report(settings.json, **packages, **{**vars(settings), "data": None})
    measure.pin(min(2, os.cpu_count() or 1))
    report.case(*ingest(settings))
    measure.pin(1)
    quiet_simulator()
    report.case(*relabel(1_000_000, settings))
    specs = domain_tasks(settings.domain)[:1]
    algorithm = f"{settings.algorithm}:first_{settings.episodes * specs[0].episode_steps}"
    store = load_store(settings.data, specs, (algorithm,), DataConfig(), measure.log)
    report.case(*chains(store, settings))
    report.case(*share(store, settings))


if __name__ == "__main__":
    main()
