"""A download of full size, made from a short real run: what to measure scale on without ExoRL.

    python -m benchmarks.synthetic --source data --domain walker --algorithm td3 \
        --episodes 10000 --out full

Writes <out>/<domain>/synthetic/buffer/episode_<index>_<length>.npz in ExoRL's layout and
compression: the source's episodes again and again, each with actions scaled by a factor of its
own, so that no two files are equal. Sizes, types and compressibility are those of real episodes; a
scaled action no longer leads to the state stored behind it: nothing should be learned from them.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from agentic.episodes import (
    FILE_NAME,
    Episode,
    buffer_dir,
    episode_files,
    read_episode,
    write_episode,
)
from envs import domain_tasks


def write(index: int, sources: Sequence[Path], domain: str, directory: Path) -> None:
    """One file."""
    episode = read_episode(sources[index % len(sources)], domain_tasks(domain)[0])
    write_episode(
        directory / f"episode_{index:06d}_{episode.steps}.npz",
        _scaled(episode, 1 - 1e-3 * np.random.default_rng(index).random()),
    )


def _scaled(episode: Episode, factor: float) -> Episode:
    return replace(episode, action=(episode.action * factor).astype(np.float32))


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the files that are not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="data_dir of the short run")
    parser.add_argument("--domain", required=True)
    parser.add_argument("--algorithm", required=True, help="of the short run")
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True, help="data_dir to write to")
    parser.add_argument("--processes", type=int, default=2)
    settings = parser.parse_args(argv)
    sources = episode_files(buffer_dir(settings.source, settings.domain, settings.algorithm))
    if not sources:
        parser.error(f"--source: no {settings.domain}/{settings.algorithm} in {settings.source}")
    directory = buffer_dir(settings.out, settings.domain, "synthetic")
    directory.mkdir(parents=True, exist_ok=True)
    task = partial(write, sources=sources, domain=settings.domain, directory=directory)
    there = {int(FILE_NAME.fullmatch(path.name)[1]) for path in episode_files(directory)}
    todo = [index for index in range(settings.episodes) if index not in there]
    with ProcessPoolExecutor(settings.processes) as pool:
        for _ in tqdm(pool.map(task, todo, chunksize=16), total=len(todo), unit="ep"):
            pass


if __name__ == "__main__":
    main()
