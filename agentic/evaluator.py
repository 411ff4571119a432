"""Trials in context: the same model tries again and again, and every return is kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from agentic.journal import Journal, Part
from agentic.methods import policy_of
from agentic.model import InUnits
from agentic.protocol import RolloutConfig
from envs import EnvPool, TaskSpec

# Streams of environment seeds that never meet: choosing a checkpoint, judging it, random policy.
SELECTION, EVALUATION, RANDOM = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Context:
    """What one context is to try.

    Attributes:
        spec: the task.
        target: return that every trial is told to reach, in the task's own units.
        seeds: of the environment, one a trial.
    """

    spec: TaskSpec
    target: float
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What C contexts of n trials brought.

    Attributes:
        returns: (C, n) float64; NaN where a context had ended before.
        failed: (C, n) bool, an action that was not finite or a diverged simulation; the return
            is what was earned before it.
        seeds: (C, n) int64, of each trial's environment.
        actions: (C, n, T, A) float32.
    """

    returns: np.ndarray
    failed: np.ndarray
    seeds: np.ndarray
    actions: np.ndarray

    def __getitem__(self, rows: slice) -> "Trials":
        """Those of some contexts."""
        return Trials(
            returns=self.returns[rows],
            failed=self.failed[rows],
            seeds=self.seeds[rows],
            actions=self.actions[rows],
        )


class Interrupted(Exception):
    """A rollout was asked to end before its last trial."""


def trial_seeds(seed: int, stream: int, contexts: int, trials: int) -> np.ndarray:
    """(C, n) environment seeds, a pure function of its arguments; trial k's do not depend on n."""
    rows = [
        np.random.SeedSequence([seed, stream, c]).generate_state(trials) for c in range(contexts)
    ]
    return np.array(rows, dtype=np.int64)


