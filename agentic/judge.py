"""Judging checkpoints: trials in context beside all that they must be compared with."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from agentic import results
from agentic import video as videos
from agentic.budget import gib, machine_bytes
from agentic.checkpoint import load_with_digest, restore_model
from agentic.config import TrainConfig
from agentic.curves import write_curves
from agentic.episodes import sweep
from agentic.evaluator import (
    EVALUATION,
    Context,
    kept_trials,
    random_returns,
    reset_trials,
    trial_seeds,
)
from agentic.journal import Journal
from agentic.locks import locked
from agentic.memory import planned
from agentic.model import InUnits, ModelSpec
from agentic.protocol import RolloutConfig, spell, target_return
from agentic.runs import choose_device
from agentic.strict import build
from agentic.table import print_table
from envs import TaskSpec, expand

RANDOM_EPISODES = 16
RESULTS = "results.json"
ADVICE = (
    "agentic-evaluate with a smaller batch (contexts at once), a smaller remember or cache=bf16 "
    "needs less"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint that is to be judged, and how.

    Attributes:
        path: of the checkpoint, which may be replaced or removed meanwhile.
        state: what was read there.
        digest: SHA-256 of what was read there.
        specs: the tasks, of one domain.
        config: contexts, trials, targets and so on.
        seed: of the environments; other seeds than the ones that chose the checkpoint.
        device: auto | cpu | cuda.
    """

    path: Path
    state: dict[str, Any]
    digest: str
    specs: tuple[TaskSpec, ...]
    config: RolloutConfig
    seed: int
    device: str

    def settings(self) -> dict[str, Any]:
        """All that the returns depend on, in plain types."""
        config = asdict(self.config)
        del config["workers"]
        return {
            "checkpoint": self.digest,
            "tasks": [spec.name for spec in self.specs],
            "seed": self.seed,
            "device": str(choose_device(self.device)),
            "rollout": config,
        }


def case_of(
    path: Path,
    specs: tuple[TaskSpec, ...] | None,
    config: RolloutConfig,
    seed: int,
    device: str,
) -> Case:
    """Checks that the checkpoint can be judged so.

    Args:
        path: the checkpoint's file.
        specs: None for all tasks that it knows.
        config: contexts, trials, targets and so on.
        seed: of the environments.
        device: auto | cpu | cuda.

    Raises:
        ValueError: it is no checkpoint, is of another task, or its context does not fit.
    """
    state, digest = load_with_digest(path)
    known = state["spec"]["tasks"]
    if specs is None:
        specs = tuple(spec for name in known for spec in expand(name))
    for spec in specs:
        if spec.name not in known:
            raise ValueError(
                f"task: got {spec.name!r}, expected one of the checkpoint's: {list(known)}"
            )
    for name in known:
        for asked in config.targets:
            _target(state, name, asked)
    return Case(
        path=path,
        state=state,
        digest=digest,
        specs=specs,
        config=config,
        seed=seed,
        device=device,
    )


def settings(cases: Sequence[Case]) -> dict[str, Any]:
    """All that the results depend on, in plain types."""
    return {"cases": [case.settings() for case in cases]}


def check(cases: Sequence[Case], video: Sequence[str] = ()) -> None:
    """Refuses what `judge` cannot do here, before there is a folder for it.

    Raises:
        ValueError: the context's keys and values do not fit into memory, or films cannot be made.
    """
    if video:
        videos.check(cases[0].specs[0])
    for case in cases:
        size, there = _cache_bytes(case), machine_bytes(choose_device(case.device))
        if size > 0.9 * there:
            raise ValueError(
                f"batch: got {case.config.batch}, whose keys and values take {gib(size)}, expected "
                f"at most the {gib(there)} of this machine; fewer contexts at once, cache=bf16 or "
                "remember fit"
            )


def _cache_bytes(case: Case) -> int:
    """Keys and values of the contexts that are held at once."""
    spec, config = build(ModelSpec, case.state["spec"], "checkpoint.spec"), case.config
    return spec.cache_bytes(config.cached(len(case.specs) * len(config.targets)), config.cache)


def judge(
    cases: Sequence[Case],
    *,
    output: Path,
    console: Console,
    video: Sequence[str] = (),
    side_by_side: bool = False,
) -> None:
    """Evaluates, writes `output`/results.json, curves and films, and prints the table.

    What is finished when it is interrupted is kept in `output`, and taken from there again.

    Args:
        cases: of several training seeds, say.
        output: existing directory.
        console: to print on.
        video: which trials are filmed, see `agentic.video.film`.
        side_by_side: in one film.

    Raises:
        ValueError: `check` finds something, or `output` is in use or holds an unfinished
            evaluation of something else.
    """
    check(cases, video)
    entries: list[dict[str, Any]] = []
    with locked(output, partial(_in_use, output)) as alone:
        if alone:
            sweep(output, RESULTS)
        journal = Journal(output, settings(cases))
        try:
            for number, case in enumerate(cases):
                with planned(lambda: ADVICE):
                    entries += _judge(case, number, journal, output, console, video, side_by_side)
        except KeyboardInterrupt as error:
            error.add_note(f"finished trials are kept in {output}")
            raise
        write_curves(entries, output)
        results.write(output / RESULTS, results.document(entries, settings(cases)))
        journal.close()
    print_table(entries, results.summarise(entries), console)
    console.print(f"every trial's return: {output / RESULTS}", soft_wrap=True)


def _in_use(output: Path) -> None:
    raise ValueError(f"output: {output} is in use by another evaluation, expected one at a time")


