"""Memory of a process that reads chains, measured where nothing else runs."""

import os
from pathlib import Path

import numpy as np

from agentic import store
from agentic.config import ChainConfig
from agentic.flat import FlatStore, store_path
from agentic.loading import part_of
from agentic.sampler import ChainSampler
from agentic.stream import ChainStream
from envs import TASKS


def resident_bytes(data_dir: Path, config: ChainConfig) -> tuple[int, list[int]]:
    """Bytes of the store `noise`, and of the process after every 50 of 1,000 micro-batches."""
    store.HELD_BYTES = 2**24
    spec = TASKS["walker_walk"]
    flat = FlatStore.open(store_path(data_dir, spec.domain, "noise"), spec)
    part = part_of(flat, np.arange(len(flat.rows)), (spec,), "with_control")
    noise = store.EpisodeStore((spec,), (part,))
    every = np.arange(noise.episodes)
    sampler = ChainSampler(noise, every, config, batch_steps=3000, seed=0)
    stream = ChainStream(sampler, threads=4)
    resident = []
    for i in range(1000):
        next(stream)
        if i % 50 == 49:
            with open("/proc/self/statm") as file:
                resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    stream.close()
    return noise.nbytes, resident
