"""Many processes on one machine: real ones, or one that pretends to be one of many."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended(world: int, rank: int = 0) -> Iterator[None]:
    """This process as one of `world`; what it receives is whatever was in the memory.

    Nothing that is computed means anything, so that tensors may as well be on the device "meta".
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in every process of a group; their answers, which JSON can hold."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(["benchmarks.tensor_parallel"])  # imported once
        torch.multiprocessing.start_processes(
            _rank, (function, world, folder, arguments), nprocs=world, start_method="forkserver"
        )
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]


def _rank(
    rank: int, function: Callable[..., Any], world: int, folder: str, arguments: tuple
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        Path(folder, str(rank)).write_text(json.dumps(function(*arguments)))
    finally:
        dist.destroy_process_group()


def loopback_bytes() -> int:
    """Bytes that all processes of this machine have sent each other, as the system counts them."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))
