"""Which trajectories form the next chains: a pure function of seed and step.

Counter-based: every micro-batch comes from a generator seeded by its seed and number, so the order
of the data is the same however often training is stopped, resumed or read ahead by workers, and the
state to save is the step alone.
"""

import math
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


@dataclass(frozen=True, kw_only=True)
class Windows:
    """B chains of which only one window of every trajectory is seen, all of one length."""

    length: int  # steps of every window
    task: np.ndarray  # (B,) index among the store's tasks
    episodes: np.ndarray  # (B, N) ascending by return
    start: np.ndarray  # (B, N) first step of each window


class ChainSampler:
    """Draws chains of one micro-batch at a time.

    Args:
        store: the episodes.
        episodes: those that may be drawn.
        config: how chains are formed.
        batch_steps: environment steps in a micro-batch, filled with as many chains as fit.
        seed: of the whole stream.
        context_steps: None; or all micro-batches are windows of so many steps, of one trajectory.

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
        context_steps: int | None = None,
    ) -> None:
        drawn_from = config.best_of(len(episodes))
        if not config.fits(len(episodes)):
            raise ValueError(
                f"chain.trajectories: got {config.trajectories}, expected at most the "
                f"{drawn_from} episodes there are to draw from"
            )
        self.store = store
        self.config = config
        self.batch_steps = batch_steps
        self.seed = seed
        self.context_steps = context_steps
        # Episodes of each task by ascending return: a chain's best is drawn from the end of it,
        # the others from below the best.
        returns_KE = store.returns[:, episodes]
        order_KE = np.stack([hindsight.ascending(row) for row in returns_KE])[:, -drawn_from:]
        self.ranked_KE = episodes[order_KE]
        share = round(drawn_from * (1 - config.best_from), 6)  # 0.7 of 10 are 7, not 6.9999
        self._top = min(math.ceil(share), drawn_from - 1)  # rank of the least that may be the best
        self.least_K = np.take_along_axis(returns_KE, order_KE, 1)[:, self._top]
        # Where ranks have weights: at rank e those of all ranks below it.
        self._mass_KE: np.ndarray | None = None
        if config.weighting == "return":
            ranked_KE = np.take_along_axis(returns_KE, order_KE, 1)
            above_KE = ranked_KE - ranked_KE[:, :1]
            # At least a hundredth of the best's, so that every episode can be drawn.
            weight_KE = np.maximum(above_KE, 0.01 * above_KE[:, -1:])
            weight_KE[weight_KE[:, -1] == 0] = 1.0
            self._mass_KE = np.pad(np.cumsum(weight_KE, axis=1), ((0, 0), (1, 0)))

    def draw(self, index: int) -> list[Chain] | Windows:
        """Micro-batch `index`: chains of windows, or of whole trajectories, all of one length.

        Windows are as long as drawn, from one step upwards: what is also decided without its
        history cannot be learned by copying from it.
        """
        rng = np.random.default_rng([self.seed, index])
        if self.context_steps is not None:
            return self._windows(rng, 1, self.context_steps)
        if rng.random() < self.config.window_share:
            total = round(math.exp(rng.uniform(0, math.log(self.config.window_steps))))
            count = self._count(rng)
            return self._windows(rng, count, min(max(1, total // count), self.store.steps))
        count = self._count(rng)
        chains = max(1, self.batch_steps // (count * self.store.steps))
        return [self._chain(rng, count) for _ in range(chains)]

    def _windows(self, rng: np.random.Generator, count: int, length: int) -> Windows:
        """Formed like chains, except that a trajectory may come twice, in different windows."""
        B = max(1, self.config.window_batch // (length * count))
        task_B = rng.integers(len(self.ranked_KE), size=B)
        if self._any:
            zero_B = np.zeros(B, int)
            all_BN = self._ranks(rng, task_B, zero_B, zero_B + self.ranked_KE.shape[1], count)
            rank_BN = np.sort(all_BN)
        else:
            best_B = self._best(rng, task_B, count)
            part_B = rng.random(B) if self.config.spread == "drawn" else np.zeros(B)
            floor_B = (best_B * part_B).astype(int)
            # The others: below the best where there is one, or up to it.
            end_B = np.maximum(best_B + self.config.replacement, floor_B + 1)
            others_BN = self._ranks(rng, task_B, floor_B, end_B, count - 1)
            rank_BN = np.column_stack([np.sort(others_BN), best_B])
        return Windows(
            length=length,
            task=task_B,
            episodes=self.ranked_KE[task_B[:, None], rank_BN],
            start=rng.integers(self.store.steps - length + 1, size=(B, count)),
        )

    @property
    def _any(self) -> bool:
        """The paper's chains: any N trajectories, whichever of them is the best."""
        return self.config.best_from == 1 and self.config.spread == "full"

    def _count(self, rng: np.random.Generator) -> int:
        """n, the trajectories of this micro-batch's chains."""
        most = self.config.trajectories
        return most if self.config.count == "fixed" else int(rng.integers(1, most + 1))

    def _best(self, rng: np.random.Generator, task_B: np.ndarray, count: int) -> np.ndarray:
        """Ranks of the chains' best episodes (B,): from the top `best_from`, others fit below."""
        episodes = self.ranked_KE.shape[1]
        low = self._top if self.config.replacement else max(self._top, count - 1)
        if self._mass_KE is None:
            return rng.integers(low, episodes, size=len(task_B))
        low_B = np.full(len(task_B), low)
        return self._ranks(rng, task_B, low_B, np.full_like(low_B, episodes), 1)[:, 0]

    def _ranks(
        self,
        rng: np.random.Generator,
        task_B: np.ndarray,
        low_B: np.ndarray,
        high_B: np.ndarray,
        count: int,
    ) -> np.ndarray:
        """Ranks from low to high - 1, each drawn by itself, (B, count)."""
        u_BN = rng.random((len(task_B), count))
        if self._mass_KE is None:
            return low_B[:, None] + (u_BN * (high_B - low_B)[:, None]).astype(int)
        below_B, up_to_B = self._mass_KE[task_B, low_B], self._mass_KE[task_B, high_B]
        mass_BN = below_B[:, None] + u_BN * (up_to_B - below_B)[:, None]
        rank_BN = np.empty(u_BN.shape, int)
        for k in np.unique(task_B):
            rank_BN[task_B == k] = self._mass_KE[k].searchsorted(mass_BN[task_B == k], "right") - 1
        return np.clip(rank_BN, low_B[:, None], high_B[:, None] - 1)

    def _different(
        self, rng: np.random.Generator, task: int, low: int, high: int, count: int
    ) -> np.ndarray:
        """Ascending ranks from low to high - 1, (count,): all different, or with replacement."""
        if count == 0:
            return np.zeros(0, int)
        share_E = None
        if self._mass_KE is not None:
            weight_E = np.diff(self._mass_KE[task, low : high + 1])
            share_E = weight_E / weight_E.sum()
        return low + np.sort(
            rng.choice(high - low, size=count, replace=self.config.replacement, p=share_E)
        )

    def _chain(self, rng: np.random.Generator, count: int) -> Chain:
        """The best from the top `best_from`, the others below it.

        With `spread` drawn, the others' ranks span a part of those below the best whose size is
        itself drawn: chains of good trajectories only, as a policy's own trials will be, come as
        often as chains from the worst to the best.
        """
        task = int(rng.integers(len(self.ranked_KE)))
        ranked_E = self.ranked_KE[task]
        if self._any:
            ranks = self._different(rng, task, 0, len(ranked_E), count)
        else:
            best = int(self._best(rng, np.array([task]), count)[0])
            floor = 0
            if self.config.spread == "drawn":
                floor = max(0, min(int(best * rng.random()), best - (count - 1)))
            end = best + self.config.replacement  # then the best itself may be among them
            ranks = np.append(self._different(rng, task, floor, end, count - 1), best)
        return Chain(task=task, episodes=tuple(int(e) for e in ranked_E[ranks]))

    def batch(self, index: int) -> tuple[Steps, torch.Tensor]:
        """Micro-batch `index`: its steps, and which of them the loss counts (B, L)."""
        drawn = self.draw(index)
        if isinstance(drawn, Windows):
            return cut(self.store, drawn, self.config.loss_on, self.least_K)
        return assemble(self.store, drawn, self.config.loss_on, self.least_K)


