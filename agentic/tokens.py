"""Environment steps become tokens, in one of two layouts.

interleaved: four tokens a step, R̂_t, s_t, a_t, r_t; the completion flag d_t joins r_t's token.
step: one token a step, the sum of the embeddings of R̂_t and s_t and, where kept, of the step
before: a_{t-1}, r_{t-1} (none at a trajectory's first step) and d_{t-1} (carried over to the next
trajectory's first step, the only place where a reached target can be seen).

The action a_t is read at s_t's token, in the step layout at the only one. Axes: B batch, L
environment steps of a whole chain (N·T), S tokens, D width, O observation, A action.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from agentic.config import TokensConfig

TOKENS_PER_STEP = {"interleaved": 4, "step": 1}
ACTION_READ_AT = {"interleaved": 1, "step": 0}  # which token of a step predicts its action


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Environment steps of B chains, trajectory after trajectory, right-padded."""

    return_to_go: Tensor  # (B, L) in units of the task's return scale
    observation: Tensor  # (B, L, O) normalised
    action: Tensor  # (B, L, A)
    reward: Tensor  # (B, L) of the step's own action
    completion: Tensor  # (B, L) 1 where a trajectory ends and has reached its target
    timestep: Tensor  # (B, L) int64, counts from 0 in every trajectory
    trajectory: Tensor  # (B, L) int64, place in the chain
    task: Tensor  # (B,) int64, index into the model's tasks
    valid: Tensor  # (B, L) bool, False for padding

    def to(self, device: torch.device) -> "Steps":
        """The same steps on another device."""
        return Steps(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def without_padding(self) -> "Steps":
        """Zeros wherever a step is padding: even what no token may see must stay finite."""
        cleaned = {}
        for name in ("return_to_go", "observation", "action", "reward", "completion"):
            value = getattr(self, name)
            valid = self.valid[..., None] if value.dim() == 3 else self.valid
            cleaned[name] = torch.where(valid, value, 0.0)
        return replace(self, **cleaned)


class TokenEmbedding(nn.Module):
    """Tokens of environment steps, for whole chains and one step at a time.

    Args:
        config: layout and what of the past is shown.
        observation_size, action_size: O, A.
        width: D.
        episode_steps: T, rows of the timestep embedding.
        trajectories: N, rows of the trajectory embedding.
        tasks: number of tasks; more than one are told apart by a learned vector.
    """

    def __init__(
        self,
        config: TokensConfig,
        *,
        observation_size: int,
        action_size: int,
        width: int,
        episode_steps: int,
        trajectories: int,
        tasks: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.return_to_go = nn.Linear(1, width)
        self.observation = nn.Linear(observation_size, width)
        self.action = nn.Linear(action_size, width) if config.past_action != "none" else None
        self.reward = nn.Linear(1, width) if config.past_reward != "none" else None
        # A chain of hindsight seldom holds a reached target with something after it: until it is
        # trained, the flag shall change nothing.
        self.completion = nn.Linear(1, width, bias=False)
        nn.init.zeros_(self.completion.weight)
        self.timestep = nn.Embedding(episode_steps, width)
        nn.init.normal_(self.timestep.weight, std=0.02)
        self.trajectory: nn.Embedding | None = None
        if config.trajectory_embedding:
            self.trajectory = nn.Embedding(trajectories, width)
            nn.init.normal_(self.trajectory.weight, std=0.02)
        self.task = nn.Embedding(tasks, width) if tasks > 1 else None
        self.norm = nn.LayerNorm(width)

    def forward(self, steps: Steps) -> Tensor:
        """All tokens of whole chains: (B, S, D) with S = tokens per step · L."""
        steps = steps.without_padding()
        place_BLD = self._place(steps)
        if self.config.layout == "step":
            # A window's first step knows no step before it, even where it has one.
            inner_BL = (steps.timestep > 0) & (steps.trajectory == _previous(steps.trajectory))
            inner_BL[:, 0] = False
            token_BLD = (
                self._now(steps)
                + place_BLD
                + self._past(
                    _previous(steps.action) * inner_BL[..., None],
                    _previous(steps.reward) * inner_BL,
                    _previous(steps.completion),
                    inner_BL,
                )
            )
            tokens_BLGD = token_BLD[:, :, None]
        else:
            tokens_BLGD = (
                torch.stack(
                    [
                        self.return_to_go(steps.return_to_go[..., None]),
                        self.observation(steps.observation),
                        *self._outcome(steps),
                    ],
                    dim=2,
                )
                + place_BLD[:, :, None]
            )
        return self.norm(tokens_BLGD).flatten(1, 2)

    def next(self, previous: Steps | None, current: Steps) -> Tensor:
        """The tokens that one more decision adds, (B, S, D); the last one predicts the action.

        Args:
            previous: the step before (L = 1) with its outcome, of the trial before at a trial's
                start; None at the start of the context.
            current: R̂_t and s_t (L = 1); its action, reward and completion are not read.
        """
        place_BLD = self._place(current)
        if self.config.layout == "step":
            token_BLD = self._now(current) + place_BLD
            if previous is not None:
                inner_BL = current.timestep > 0
                token_BLD = token_BLD + self._past(
                    previous.action * inner_BL[..., None],
                    previous.reward * inner_BL,
                    previous.completion,
                    inner_BL,
                )
            return self.norm(token_BLD)
        tokens = [
            self.return_to_go(current.return_to_go[..., None]) + place_BLD,
            self.observation(current.observation) + place_BLD,
        ]
        if previous is not None:
            before_BLD = self._place(previous)
            tokens = [token + before_BLD for token in self._outcome(previous)] + tokens
        return self.norm(torch.cat(tokens, dim=1))

    def _place(self, steps: Steps) -> Tensor:
        """What all tokens of a step share: when, in which trajectory, for which task."""
        place_BLD = self.timestep(steps.timestep)
        if self.trajectory is not None:
            place_BLD = place_BLD + self.trajectory(steps.trajectory)
        if self.task is not None:
            place_BLD = place_BLD + self.task(steps.task)[:, None]
        return place_BLD

    def _now(self, steps: Steps) -> Tensor:
        return self.return_to_go(steps.return_to_go[..., None]) + self.observation(
            steps.observation
        )

    def _past(
        self, action_BLA: Tensor, reward_BL: Tensor, completion_BL: Tensor, inner_BL: Tensor
    ) -> Tensor:
        """Step layout: the sum of what is shown of the step before, nothing where not `inner`."""
        past_BLD = self.completion(completion_BL[..., None])
        if self.action is not None:
            kept_BL1 = self._kept(inner_BL, self.config.past_action)
            past_BLD = past_BLD + self.action(action_BLA) * kept_BL1
        if self.reward is not None:
            kept_BL1 = self._kept(inner_BL, self.config.past_reward)
            past_BLD = past_BLD + self.reward(reward_BL[..., None]) * kept_BL1
        return past_BLD

    def _outcome(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Interleaved layout: a_t's and r_t's tokens, each (B, L, D); empty ones where hidden."""
        flag_BLD = self.completion(steps.completion[..., None])
        action_BLD = reward_BLD = torch.zeros_like(flag_BLD)
        if self.action is not None:
            kept_BL1 = self._kept(steps.valid, self.config.past_action)
            action_BLD = self.action(steps.action) * kept_BL1
        if self.reward is not None:
            kept_BL1 = self._kept(steps.valid, self.config.past_reward)
            reward_BLD = self.reward(steps.reward[..., None]) * kept_BL1
        return action_BLD, reward_BLD + flag_BLD

    def _kept(self, shown_BL: Tensor, past: str) -> Tensor:
        """(B, L, 1) mask of the shown tokens, thinned out in training where `past` is dropout."""
        if past == "dropout" and self.training:
            drawn_BL = torch.rand(shown_BL.shape, device=shown_BL.device) >= self.config.dropout
            shown_BL = shown_BL & drawn_BL
        return shown_BL[..., None]


def _previous(x: Tensor) -> Tensor:
    """x[t-1] at t along axis 1, zeros at the front."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
