"""A recipe in several processes, each a learner of its own with its own seed."""

import multiprocessing
import signal
import traceback
from collections.abc import Generator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentic.collect_config import RndConfig
from agentic.episodes import Episode
from agentic.explore.recipes import Recipe, for_workers
from envs import TaskSpec, quiet_simulator


class WorkerError(RuntimeError):
    """A worker failed; the message has its traceback or its exit code."""


def stream(
    recipe: str,
    task: TaskSpec,
    seed: int,
    workers: int,
    rnd: RndConfig | None = None,
    folder: Path | None = None,
) -> Generator[Episode, None, None]:
    """Finished episodes of `recipe`, without end, in the order in which they finish.

    Closing the generator, or an error, ends the workers; so does the end of this process.

    Args:
        recipe: a key of `RECIPES`.
        task: what to explore.
        seed: of everything random. With `workers` <= 1 the episodes follow from it; with more,
            those of each worker do, and their order does not.
        workers: processes with one torch thread each; 0 explores in this process.
        rnd: sizes and rates of the recipe rnd.
        folder: the recipe's own, for learners that go on where they were interrupted; the episodes
            then follow from what is there as well.

    Raises:
        ValueError: the recipe is unknown, `workers` is negative, or a learner in the folder does
            not fit; on the call, not later.
        WorkerError: a worker failed or died; its own ValueError comes as it is.
    """
    if workers < 0:
        raise ValueError(f"workers: got {workers}, expected at least 0")
    recipes = for_workers(recipe, max(workers, 1), rnd, folder)
    seeds = np.random.SeedSequence(seed).spawn(len(recipes))
    if workers == 0:
        return recipes[0](task, np.random.default_rng(seeds[0]))
    return _gather(recipes, task, seeds)


def _gather(
    recipes: list[Recipe], task: TaskSpec, seeds: list[np.random.SeedSequence]
) -> Generator[Episode, None, None]:
    # Spawned: a fork would copy the locks of the parent's threads, held or not.
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, BaseProcess] = {}
    try:
        # A pipe each and not one queue: a worker that is killed in the middle of a message then
        # shows as the end of its pipe, and leaves no lock behind that the others wait for. A pipe
        # holds less than an episode, so workers pause while nobody reads.
        for recipe, seed in zip(recipes, seeds, strict=True):
            reader, writer = context.Pipe(duplex=False)
            arguments = (recipe, task, seed, writer)
            worker: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            workers[reader] = worker
            writer.close()  # the worker's is now the only one
        while True:
            for ready in wait(list(workers)):
                yield _receive(ready, workers[ready])
    finally:
        for worker in workers.values():
            worker.terminate()
        for reader, worker in workers.items():
            worker.join()
            reader.close()


def _receive(reader: Any, worker: BaseProcess) -> Episode:
    try:
        result = reader.recv()
    except (EOFError, OSError):  # between messages, or within one
        worker.join()
        message = f"{worker.name} died without a message, exit code {worker.exitcode}"
        raise WorkerError(message) from None
    if isinstance(result, str):
        raise WorkerError(f"{worker.name} failed:\n{result}")
    if isinstance(result, ValueError):
        raise result
    return result


def _work(recipe: Recipe, task: TaskSpec, seed: np.random.SeedSequence, writer: Any) -> None:
    """Body of a worker: sends episodes, or at last a ValueError, or a traceback as text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
    torch.set_num_threads(1)
    quiet_simulator()
    try:
        for episode in recipe(task, np.random.default_rng(seed)):
            writer.send(episode)
    except BrokenPipeError:
        pass  # the parent is gone
    except ValueError as error:  # the user's to mend, as everywhere
        writer.send(ValueError(str(error)))
    except Exception:
        writer.send(traceback.format_exc())
