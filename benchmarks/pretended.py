"""A process group that sends nothing: one process counts what each of many would receive."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
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
