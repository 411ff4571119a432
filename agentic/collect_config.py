"""Settings of collecting, and of a task, which says how its data are made."""

import dataclasses
from dataclasses import dataclass
from importlib import resources

import yaml

from agentic.strict import at_least, between, build
from envs import expand


@dataclass(frozen=True, kw_only=True)
class RndConfig:
    """Sizes and rates of the recipe rnd; values in configs/rnd/."""

    environments: int  # played in lockstep
    seed_steps: int  # environment steps of uniform actions before learning
    hidden: int  # width of actor and critics
    novelty_hidden: int  # width of predictor and random target
    novelty_size: int  # their outputs
    batch: int
    updates_per_step: float  # per environment step
    learning_rate: float
    gamma: float
    n_steps: int  # between an observation and the one whose value is bootstrapped from
    tau: float  # target update rate
    noise: float  # standard deviation of the truncated normal around the actor's mean
    noise_clip: float  # of the noise in updates
    replay_capacity: int  # transitions

    def __post_init__(self) -> None:
        for name in ("environments", "hidden", "novelty_hidden", "novelty_size"):
            at_least(f"rnd.{name}", getattr(self, name), 1, 10**5)
        at_least("rnd.seed_steps", self.seed_steps, 0)
        at_least("rnd.batch", self.batch, 2, 10**6)  # one observation has no variance
        at_least("rnd.updates_per_step", self.updates_per_step, 0, 1000)
        if not self.learning_rate > 0:
            raise ValueError(f"rnd.learning_rate: got {self.learning_rate}, expected above 0")
        between("rnd.gamma", self.gamma, 0, 1)
        between("rnd.n_steps", self.n_steps, 1, 250)  # the shortest episodes
        between("rnd.tau", self.tau, 0, 1)
        at_least("rnd.noise", self.noise, 0)
        at_least("rnd.noise_clip", self.noise_clip, 0)
        between("rnd.replay_capacity", self.replay_capacity, 1000, 10**8)  # the longest episodes
        between("rnd.environments", self.environments, 1, 1000)


def small_rnd() -> RndConfig:
    """What configs/rnd/small.yaml says: the recipe where nothing else has been asked for."""
    text = (resources.files("configs") / "rnd" / "small.yaml").read_text()
    return build(RndConfig, yaml.safe_load(text), "rnd")


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What to explore, and for how long; whichever limit is reached first ends it."""

    recipe: str  # td3 | rnd | babble | random
    reward_task: str  # the task whose reward is stored and, for td3, learned
    episodes: int
    seconds: float
    workers: int  # exploring processes, each a learner of its own; 0 explores in this process
    rnd: RndConfig = dataclasses.field(default_factory=small_rnd)

    def __post_init__(self) -> None:
        at_least("episodes", self.episodes, 1)
        at_least("seconds", self.seconds, 0)
        at_least("workers", self.workers, 0, 1000)
        if len(expand(self.reward_task)) != 1:
            raise ValueError(f"reward_task: got {self.reward_task!r}, expected one task")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A task and how its data are made where there are none."""

    name: str
    collect: CollectConfig

    def __post_init__(self) -> None:
        (learned,) = expand(self.collect.reward_task)
        if expand(self.name)[0].domain != learned.domain:
            raise ValueError(
                f"task.name: got {self.name!r}, expected a task of the domain {learned.domain!r} "
                f"as task.collect.reward_task={learned.name}; say task=<name> to change both"
            )
