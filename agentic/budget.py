"""The memory that a run will take, and what would fit, known before anything large exists."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agentic.config import TrainConfig
from agentic.model import AgenticTransformer, ModelSpec
from agentic.store import EpisodeStore
from agentic.tokens import ACTION_READ_AT
from parallel import LAYERS, Scope
from parallel.memory import Batch, MemoryPlan, Stack, longest, plan

PROCESS = 2**29  # bytes of Python with PyTorch and the simulator, or of a CUDA context
VARIANTS = list(itertools.product(LAYERS, (False, True)))  # layer.kind, layer.recompute


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run needs, and what there is."""

    config: TrainConfig
    spec: ModelSpec
    parameters: int
    data: int  # bytes of the episodes, where they are in the same memory
    machine: int  # bytes of the memory that the model is in
    device: torch.device

    @property
    def beside(self) -> int:
        """Bytes that the step has no part in."""
        return PROCESS + self.data

    def plan(self) -> MemoryPlan:
        """Of the step with the micro-batch that takes most."""
        return self._of(self.largest())

    def largest(self) -> Batch:
        """The micro-batch that takes most of those that the sampler can draw."""
        return max(self.batches(), key=lambda batch: self._of(batch).total)

    def batches(self) -> Iterator[Batch]:
        """The largest micro-batches of `ChainSampler` for every number of trajectories."""
        chain, T = self.config.chain, self.spec.episode_steps
        K = self.config.context_steps
        if K is not None:
            yield self._batch(max(1, chain.window_batch // K), 1, K)
            return
        N = chain.trajectories
        for n in range(1, N + 1) if chain.count == "uniform" else [N]:
            yield self._batch(max(1, self.config.batch_steps // (n * T)), n, T)
            if chain.window_share:
                longest = min(max(1, chain.window_steps // n), T)
                for length in (longest, min(longest, max(1, chain.window_batch // n))):
                    yield self._batch(max(1, chain.window_batch // (n * length)), n, length)
                yield self._batch(max(1, chain.window_batch // n), n, 1)

    def caches(self) -> int:
        """Bytes of the keys and values of the larger of the two kinds of rollouts."""
        return max(
            self.spec.cache_bytes(
                rolling.cached(len(rolling.targets) * len(self.spec.tasks)), rolling.cache
            )
            for rolling in (self.config.rollout, self.config.evaluation)
        )

    def longest_chain(self, kind: str, recompute: bool) -> int:
        """Environment steps of the longest single chain whose training step fits; 0: none does."""
        T = self.spec.episode_steps
        last = self.config.chain.loss_on == "last"

        def fits(steps: int) -> bool:
            batch = self._tokens(1, steps, max(0, steps - T) if last else 0)
            return self.beside + self._plan(kind, recompute, batch).total <= self.machine

        return longest(fits)

    def what_fits(self, kind: str, recompute: bool) -> str:
        """The longest chain in words."""
        steps = self.longest_chain(kind, recompute)
        tokens = steps * self.spec.tokens_per_step
        return f"{tokens:,} tokens ({steps / self.spec.episode_steps:,.1f} trajectories)"

    def check(self) -> None:
        """Raises ValueError where the run needs more than there is, with what would fit.

        Of one process's share of a cube there is no plan.
        """
        if self.config.parallel.cuts:
            return
        layer, there = self.config.layer, f"the {gib(self.machine)} of this machine"
        needed = self.beside + self.plan().total
        if needed > self.machine and self.config.context_steps is not None:
            raise ValueError(
                f"chain.window_batch: got {self.config.chain.window_batch}, needing {gib(needed)} "
                f"in windows of {self.config.context_steps}, expected at most {there}"
            )
        if needed > self.machine:
            own = self.longest_chain(layer.kind, layer.recompute)
            fitting = [
                f"layer={kind} layer.recompute={recompute} up to {self.what_fits(kind, recompute)}"
                for kind, recompute in VARIANTS
                if (kind, recompute) == (layer.kind, layer.recompute)
                or self.longest_chain(kind, recompute) > own
            ]
            batch = self.largest()
            raise ValueError(
                f"layer.kind: got {layer.kind!r} with recompute {layer.recompute}, needing "
                f"{gib(needed)} for {batch.sequences} x {batch.tokens:,} tokens "
                f"(chain.trajectories={self.config.chain.trajectories}, "
                f"batch_steps={self.config.batch_steps}), expected at most {there}; "
                f"one chain fits with {', '.join(fitting)}"
            )
        rolling = self.beside + 4 * 4 * self.parameters + self.caches()
        if rolling > self.machine:
            raise ValueError(
                f"evaluation.batch: rollouts need {gib(rolling)}, {gib(self.caches())} of it "
                f"keys and values, expected at most {there}; fewer contexts at once (batch), fewer "
                "trials, cache=bf16 or remember, of rollout and evaluation, fit"
            )

    def advice(self) -> str:
        """What was planned of which memory, and what takes less."""
        if self.config.parallel.cuts:
            told = "of a process's share of the cube there is no plan"
        else:
            needed = gib(self.beside + self.plan().total)
            told = f"planned were {needed} of {gib(self.machine)} at the peak of a step"
        less = "chain.window_batch"
        if self.config.context_steps is None:
            less = "batch_steps, chain.window_batch or chain.trajectories, layer=blockwise"
        return (
            f"{told}; a smaller {less} needs less, and in rollouts, of whose keys and values there "
            f"are {gib(self.caches())}, a smaller rollout.batch or rollout.remember, or "
            "rollout.cache=bf16"
        )

    def stack(self) -> Stack:
        """The layers as `parallel.memory` takes them."""
        return Stack(
            size=self.spec.layer_size(),
            layers=self.spec.model.layers,
            kind=self.config.layer.kind,
            recompute=self.config.layer.recompute,
            half=self.config.precision == "bf16",
            blocks=self.spec.block_settings(),
            device=self.device,
        )

    def _of(self, batch: Batch) -> MemoryPlan:
        return self._plan(self.config.layer.kind, self.config.layer.recompute, batch)

    def _batch(self, chains: int, trajectories: int, length: int) -> Batch:
        last = self.config.chain.loss_on == "last"
        first = (trajectories - 1) * length if last else 0
        return self._tokens(chains, trajectories * length, first)

    def _tokens(self, chains: int, steps: int, first: int) -> Batch:
        """Actions are read from step `first` on, as in `AgenticTransformer.forward`."""
        group = self.spec.tokens_per_step
        read_at = first * group + ACTION_READ_AT[self.spec.tokens.layout]
        return Batch(
            sequences=chains, tokens=steps * group, scope=Scope(start=read_at, stride=group)
        )

    def _plan(self, kind: str, recompute: bool, batch: Batch) -> MemoryPlan:
        stack = replace(self.stack(), kind=kind, recompute=recompute)
        tokens = batch.sequences * batch.tokens
        # Raw steps and normalised ones: observation, action, three numbers, two indices.
        width = self.spec.observation_size + self.spec.action_size
        around = 2 * tokens // self.spec.tokens_per_step * 4 * (width + 7)
        if not (recompute or kind == "blockwise"):  # else the embedding is computed again
            around += 4 * tokens * self.spec.model.width  # the input of its norm
        return plan(
            stack,
            batch,
            parameters=self.parameters,
            around=around,
            averaged=True,
            accumulate=self.config.optimizer.accumulate > 1,
        )


def budget_of(
    config: TrainConfig, spec: ModelSpec, store: EpisodeStore, device: torch.device
) -> Budget | None:
    """The budget of a run on this machine; the model is not built. Cloning needs none.

    Raises:
        ValueError: the spec is of no model.
    """
    if spec.method == "bc":
        return None
    with torch.device("meta"):  # shapes without memory
        parameters = AgenticTransformer(spec).parameter_count()
    return Budget(
        config=config,
        spec=spec,
        parameters=parameters,
        data=0 if device.type == "cuda" else store.held_bytes,
        machine=machine_bytes(device),
        device=device,
    )


def machine_bytes(device: torch.device) -> int:
    """Memory of the device: of a GPU its own, else what this process may have of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *cgroup_limits()])


def cgroup_limits(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Memory limits of the process's control groups, versions 1 and 2, and of those around them."""
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = top / path.lstrip("/")
        # Inside a container the path may be the host's: the container's own limit is at the top.
        for folder in [inner, *inner.parents][: len(inner.relative_to(top).parts) + 1]:
            file = folder / name
            text = file.read_text().strip() if file.is_file() else "max"
            if text.isdigit():
                yield int(text)


def gib(size: int) -> str:
    """As memory is counted by systems; small sizes in MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
