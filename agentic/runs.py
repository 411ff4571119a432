"""Run directories: one per run, never shared; its settings; its start-up table."""

import itertools
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from agentic import checkpoint, migrations
from agentic.budget import VARIANTS, Budget, gib
from agentic.config import TrainConfig
from agentic.episodes import sweep, write_atomically
from agentic.interpolation import check_values
from agentic.locks import LOCK, locked
from agentic.model import ModelSpec
from agentic.scale import ParallelConfig
from agentic.store import EpisodeStore
from agentic.strict import build
from agentic.texts import read_yaml
from agentic.trainer import Trainer
from agentic.within import within
from agentic.wording import spell_setting
from parallel.kernels import kernel_for
from parallel.mesh import CUBE

CONFIG_FILE = "config.yaml"
# Short names on the command line, which hydra has put where they belong; no settings of their own.
SHORT = ("trajectories", "chains", "trials")


def fresh_dir(parent: Path, name: str) -> Path:
    """Makes `<parent>/<date-time>-<name>`, with a number behind it where that is taken.

    Raises:
        ValueError: it cannot be written.
    """
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for count in itertools.count(1):
        path = parent / (stem if count == 1 else f"{stem}-{count}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run in the same second
            continue
        except OSError as error:
            raise ValueError(f"run_dir: cannot make {path} ({error.strerror})") from error
        return path
    raise AssertionError("unreachable")


def settings(values: dict[str, Any], overridden: list[str]) -> TrainConfig:
    """The settings of a new run, or of the one to go on with; touches no file but that one's.

    Args:
        values: the composed settings.
        overridden: what the command line says, as it says it.

    Raises:
        ValueError: a setting is off. A resumed run takes its own, and may only be spread otherwise.
    """
    if values.get("resume") is None:
        config = build(TrainConfig, {k: v for k, v in values.items() if k not in SHORT})
        # A run may be resumed from another working directory.
        config = replace(config, data_dir=str(Path(config.data_dir).absolute()))
        if config.data.store_dir is not None:
            store_dir = str(Path(config.data.store_dir).absolute())
            config = replace(config, data=replace(config.data, store_dir=store_dir))
        return config
    spread = [name for name in overridden if name.startswith("parallel")]
    others = [name for name in overridden if name not in spread and not name.startswith("resume=")]
    if others:
        raise ValueError(
            f"resume: goes on with the run's own settings, got also {others}, expected none but "
            "parallel"
        )
    config = replace(read_config(Path(str(values["resume"]))), resume=str(values["resume"]))
    if spread:
        given = values["parallel"]
        if not any(name.startswith("parallel=") for name in spread):  # some settings of its kind
            names = [name.partition("=")[0].removeprefix("parallel.") for name in spread]
            given = asdict(config.parallel) | {name: given[name] for name in names}
        config = replace(config, parallel=build(ParallelConfig, given, "parallel"))
    return config


def open_run(config: TrainConfig, held: ExitStack) -> tuple[str, bool]:
    """The directory of a new run, or of the one to go on with, and whether it is resumed.

    `resume=<run dir>` goes on with that run; the same `run_dir` with the same settings as well.

    Args:
        config: the run's settings.
        held: keeps other processes out of the directory until it is closed.

    Raises:
        ValueError: a directory cannot be used, is in use, or holds another run.
    """
    if config.resume is not None:
        run_dir = Path(config.resume)
    elif config.run_dir is None:
        run_dir = fresh_dir(Path("runs"), config.task.name)
    else:
        run_dir = Path(config.run_dir)
        if _foreign(run_dir):
            raise ValueError(f"run_dir: {run_dir} holds other files, expected a new or empty one")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run_dir: cannot make {run_dir} ({error.strerror})") from error
    if not os.access(run_dir, os.W_OK):
        raise ValueError(f"run_dir: {run_dir} is not writable")
    setting = "run_dir" if config.resume is None else "resume"
    checkpoints = within(run_dir / checkpoint.FOLDER, run_dir, setting)
    checkpoints.mkdir(exist_ok=True)
    # Not the run's own folder: that is held by an evaluation into it, as the one at the end.
    alone = held.enter_context(locked(checkpoints, partial(_in_use, run_dir)))
    if alone:
        sweep(run_dir, CONFIG_FILE)
        checkpoint.sweep(run_dir)
    resumed = bool(checkpoint.step_files(run_dir))
    if config.resume is not None:
        return str(run_dir), resumed
    if config.run_dir is not None and _begun(run_dir):
        before = read_config(run_dir)
        if before.learning != config.learning or before.data_dir != config.data_dir:
            raise ValueError(
                f"run_dir: {run_dir} holds a run with other settings, expected a new folder, "
                f"or {spell_setting('resume', str(run_dir))} alone to go on with it"
            )
        return str(run_dir), resumed
    write_atomically(run_dir / CONFIG_FILE, config_text(config).encode())
    return str(run_dir), False


def _in_use(run_dir: Path) -> None:
    raise ValueError(
        f"run_dir: {run_dir} is in use by another process that trains there; expected one at a time"
    )


def _foreign(run_dir: Path) -> bool:
    """Whether a folder holds something and no run; one killed at its very start is a run."""
    if not run_dir.is_dir() or (run_dir / CONFIG_FILE).is_file():
        return False
    others = [p.name for p in run_dir.iterdir() if not p.name.startswith(f".{CONFIG_FILE}.")]
    return bool(others) and (others != [checkpoint.FOLDER] or _filled(run_dir))


def _begun(run_dir: Path) -> bool:
    """Whether there is a run that came as far as its first step; one refused before did not."""
    if not (run_dir / CONFIG_FILE).is_file():
        return False
    others = [p for p in run_dir.iterdir() if p.name not in (CONFIG_FILE, checkpoint.FOLDER)]
    return bool(others) or _filled(run_dir)


def _filled(run_dir: Path) -> bool:
    """Whether there is anything beside the lock in its folder of checkpoints."""
    folder = run_dir / checkpoint.FOLDER
    return not folder.is_dir() or any(p.name != LOCK for p in folder.iterdir())


def config_text(config: TrainConfig) -> str:
    """The resolved settings as yaml; loading them again gives the same settings."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False)


def read_config(run_dir: Path) -> TrainConfig:
    """The settings of an existing run, those of an older version's in today's form.

    Raises:
        ValueError: there are none, or they are damaged.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"resume: got {run_dir}, expected a run directory with {CONFIG_FILE}")
    try:
        values = read_yaml(path)
        check_values(values)
    except ValueError as error:
        raise ValueError(f"resume: {path} is not what a run writes ({error})") from error
    try:
        return build(TrainConfig, migrations.settings(values)[0])
    except ValueError as error:
        raise ValueError(f"resume: {path} is damaged: {error}") from error