def cut(
    store: EpisodeStore, windows: Windows, loss_on: str, least_K: np.ndarray
) -> tuple[Steps, torch.Tensor]:
    """Gathers windows of chains that are relabelled to their best, as `assemble` does whole ones.

    Args:
        store: the episodes.
        windows: which of their steps.
        loss_on: see `hindsight.loss_weights`.
        least_K: of every task, the return from which on a trajectory counts as of the `top`.

    Returns:
        The steps (B, L, ·) with L = N · length, and the loss weights (B, L).
    """
    B, N = windows.episodes.shape
    k_BN1, e_BN1 = windows.task[:, None, None], windows.episodes[..., None]
    t_BNW = windows.start[..., None] + np.arange(windows.length)
    returns_BN1 = store.returns[k_BN1, e_BN1]
    own_BNW, reward_BNW = _by_task(store, windows.task, e_BN1, t_BNW)
    target_B11 = returns_BN1.max(axis=1, keepdims=True)
    reached_BNW = (t_BNW == store.steps - 1) & (returns_BN1 >= target_B11)
    missing_BN1 = (target_B11 - returns_BN1).astype(np.float32)
    arrays = {
        "return_to_go": own_BNW + missing_BN1,
        "observation": store.observation(e_BN1, t_BNW),
        "action": store.action(e_BN1, t_BNW),
        "reward": reward_BNW,
        "completion": reached_BNW.astype(np.float32),
        "timestep": t_BNW,
        "trajectory": np.zeros_like(t_BNW) + np.arange(N)[:, None],
        "valid": np.ones_like(reached_BNW),
    }
    L = N * windows.length
    tensors = {n: torch.from_numpy(a.reshape(B, L, *a.shape[3:])) for n, a in arrays.items()}
    weight_BNW = hindsight.loss_weights(
        returns_BN1[..., 0], windows.length, loss_on, least_K[windows.task][:, None]
    )
    steps = Steps(**tensors, task=torch.from_numpy(windows.task))
    return steps, torch.from_numpy(weight_BNW).flatten(1)


