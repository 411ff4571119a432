"""Environment steps become tokens, in one of two layouts.

interleaved: four tokens a step, R̂_t, s_t, a_t, r_t; the completion flag d_t joins r_t's token.
step: one token a step, the sum of the embeddings of R̂_t and s_t and, where kept, of the step
before: a_{t-1}, r_{t-1} (none at a trajectory's first step) and d_{t-1} (carried over to the next
trajectory's first step, the only place where a reached target can be seen).

The action a_t is read at s_t's token, in the step layout at the only one. Axes: B batch, L
environment steps of a whole chain (N·T), S tokens, D width, O observation, A action.
"""

from collections.abc import Callable
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


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """What the tokens of a step are made of; every step is on its own.

    The outcome (action, reward, completion) is the step's own in the interleaved layout, and that
    of the step before in the step layout.
    """

    return_to_go: Tensor  # (B, L)
    observation: Tensor  # (B, L, O)
    action: Tensor  # (B, L, A)
    reward: Tensor  # (B, L)
    completion: Tensor  # (B, L)
    action_shown: Tensor  # (B, L) bool
    reward_shown: Tensor  # (B, L) bool
    timestep: Tensor  # (B, L) int64
    trajectory: Tensor  # (B, L) int64
    task: Tensor  # (B,) int64

    def at(self, sequences: slice, steps: Tensor) -> "TokenInputs":
        """Some sequences, and of them the steps with these indices."""
        chosen = {}
        for f in fields(self):
            value = getattr(self, f.name)[sequences]
            chosen[f.name] = value if f.name == "task" else value[:, steps]
        return TokenInputs(**chosen)


