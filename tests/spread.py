"""A small training over processes, for tests of what all of them do alike."""

import dataclasses

import numpy as np
import torch
from conftest import make_model, make_store
from training import make_config

from agentic.scale import ParallelConfig
from agentic.tokens import Steps
from agentic.trainer import Trainer
from parallel.mesh import CubeMesh
from parallel.world import World

CASES = {  # copies, (x, y, z), keys
    "serial": (1, (1, 1, 1), "gather"),
    "data": (2, (1, 1, 1), "gather"),
    "x": (1, (2, 1, 1), "gather"),
    "y": (1, (1, 2, 1), "gather"),
    "z": (1, (1, 1, 2), "gather"),
    "ring": (1, (2, 1, 1), "ring"),
    "cube": (1, (2, 2, 2), "gather"),
    "data x ring": (2, (2, 1, 1), "ring"),
    "data x cube": (2, (1, 2, 1), "gather"),
    "wide": (1, (4, 1, 1), "ring"),
}


def spread_size(case):
    """How many processes a case has."""
    copies, (x, y, z), _ = CASES[case]
    return copies * x * y * z


class Wide:
    """A stream in double precision, that tells which micro-batches it has made."""

    def __init__(self, stream):
        self._stream, self.taken = stream, []
        self.load_state_dict, self.state_dict = stream.load_state_dict, stream.state_dict
        self.close, self.sampler = stream.close, stream.sampler

    @property
    def position(self):
        return self._stream.position

    def __next__(self):
        self.taken.append(self._stream.position + self._stream._rank)
        return _widened(*next(self._stream))


def _widened(steps, weight_BL):
    fields = {name: getattr(steps, name) for name in Steps.__dataclass_fields__}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in fields.items()}
    return Steps(**wide), weight_BL.double()


def spread_trainer(case, run_dir, steps, dtype=torch.float64, **changes):
    """A trainer of this process; of several, in their group."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    copies, (x, y, z), keys = CASES[case]
    model = make_model(
        kind="blockwise", past_action="dropout", trajectories=2, layer_dropout=0.2, width=16
    ).to(dtype)
    config = make_config(model, steps=steps, **changes)
    config = dataclasses.replace(config, parallel=ParallelConfig(kind="cube", keys=keys))
    size = spread_size(case)
    rank = torch.distributed.get_rank() if size > 1 else 0
    store = torch.distributed.FileStore(str(run_dir / "meeting"), size) if size > 1 else None
    world = World(store, rank, size)
    mesh = CubeMesh(x, y, z, dp=copies, world=world)
    data = make_store([float(r) for r in range(10)], steps=5)
    trainer = Trainer(
        config, model, data, np.arange(8), np.arange(8, 10), run_dir, world=world, mesh=mesh
    )
    if dtype == torch.float64:
        trainer.stream = Wide(trainer.stream)
        batch = trainer.validation.batch
        trainer.validation.batch = lambda index: _widened(*batch(index))
    return trainer
