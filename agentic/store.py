"""What training learns from: chosen episodes of one or several algorithms, with their rewards."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agentic.flat import FlatStore
from agentic.relabel import Rewards
from envs import TaskSpec

QUANTILES = {
    "min": 0.0,
    "p10": 0.1,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "max": 1.0,
}
HELD_BYTES = 2**27  # of arrays on disk that may stay in this process's memory
PAGES = 2**16  # that the system maps around a place that is read


@dataclass(frozen=True, kw_only=True)
class Part:
    """Chosen rows of one algorithm's arrays.

    Attributes:
        name: the algorithm.
        rows: (E,) indices into the arrays' first axis.
        observation: (R, T+1, O) float32.
        action: (R, T+1, A) float32; action[t+1] is taken in observation[t].
        moments: (R, 2, O) float64, see `agentic.flat`.
        rewards: of each task.
        other_lengths: files left out since their episodes have another length, by length.
        rejected: files left out since they hold no sound episode, with the reason.
        flat: where the arrays come from, none if they were made in memory.
    """

    name: str
    rows: np.ndarray
    observation: np.ndarray
    action: np.ndarray
    moments: np.ndarray
    rewards: tuple[Rewards, ...]
    other_lengths: dict[int, int]
    rejected: tuple[str, ...]
    flat: FlatStore | None

    @property
    def summary(self) -> str:
        """How many episodes were chosen, and what was left out."""
        lengths = ", ".join(f"{n:,} of {steps}" for steps, n in sorted(self.other_lengths.items()))
        text = f"{len(self.rows):,} episodes"
        if lengths:
            text += f"; left out for their number of steps: {lengths}"
        if self.rejected:
            text += f"; {len(self.rejected):,} bad files left out, the first: {self.rejected[0]}"
        return text


class EpisodeStore:
    """E whole episodes of T steps, for K tasks of one domain.

    Attributes:
        specs: the K tasks.
        parts: where the episodes are, one part after the other.
        returns: (K, E) float64.
    """

    def __init__(self, specs: tuple[TaskSpec, ...], parts: tuple[Part, ...]) -> None:
        self.specs = specs
        self.parts = parts
        self.returns = np.array(
            [
                np.concatenate([p.rewards[k].returns[p.rows] for p in parts])
                for k in range(len(specs))
            ]
        )
        self._part_E = np.repeat(np.arange(len(parts)), [len(p.rows) for p in parts])
        self._row_E = np.concatenate([p.rows for p in parts])
        self._read = 0  # bytes since the last release

    @property
    def episodes(self) -> int:
        """E."""
        return len(self._row_E)

    @property
    def steps(self) -> int:
        """T."""
        return self.parts[0].action.shape[1] - 1

    @property
    def observation_size(self) -> int:
        """O."""
        return self.parts[0].observation.shape[2]

    @property
    def action_size(self) -> int:
        """A."""
        return self.parts[0].action.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, on disk or in memory."""
        step = self.observation_size + self.action_size + 2 * len(self.specs)
        return 4 * step * self.episodes * self.steps

    @property
    def held_bytes(self) -> int:
        """Bytes of them that stay in this process's memory at most."""
        return min(self.nbytes, HELD_BYTES)

    def name(self, episode: int) -> str:
        """Algorithm and file of an episode, or its row where there is no file."""
        part, row = self.parts[self._part_E[episode]], int(self._row_E[episode])
        return f"{part.name}/{row if part.flat is None else part.flat.index.names[row]}"

    def observation(self, episode: np.ndarray, step: np.ndarray | None = None) -> np.ndarray:
        """s_t float32: (..., O) for indices that are broadcast; (..., T, O) for whole episodes."""
        return self._take([p.observation for p in self.parts], 0, episode, step)

    def action(self, episode: np.ndarray, step: np.ndarray | None = None) -> np.ndarray:
        """a_t float32, taken in s_t: (..., A), or (..., T, A) of whole episodes."""
        return self._take([p.action for p in self.parts], 1, episode, step)

    def reward(self, task: int, episode: np.ndarray, step: np.ndarray | None = None) -> np.ndarray:
        """r_t float32 of the task, earned by a_t: (...,), or (..., T) of whole episodes."""
        return self._take([p.rewards[task].reward for p in self.parts], 0, episode, step)

    def return_to_go(self, task: int, episode: np.ndarray, step: np.ndarray) -> np.ndarray:
        """The episode's own rewards from step t on (...,) float32."""
        return self._take([p.rewards[task].return_to_go for p in self.parts], 0, episode, step)

    def _take(
        self, arrays: list[np.ndarray], shift: int, episode: np.ndarray, step: np.ndarray | None
    ) -> np.ndarray:
        """Single steps by one gather for every part that they come from, or whole episodes."""
        self._check()
        part, row = self._part_E[episode], self._row_E[episode]
        width = arrays[0].shape[2:]
        if step is None:
            taken = np.empty((*row.shape, self.steps, *width), arrays[0].dtype)
            for place, p in np.ndenumerate(part):  # a copy of one block of memory each
                taken[place] = arrays[p][row[place], shift : shift + self.steps]
            runs = row.size
        else:
            index = row * arrays[0].shape[1] + step + shift
            flat = [array.reshape(-1, *width) for array in arrays]
            if len(flat) == 1:
                taken = np.take(flat[0], index, axis=0)
            else:
                part = np.broadcast_to(part, index.shape)
                taken = np.empty((*index.shape, *width), flat[0].dtype)
                for p in np.unique(part):
                    taken[part == p] = np.take(flat[p], index[part == p], axis=0)
            runs = math.prod(index.shape[:-1])
        self._forget(taken.nbytes + PAGES * runs)
        return taken

    def _check(self) -> None:
        """Before every read, which would end the process where a file has been cut off."""
        for part in self.parts:
            if part.flat is not None:
                part.flat.check()
            for task in part.rewards:
                task.check()

    def _forget(self, read: int) -> None:
        """Keeps what random reads have mapped within bounds, however large the files are."""
        self._read += read
        if self._read > HELD_BYTES:
            self._read = 0
            for part in self.parts:
                if part.flat is not None:
                    part.flat.release()
                for task in part.rewards:
                    task.release()

    @cached_property
    def observation_units(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (+1e-6) of every observation entry, (O,) float32 each."""
        mean_EO, squares_EO = np.concatenate([p.moments[p.rows] for p in self.parts]).swapaxes(0, 1)
        mean = mean_EO.mean(axis=0)
        variance = squares_EO.mean(axis=0) / self.steps + np.square(mean_EO - mean).mean(axis=0)
        return mean.astype(np.float32), (np.sqrt(variance) + 1e-6).astype(np.float32)

    def return_scale(self) -> np.ndarray:
        """(K,) each task's best return: returns-to-go become values in [0, 1]."""
        best = self.returns.max(axis=1)
        return np.where(best > 0, best, 1.0).astype(np.float32)

    def return_quantiles(self) -> list[dict[str, float]]:
        """For each task the distribution of the episodes' returns, with its mean."""
        return [quantiles(row) | {"mean": float(row.mean())} for row in self.returns]


def quantiles(returns: np.ndarray) -> dict[str, float]:
    """The distribution of returns by the names of `QUANTILES`."""
    values = np.quantile(returns, list(QUANTILES.values()))
    return {name: float(value) for name, value in zip(QUANTILES, values, strict=True)}


def in_memory(
    specs: tuple[TaskSpec, ...],
    *,
    observation_ETO: np.ndarray,
    action_ETA: np.ndarray,
    reward_KET: np.ndarray,
) -> EpisodeStore:
    """A store of given arrays."""
    E, T, O = observation_ETO.shape
    returns_KE = reward_KET.sum(axis=2, dtype=np.float64)
    earned_KET = np.cumsum(reward_KET, axis=2, dtype=np.float64)
    to_go_KET = returns_KE[..., None] - earned_KET + reward_KET
    mean_EO = observation_ETO.mean(axis=1, dtype=np.float64)
    squares_EO = np.square(observation_ETO - mean_EO[:, None]).sum(axis=1)
    part = Part(
        name="memory",
        rows=np.arange(E),
        observation=np.concatenate([observation_ETO, np.zeros((E, 1, O), np.float32)], axis=1),
        action=np.concatenate([np.zeros_like(action_ETA[:, :1]), action_ETA], axis=1),
        moments=np.stack([mean_EO, squares_EO], axis=1),
        rewards=tuple(
            Rewards(reward=r, return_to_go=g.astype(np.float32), returns=total)
            for r, g, total in zip(reward_KET, to_go_KET, returns_KE, strict=True)
        ),
        other_lengths={},
        rejected=(),
        flat=None,
    )
    return EpisodeStore(specs, (part,))


def split(store: EpisodeStore, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Episode indices for training and for validation.

    The held-out ones are spread evenly over the ranks by (mean) return, so that both sides have all
    qualities; the best of each task stays in training.
    """
    order = np.argsort(store.returns.mean(axis=0), kind="stable")
    spare = order[~np.isin(order, store.returns.argmax(axis=1))]
    count = min(round(share * store.episodes), len(spare))
    held_out = spare[((np.arange(count) + 0.5) * len(spare) / max(1, count)).astype(int)]
    return np.setdiff1d(order, held_out), np.sort(held_out)