def kept_trials(
    model: InUnits,
    contexts: Sequence[Context],
    config: RolloutConfig,
    *,
    journal: Journal | None = None,
    name: str = "keep",
    progress: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> Trials:
    """Runs the trials of each context one after the other; nothing is forgotten between them.

    Every trial starts with the same target return, of which the reward is taken off step by step.

    Args:
        model: in evaluation mode; knows the tasks.
        contexts: of tasks of one domain, with equally many trials.
        config: how; its `contexts`, `trials` and `target` stand in `contexts` already.
        journal: where finished trials are kept, and taken from.
        name: of this rollout in the journal.
        progress: show a bar of environment steps.
        interrupted: asked at every step.

    Raises:
        Interrupted: `interrupted` said so.
    """
    return _in_batches(model, contexts, config, False, journal, name, progress, interrupted)


def reset_trials(
    model: InUnits,
    contexts: Sequence[Context],
    config: RolloutConfig,
    *,
    journal: Journal | None = None,
    name: str = "reset",
    progress: bool = False,
) -> Trials:
    """The same episodes with the context emptied before every trial: what does it do for us?

    So the trials of a context are independent of each other, and none is left out when an earlier
    one has reached the target. All else is as in `kept_trials`, to the last bit: the first trial is
    the same.
    """
    apart = replace(config, stop=False)
    return _in_batches(model, contexts, apart, True, journal, name, progress, lambda: False)


def _in_batches(
    model: InUnits,
    contexts: Sequence[Context],
    config: RolloutConfig,
    reset: bool,
    journal: Journal | None,
    name: str,
    progress: bool,
    interrupted: Callable[[], bool],
) -> Trials:
    batches = []
    for first in range(0, len(contexts), config.batch):
        batch = contexts[first : first + config.batch]
        part = None if journal is None else journal.part(f"{name}_{first:05d}")
        batches.append(_rollout(model, batch, config, reset, part, progress, interrupted))
    return Trials(
        **{
            field: np.concatenate([getattr(batch, field) for batch in batches])
            for field in ("returns", "failed", "seeds", "actions")
        }
    )


def _rollout(
    model: InUnits,
    contexts: Sequence[Context],
    config: RolloutConfig,
    reset: bool,
    part: Part | None,
    progress: bool,
    interrupted: Callable[[], bool],
) -> Trials:
    """One batch of contexts in lockstep."""
    batch = _Batch(contexts, config.stop)
    kept = 0
    for k, trial in enumerate(part.kept() if part else ()):
        assert part is not None
        try:
            batch.end(k, *batch.arrays(k, trial))
        except ValueError as error:
            raise part.damaged(k, str(error)) from error
        kept = k + 1
    if kept == batch.trials or not batch.running_C.any():
        return batch.brought()
    task_C = np.array([model.spec.tasks.index(c.spec.name) for c in contexts])
    policy = policy_of(model, task_C, batch.trials, config.remember, config.cache)
    for k, trial in enumerate(part.kept() if part and not reset else ()):
        assert part is not None
        try:
            policy.recall(trial.get("memory"))
        except ValueError as error:
            raise part.damaged(k, str(error)) from error
    steps, label = contexts[0].spec.episode_steps, "reset" if reset else "kept"
    with (
        _threads(config.threads),
        EnvPool([c.spec.name for c in contexts], workers=config.workers) as pool,
        tqdm(
            total=batch.trials * steps,
            initial=kept * steps,
            desc=f"context {label}",
            unit="step",
            disable=None if progress else True,
        ) as bar,
    ):
        for k in range(kept, batch.trials):
            observation, _ = pool.reset(batch.seeds_CN[:, k].tolist())
            if reset:
                policy.forget()
            policy.begin_trial()
            returns_C, clipped = np.zeros(len(contexts)), 0
            actions_CTA = np.zeros((len(contexts), steps, pool.task.action_size), np.float32)
            done = False
            for t in range(steps):
                if interrupted():
                    raise Interrupted
                chosen = policy.act(observation, batch.target_C - returns_C)
                action = np.clip(chosen, -1, 1)  # what the environment gets is remembered
                clipped += int((np.abs(chosen) > 1).any(axis=1).sum())
                observation, reward, _, done = pool.step(action)
                returns_C += reward
                policy.record(action, reward, done & (returns_C >= batch.target_C))
                actions_CTA[:, t] = action
                bar.update()
            assert done, "an episode has exactly the task's number of steps"
            if clipped:
                tqdm.write(f"trial {k + 1}: {clipped:,} actions beyond [-1, 1] were clipped")
            if progress:
                ran = returns_C[batch.running_C]
                mean = f"mean return of {len(ran)} contexts {ran.mean():.1f}"
                tqdm.write(f"context {label}, trial {k + 1} of {batch.trials}: {mean}")
            batch.end(k, returns_C, pool.failed, actions_CTA)
            if part is not None:
                content = {"returns": returns_C, "failed": pool.failed, "actions": actions_CTA}
                more = k + 1 < batch.trials and not reset
                memory = {"memory": policy.memory()} if more else {}
                part.keep(k, {n: torch.from_numpy(a) for n, a in content.items()} | memory)
            if not batch.running_C.any():
                break
    return batch.brought()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """PyTorch on so many threads, by default half of what it has.

    A decision reads keys and values, for which few threads suffice. And as many threads as cores
    wait for each other at every operation as soon as anything else runs, simulators among it: on
    two cores decisions then take four times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Batch:
    """What the trials of C contexts have brought so far.

    Args:
        contexts: with equally many trials.
        stop: a context ends with its first trial that reaches the target.
    """

    def __init__(self, contexts: Sequence[Context], stop: bool) -> None:
        spec = contexts[0].spec
        self.stop = stop
        self.target_C = np.array([c.target for c in contexts])
        self.seeds_CN = np.array([c.seeds for c in contexts], dtype=np.int64)
        C, self.trials = self.seeds_CN.shape
        self.running_C = np.ones(C, dtype=bool)
        self._returns_CN = np.full((C, self.trials), np.nan)
        self._failed_CN = np.zeros((C, self.trials), dtype=bool)
        shape = (C, self.trials, spec.episode_steps, spec.action_size)
        self._actions_CNTA = np.zeros(shape, np.float32)

    def end(self, k: int, returns: np.ndarray, failed: np.ndarray, actions: np.ndarray) -> None:
        """Trial `k` is over: (C,), (C,), (C, T, A). What ended contexts went on to do is left out.

        They are played on with the others, which costs less than taking them out.
        """
        ran_C = self.running_C.copy()
        self._returns_CN[ran_C, k] = returns[ran_C]
        self._failed_CN[ran_C, k] = failed[ran_C]
        self._actions_CNTA[ran_C, k] = actions[ran_C]
        if self.stop:
            self.running_C &= returns < self.target_C

    def arrays(self, k: int, trial: Any) -> list[np.ndarray]:
        """What `end` takes of trial `k`, from a file.

        Raises:
            ValueError: it is not that of a trial of these contexts.
        """
        C, N, T, A = self._actions_CNTA.shape
        if k >= N or not isinstance(trial, dict):
            raise ValueError(f"expected {N} trials")
        found = []
        for name, shape, dtype in (
            ("returns", (C,), torch.float64),
            ("failed", (C,), torch.bool),
            ("actions", (C, T, A), torch.float32),
        ):
            value = trial.get(name)
            if not isinstance(value, torch.Tensor) or value.is_meta:
                raise ValueError(f"{name}: got no tensor")
            if (tuple(value.shape), value.dtype) != (shape, dtype):
                got = f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(f"{name}: got {got}, expected {dtype} {shape}")
            if not value.isfinite().all():
                raise ValueError(f"{name}: got numbers that are not finite")
            found.append(value.numpy())
        return found

    def brought(self) -> Trials:
        """All of it."""
        return Trials(
            returns=self._returns_CN,
            failed=self._failed_CN,
            seeds=self.seeds_CN,
            actions=self._actions_CNTA,
        )


def random_returns(spec: TaskSpec, *, episodes: int, seed: int) -> np.ndarray:
    """Returns of uniformly random actions, (episodes,)."""
    rng = np.random.default_rng([seed, RANDOM])
    returns = np.zeros(episodes)
    done = False
    with EnvPool([spec.name] * episodes) as pool:
        pool.reset([int(s) for s in trial_seeds(seed, RANDOM, 1, episodes)[0]])
        while not done:
            action = rng.uniform(-1, 1, (episodes, spec.action_size)).astype(np.float32)
            _, reward, _, done = pool.step(action)
            returns += reward
    return returns
