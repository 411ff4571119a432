"""TD3 that hands out its whole learning history, episode by episode.

Fujimoto et al. 2018 with n-step returns, sized for one CPU core: small networks, few updates per
step, several environments in lockstep. The data are the purpose and not the final policy, so
behaviour is spread on purpose: every episode has a noise level of its own, and some are played by
an earlier actor.

Axes: E environments, B batch, U updates in a row, O observation, A action.
"""

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agentic.episodes import Episode
from agentic.explore import noise
from agentic.explore.babble import mixture
from agentic.explore.mlp import MlpEnsemble
from agentic.explore.recording import Recording
from agentic.explore.replay import Replay
from envs import EnvPool, TaskSpec


@dataclass(frozen=True, kw_only=True)
class Td3Settings:
    """Sizes and rates of one TD3 run; the defaults suit walker."""

    environments: int = 16  # played in lockstep
    warmup_steps: int = 16_000  # environment steps of random controllers before learning
    hidden: int = 128  # width of both hidden layers
    batch: int = 128
    updates_per_step: float = 0.25  # critic updates per environment step
    learning_rate: float = 1e-3
    gamma: float = 0.99
    n_steps: int = 3  # rewards summed before bootstrapping
    tau: float = 0.02  # target update rate, applied with every actor update
    actor_period: int = 2  # critic updates per actor update
    target_noise: float = 0.2
    target_noise_clip: float = 0.3
    noise_low: float = 0.05  # behaviour noise of an episode: log-uniform in [low, high]
    noise_high: float = 1.0
    snapshot_fraction: float = 0.3  # episodes played by an earlier actor
    replay_capacity: int = 1_000_000  # transitions

    def __post_init__(self) -> None:
        counts = ("environments", "warmup_steps", "hidden", "batch", "n_steps", "actor_period")
        for field in counts:
            if getattr(self, field) < 1:
                raise ValueError(f"td3.{field}: got {getattr(self, field)}, expected at least 1")
        if not 0 < self.noise_low <= self.noise_high:
            raise ValueError(
                f"td3.noise_low, noise_high: got {self.noise_low}, {self.noise_high}, "
                "expected 0 < low <= high"
            )


SETTINGS = {
    "cartpole": Td3Settings(hidden=64),
    "cheetah": Td3Settings(updates_per_step=0.125),
}


def td3(
    task: TaskSpec, rng: np.random.Generator, settings: Td3Settings | None = None
) -> Generator[Episode, None, None]:
    """Episodes without end: first the warm-up's, then those of a TD3 that learns `task`.

    Args:
        task: what to learn; its reward is the one stored.
        rng: source of all randomness, torch's included.
        settings: defaults to the domain's entry in `SETTINGS`.
    """
    s = settings or SETTINGS.get(task.domain, Td3Settings())
    pool = EnvPool([task.name] * s.environments)
    warmup: list[Recording] = []
    for _ in range(0, s.warmup_steps, s.environments * task.episode_steps):
        warmup.append(Recording(pool, rng).play(mixture(task, rng, s.environments)))
        yield from warmup[-1].episodes()
    learner = Learner(task, s, warmup, rng)
    warmup.clear()
    actor = learner.actor
    snapshots = [actor.vector[0].clone()]
    shape = (s.environments, task.episode_steps, task.action_size)
    while True:
        scale = np.exp(rng.uniform(np.log(s.noise_low), np.log(s.noise_high), s.environments))
        scale[0] = s.noise_low  # one environment always shows what has been learned
        disturbance = scale[:, None, None] * noise.coloured(rng, shape)
        # The last environments go to earlier actors.
        former = min(rng.binomial(s.environments, s.snapshot_fraction), s.environments - 1)
        current = s.environments - former
        past = MlpEnsemble(former, actor.sizes)
        for row, index in enumerate(rng.integers(len(snapshots), size=former)):
            past.vector[row] = snapshots[index]
        recording = Recording(pool, rng)
        while not recording.done:
            t = recording.step
            x_EO = learner.standardise(recording.observation[:, t])
            with torch.inference_mode():
                now = actor(x_EO[None, :current])[0]
                then = past(x_EO[current:, None])[:, 0]
                action = torch.cat((now, then)).tanh().numpy()
            recording.advance(action + disturbance[:, t])
            learner.remember(recording, recording.step)
            learner.learn(s.environments)
        snapshots.append(actor.vector[0].clone())
        yield from recording.episodes()


