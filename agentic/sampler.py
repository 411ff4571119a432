"""Which trajectories form the next chains: a pure function of seed and step.

Counter-based: every draw comes from a generator seeded by (seed, stream, step), so the order of the
data is the same however often training is stopped, resumed or read ahead by workers, and the
state to save is the step alone.
"""

from dataclasses import dataclass

import numpy as np
import torch

from agentic import hindsight
from agentic.config import ChainConfig
from agentic.store import EpisodeStore
from agentic.tokens import Steps


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One chain before its arrays are gathered."""

    task: int  # index among the store's tasks
    episodes: tuple[int, ...]  # ascending by return; the last is the best


class ChainSampler:
    """Draws chains of one micro-batch at a time.

    Args:
        store: the episodes.
        episodes: those that may be drawn.
        config: how chains are formed.
        batch_steps: environment steps in a micro-batch, filled with as many chains as fit.
        seed: of the whole stream.
        single_steps: for micro-batches before this one, chains are single trajectories.

    Raises:
        ValueError: fewer episodes than a chain needs.
    """

    def __init__(
        self,
        store: EpisodeStore,
        episodes: np.ndarray,
        config: ChainConfig,
        *,
        batch_steps: int,
        seed: int,
        single_steps: int = 0,
    ) -> None:
        if len(episodes) < config.trajectories:
            raise ValueError(
                f"chain.trajectories: got {config.trajectories}, expected at most the "
                f"{len(episodes)} episodes there are to draw from"
            )
        self.store = store
        self.config = config
        self.batch_steps = batch_steps
        self.seed = seed
        self.single_steps = single_steps
        # Episodes of each task by ascending return: a chain's best is drawn from the end of it,
        # the others from below the best.
        returns_KE = store.returns[:, episodes]
        self.ranked_KE = episodes[np.argsort(returns_KE, axis=1, kind="stable")]

    def draw(self, index: int) -> list[Chain]:
        """The chains of micro-batch `index`; all of one length, so nothing is padded."""
        rng = np.random.default_rng([self.seed, index])
        count = self.config.trajectories
        if index < self.single_steps:
            count = 1
        elif self.config.count == "uniform":
            count = int(rng.integers(1, count + 1))
        chains = max(1, self.batch_steps // (count * self.store.steps))
        return [self._chain(rng, count) for _ in range(chains)]

    def _chain(self, rng: np.random.Generator, count: int) -> Chain:
        """The best from the top `best_from`, the others below it, all different.

        With `spread` drawn, the others' ranks span a part of those below the best whose size is
        itself drawn: chains of good trajectories only, as a policy's own trials will be, come as
        often as chains from the worst to the best.
        """
        task = int(rng.integers(len(self.ranked_KE)))
        ranked_E = self.ranked_KE[task]
        episodes = len(ranked_E)
        if self.config.best_from == 1:  # as in the paper: all uniform
            drawn = np.sort(rng.choice(episodes, size=count, replace=False))
            return Chain(task=task, episodes=tuple(int(e) for e in ranked_E[drawn]))
        lowest = min(int(np.ceil(episodes * (1 - self.config.best_from))), episodes - 1)
        best = int(rng.integers(max(lowest, count - 1), episodes))
        floor = 0
        if self.config.spread == "drawn":
            floor = min(int(best * rng.random()), best - (count - 1))
        others = floor + np.sort(rng.choice(best - floor, size=count - 1, replace=False))
        return Chain(task=task, episodes=tuple(int(e) for e in ranked_E[[*others, best]]))

    def batch(self, index: int) -> tuple[Steps, torch.Tensor]:
        """Micro-batch `index`: its steps, and which of them the loss counts (B, L)."""
        return assemble(self.store, self.draw(index), self.config.loss_on)


def assemble(
    store: EpisodeStore, chains: list[Chain], loss_on: str
) -> tuple[Steps, torch.Tensor]:
    """Gathers chains, relabels them to their best and pads shorter ones on the right.

    Returns:
        The steps (B, L, ·) with L = (longest chain) · T, and the loss weights (B, L).
    """
    T = store.steps
    L = max(len(chain.episodes) for chain in chains) * T
    B = len(chains)
    columns = {
        "return_to_go": np.zeros((B, L), np.float32),
        "observation": np.zeros((B, L, store.observation.shape[2]), np.float32),
        "action": np.zeros((B, L, store.action.shape[2]), np.float32),
        "reward": np.zeros((B, L), np.float32),
        "completion": np.zeros((B, L), np.float32),
        "timestep": np.zeros((B, L), np.int64),
        "trajectory": np.zeros((B, L), np.int64),
        "valid": np.zeros((B, L), bool),
    }
    weight_BL = np.zeros((B, L), np.float32)
    for b, chain in enumerate(chains):
        N = len(chain.episodes)
        ids = list(chain.episodes)
        returns_N = store.returns[chain.task, ids]
        reward_NT = store.reward[chain.task, ids]
        target = float(returns_N.max())
        gathered = {
            "return_to_go": hindsight.returns_to_go(reward_NT, target),
            "observation": store.observation[ids],
            "action": store.action[ids],
            "reward": reward_NT,
            "completion": hindsight.completion(returns_N, target, T),
            "timestep": np.broadcast_to(np.arange(T), (N, T)),
            "trajectory": np.broadcast_to(np.arange(N)[:, None], (N, T)),
            "valid": np.ones((N, T), bool),
        }
        for name, array in gathered.items():
            columns[name][b, : N * T] = array.reshape(N * T, *array.shape[2:])
        weight_BL[b, : N * T] = hindsight.loss_weights(N, T, loss_on).reshape(-1)
    task_B = torch.tensor([chain.task for chain in chains])
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    return Steps(**tensors, task=task_B), torch.from_numpy(weight_BL)
