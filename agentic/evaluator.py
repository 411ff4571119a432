"""Trials in context: the same model tries again and again, and every return is kept."""

from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from agentic.model import AgenticTransformer
from agentic.policy import Policy
from envs import EnvPool, TaskSpec

# Streams of environment seeds that never meet: choosing a checkpoint, judging it, random policy.
SELECTION, EVALUATION, RANDOM = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What C contexts of n trials brought.

    Attributes:
        returns: (C, n) float64.
        failed: (C, n) bool, an action that was not finite or a diverged simulation; the return
            is what was earned before it.
        seeds: (C, n) int64, of each trial's environment.
        actions: (n, T, A) float32 that the first context took.
    """

    returns: np.ndarray
    failed: np.ndarray
    seeds: np.ndarray
    actions: np.ndarray


def trial_seeds(seed: int, stream: int, contexts: int, trials: int) -> np.ndarray:
    """(C, n) environment seeds, a pure function of its arguments; trial k's do not depend on n."""
    rows = [
        np.random.SeedSequence([seed, stream, c]).generate_state(trials) for c in range(contexts)
    ]
    return np.array(rows, dtype=np.int64)


def rollout(
    model: AgenticTransformer,
    spec: TaskSpec,
    *,
    target: float,
    seeds: np.ndarray,
    progress: bool = False,
) -> Trials:
    """Runs n trials in each of C contexts; nothing is forgotten between the trials of a context.

    Every trial starts with the same target return, of which the reward is taken off step by step.

    Args:
        model: in evaluation mode; knows `spec` among its tasks.
        spec: the task.
        target: target return in the task's own units.
        seeds: (C, n), one environment seed a trial.
        progress: show a bar of environment steps.
    """
    contexts, trials = seeds.shape
    task = model.spec.tasks.index(spec.name)
    policy = Policy(model, np.full(contexts, task), trials)
    pool = EnvPool([spec.name] * contexts)
    returns = np.zeros((contexts, trials))
    failed = np.zeros((contexts, trials), dtype=bool)
    actions = np.zeros((trials, spec.episode_steps, spec.action_size), np.float32)
    total = trials * spec.episode_steps
    with tqdm(total=total, desc=spec.name, unit="step", disable=None if progress else True) as bar:
        for k in range(trials):
            observation, _ = pool.reset([int(s) for s in seeds[:, k]])
            policy.begin_trial()
            for t in range(spec.episode_steps):
                action = policy.act(observation, target - returns[:, k])
                observation, reward, _, done = pool.step(action)
                returns[:, k] += reward
                policy.record(action, reward, done & (returns[:, k] >= target))
                actions[k, t] = action[0]
                bar.update()
            assert done, "an episode has exactly the task's number of steps"
            failed[:, k] = pool.failed
    pool.close()
    return Trials(returns=returns, failed=failed, seeds=seeds, actions=actions)


def rollout_reset(
    model: AgenticTransformer, spec: TaskSpec, *, target: float, seeds: np.ndarray
) -> Trials:
    """The same episodes with the context emptied before every trial: what does it do for us?"""
    alone = rollout(model, spec, target=target, seeds=seeds.reshape(-1, 1))
    return Trials(
        returns=alone.returns.reshape(seeds.shape),
        failed=alone.failed.reshape(seeds.shape),
        seeds=seeds,
        actions=alone.actions,
    )


def random_returns(spec: TaskSpec, *, episodes: int, seed: int) -> np.ndarray:
    """Returns of uniformly random actions, (episodes,)."""
    rng = np.random.default_rng([seed, RANDOM])
    pool = EnvPool([spec.name] * episodes)
    pool.reset([int(s) for s in trial_seeds(seed, RANDOM, 1, episodes)[0]])
    returns = np.zeros(episodes)
    done = False
    while not done:
        action = rng.uniform(-1, 1, (episodes, spec.action_size)).astype(np.float32)
        _, reward, _, done = pool.step(action)
        returns += reward
    pool.close()
    return returns
