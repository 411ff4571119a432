"""Runs a function in several processes that form a group, as ranks of a run."""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "agentic.train"])


def _rank(function, rank, world, folder, answers, arguments):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        answers.send((True, function(rank, *arguments)))
    except BaseException:
        answers.send((False, traceback.format_exc()))
    finally:
        answers.close()
        dist.destroy_process_group()


def run_ranks(world, function, *arguments, timeout=120):
    """`function(rank, *arguments)` in `world` processes; their answers by rank.

    The function stands at the top of a module; arguments and answers are plain values or arrays.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ends, processes = [], []
        for rank in range(world):
            mine, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank, args=(function, rank, world, folder, theirs, arguments), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            ends.append(mine)
            processes.append(process)
        answers = []
        for rank, end in enumerate(ends):
            assert end.poll(timeout), f"rank {rank} has not answered in {timeout} s"
            try:
                answers.append(end.recv())
            except EOFError:
                answers.append((False, "died"))
        failed = [f"rank {rank}:\n{told}" for rank, (ok, told) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        for process in processes:
            process.join(timeout)
        return [answer for _, answer in answers]
