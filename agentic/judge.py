"""Judging a checkpoint: trials in context beside all that they must be compared with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agentic import results
from agentic import video as videos
from agentic.checkpoint import load, restore_model
from agentic.config import RolloutConfig, TrainConfig
from agentic.curves import write_curves
from agentic.evaluator import EVALUATION, random_returns, rollout, rollout_reset, trial_seeds
from agentic.runs import choose_device
from agentic.strict import build
from agentic.table import print_table
from envs import TaskSpec, expand

RANDOM_EPISODES = 16


def judge(
    path: Path,
    *,
    specs: tuple[TaskSpec, ...] | None,
    config: RolloutConfig,
    seed: int,
    device: str,
    output: Path,
    video: bool,
    console: Console,
) -> list[dict[str, Any]]:
    """Evaluates the checkpoint at `path`, writes `output`/results.json and prints the table.

    Args:
        path: checkpoint file.
        specs: the tasks; None for all that the checkpoint knows.
        config: contexts, trials and target.
        seed: of the environments; other seeds than the ones that chose the checkpoint.
        device: auto | cpu | cuda.
        output: existing directory.
        video: also write `output`/videos/<task>.mp4.
        console: to print on.

    Raises:
        ValueError: the checkpoint is of another task.
    """
    state = load(path)
    model = restore_model(state, choose_device(device))
    known = model.spec.tasks
    if specs is None:
        specs = tuple(spec for name in known for spec in expand(name))
    for spec in specs:
        if spec.name not in known:
            raise ValueError(
                f"task: got {spec.name!r}, expected one of the checkpoint's: {list(known)}"
            )
    if video:
        videos.check(specs[0])
    seeds = trial_seeds(seed, EVALUATION, config.contexts, config.trials)
    cache = sum(
        c.nbytes for c in model.caches(config.contexts, config.trials * specs[0].episode_steps)
    )
    console.print(
        f"evaluating step {state['step']}: {config.contexts} contexts of {config.trials} trials, "
        f"key/value cache {cache / 2**20:.0f} MiB"
    )
    if config.trials > model.spec.trajectories:
        console.print(
            f"note: {config.trials} trials in a context, trained with {model.spec.trajectories}"
        )
    trained = state["config"]
    about = {
        "checkpoint": str(path),
        "checkpoint_step": state["step"],
        "method": trained["method"],
        "layout": trained["tokens"]["layout"],
        "layer": trained["layer"]["kind"],
        "train_trajectories": trained["chain"]["trajectories"],
        "train_seed": trained["seed"],
        "relabel_mode": build(TrainConfig, trained).data.relabel,
    }
    entries, films = [], []
    for spec in specs:
        dataset = state["data"]["quantiles"][known.index(spec.name)]
        target = config.target * dataset["max"]
        kept = rollout(model, spec, target=target, seeds=seeds, progress=True)
        entries.append(
            results.task_result(
                about=about,
                task=spec.name,
                target={"asked": f"{config.target:g}x", "return": target},
                kept=kept,
                reset=rollout_reset(model, spec, target=target, seeds=seeds),
                random=random_returns(spec, episodes=RANDOM_EPISODES, seed=seed),
                dataset=dataset,
                dataset_returns=None,
            )
        )
        films.append((spec, kept))
    results.write(output / "results.json", results.document(entries, {"evaluation_seed": seed}))
    print_table(entries, results.summarise(entries), console)
    write_curves(entries, output)
    console.print(f"every trial's return: {output / 'results.json'}", soft_wrap=True)
    if video:
        for spec, kept in films:
            kept = replace(kept, actions=kept.actions[None])
            videos.film(spec, kept, output / "videos", which=("first", "last"), side_by_side=False)
    return entries
