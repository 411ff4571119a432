"""DDPG with twin critics, as the agents of the unsupervised RL benchmark have it.

Laskin et al. 2021 (URLB), after DrQ-v2: a LayerNorm and tanh trunk in front of actor and critics,
truncated normal noise, returns of n steps, and a target for the critics only. Where rewards come
from is the caller's matter.

Axes: B batch, O observation, A action, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

EDGE = 1 - 1e-6  # actions stay inside the open interval, where tanh's gradient lives


@dataclass(frozen=True, kw_only=True)
class DdpgSettings:
    """Rates of the learning, and the width of its networks."""

    hidden: int
    learning_rate: float
    bootstrap: float  # gamma ** n: the weight of the value n steps later
    tau: float  # target update rate
    noise: float  # standard deviation around the actor's mean, of behaviour and next actions
    noise_clip: float  # of the noise in updates


class Ddpg:
    """Actor, twin critics and the critics' target, with their optimisers.

    Args:
        observation_size: O.
        action_size: A.
        settings: rates and width.
        generator: draws the weights, and all noise from then on.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        settings: DdpgSettings,
        generator: torch.Generator,
    ) -> None:
        s = self.settings = settings
        self.generator = generator
        sizes = (observation_size, action_size, s.hidden, generator)
        self.actor = Actor(*sizes)
        self.critic = Critic(*sizes)
        self.target = Critic(*sizes).requires_grad_(False)
        self.target.load_state_dict(self.critic.state_dict())
        self.actor_optimiser = torch.optim.Adam(
            self.actor.parameters(), s.learning_rate, fused=True
        )
        self.critic_optimiser = torch.optim.Adam(
            self.critic.parameters(), s.learning_rate, fused=True
        )

    def act(self, observation: Tensor) -> Tensor:
        """Actions (B, A) of the behaviour: the actor's mean with noise that is not clipped."""
        with torch.no_grad():
            return self._noisy(self.actor(observation), clip=None)

    def update(
        self, observation: Tensor, action: Tensor, reward: Tensor, next_observation: Tensor
    ) -> None:
        """One step of the critics, then of the actor, then of the target.

        Args:
            observation: (B, O).
            action: (B, A) taken there.
            reward: (B, 1) earned before `next_observation`.
            next_observation: (B, O) n steps later.
        """
        s = self.settings
        with torch.no_grad():
            next_action = self._noisy(self.actor(next_observation), s.noise_clip)
            next_q = torch.minimum(*self.target(next_observation, next_action))
            goal = reward + s.bootstrap * next_q
        first, second = self.critic(observation, action)
        loss = functional.mse_loss(first, goal) + functional.mse_loss(second, goal)
        _descend(self.critic_optimiser, loss)

        imagined = self._noisy(self.actor(observation), s.noise_clip)
        self.critic.requires_grad_(False)  # its gradients would not be used
        loss = -torch.minimum(*self.critic(observation, imagined)).mean()
        self.critic.requires_grad_(True)
        _descend(self.actor_optimiser, loss)

        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.critic.parameters(), strict=True)
            for slow, learned in pairs:
                slow.lerp_(learned, s.tau)

    def _noisy(self, mean: Tensor, clip: float | None) -> Tensor:
        noise = torch.randn(mean.shape, generator=self.generator).mul_(self.settings.noise)
        if clip is not None:
            noise.clamp_(-clip, clip)
        action = mean + noise
        # The gradient passes as if nothing had been cut off: an actor at the edge can come back.
        return action + (action.clamp(-EDGE, EDGE) - action).detach()


class Actor(nn.Module):
    """(B, O) to the mean action (B, A) in (-1, 1)."""

    def __init__(
        self, observation_size: int, action_size: int, hidden: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            trunk(observation_size, hidden, generator),
            linear(hidden, hidden, generator),
            nn.ReLU(),
            linear(hidden, action_size, generator),
            nn.Tanh(),
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Means (B, A)."""
        return self.layers(observation)


class Critic(nn.Module):
    """Two values of an observation and an action, from one trunk."""

    def __init__(
        self, observation_size: int, action_size: int, hidden: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.trunk = trunk(observation_size + action_size, hidden, generator)
        self.heads = nn.ModuleList(
            nn.Sequential(
                linear(hidden, hidden, generator), nn.ReLU(), linear(hidden, 1, generator)
            )
            for _ in range(2)
        )

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, 1), (B, 1)."""
        h = self.trunk(torch.cat((observation, action), 1))
        first, second = self.heads
        return first(h), second(h)


def trunk(inputs: int, hidden: int, generator: torch.Generator) -> nn.Sequential:
    """The first layer, with its outputs kept in (-1, 1)."""
    return nn.Sequential(linear(inputs, hidden, generator), nn.LayerNorm(hidden), nn.Tanh())


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights and no bias to begin with."""
    layer = skip_init(nn.Linear, inputs, outputs)  # leaves torch's global generator alone
    nn.init.orthogonal_(layer.weight, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
