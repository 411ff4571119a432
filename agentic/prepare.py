"""The data of a training: collected where there are none, and the same in all processes."""

from pathlib import Path

from rich.console import Console

from agentic.collector import collect, print_worth, unfinished
from agentic.config import TrainConfig
from agentic.loading import load_store
from agentic.store import EpisodeStore
from envs import expand
from parallel.world import World


def prepare_data(config: TrainConfig, console: Console) -> EpisodeStore:
    """The task's episodes, collected first where the task's own recipe has none yet."""
    specs = expand(config.task.name)
    wanted, data_dir = config.task.collect, Path(config.data_dir)
    if config.algorithms is None and unfinished(wanted, data_dir):
        console.print(
            f"no finished data in {data_dir}/{specs[0].domain}/{wanted.recipe}: collecting with "
            f"{wanted.recipe}, at most {wanted.seconds:.0f} s or {wanted.episodes} episodes"
        )
        print_worth(collect(wanted, data_dir, config.seed), console)
    return open_data(config, console)


def open_data(config: TrainConfig, console: Console) -> EpisodeStore:
    """The task's episodes, which must be there."""
    algorithms = config.algorithms or (config.task.collect.recipe,)
    specs = expand(config.task.name)
    return load_store(config.data_dir, specs, algorithms, config.data, console.print)


def shared_data(
    config: TrainConfig, console: Console, world: World, *, begun: bool = False
) -> EpisodeStore:
    """The same episodes in all processes; the first one prepares them, however long it takes.

    Args:
        config: the run's settings.
        console: to print on.
        world: the processes.
        begun: whether the run has learned from its data already. No others are collected then.

    Raises:
        ValueError: there are none, or a process finds others than the first, as on a disk that they
            do not share.
    """
    stores: list[EpisodeStore] = []

    def prepare() -> list:
        stores.append((open_data if begun else prepare_data)(config, console))
        return [stores[0].episodes, stores[0].return_quantiles()]

    told = world.on_main(prepare)
    store = stores[0] if world.main else open_data(config, console)
    if [store.episodes, store.return_quantiles()] != told:
        raise ValueError(
            f"data_dir: got {store.episodes} episodes in {config.data_dir} on rank {world.rank}, "
            f"expected the {told[0]} of rank 0; their returns differ"
        )
    return store