class TokenEmbedding(nn.Module):
    """Tokens of environment steps, for whole chains and one step at a time.

    Args:
        config: layout and what of the past is shown.
        observation_size, action_size: O, A.
        width: D.
        episode_steps: T, rows of the timestep embedding.
        trajectories: N, rows of the trajectory embedding.
        tasks: number of tasks; more than one are told apart by a learned vector, if asked for.
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
        self.timestep: nn.Embedding | None = None
        if config.timestep_embedding:
            self.timestep = nn.Embedding(episode_steps, width)
            nn.init.normal_(self.timestep.weight, std=0.02)
        self.trajectory: nn.Embedding | None = None
        if config.trajectory_embedding:
            self.trajectory = nn.Embedding(trajectories, width)
            nn.init.normal_(self.trajectory.weight, std=0.02)
        told = tasks > 1 and config.task_embedding
        self.task = nn.Embedding(tasks, width) if told else None
        self.norm = nn.LayerNorm(width)

    def forward(
        self, steps: "Steps | TokenInputs", norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """All tokens of whole chains: (B, S, D) with S = tokens per step · L.

        Args:
            steps: of whole chains, or already what their tokens are made of, of any steps.
            norm: instead of the layer norm, for weights that are only some of the columns.
        """
        inputs = steps if isinstance(steps, TokenInputs) else self.inputs(steps)
        place_BLD = self._place(inputs.timestep, inputs.trajectory, inputs.task)
        if self.config.layout == "step":
            token_BLD = self._now(inputs) + place_BLD + self._past(inputs)
            tokens_BLGD = token_BLD[:, :, None]
        else:
            tokens_BLGD = (
                torch.stack(
                    [
                        self.return_to_go(inputs.return_to_go[..., None]),
                        self.observation(inputs.observation),
                        *self._outcome(inputs),
                    ],
                    dim=2,
                )
                + place_BLD[:, :, None]
            )
        return (norm or self.norm)(tokens_BLGD).flatten(1, 2)

    def inputs(self, steps: Steps) -> TokenInputs:
        """What the tokens of whole chains are made of, step by step."""
        steps = steps.without_padding()
        action_BLA, reward_BL, completion_BL = steps.action, steps.reward, steps.completion
        shown_BL = steps.valid
        if self.config.layout == "step":
            # A window's first step knows no step before it, even where it has one.
            shown_BL = (steps.timestep > 0) & (steps.trajectory == _previous(steps.trajectory))
            shown_BL[:, 0] = False
            action_BLA = _previous(action_BLA) * shown_BL[..., None]
            reward_BL = _previous(reward_BL) * shown_BL
            completion_BL = _previous(completion_BL)
        return TokenInputs(
            return_to_go=steps.return_to_go,
            observation=steps.observation,
            action=action_BLA,
            reward=reward_BL,
            completion=completion_BL,
            action_shown=self._kept(shown_BL, self.config.past_action),
            reward_shown=self._kept(shown_BL, self.config.past_reward),
            timestep=steps.timestep,
            trajectory=steps.trajectory,
            task=steps.task,
        )

    def next(self, previous: Steps | None, current: Steps) -> Tensor:
        """The tokens that one more decision adds, (B, S, D); the last one predicts the action.

        Args:
            previous: the step before (L = 1) with its outcome, of the trial before at a trial's
                start; None at the start of the context.
            current: R̂_t and s_t (L = 1); its action, reward and completion are not read.
        """
        place_BLD = self._place(current.timestep, current.trajectory, current.task)
        if self.config.layout == "step":
            token_BLD = self._now(current) + place_BLD
            if previous is not None:
                inner_BL = current.timestep > 0
                token_BLD = token_BLD + self._past(self._outcome_of(previous, inner_BL))
            return self.norm(token_BLD)
        tokens = [
            self.return_to_go(current.return_to_go[..., None]) + place_BLD,
            self.observation(current.observation) + place_BLD,
        ]
        if previous is not None:
            before_BLD = self._place(previous.timestep, previous.trajectory, previous.task)
            outcome = self._outcome(self._outcome_of(previous, previous.valid))
            tokens = [token + before_BLD for token in outcome] + tokens
        return self.norm(torch.cat(tokens, dim=1))

    def _place(self, timestep_BL: Tensor, trajectory_BL: Tensor, task_B: Tensor) -> Tensor:
        """What all tokens of a step share: when, in which trajectory, for which task."""
        place_BLD = torch.zeros(1, 1, 1, device=timestep_BL.device)
        if self.timestep is not None:
            place_BLD = self.timestep(timestep_BL)
        if self.trajectory is not None:
            place_BLD = place_BLD + self.trajectory(trajectory_BL)
        if self.task is not None:
            place_BLD = place_BLD + self.task(task_B)[:, None]
        return place_BLD

    def _now(self, now: Steps | TokenInputs) -> Tensor:
        return self.return_to_go(now.return_to_go[..., None]) + self.observation(now.observation)

    def _outcome_of(self, previous: Steps, shown_BL: Tensor) -> TokenInputs:
        """The outcome of one step, of which action and reward are seen where `shown`."""
        return TokenInputs(
            return_to_go=previous.return_to_go,
            observation=previous.observation,
            action=previous.action * shown_BL[..., None],
            reward=previous.reward * shown_BL,
            completion=previous.completion,
            action_shown=shown_BL,
            reward_shown=shown_BL,
            timestep=previous.timestep,
            trajectory=previous.trajectory,
            task=previous.task,
        )

    def _past(self, inputs: TokenInputs) -> Tensor:
        """Step layout: the sum of what is shown of the step before."""
        past_BLD = self.completion(inputs.completion[..., None])
        if self.action is not None:
            past_BLD = past_BLD + self.action(inputs.action) * inputs.action_shown[..., None]
        if self.reward is not None:
            reward_BLD = self.reward(inputs.reward[..., None])
            past_BLD = past_BLD + reward_BLD * inputs.reward_shown[..., None]
        return past_BLD

    def _outcome(self, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
        """Interleaved layout: a_t's and r_t's tokens, each (B, L, D); empty ones where hidden."""
        flag_BLD = self.completion(inputs.completion[..., None])
        action_BLD = reward_BLD = torch.zeros_like(flag_BLD)
        if self.action is not None:
            action_BLD = self.action(inputs.action) * inputs.action_shown[..., None]
        if self.reward is not None:
            reward_BLD = self.reward(inputs.reward[..., None]) * inputs.reward_shown[..., None]
        return action_BLD, reward_BLD + flag_BLD

    def _kept(self, shown_BL: Tensor, past: str) -> Tensor:
        """Those of the shown that are seen: thinned out in training where `past` is dropout."""
        if past == "dropout" and self.training:
            drawn_BL = torch.rand(shown_BL.shape, device=shown_BL.device) >= self.config.dropout
            shown_BL = shown_BL & drawn_BL
        return shown_BL


def _previous(x: Tensor) -> Tensor:
    """x[t-1] at t along axis 1, zeros at the front."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