def model_spec(config: TrainConfig, store: EpisodeStore) -> ModelSpec:
    """The model that the settings ask for on these data."""
    return ModelSpec(
        tasks=tuple(spec.name for spec in store.specs),
        observation_size=store.observation_size,
        action_size=store.action_size,
        episode_steps=store.steps,
        trajectories=config.chain.trajectories,
        tokens=config.tokens,
        model=config.model,
        layer=config.layer,
        method=config.method,
        context_steps=config.context_steps,
    )


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one.

    Raises:
        ValueError: cuda is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got 'cuda', expected a device that is here: cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def print_start(
    config: TrainConfig,
    run_dir: Path,
    trainer: Trainer,
    budget: Budget | None,
    console: Console,
) -> None:
    """What will be trained, on what, and how much memory that will take."""
    store, model, trajectories = trainer.store, trainer.model, config.chain.trajectories
    steps, filled = trajectories * store.steps, config.batch_steps
    if config.context_steps is not None:
        steps, filled = config.context_steps, config.chain.window_batch
    sequences, sequence = max(1, filled // steps), steps * model.spec.tokens_per_step
    table = Table(title=str(run_dir), show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    table.add_row("data", f"{store.episodes:,} episodes of {store.steps} steps")
    for part in store.parts:
        table.add_row(f"data, {part.name}", part.summary)
    for spec, row in zip(store.specs, store.return_quantiles(), strict=True):
        spread = "  ".join(f"{name} {row[name]:.1f}" for name in ("min", "median", "p90", "max"))
        table.add_row(f"returns, {spec.name}", spread)
    held_out = f"{trainer.held_out} episodes held out"
    if trainer.validation is None:
        held_out = f"none: holdout={config.holdout} leaves fewer than {trajectories} episodes"
    table.add_row("validation", held_out)
    cloning = config.method == "bc"
    shown = "observations" if cloning else f"{config.tokens.layout} layout"
    table.add_row("model", f"{config.method}, {model.parameter_count():,} parameters, {shown}")
    if not cloning:
        table.add_row("layer", _layer(config, trainer, sequences, sequence))
    table.add_row(
        "observations per step" if cloning else "tokens per step",
        _tokens(config, model.spec, sequences, sequence),
    )
    table.add_row("windows", _windows(config, model.spec))
    if budget is None:
        table.add_row("memory, predicted", "none")
    elif config.parallel.cuts:
        told = f"of a process's share: none; in one process {gib(budget.plan().total)}"
        table.add_row("memory, predicted", f"{told} and what is beside the step")
    else:
        table.add_row("memory, predicted", _memory(budget))
        if config.context_steps is None:
            fitting = [
                f"{kind}{', recompute' if recompute else ''}: {budget.what_fits(kind, recompute)}"
                for kind, recompute in VARIANTS
            ]
            table.add_row("longest chain", "\n".join(fitting))
    table.add_row("device", f"{trainer.device}, {config.precision}")
    if trainer.world.size > 1:
        table.add_row("processes", _processes(config, trainer))
    console.print(table)


def _tokens(config: TrainConfig, spec: ModelSpec, sequences: int, sequence: int) -> str:
    """Tokens of an optimiser step: of whole chains, where there are any, or of windows."""
    accumulate, chain = config.optimizer.accumulate, config.chain
    if config.context_steps is None and chain.window_share == 1:
        most = max(chain.window_steps, chain.window_batch) * spec.tokens_per_step
        return f"up to {most * accumulate:,}, in windows (accumulated {accumulate} times)"
    tokens = sequences * sequence * accumulate
    return f"{tokens:,} ({sequences} x {sequence:,}, accumulated {accumulate} times)"


def _windows(config: TrainConfig, spec: ModelSpec) -> str:
    """Which micro-batches are windows, and of what length."""
    chain = config.chain
    if config.context_steps is not None:
        drawn = "" if chain.top == 1 else f" of the best {chain.top:.0%} of the episodes"
        return f"all, of {config.context_steps} environment steps{drawn}"
    return (
        f"{chain.window_share:.0%} of the micro-batches, of up to "
        f"{chain.window_steps * spec.tokens_per_step:,} tokens"
    )


def _processes(config: TrainConfig, trainer: Trainer) -> str:
    """How many, and what each axis of them does."""
    mesh = trainer.mesh
    own = sum(parameter.numel() for parameter in trainer.model.parameters())
    told = [f"{trainer.world.size}: "]
    if mesh.sizes["dp"] > 1:
        told.append(f"{mesh.sizes['dp']} copies of the model, each with micro-batches of its own; ")
    if mesh.sizes[CUBE] > 1:
        told.append(f"cut {[mesh.sizes[axis] for axis in 'xyz']} along x, y, z; ")
    told.append(f"{own:,} parameters each")
    if mesh.sizes["x"] > 1:
        told.append(f"; keys along x: {config.parallel.keys}")
    return "".join(told)


def _layer(config: TrainConfig, trainer: Trainer, sequences: int, sequence: int) -> str:
    """The kind, what computes its attention, and its blocks where it has them."""
    size = trainer.model.spec.layer_size()
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    told = [config.layer.kind, f"recompute {config.layer.recompute}"]
    if config.layer.kind == "blockwise":
        told.append(f"{kernel_for(trainer.device, dtype, size.head_width).name} attention")
        blocks = trainer.model.spec.block_settings().sizes(
            size,
            batch=sequences,
            sequence=sequence,
            element_bytes=4,
            device=trainer.device,
        )
        told.append(f"blocks of {blocks.query} queries, {blocks.key} keys, {blocks.rows} rows")
    return ", ".join(told)


def _memory(budget: Budget) -> str:
    """The plan by kind, against what there is."""
    memory = budget.plan()
    return (
        f"{gib(budget.beside + memory.total)} of {gib(budget.machine)} at the peak of a step: "
        f"parameters {gib(memory.parameters)}, averaged {gib(memory.averaged)}, "
        f"optimizer {gib(memory.optimizer)}, gradients {gib(memory.gradients)}, "
        f"activations {gib(memory.activations)}, data {gib(budget.data)}, "
        f"process {gib(budget.beside - budget.data)}; in rollouts keys and values "
        f"{gib(budget.caches())}"
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, for yaml."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
