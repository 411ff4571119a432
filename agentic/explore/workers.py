"""A recipe in several processes, each a learner of its own with its own seed."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from agentic.episodes import Episode
from agentic.explore.recipes import RECIPES
from envs import TaskSpec

POLL_SECONDS = 1.0  # how often an idle parent looks whether a worker has died
QUEUED_EPISODES = 8  # per worker; a slow reader then slows the workers, and memory stays bounded


class WorkerError(RuntimeError):
    """A worker failed; the message has its traceback or its exit code."""


def stream(recipe: str, task: TaskSpec, seed: int, workers: int) -> Iterator[Episode]:
    """Finished episodes of `recipe`, without end, in the order in which they finish.

    Closing the generator, or an error, ends the workers; so does the end of this process.

    Args:
        recipe: a key of `RECIPES`.
        task: what to explore.
        seed: of everything random. With `workers` <= 1 the episodes follow from it; with more,
            those of each worker do, and their order does not.
        workers: processes with one torch thread each; 0 explores in this process.

    Raises:
        ValueError: the recipe is unknown or `workers` is negative; on the call, not later.
        WorkerError: a worker failed or died.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, expected one of {sorted(RECIPES)}")
    if workers < 0:
        raise ValueError(f"workers: got {workers}, expected at least 0")
    seeds = np.random.SeedSequence(seed).spawn(max(workers, 1))
    if workers == 0:
        return RECIPES[recipe](task, np.random.default_rng(seeds[0]))
    return _gather(recipe, task, seeds)


def _gather(recipe: str, task: TaskSpec, seeds: list[np.random.SeedSequence]) -> Iterator[Episode]:
    # Spawned: a fork would copy the parent's threads' locks, held or not.
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue(maxsize=QUEUED_EPISODES * len(seeds))
    processes = [
        context.Process(target=_work, args=(recipe, task, seed, results), daemon=True)
        for seed in seeds
    ]
    try:
        for process in processes:
            process.start()
        while True:
            result = _next(results, processes)
            if isinstance(result, str):
                raise WorkerError(f"{recipe} worker failed:\n{result}")
            yield result
    finally:
        _end(processes)
        results.close()


def _next(results: Any, processes: Sequence[BaseProcess]) -> Episode | str:
    """Waits for an episode or a worker's traceback; a worker that died silently is an error."""
    while True:
        try:
            return results.get(timeout=POLL_SECONDS)
        except queue.Empty:
            dead = [process for process in processes if process.exitcode is not None]
            if not dead:
                continue
        try:
            # It may have spoken between the two looks.
            return results.get(timeout=POLL_SECONDS)
        except queue.Empty:
            raise WorkerError(
                f"worker {dead[0].name} died without a message, exit code {dead[0].exitcode}"
            ) from None


def _work(recipe: str, task: TaskSpec, seed: np.random.SeedSequence, results: Any) -> None:
    """Body of a worker: puts episodes, or one traceback as text, into `results`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
    torch.set_num_threads(1)
    try:
        for episode in RECIPES[recipe](task, np.random.default_rng(seed)):
            results.put(episode)
    except Exception:
        results.put(traceback.format_exc())


def _end(processes: Sequence[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    for process in started:
        process.join()
