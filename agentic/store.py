"""A domain's episodes in memory, relabelled with each task's reward, with their statistics."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tqdm import tqdm

from agentic import hindsight
from agentic.episodes import Episode, buffer_dir, episode_files, read_episode
from envs import TaskSpec, reward

QUANTILES = {
    "min": 0.0,
    "p10": 0.1,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "max": 1.0,
}
RELABEL_MODE = "with_control"  # the reward sees the action, as the simulator's own does


@dataclass(frozen=True, kw_only=True)
class EpisodeStore:
    """E whole episodes of T steps, for K tasks of one domain.

    Attributes:
        specs: the K tasks.
        files: the E sources.
        observation: (E, T, O) float32, s_0 .. s_{T-1}.
        action: (E, T, A) float32, a_t taken in s_t.
        reward: (K, E, T) float32, r_t earned by a_t.
        returns: (K, E) float64.
    """

    specs: tuple[TaskSpec, ...]
    files: tuple[Path, ...]
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    returns: np.ndarray

    @property
    def episodes(self) -> int:
        """E."""
        return len(self.files)

    @property
    def steps(self) -> int:
        """T."""
        return self.action.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in memory."""
        return self.observation.nbytes + self.action.nbytes + 2 * self.reward.nbytes

    @cached_property
    def own_return_to_go(self) -> np.ndarray:
        """(K, E, T) float32: each trajectory told to reach its own return."""
        own = [
            [
                hindsight.returns_to_go(self.reward[k, e], self.returns[k, e])
                for e in range(self.episodes)
            ]
            for k in range(len(self.specs))
        ]
        return np.array(own, np.float32)

    def observation_units(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (+1e-6) of every observation entry, (O,) float32 each."""
        flat = self.observation.reshape(-1, self.observation.shape[-1])
        mean = flat.mean(axis=0, dtype=np.float64)
        std = flat.std(axis=0, dtype=np.float64)
        return mean.astype(np.float32), (std + 1e-6).astype(np.float32)

    def return_scale(self) -> np.ndarray:
        """(K,) each task's best return: returns-to-go become values in [0, 1]."""
        best = self.returns.max(axis=1)
        return np.where(best > 0, best, 1.0).astype(np.float32)

    def return_quantiles(self) -> list[dict[str, float]]:
        """For each task the distribution of the episodes' returns, with its mean."""
        tables = []
        for row in self.returns:
            quantiles = np.quantile(row, list(QUANTILES.values()))
            table = {name: float(q) for name, q in zip(QUANTILES, quantiles, strict=True)}
            tables.append(table | {"mean": float(row.mean())})
        return tables


def relabel(spec: TaskSpec, episode: Episode) -> np.ndarray:
    """`spec`'s reward of every step, (T,) float32; row 0, the reset, has none."""
    r = reward(
        spec.name,
        observation=episode.observation[1:],
        action=episode.action[1:],
        physics=episode.physics[1:],
    )
    return r.astype(np.float32)


def find_files(data_dir: Path, domain: str, algorithms: tuple[str, ...]) -> list[Path]:
    """The npz episodes of these exploration algorithms.

    Raises:
        ValueError: an algorithm is named twice, or has no episodes; says what was looked for and
            what is there instead.
    """
    files: list[Path] = []
    if len(set(algorithms)) < len(algorithms):
        raise ValueError(f"algorithms: got {list(algorithms)}, expected each of them once")
    for algorithm in algorithms:
        directory = buffer_dir(data_dir, domain, algorithm)
        found = episode_files(directory)
        if not found:
            raise ValueError(
                f"data_dir: looked for {directory}/<name>_<index>_<length>.npz, "
                f"expected ExoRL episodes, got {_what_is_there(directory)}"
            )
        files += found
    return files


def _what_is_there(directory: Path) -> str:
    """The nearest existing folder on the way to `directory`, and what it holds."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    names = sorted(p.name for p in place.iterdir())[:5] if place.is_dir() else []
    return f"{place} with {', '.join(names) if names else 'nothing in it'}"


def load_store(
    data_dir: str | Path, specs: tuple[TaskSpec, ...], algorithms: tuple[str, ...]
) -> EpisodeStore:
    """Reads, checks and relabels all episodes of the tasks' domain.

    Raises:
        ValueError: no episodes, or one that is not whole and sound; names the file.
    """
    files = find_files(Path(data_dir), specs[0].domain, algorithms)
    shape = (len(files), specs[0].episode_steps)
    observation = np.empty((*shape, specs[0].observation_size), np.float32)
    action = np.empty((*shape, specs[0].action_size), np.float32)
    rewards = np.empty((len(specs), *shape), np.float32)
    for i, path in enumerate(tqdm(files, desc="reading episodes", disable=None, leave=False)):
        episode = read_episode(path, specs[0])
        observation[i] = episode.observation[:-1]
        action[i] = episode.action[1:]
        for k, spec in enumerate(specs):
            rewards[k, i] = relabel(spec, episode)
    return EpisodeStore(
        specs=specs,
        files=tuple(files),
        observation=observation,
        action=action,
        reward=rewards,
        returns=rewards.sum(axis=2, dtype=np.float64),
    )


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
