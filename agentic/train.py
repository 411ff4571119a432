"""agentic-train: data where missing, training, and trials of the best checkpoint."""

import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from agentic import checkpoint
from agentic.budget import budget_of
from agentic.config import TrainConfig
from agentic.entry import going_on, run
from agentic.judge import case_of, judge
from agentic.memory import planned
from agentic.methods import fresh_model
from agentic.metrics import MetricLog
from agentic.model import InUnits, ModelSpec
from agentic.prepare import shared_data
from agentic.runs import choose_device, config_text, model_spec, open_run, print_start, settings
from agentic.spread import mesh_of, print_plan, sides_of
from agentic.store import EpisodeStore, split
from agentic.trainer import Trainer
from agentic.wording import spell_setting
from envs import expand, without_rendering
from parallel.mesh import CubeMesh
from parallel.world import World, processes


def build_model(spec: ModelSpec, store: EpisodeStore) -> InUnits:
    """A fresh model in the units of the data."""
    model = fresh_model(spec)
    mean, std = store.observation_units
    model.set_units(observation_mean=mean, observation_std=std, return_scale=store.return_scale())
    return model


def command(values: dict[str, Any]) -> None:
    """Trains, or goes on training, then evaluates; the first of several processes does the rest."""
    without_rendering()
    config = settings(values, HydraConfig.get().overrides.task)
    sides = sides_of(config, processes())  # what does not fit is refused before processes meet
    device = choose_device(config.device)
    world = World.start(device.type, timeout=config.parallel.timeout)
    mesh = mesh_of(config, sides, device, world)  # while all are here
    console = Console(markup=False, emoji=False, quiet=not world.main)
    print_plan(config, sides, console)
    with ExitStack() as held:
        folder, resumed = world.on_main(lambda: open_run(config, held))
        command_line = "agentic-train"
        if world.size > 1:
            command_line = f"torchrun --nproc-per-node {world.local_size} -m agentic.train"
        again = f"{command_line} {spell_setting('resume', folder)}"
        with going_on(again):
            ended_by = train(config, Path(folder), resumed, world, mesh, console, again)
            if ended_by is None and world.main:
                best = checkpoint.find(Path(folder))
                specs = expand(config.task.name)
                case = case_of(best, specs, config.evaluation, config.seed, config.device)
                judge([case], output=Path(folder), console=console)
    if ended_by is not None:
        sys.exit(128 + ended_by)


def train(
    config: TrainConfig,
    run_dir: Path,
    resumed: bool,
    world: World,
    mesh: CubeMesh,
    console: Console,
    again: str,
) -> Signals | None:
    """Prepares the data and trains; returns the signal that ended it earlier, if one did.

    Args:
        config: the settings.
        run_dir: the run's folder.
        resumed: whether it goes on from a checkpoint there.
        world: the processes.
        mesh: how they share the work.
        console: to print on.
        again: the command line that goes on with it.
    """
    store = shared_data(config, console, world, begun=resumed)
    training, held_out = split(store, config.holdout)
    if not config.chain.fits(len(held_out)):  # too few for a chain: all train, none validates
        training, held_out = split(store, 0.0)
    spec, device = model_spec(config, store), choose_device(config.device)
    budget = budget_of(config, spec, store, device)
    if budget is not None:
        budget.check()
    with planned(lambda: "of cloning there is no plan" if budget is None else budget.advice()):
        torch.manual_seed(config.seed)
        model = build_model(spec, store).to(device)
        trainer = Trainer(config, model, store, training, held_out, run_dir, world=world, mesh=mesh)
        print_start(config, run_dir, trainer, budget, console)
        if resumed:
            console.print(f"resuming from {trainer.resume()}")
        told = config_text(config)
        log = MetricLog(run_dir, trainer.step, told, lines=trainer.logged) if world.main else None
        with log or nullcontext():
            ended_by = trainer.train(log)
    world.close()
    if ended_by is not None:
        told = f"{ended_by.name}: step {trainer.step} of {config.steps} saved"
        console.print(f"{told}; go on with {again}", soft_wrap=True)
    return ended_by


def main() -> None:
    """The console script."""
    run("agentic-train", "train", command, spread=True)


if __name__ == "__main__":
    main()
