"""The micro-batches of a training in their order: made ahead, shared out over ranks, resumable."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from agentic.sampler import ChainSampler
from agentic.tokens import Steps

Batch = tuple[Steps, torch.Tensor]
AHEAD = 2  # micro-batches that every thread keeps ready


class ChainStream:
    """Hands out a sampler's micro-batches, every one to one of the data-parallel ranks.

    Since micro-batch i is a function of the sampler's seed and i, their order depends neither on
    the number of threads nor on that of ranks, and `position` is all there is to save. Threads and
    not processes make batches ahead: gathering is numpy's, which lets other threads run meanwhile,
    and nothing is copied between processes.

    Args:
        sampler: makes the micro-batches.
        rank, ranks: this stream takes the micro-batches rank, rank + ranks, rank + 2 ranks ...
        threads: that make micro-batches ahead; 0 makes each when it is asked for.
    """

    def __init__(
        self, sampler: ChainSampler, *, rank: int = 0, ranks: int = 1, threads: int = 0
    ) -> None:
        assert 0 <= rank < ranks
        self.sampler = sampler
        self.position = 0  # micro-batches that all ranks together have taken
        self._rank, self._ranks = rank, ranks
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._ready: deque[Future[Batch]] = deque()

    def __iter__(self) -> "ChainStream":
        return self

    def __next__(self) -> Batch:
        """The next micro-batch of this rank: its steps, and which of them the loss counts."""
        index = self.position + self._rank
        self.position += self._ranks
        if not self._threads:
            return self.sampler.batch(index)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "chains")
        while len(self._ready) <= AHEAD * self._threads:
            ahead = index + len(self._ready) * self._ranks
            self._ready.append(self._pool.submit(self.sampler.batch, ahead))
        return self._ready.popleft().result()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; the same for all ranks."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was saved, with whatever number of ranks and threads."""
        self._drop()
        self.position = int(state["position"])

    def close(self) -> None:
        """Ends the threads, until there is more to do."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _drop(self) -> None:
        while self._ready:
            self._ready.pop().cancel()