def _judge(
    case: Case,
    number: int,
    journal: Journal,
    output: Path,
    console: Console,
    video: Sequence[str],
    side_by_side: bool,
) -> list[dict[str, Any]]:
    state, config, specs = case.state, case.config, case.specs
    model = restore_model(state, choose_device(case.device))
    seeds_CN = trial_seeds(case.seed, EVALUATION, config.contexts, config.trials)
    goals = [
        (spec, asked, _target(state, spec.name, asked))
        for spec in specs
        for asked in config.targets
    ]
    contexts = [
        Context(spec=spec, target=target, seeds=tuple(row))
        for spec, _, target in goals
        for row in seeds_CN.tolist()
    ]
    context = "reset" if model.spec.context_steps is not None else config.context
    _tell(case, model, context, len(contexts), console)
    kept = reset = None
    if context != "reset":
        name = f"{number:02d}_keep"
        kept = kept_trials(model, contexts, config, journal=journal, name=name, progress=True)
    if context != "keep":
        name = f"{number:02d}_reset"
        reset = reset_trials(model, contexts, config, journal=journal, name=name, progress=True)
    random = {
        spec.name: random_returns(spec, episodes=RANDOM_EPISODES, seed=case.seed) for spec in specs
    }
    entries = []
    for g, (spec, asked, target) in enumerate(goals):
        rows = slice(g * config.contexts, (g + 1) * config.contexts)
        entries.append(
            results.task_result(
                about=_about(case),
                task=spec.name,
                target={"asked": spell(asked), "return": target},
                kept=None if kept is None else kept[rows],
                reset=None if reset is None else reset[rows],
                random=random[spec.name],
                dataset=_quantiles(state, spec.name),
                dataset_returns=_returns(state, spec.name),
            )
        )
        shown = kept if kept is not None else reset
        if video and shown is not None:
            place = output / "videos" / f"{number:02d}_{spell(asked)}".replace(":", "-")
            for take in videos.film(
                spec, shown[rows], place, which=video, side_by_side=side_by_side
            ):
                console.print(
                    f"{take.path}: {take.choice} trial ({take.trial + 1} of context "
                    f"{take.context + 1})",
                    soft_wrap=True,
                )
    return entries


def _tell(
    case: Case,
    model: InUnits,
    context: str,
    contexts: int,
    console: Console,
) -> None:
    """What is going to run, and warnings."""
    config, spec = case.config, model.spec
    K = spec.context_steps
    seen = f"{config.held * spec.episode_steps * spec.tokens_per_step:,} tokens a context"
    if K is not None:
        seen = f"seeing the last {K} steps"
    ways = {"keep": "kept", "reset": "reset between trials", "both": "kept, then reset"}
    goals = contexts // config.contexts
    each = f" for each of {goals} tasks and targets" if goals > 1 else ""
    console.print(
        f"evaluating {case.path.name} (step {case.state['step']}): {config.contexts} context(s) "
        f"of {config.trials} trial(s){each}, {ways[context]}; {seen}, "
        f"keys and values {gib(_cache_bytes(case))} in {config.cache}",
        soft_wrap=True,
    )
    if context != config.context:
        console.print(
            f"context: got {config.context}, only reset is run: a policy that sees the last {K} "
            "steps keeps nothing between trials",
            soft_wrap=True,
        )
    for task in case.specs:
        for asked in config.targets:
            target = _target(case.state, task.name, asked)
            if target > task.max_return:
                console.print(
                    f"warning: target {spell(asked)} is a return of {target:,.1f}, more than an "
                    f"episode of {task.name} can earn ({task.max_return:,.0f})",
                    soft_wrap=True,
                )
    if context != "reset" and config.held > spec.trajectories:
        console.print(
            f"warning: a context holds up to {config.held} trials, trained with at most "
            f"{spec.trajectories} trajectories (remember={spec.trajectories} holds no more)",
            soft_wrap=True,
        )


def _about(case: Case) -> dict[str, Any]:
    """Which model, trained and judged how."""
    trained, config = case.state["config"], case.config
    learned = asdict(replace(build(TrainConfig, trained).learning, seed=0))
    del learned["optimizer"]["skip_limit"]  # changes nothing of what is learned
    return {
        "checkpoint": str(case.path),
        "checkpoint_step": case.state["step"],
        "method": trained["method"],
        "context_steps": learned["context_steps"],
        "layout": trained["tokens"]["layout"],
        "layer": trained["layer"]["kind"],
        "train_trajectories": trained["chain"]["trajectories"],
        "train_steps": trained["steps"],
        # Runs that differ in more than their seed are no sample of one experiment.
        "train_settings": hashlib.sha256(json.dumps(learned).encode()).hexdigest()[:12],
        "train_seed": trained["seed"],
        "evaluation_seed": case.seed,
        "relabel_mode": learned["data"]["relabel"],
        "stop": config.stop,
        "remember": config.remember,
        "cache": config.cache,
    }


def _target(state: dict[str, Any], task: str, asked: float | str) -> float:
    return target_return(asked, _quantiles(state, task), _returns(state, task))


def _quantiles(state: dict[str, Any], task: str) -> dict[str, float]:
    return state["data"]["quantiles"][list(state["spec"]["tasks"]).index(task)]


def _returns(state: dict[str, Any], task: str) -> np.ndarray | None:
    """All returns of the dataset; None in checkpoints from before they were kept there."""
    returns: torch.Tensor | None = state["data"]["returns"]
    return None if returns is None else returns[state["spec"]["tasks"].index(task)].numpy()