def _by_task(
    store: EpisodeStore, task_B: np.ndarray, e_BN1: np.ndarray, t_BNW: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Own returns-to-go and rewards (B, N, W), every chain's for its own task."""
    own_BNW, reward_BNW = (np.empty(t_BNW.shape, np.float32) for _ in range(2))
    for k in np.unique(task_B):
        of_k = task_B == k
        place = int(k), e_BN1[of_k], t_BNW[of_k]
        own_BNW[of_k], reward_BNW[of_k] = store.return_to_go(*place), store.reward(*place)
    return own_BNW, reward_BNW


def assemble(
    store: EpisodeStore, chains: list[Chain], loss_on: str, least_K: np.ndarray
) -> tuple[Steps, torch.Tensor]:
    """Gathers chains, relabels them to their best and pads shorter ones on the right.

    Args:
        store: the episodes.
        chains: which of them.
        loss_on: see `hindsight.loss_weights`.
        least_K: see `cut`.

    Returns:
        The steps (B, L, ·) with L = (longest chain) · T, and the loss weights (B, L).
    """
    T = store.steps
    L = max(len(chain.episodes) for chain in chains) * T
    B = len(chains)
    columns: dict[str, np.ndarray] = {
        "return_to_go": np.zeros((B, L), np.float32),
        "observation": np.zeros((B, L, store.observation_size), np.float32),
        "action": np.zeros((B, L, store.action_size), np.float32),
        "reward": np.zeros((B, L), np.float32),
        "completion": np.zeros((B, L), np.float32),
        "timestep": np.zeros((B, L), np.int64),
        "trajectory": np.zeros((B, L), np.int64),
        "valid": np.zeros((B, L), bool),
    }
    weight_BL = np.zeros((B, L), np.float32)
    for b, chain in enumerate(chains):
        N = len(chain.episodes)
        e_N = np.array(chain.episodes)
        returns_N = store.returns[chain.task, e_N]
        reward_NT = store.reward(chain.task, e_N)
        target = float(returns_N.max())
        gathered: dict[str, np.ndarray] = {
            "return_to_go": hindsight.returns_to_go(reward_NT, target),
            "observation": store.observation(e_N),
            "action": store.action(e_N),
            "reward": reward_NT,
            "completion": hindsight.completion(returns_N, target, T),
            "timestep": np.broadcast_to(np.arange(T), (N, T)),
            "trajectory": np.broadcast_to(np.arange(N)[:, None], (N, T)),
            "valid": np.ones((N, T), bool),
        }
        for name, array in gathered.items():
            columns[name][b, : N * T] = array.reshape(N * T, *array.shape[2:])
        weight_NT = hindsight.loss_weights(returns_N, T, loss_on, least_K[chain.task])
        weight_BL[b, : N * T] = weight_NT.reshape(-1)
    task_B = torch.tensor([chain.task for chain in chains])
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    return Steps(**tensors, task=task_B), torch.from_numpy(weight_BL)
