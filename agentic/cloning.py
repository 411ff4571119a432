"""Behaviour cloning: an action from the last observations alone, by a multilayer perceptron."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from agentic.model import InUnits, ModelSpec, action_loss
from agentic.tokens import Steps


class BehaviourCloning(InUnits):
    """Predicts an action from the K last observations; sees no action, reward or return.

    The baseline of the Decision Transformer's authors (Chen et al. 2021): hidden layers with ReLU
    and dropout, mean squared error. Several tasks are told apart by a one-hot vector, if
    `tokens.task_embedding` says so.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.context_steps is not None
        self._context = spec.context_steps
        self._tasks = len(spec.tasks) if spec.tokens.task_embedding else 1
        size, width = spec.context_steps * spec.observation_size, spec.model.width
        size += self._tasks if self._tasks > 1 else 0
        hidden: list[nn.Module] = []
        for _ in range(spec.model.layers):
            hidden += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(spec.model.dropout)]
            size = width
        self.layers = nn.Sequential(*hidden)
        self.head = nn.Linear(width, spec.action_size)

    def forward(self, steps: Steps, first: int = 0) -> Tensor:
        """Actions (B, L - first, A) in (-1, 1) of the steps from `first` on.

        Args:
            steps: raw, of one trajectory, before whose first step there is nothing.
            first: nothing that only earlier actions need is computed.
        """
        context_BLKO, task_BL = self._contexts(steps)
        return self._act(context_BLKO[:, first:], task_BL[:, first:])

    def loss(self, steps: Steps, weight_BL: Tensor) -> Tensor:
        """See `InUnits.loss`; of those steps whose K observations are known.

        These are all of a window that begins with its trajectory, else those from the K-th on.
        """
        place_L = torch.arange(weight_BL.shape[1], device=self.device)
        known_BL = (place_L >= self._context - 1) | (steps.timestep[:, :1] == 0)
        context_BLKO, task_BL = self._contexts(steps)
        predicted_NA = self._act(context_BLKO[known_BL], task_BL[known_BL])
        action_NA, weight_N = steps.action[known_BL], weight_BL[known_BL]
        return action_loss(predicted_NA[None], action_NA[None], weight_N[None], weight_N.sum())

    def _contexts(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Every step's last K normalised observations, zeros before the first, and its task.

        Returns:
            (B, L, K, O), oldest first, a view; (B, L).
        """
        observation_BLO = self.normalise(steps).observation
        padded_BLO = pad(observation_BLO, (0, 0, self._context - 1, 0))
        context_BLKO = padded_BLO.unfold(1, self._context, 1).transpose(2, 3)
        return context_BLKO, steps.task[:, None].expand(steps.timestep.shape)

    def _act(self, context_KO: Tensor, task: Tensor) -> Tensor:
        """Actions (..., A) from observations (..., K, O) and tasks (...)."""
        x = context_KO.flatten(-2)
        if self._tasks > 1:
            x = torch.cat([x, one_hot(task, self._tasks).to(x.dtype)], dim=-1)
        return torch.tanh(self.head(self.layers(x)))