class Learner(Replay):
    """Actor, twin critics, their targets and the replay.

    Args:
        task: what is learned.
        s: sizes and rates.
        warmup: finished recordings; they fill the replay, and their mean and deviation standardise
            every observation from then on.
        rng: seeds the generator of weights, batches and target noise.
    """

    def __init__(
        self, task: TaskSpec, s: Td3Settings, warmup: list[Recording], rng: np.random.Generator
    ) -> None:
        self.settings = s
        self.generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        seen = np.concatenate([r.observation.reshape(-1, task.observation_size) for r in warmup])
        self.mean = torch.from_numpy(seen.mean(axis=0))
        self.std = torch.from_numpy(seen.std(axis=0)).clamp_min_(1e-2)

        actor_sizes = (task.observation_size, s.hidden, s.hidden, task.action_size)
        critic_sizes = (task.observation_size + task.action_size, s.hidden, s.hidden, 1)
        self.actor, self.target_actor = (MlpEnsemble(1, actor_sizes) for _ in range(2))
        self.critic, self.target_critic = (MlpEnsemble(2, critic_sizes, True) for _ in range(2))
        self.actor.initialise(self.generator)
        self.critic.initialise(self.generator)
        self._track(1.0)
        self.actor_optimiser = torch.optim.Adam([self.actor.vector], s.learning_rate, fused=True)
        self.critic_optimiser = torch.optim.Adam([self.critic.vector], s.learning_rate, fused=True)
        self.updates = 0
        self.owed = 0.0

        # Rows (observation, action, return, next observation).
        widths = (task.observation_size, task.action_size, 1, task.observation_size)
        super().__init__(s.replay_capacity, widths)
        for recording in warmup:
            for step in range(1, task.episode_steps + 1):
                self.remember(recording, step)

    def standardise(self, observation: np.ndarray) -> Tensor:
        """Observations by the mean and deviation of the warm-up."""
        return (torch.from_numpy(observation) - self.mean) / self.std

    def remember(self, recording: Recording, step: int) -> None:
        """Stores the E transitions that span the n steps up to `step`; none near the start.

        Episodes end by time alone, so every transition bootstraps.
        """
        n, gamma = self.settings.n_steps, self.settings.gamma
        start = step - n
        if start < 0:
            return
        discounts = gamma ** np.arange(n, dtype=np.float32)
        rewards_EN = recording.reward[:, start + 1 : step + 1, 0]
        rows = torch.cat(
            (
                self.standardise(recording.observation[:, start]),
                torch.from_numpy(recording.action[:, start + 1]),
                torch.from_numpy(rewards_EN @ discounts)[:, None],
                self.standardise(recording.observation[:, step]),
            ),
            dim=1,
        )
        self.add(rows)

    def learn(self, steps: int) -> None:
        """Makes the updates that `steps` more environment steps entitle to."""
        s = self.settings
        self.owed += steps * s.updates_per_step
        due = int(self.owed)
        if due == 0:
            return
        self.owed -= due
        index_UB = self.draw(due, s.batch, self.generator)
        noise_UBA = torch.randn((due, s.batch, self.widths[1]), generator=self.generator)
        noise_UBA.mul_(s.target_noise).clamp_(-s.target_noise_clip, s.target_noise_clip)
        for batch, target_noise in zip(self.rows[index_UB], noise_UBA, strict=True):
            self._update(batch, target_noise)

    def _update(self, batch: Tensor, target_noise: Tensor) -> None:
        s = self.settings
        x, action, reward, next_x = batch.split(self.widths, dim=1)
        with torch.no_grad():
            next_action = (self.target_actor(next_x[None])[0].tanh() + target_noise).clamp_(-1, 1)
            next_q = self.target_critic(_both(torch.cat((next_x, next_action), 1))).amin(0)
            target = reward + s.gamma**s.n_steps * next_q
        q = self.critic(_both(torch.cat((x, action), 1)))
        loss = functional.mse_loss(q, _both(target))
        self.critic.backward(loss)
        self.critic_optimiser.step()
        self.updates += 1
        if self.updates % s.actor_period:
            return
        imagined = torch.cat((x[None], self.actor(x[None]).tanh()), 2)
        loss = -self.critic(imagined, only=0).mean()
        self.actor.backward(loss)
        self.actor_optimiser.step()
        self._track(s.tau)

    def _track(self, rate: float) -> None:
        """Moves the targets towards the learned networks."""
        self.target_actor.vector.lerp_(self.actor.vector, rate)
        self.target_critic.vector.lerp_(self.critic.vector, rate)


def _both(x: Tensor) -> Tensor:
    """(B, ...) repeated for the two critics, without a copy."""
    return x.expand(2, *x.shape)
