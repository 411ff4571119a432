"""agentic-evaluate: a checkpoint acts in the simulator, trial after trial in one context."""

from pathlib import Path
from typing import Any

from rich.console import Console

from agentic.checkpoint import find, load
from agentic.config import EvaluateConfig
from agentic.entry import run
from agentic.judge import judge
from agentic.runs import fresh_dir
from agentic.strict import build
from envs import expand


def command(values: dict[str, Any]) -> None:
    """Evaluates and writes results.json."""
    config = build(EvaluateConfig, values)
    path = find(Path(config.checkpoint))
    if not path.is_file():
        raise ValueError(f"checkpoint: got {path}, expected a checkpoint file or run directory")
    load(path)  # before anything is written
    if config.output is None:
        in_run = path.parent.name == "checkpoints"
        place = path.parent.parent if in_run else path.parent
        output = fresh_dir(place / "evaluations", f"seed{config.seed}")
    else:
        output = Path(config.output)
        if (output / "results.json").exists():
            raise ValueError(f"output: {output} has a results.json already, expected a new folder")
        output.mkdir(parents=True, exist_ok=True)
    judge(
        path,
        specs=None if config.task is None else expand(config.task.name),
        config=config.rollout,
        seed=config.seed,
        device=config.device,
        output=output,
        video=config.video,
        console=Console(markup=False),
    )


def main() -> None:
    """The console script."""
    run("agentic-evaluate", "evaluate", command)


if __name__ == "__main__":
    main()
