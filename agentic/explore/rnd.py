"""Reward-free exploration: DDPG that is paid for observations it cannot yet predict.

Random network distillation (Burda et al. 2018) as in the unsupervised RL benchmark (Laskin et al.
2021): a predictor learns the outputs of a random network, and its error is the reward. With the
sizes of configs/rnd/paper.yaml this is URLB's agent; only the transitions of an episode in progress
are learned from at once, and not when it ends. The task's own reward is stored with the episodes
and never reaches the learner.

Axes: E environments, U updates in a row, B batch, O observation, A action.
"""

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentic.collect_config import RndConfig, small_rnd
from agentic.entries import check
from agentic.episodes import Episode, read_episode
from agentic.explore import noise
from agentic.explore.ddpg import Ddpg, DdpgSettings, linear
from agentic.explore.memory import Memory
from agentic.explore.recording import Recording
from agentic.explore.replay import Replay
from agentic.strict import at_least, between
from envs import EnvPool, TaskSpec

CLAMP = 5.0  # standardised observations stay within +-5


def rnd(
    task: TaskSpec,
    rng: np.random.Generator,
    config: RndConfig | None = None,
    memory: Memory | None = None,
) -> Generator[Episode, None, None]:
    """Episodes of `task`'s domain without end, from uniform actions to what novelty has taught.

    Args:
        task: whose simulator to explore; its reward is stored.
        rng: source of all randomness, torch's included.
        config: sizes and rates; configs/rnd/small.yaml by default.
        memory: where the learner is saved after every episode, and goes on from if it has been
            saved before. What it has yielded by then and is not on disk is only missing in its
            replay.
    """
    c = config or small_rnd()
    learner = Learner(task, c, rng)
    if memory is not None:
        learner.recall(memory)
    pool = EnvPool([task.name] * c.environments)
    while True:
        recording = Recording(pool, rng)
        while not recording.done:
            observation = recording.observation[:, recording.step]
            if learner.steps < c.seed_steps:
                action = noise.uniform(rng, (c.environments, 1, task.action_size))[:, 0]
            else:
                action = learner.ddpg.act(torch.from_numpy(observation)).numpy()
            recording.advance(action)
            learner.remember(recording)
            learner.learn(c.environments)
        if memory is not None:
            memory.save(learner.state())
        yield from recording.episodes()


def problem(memory: Memory, config: RndConfig | None) -> str | None:
    """Why a learner begins anew although its folder is not empty; None where it goes on.

    Raises:
        ValueError: a learner of other sizes is there, and would be lost.
    """
    try:
        state = memory.load()
    except ValueError as error:
        episodes = len(memory.episodes())
        if not memory.path.exists() and episodes == 0:
            return None
        return f"rnd: {error}; a new learner begins, with {episodes} episodes in its replay"
    sizes = ("hidden", "novelty_hidden", "novelty_size")
    try:
        check("config", state.get("config"), dict.fromkeys(sizes, int))
    except ValueError as error:
        raise ValueError(f"{memory.path} is not a learner ({error})") from error
    for name in sizes:
        before, asked = state["config"][name], getattr(config or small_rnd(), name)
        if before != asked:
            raise ValueError(
                f"rnd.{name}: got {asked}, expected {before} as in {memory.path}; choose another "
                "data_dir, or delete that file to begin a new learner"
            )
    return None


