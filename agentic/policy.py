"""Acting: the transformer with a key/value cache, one call per environment step."""

from dataclasses import replace

import numpy as np
import torch

from agentic.model import AgenticTransformer
from agentic.tokens import Steps


class Policy:
    """C contexts that act in lockstep, trial after trial; deterministic.

    Args:
        model: put into evaluation mode by the caller.
        task: (C,) index of each context's task among the model's.
        trials: most trials that a context will hold.
    """

    def __init__(self, model: AgenticTransformer, task: np.ndarray, trials: int) -> None:
        spec = model.spec
        if spec.tokens.trajectory_embedding and trials > spec.trajectories:
            raise ValueError(
                f"trials: got {trials}, expected at most {spec.trajectories}, the trajectories "
                "that this model's trajectory embedding was trained with"
            )
        self.model = model
        self.device = model.head.weight.device
        self.task_C = torch.as_tensor(task, device=self.device)
        self.caches = model.caches(len(task), trials * spec.episode_steps)
        self.trial = -1
        self.timestep = 0
        self.previous: Steps | None = None
        self.current: Steps | None = None

    def begin_trial(self) -> None:
        """All that came before stays in the context."""
        self.trial += 1
        self.timestep = 0

    def act(self, observation: np.ndarray, return_to_go: np.ndarray) -> np.ndarray:
        """Actions (C, A) float32 for observations (C, O) and remaining target returns (C,)."""
        contexts = len(observation)
        one = torch.ones(contexts, 1, device=self.device)
        self.current = Steps(
            return_to_go=self._tensor(return_to_go)[:, None],
            observation=self._tensor(observation)[:, None],
            action=one.new_zeros(contexts, 1, self.model.spec.action_size),
            reward=one * 0,
            completion=one * 0,
            timestep=(one * self.timestep).long(),
            trajectory=(one * self.trial).long(),
            task=self.task_C,
            valid=one.bool(),
        )
        return self.model.decode(self.previous, self.current, self.caches).cpu().numpy()

    def record(self, action: np.ndarray, reward: np.ndarray, completed: np.ndarray) -> None:
        """What the last decision led to: action (C, A), reward (C,), target reached (C,)."""
        assert self.current is not None, "record follows act"
        self.previous = replace(
            self.current,
            action=self._tensor(action)[:, None],
            reward=self._tensor(reward)[:, None],
            completion=self._tensor(completed)[:, None],
        )
        self.timestep += 1

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)
