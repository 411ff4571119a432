"""From settings to processes: sides of the cube, checked before any process waits for another."""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from agentic.config import TrainConfig
from agentic.model import layer_size
from agentic.tokens import TOKENS_PER_STEP
from envs import expand
from parallel.cost import Candidate, Shape, misfits, plan_shape
from parallel.mesh import CubeMesh
from parallel.world import World


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Copies of the cube, and its shape.

    Attributes:
        dp: copies, on different micro-batches.
        shape: of the cube.
        candidates: what the planner chose the shape from, its choice first; empty: it was given.
    """

    dp: int
    shape: Shape
    candidates: tuple[Candidate, ...] = ()


def sides_of(config: TrainConfig, processes: int) -> Sides:
    """The sides that the settings mean for so many processes.

    Raises:
        ValueError: another number of processes is needed, or the model cannot be cut so.
    """
    dp, shape = config.parallel.sides(processes)
    accumulate = config.optimizer.accumulate
    if accumulate % dp:
        raise ValueError(
            f"optimizer.accumulate: got {accumulate} micro-batch(es) a step for {dp} copies of the "
            f"model, expected a multiple of {dp}: copies share them out"
        )
    size = layer_size(config.model)
    if shape is None:
        steps = config.chain.trajectories * expand(config.task.name)[0].episode_steps
        tokens = steps * TOKENS_PER_STEP[config.tokens.layout]
        candidates = plan_shape(
            processes // dp,
            size,
            layers=config.model.layers,
            batch=max(1, config.batch_steps // steps),
            tokens=tokens,
            unit=TOKENS_PER_STEP[config.tokens.layout],
            ring=config.parallel.keys == "ring",
            element_bytes=2 if config.precision == "bf16" else 4,
        )
        return Sides(dp=dp, shape=candidates[0].shape, candidates=tuple(candidates))
    wrong = misfits(Shape(*shape), size)
    if wrong:
        raise ValueError("; ".join(f"model.{told}" for told in wrong))
    return Sides(dp=dp, shape=Shape(*shape))


def mesh_of(config: TrainConfig, sides: Sides, device: torch.device, world: World) -> CubeMesh:
    """The processes as a mesh, when they have met."""
    x, y, z = sides.shape
    return CubeMesh(
        x, y, z, dp=sides.dp, device=device.type, timeout=config.parallel.timeout, world=world
    )


def print_plan(config: TrainConfig, sides: Sides, console: Console) -> None:
    """The table that the shape was chosen from; or that there is nothing to choose."""
    kind = config.parallel.kind
    if kind != "none" and sides.dp * sides.shape.processes == 1:
        console.print(
            f"parallel={kind}: one process, nothing is shared out; more are started with "
            "torchrun --nproc-per-node P -m agentic.train ..."
        )
    if len(sides.candidates) < 2:
        return
    table = Table(title="parallel.shape=auto: received by a process, per layer and step")
    for column in sides.candidates[0].row():
        table.add_column(column, justify="right")
    for candidate in sides.candidates:
        table.add_row(*candidate.row().values())
    console.print(table)
