"""What an optimiser step is made of: learning rate, loss, gradients of all processes."""

import math
import signal
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from agentic.config import TrainConfig
from agentic.cube_model import CubeTransformer
from agentic.interrupt import Interrupt
from agentic.model import InUnits
from agentic.stream import ChainStream
from agentic.tokens import Steps
from parallel.collectives import all_reduce
from parallel.mesh import CUBE, CubeMesh


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to `final_fraction`; for the update that makes step + 1."""
    optimizer = config.optimizer
    warm = min(1.0, (step + 1) / max(1, optimizer.warmup_steps))
    past = max(0, step - optimizer.warmup_steps) / max(1, config.steps - optimizer.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * past))
    floor = optimizer.final_fraction
    return optimizer.learning_rate * warm * (floor + (1 - floor) * cosine)


class Imitation(nn.Module):
    """A model's loss as a module of its own, which is what DistributedDataParallel wraps."""

    def __init__(self, model: InUnits, precision: str) -> None:
        super().__init__()
        self.model = model
        self._half = precision == "bf16"

    def forward(self, steps: Steps, weight_BL: Tensor) -> Tensor:
        """The loss, or this process's share of it in a cube, of steps on any device."""
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._half):
            return self.model.loss(steps.to(device), weight_BL.to(device))


def seed_micro_batch(seed: int, index: int) -> None:
    """Makes what micro-batch `index` draws its own, whoever takes it and however often resumed."""
    drawn = np.random.SeedSequence([seed, index]).generate_state(1)
    torch.manual_seed(int(drawn[0]))


def accumulate(
    learner: nn.Module,
    model: InUnits,
    stream: ChainStream,
    config: TrainConfig,
    mesh: CubeMesh,
    asked: Callable[[], signal.Signals | None],
) -> tuple[float, float] | None:
    """Adds up the gradients of a step's micro-batches.

    Args:
        learner: an `Imitation` of the model, or one that averages the gradients of its copies.
        model: what learns.
        stream: the micro-batches.
        config: the run's settings.
        mesh: the processes.
        asked: the signal to end that any of them has got.

    Returns:
        The mean loss and the number of tokens, of all processes; None where they were asked to end
        between two micro-batches: some of the gradients are there, and some have been taken.
    """
    copies = mesh.sizes["dp"]
    count = config.optimizer.accumulate // copies
    sums = torch.zeros(2, dtype=torch.float64, device=model.device)  # loss, tokens
    for k in range(count):
        if k > 0 and asked() is not None:
            return None
        seed_micro_batch(config.seed, stream.position + mesh.place["dp"])
        steps, weight_BL = next(stream)
        # Gradients of copies are averaged once, with the last micro-batch.
        last = k == count - 1 or not isinstance(learner, DistributedDataParallel)
        with nullcontext() if last else learner.no_sync():  # type: ignore[operator]
            loss = learner(steps, weight_BL) / count
            loss.backward()
        sums[0] += loss.detach()
        sums[1] += int(steps.valid.sum()) * model.spec.tokens_per_step
    sums[0] = all_reduce(sums[0], mesh, CUBE) / copies
    loss, tokens = all_reduce(sums, mesh, "dp").tolist()
    return loss, tokens


def clip_gradients(model: InUnits, most: float, mesh: CubeMesh) -> float:
    """Scales all gradients down to the common norm `most` where theirs is larger; their norm."""
    if not isinstance(model, CubeTransformer):
        return float(nn.utils.clip_grad_norm_(model.parameters(), most))
    squares = torch.zeros((), dtype=torch.float64, device=model.device)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            holders = mesh.sizes[CUBE] if model.cuts[name].x is None else 1
            squares += parameter.grad.double().square().sum() / holders
    norm = all_reduce(squares, mesh, CUBE).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return float(norm)


def ended(interrupt: Interrupt, mesh: CubeMesh, device: torch.device) -> signal.Signals | None:
    """The signal that any of the processes has got, for all of them in the same step."""
    if max(mesh.sizes.values()) == 1:
        return interrupt.signal
    kinds = (signal.SIGINT, signal.SIGTERM)
    got = torch.tensor([float(interrupt.signal == kind) for kind in kinds], device=device)
    counts = all_reduce(all_reduce(got, mesh, CUBE), mesh, "dp").tolist()
    return next((kind for kind, count in zip(kinds, counts, strict=True) if count), None)
