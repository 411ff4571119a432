"""agentic-collect: exploration episodes of a task's domain, in ExoRL's files."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from agentic.collect_config import CollectConfig, RndConfig, TaskConfig
from agentic.collector import collect, print_worth, worth
from agentic.config import MAX_SEED
from agentic.entry import going_on, run, same_command
from agentic.episodes import buffer_dir
from agentic.strict import build
from envs import expand, without_rendering


@dataclass(frozen=True, kw_only=True)
class CollectCommand:
    """Everything that `agentic-collect` is told; the task's own recipe is the default."""

    task: TaskConfig
    recipe: str
    reward_task: str
    episodes: int
    seconds: float
    workers: int
    rnd: RndConfig
    data_dir: str
    seed: int

    def __post_init__(self) -> None:
        (learned, *_), (asked, *_) = expand(self.reward_task), expand(self.task.name)
        if learned.domain != asked.domain:
            raise ValueError(
                f"reward_task: got {self.reward_task!r}, expected a task of {asked.domain}, as "
                f"task={asked.name}"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed: got {self.seed}, expected a value in [0, {MAX_SEED}]")


def command(values: dict[str, Any]) -> None:
    """Collects, and shows what the data are worth."""
    without_rendering()
    asked = build(CollectCommand, values)
    config = CollectConfig(**{f.name: getattr(asked, f.name) for f in fields(CollectConfig)})
    (spec,) = expand(config.reward_task)
    console = Console(markup=False, emoji=False)
    console.print(
        f"{config.recipe} on {spec.name} into "
        f"{buffer_dir(Path(asked.data_dir), spec.domain, config.recipe)}, "
        f"until {config.episodes} episodes or {config.seconds:.0f} seconds"
    )
    with going_on(same_command("agentic-collect")):
        try:
            returns = collect(config, Path(asked.data_dir), asked.seed)
        except KeyboardInterrupt:
            print_worth(worth(config, Path(asked.data_dir)), console)
            raise
    print_worth(returns, console)


def main() -> None:
    """The console script."""
    run("agentic-collect", "collect", command)


if __name__ == "__main__":
    main()
