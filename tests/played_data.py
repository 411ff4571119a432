"""Real episodes of the simulator, in ExoRL's files."""

from pathlib import Path

from agentic.collect_config import CollectConfig
from agentic.collector import collect


def play(data_dir: Path, task: str, episodes: int, seed: int = 0) -> Path:
    """Random episodes of `task` in `data_dir`'s algorithm `random`. Returns `data_dir`."""
    config = CollectConfig(
        recipe="random", reward_task=task, episodes=episodes, seconds=60, workers=0
    )
    collect(config, data_dir, seed)
    return data_dir
