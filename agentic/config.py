"""Settings: plain mappings (hydra's yaml) become frozen dataclasses once, at the entry."""

import dataclasses
import math
from dataclasses import dataclass

from agentic.collect_config import TaskConfig
from agentic.protocol import RolloutConfig
from agentic.scale import ParallelConfig
from agentic.strict import at_least, between, one_of
from envs import expand
from parallel import LAYERS

MAX_SEED = 2**63 - 1  # what torch takes
# Agentic Transformer; and its baselines: Decision Transformer, behaviour cloning
METHODS = ("at", "dt", "bc")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How episode files become arrays, and batches."""

    store_dir: str | None = None  # where ingested episodes go; none: beside the files
    on_bad_file: str = "error"  # a file that holds no sound episode: error | skip
    on_other_length: str = "skip"  # one whose name says another number of steps: error | skip
    relabel: str = "with_control"  # with_control: the simulator's reward; state_only: ExoRL's
    workers: int | None = None  # processes that ingest; none: one per core
    prefetch: int = 1  # threads that make batches ahead; 0: none

    def __post_init__(self) -> None:
        one_of("data.on_bad_file", self.on_bad_file, ("error", "skip"))
        one_of("data.on_other_length", self.on_other_length, ("error", "skip"))
        one_of("data.relabel", self.relabel, ("with_control", "state_only"))
        if self.workers is not None:
            at_least("data.workers", self.workers, 1, 10_000)
        at_least("data.prefetch", self.prefetch, 0, 1000)


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """How trajectories form a chain of hindsight."""

    trajectories: int  # N, the most trajectories in a chain
    count: str  # fixed: always N; uniform: n ~ U{1..N} for every micro-batch, windows or not
    window_share: float  # of the micro-batches: chains of windows, the others of whole trajectories
    window_steps: int  # environment steps in the longest chain of windows
    window_batch: int  # environment steps that chains of windows fill a micro-batch with
    best_from: float  # share of the episodes, by return, that a chain's best is drawn from
    spread: str  # full: the others come from all below the best; drawn: from a part, of drawn size
    loss_on: str  # last: the chain's best; top: and all that could be a chain's best; all
    top: float = 1.0  # share of the episodes, by return, that anything is drawn from
    weighting: str = "uniform"  # uniform; return: episodes by their return above the worst's
    replacement: bool = False  # whether a trajectory may come twice in a chain

    def __post_init__(self) -> None:
        at_least("chain.trajectories", self.trajectories, 1, 10**5)
        one_of("chain.count", self.count, ("fixed", "uniform"))
        at_least("chain.window_steps", self.window_steps, 1)
        at_least("chain.window_batch", self.window_batch, 1)
        between("chain.window_share", self.window_share, 0, 1)
        between("chain.best_from", self.best_from, 0, 1)
        between("chain.top", self.top, 0, 1)
        one_of("chain.spread", self.spread, ("full", "drawn"))
        one_of("chain.loss_on", self.loss_on, ("last", "top", "all"))
        one_of("chain.weighting", self.weighting, ("uniform", "return"))

    def best_of(self, episodes: int) -> int:
        """How many of so many episodes `top` leaves: the best of every task, at least one."""
        most = math.floor(round(episodes * self.top, 6))  # 0.7 of 10 are 7, not 6.9999
        return min(episodes, max(1, most))

    def fits(self, episodes: int) -> bool:
        """Whether so many episodes are enough for a chain."""
        return self.best_of(episodes) >= (1 if self.replacement else self.trajectories)


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """What the model is shown of every environment step."""

    layout: str  # interleaved: four tokens a step (R, s, a, r); step: one
    past_action: str  # keep | dropout | none
    past_reward: str  # keep | dropout | none
    dropout: float  # rate of `dropout` above, per token
    trajectory_embedding: bool  # a learned vector for the trajectory's place in the chain
    timestep_embedding: bool = True  # a learned vector for the step's number in its episode
    task_embedding: bool = True  # a learned vector for the task, where there are several

    def __post_init__(self) -> None:
        one_of("tokens.layout", self.layout, ("interleaved", "step"))
        one_of("tokens.past_action", self.past_action, ("keep", "dropout", "none"))
        one_of("tokens.past_reward", self.past_reward, ("keep", "dropout", "none"))
        between("tokens.dropout", self.dropout, 0, 1)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Which of the equivalent computations of a transformer layer runs."""

    kind: str  # see parallel.layers.LAYERS
    recompute: bool  # keep only the layer's input, compute the rest again in the backward pass
    block_query: int | None = None  # rows of a block of the kind blockwise; none: chosen
    block_key: int | None = None
    block_rows: int | None = None  # of the feed-forward

    def __post_init__(self) -> None:
        one_of("layer.kind", self.kind, tuple(LAYERS))
        for name in ("block_query", "block_key", "block_rows"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"layer.{name}", value, 1)
                if self.kind != "blockwise":
                    raise ValueError(
                        f"layer.{name}: got {value}, expected null: {self.kind} has no blocks"
                    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of the transformer."""

    layers: int
    width: int
    heads: int
    feed_forward: int  # hidden width of the feed-forward, in multiples of `width`
    dropout: float

    def __post_init__(self) -> None:
        most = {"layers": 10**4, "width": 10**6, "heads": 10**6, "feed_forward": 1000}
        for name, limit in most.items():
            at_least(f"model.{name}", getattr(self, name), 1, limit)
        if self.width % self.heads:
            raise ValueError(
                f"model.heads: got {self.heads}, expected a divisor of model.width={self.width}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout: got {self.dropout}, expected a value in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float
    final_fraction: float  # learning rate at the last step, as a part of learning_rate
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, ...]
    clip_norm: float
    average: float  # decay per step of the averaged weights that act and are judged; 0: the last
    accumulate: int  # micro-batches per step
    skip_limit: int = 5  # steps in a row that are not finite, and left out, before training stops

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(
                f"optimizer.learning_rate: got {self.learning_rate}, expected a value above 0"
            )
        between("optimizer.final_fraction", self.final_fraction, 0, 1)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optimizer.betas: got {self.betas}, expected two values in [0, 1)")
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm: got {self.clip_norm}, expected above 0")
        if not 0 <= self.average < 1:
            raise ValueError(f"optimizer.average: got {self.average}, expected a value in [0, 1)")
        at_least("optimizer.accumulate", self.accumulate, 1, 10**6)
        at_least("optimizer.skip_limit", self.skip_limit, 1)


@dataclass(frozen=True, kw_only=True)
class ClockConfig:
    """How often things happen, in optimiser steps; 0 is never."""

    log_steps: int
    validate_steps: int
    rollout_steps: int
    rollout_from: float  # no rollouts in this first part of the training
    checkpoint_steps: int
    histogram_steps: int
    rollout_share: float = 1.0  # most that rollouts before the last may take of the time

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            at_least(f"clocks.{f.name}", getattr(self, f.name), 0)
        between("clocks.rollout_from", self.rollout_from, 0, 1)
        between("clocks.rollout_share", self.rollout_share, 0, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `agentic-train` is told."""

    task: TaskConfig
    data_dir: str
    algorithms: tuple[str, ...] | None  # see agentic.selection; none: the task's own recipe
    holdout: float  # share of the episodes that only validation sees
    method: str  # see METHODS
    chain: ChainConfig
    tokens: TokensConfig
    model: ModelConfig
    layer: LayerConfig
    optimizer: OptimizerConfig
    steps: int
    batch_steps: int  # environment steps in a micro-batch
    clocks: ClockConfig
    rollout: RolloutConfig  # at the rollout clock; the best checkpoint is chosen by it
    evaluation: RolloutConfig  # after the training, with fresh seeds
    precision: str  # fp32 | bf16 (autocast)
    device: str  # auto | cpu | cuda
    keep_checkpoints: int
    seed: int
    run_dir: str | None  # a new folder under runs/ if null; an unfinished run there is resumed
    resume: str | None  # run directory to go on with, by its own settings
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    context_steps: int | None = None  # K, all that the policy sees of a trial; none: everything

    @property
    def learning(self) -> "TrainConfig":
        """The settings less those that change nothing of what is learned: places, processes."""
        replace = dataclasses.replace
        return replace(
            self,
            run_dir=None,
            resume=None,
            data_dir="",
            parallel=ParallelConfig(),
            optimizer=replace(self.optimizer, skip_limit=1),
            data=replace(self.data, store_dir=None, workers=None, prefetch=0),
            rollout=replace(self.rollout, threads=None, workers=None),
            evaluation=replace(self.evaluation, threads=None, workers=None),
        )

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        self._check_context()
        between("holdout", self.holdout, 0, 0.5)
        at_least("steps", self.steps, 1)
        at_least("batch_steps", self.batch_steps, 1)
        one_of("precision", self.precision, ("fp32", "bf16"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        at_least("keep_checkpoints", self.keep_checkpoints, 1)
        between("seed", self.seed, 0, MAX_SEED)
        for name in ("rollout", "evaluation"):
            rolling = getattr(self, name)
            rolling.check(f"{name}.")
            numbered = self.tokens.trajectory_embedding and self.context_steps is None
            if numbered and rolling.trials > self.chain.trajectories:
                raise ValueError(
                    f"{name}.trials: got {rolling.trials}, expected at most "
                    f"chain.trajectories={self.chain.trajectories} with tokens.trajectory_embedding"
                )
        if self.parallel.cuts and self.layer.kind != "blockwise":
            raise ValueError(
                f"layer.kind: got {self.layer.kind!r}, expected 'blockwise' with "
                f"parallel={self.parallel.kind}"
            )
        rolling = self.rollout
        if rolling.context != "keep" or rolling.stop or len(rolling.targets) != 1:
            raise ValueError(
                f"rollout: got context={rolling.context}, stop={rolling.stop}, "
                f"target={rolling.target}, expected context=keep, stop=false and one target: "
                "one number chooses the checkpoint"
            )

    def _check_context(self) -> None:
        """Raises ValueError where the method and what it sees do not go together."""
        K = self.context_steps
        if self.method == "at":
            if K is not None:
                raise ValueError(
                    f"context_steps: got {K}, expected null with method=at, which sees whole "
                    "chains; method=dt sees the last steps alone"
                )
            return
        steps = expand(self.task.name)[0].episode_steps
        if K is None or not 1 <= K <= steps:
            raise ValueError(
                f"context_steps: got {K}, expected 1 to {steps} steps with method={self.method}"
            )
        if self.chain.trajectories != 1:
            raise ValueError(
                f"chain.trajectories: got {self.chain.trajectories}, expected 1 with "
                f"method={self.method}, which sees no other trajectory"
            )
        if self.parallel.cuts:
            raise ValueError(
                f"parallel: got {self.parallel.kind}, expected none or data with "
                f"method={self.method}, whose sequences are short"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RolloutConfig):
    """Everything that `agentic-evaluate` is told."""

    checkpoint: str | tuple[str, ...]  # files, or run directories (their best checkpoints)
    device: str
    seed: int
    output: str | None  # directory of results.json; none: a new folder beside the checkpoint
    video: tuple[str, ...] = ()  # which trials are filmed: first, last, best
    side_by_side: bool = False  # in one film
    task: TaskConfig | None = None  # none: every task of the checkpoint

    def __post_init__(self) -> None:
        self.check()
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        between("seed", self.seed, 0, MAX_SEED)
        for trial in self.video:
            one_of("video", trial, ("first", "last", "best"))
        if not self.checkpoints:
            raise ValueError("checkpoint: got an empty list, expected files or run directories")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """One or several."""
        return (self.checkpoint,) if isinstance(self.checkpoint, str) else self.checkpoint
