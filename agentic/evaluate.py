"""agentic-evaluate: checkpoints act in the simulator, trial after trial in one context."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from agentic.checkpoint import FOLDER, find
from agentic.config import EvaluateConfig
from agentic.entry import going_on, run, same_command
from agentic.journal import continues
from agentic.judge import RESULTS, Case, case_of, check, judge, settings
from agentic.protocol import RolloutConfig
from agentic.runs import fresh_dir
from agentic.strict import build
from envs import expand, without_rendering


def command(values: dict[str, Any]) -> None:
    """Evaluates and writes results.json."""
    config = build(EvaluateConfig, values)
    if not config.video:
        without_rendering()
    rollout = RolloutConfig(**{f.name: getattr(config, f.name) for f in fields(RolloutConfig)})
    specs = None if config.task is None else expand(config.task.name)
    cases = [
        case_of(find(Path(place)), specs, rollout, config.seed, config.device)
        for place in config.checkpoints
    ]
    _check_different(cases)
    check(cases, config.video)
    console, wanted = Console(markup=False, emoji=False), settings(cases)
    if config.output is None:
        output = _beside(cases[0].path, config.seed, wanted, console)
    else:
        output = Path(config.output)
        # Killed right after it had written them, it is still to be tidied up.
        if (output / RESULTS).exists() and not continues(output, wanted):
            raise ValueError(f"output: {output} has a {RESULTS} already, expected a new folder")
        output.mkdir(parents=True, exist_ok=True)
    with going_on(same_command("agentic-evaluate")):
        judge(
            cases,
            output=output,
            console=console,
            video=config.video,
            side_by_side=config.side_by_side,
        )


def _check_different(cases: Sequence[Case]) -> None:
    """A model that is judged twice says nothing about training seeds."""
    found: dict[str, Path] = {}
    for case in cases:
        if case.digest in found:
            raise ValueError(
                f"checkpoint: got {found[case.digest]} and {case.path}, which are the same, "
                "expected different ones"
            )
        found[case.digest] = case.path


def _beside(path: Path, seed: int, wanted: dict[str, Any], console: Console) -> Path:
    """An unfinished evaluation of the same near the checkpoint, or a new folder for one."""
    in_run = path.parent.name == FOLDER
    place = (path.parent.parent if in_run else path.parent) / "evaluations"
    for folder in sorted(place.glob("*/")):
        if continues(folder, wanted):
            console.print(f"going on with {folder}", soft_wrap=True)
            return folder
    return fresh_dir(place, f"seed{seed}")


def main() -> None:
    """The console script."""
    run("agentic-evaluate", "evaluate", command)


if __name__ == "__main__":
    main()