class Learner(Replay):
    """The agent, its sense of novelty, and the replay: rows (observation, action, later one).

    Args:
        task: gives the sizes.
        config: sizes and rates.
        rng: seeds the generator of weights, batches and noise.
    """

    def __init__(self, task: TaskSpec, config: RndConfig, rng: np.random.Generator) -> None:
        # No place for a reward: what is not stored cannot be learned.
        widths = (task.observation_size, task.action_size, task.observation_size)
        super().__init__(config.replay_capacity, widths)
        self.task = task
        self.config = config
        self.generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        settings = DdpgSettings(
            hidden=config.hidden,
            learning_rate=config.learning_rate,
            bootstrap=config.gamma**config.n_steps,
            tau=config.tau,
            noise=config.noise,
            noise_clip=config.noise_clip,
        )
        self.ddpg = Ddpg(task.observation_size, task.action_size, settings, self.generator)
        self.novelty = Novelty(task.observation_size, config, self.generator)
        self.steps = 0  # environment steps, over all sessions
        self.updates = 0
        self.owed = 0.0  # updates that steps entitle to

    def remember(self, recording: Recording) -> None:
        """Stores the E transitions that end at the recording's step; none near the start."""
        start = recording.step - self.config.n_steps
        if start >= 0:
            self.add(
                _rows(
                    recording.observation[:, start],
                    recording.action[:, start + 1],
                    recording.observation[:, recording.step],
                )
            )

    def recall(self, memory: Memory) -> None:
        """Goes on from what was saved; the replay is filled with the episodes that are there.

        A learner that is missing or damaged begins anew, but not from an empty replay.
        """
        memory.sweep()
        self.refill(memory.episodes())
        try:
            state = memory.load()
        except ValueError:
            return  # whoever starts the recipe has said so
        try:
            self.load_state(state)
        except ValueError as error:
            raise ValueError(
                f"{memory.path} is not of this learner ({error}); without it a new one begins"
            ) from error

    def refill(self, files: Iterable[Path]) -> None:
        """Stores the transitions of the last files, as many as the replay holds.

        Raises:
            ValueError: a file is damaged; names it.
        """
        n = self.config.n_steps
        each = self.task.episode_steps + 1 - n
        most = math.ceil(len(self.rows) / each)
        for path in list(files)[-most:]:
            episode = read_episode(path, self.task)
            self.add(
                _rows(
                    episode.observation[:-n],
                    episode.action[1 : 1 + each],
                    episode.observation[n:],
                )
            )

    def learn(self, steps: int) -> None:
        """Counts `steps` more environment steps, and makes the updates they entitle to."""
        self.steps += steps
        if self.steps <= self.config.seed_steps or self.stored == 0:
            return
        self.owed += steps * self.config.updates_per_step
        due = int(self.owed)
        self.owed -= due
        for index_B in self.draw(due, self.config.batch, self.generator):
            observation, action, later = self.rows[index_B].split(self.widths, dim=1)
            reward = self.novelty.learn(observation)
            self.ddpg.update(observation, action, reward, later)
            self.updates += 1

    def state(self) -> dict[str, Any]:
        """All but the replay, as plain types and tensors."""
        return {
            "config": asdict(self.config),
            "counts": {"steps": self.steps, "updates": self.updates, "owed": self.owed},
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, with this learner's own rates.

        Raises:
            ValueError: it is not that of a learner of these sizes.
        """
        check("counts", state.get("counts"), {"steps": int, "updates": int, "owed": float})
        for name in ("steps", "updates"):
            at_least(name, state["counts"][name], 0)
        between("owed", state["counts"]["owed"], 0, 1)
        for name, part in self._parts().items():
            if isinstance(part, torch.optim.Optimizer):
                found = state.get(name)
                moments = found.get("state") if isinstance(found, dict) else None
                _check_moments(name, moments, part)
                groups = part.state_dict()["param_groups"]  # this learner's own rates
                part.load_state_dict({"state": moments, "param_groups": groups})
            else:
                _check_tensors(name, state.get(name), part.state_dict())
                part.load_state_dict(state[name])
        self.steps = state["counts"]["steps"]
        self.updates = state["counts"]["updates"]
        self.owed = state["counts"]["owed"]

    def _parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {
            "actor": self.ddpg.actor,
            "critic": self.ddpg.critic,
            "target": self.ddpg.target,
            "novelty": self.novelty,
            "actor_optimiser": self.ddpg.actor_optimiser,
            "critic_optimiser": self.ddpg.critic_optimiser,
            "novelty_optimiser": self.novelty.optimiser,
        }


class Novelty(nn.Module):
    """How badly a predictor knows the outputs of a random network, in units of its deviation.

    Args:
        observation_size: O.
        config: sizes and the learning rate.
        generator: draws the weights.
    """

    def __init__(
        self, observation_size: int, config: RndConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        sizes = (observation_size, config.novelty_hidden, config.novelty_size, generator)
        self.predictor = _perceptron(*sizes)
        self.random = _perceptron(*sizes).requires_grad_(False)
        # A batch is standardised by its own statistics, always: no running ones are kept.
        self.standardise = nn.BatchNorm1d(observation_size, affine=False, track_running_stats=False)
        self.scale = RunningVariance()
        self.optimiser = torch.optim.Adam(
            self.predictor.parameters(), config.learning_rate, fused=True
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Prediction errors (B, 1) of a batch (B, O), each a mean over the outputs."""
        x = self.standardise(observation).clamp(-CLAMP, CLAMP)
        difference = self.predictor(x) - self.random(x)
        return difference.square().mean(dim=1, keepdim=True)

    def learn(self, observation: Tensor) -> Tensor:
        """One step of the predictor on a batch; then the batch's rewards (B, 1)."""
        self.optimiser.zero_grad(set_to_none=True)
        self(observation).mean().backward()
        self.optimiser.step()
        with torch.no_grad():
            error = self(observation)
            self.scale.add(error)
            return error / (self.scale.variance.sqrt() + 1e-8)


class RunningVariance(nn.Module):
    """Mean and variance of all numbers seen, batch by batch, as URLB keeps them.

    It begins with mean 0 and variance 1 of 1e-4 numbers, and merges the batches' own (unbiased)
    variances by their sizes (Chan et al. 1979).
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("mean", 0.0), ("variance", 1.0), ("count", 1e-4)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    def add(self, numbers: Tensor) -> None:
        """Takes in a batch of at least two numbers, of any shape."""
        new, n = numbers.double(), numbers.numel()
        total = self.count + n
        delta = new.mean() - self.mean
        self.variance = (
            self.count * self.variance + n * new.var() + delta**2 * self.count * n / total
        ) / total
        self.mean = self.mean + delta * n / total
        self.count = total


def _perceptron(
    inputs: int, hidden: int, outputs: int, generator: torch.Generator
) -> nn.Sequential:
    return nn.Sequential(
        linear(inputs, hidden, generator),
        nn.ReLU(),
        linear(hidden, hidden, generator),
        nn.ReLU(),
        linear(hidden, outputs, generator),
    )


def _rows(observation: np.ndarray, action: np.ndarray, later: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate((observation, action, later), axis=1))


def _check_moments(name: str, moments: Any, optimiser: torch.optim.Optimizer) -> None:
    """Raises ValueError where they are not Adam's of these parameters, or of none of them."""
    parameters = optimiser.param_groups[0]["params"]
    numbers = range(len(parameters))
    if not isinstance(moments, dict) or (moments and set(moments) != set(numbers)):
        raise ValueError(f"{name}: expected moments of {len(parameters)} parameters, or none")
    for number, of_one in moments.items():
        like = {key: parameters[number] for key in ("exp_avg", "exp_avg_sq")}
        _check_tensors(f"{name}.{number}", of_one, like | {"step": torch.zeros(())})


def _check_tensors(name: str, found: Any, expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError where a dict has other keys, shapes or dtypes than expected."""
    if not isinstance(found, dict) or found.keys() != expected.keys():
        raise ValueError(f"{name}: expected {sorted(expected)}")
    for key, like in expected.items():
        tensor = found[key]
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            raise ValueError(f"{name}.{key}: got no tensor")
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name}.{key}: got {got}, expected {tuple(like.shape)}")
