"""Acting on the last steps alone, which are encoded again at every decision."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from agentic.model import InUnits
from agentic.policy import LockstepPolicy
from agentic.tokens import Steps


class WindowPolicy(LockstepPolicy):
    """Sees the last K steps of its trial, and nothing of the trials before.

    No keys and values are kept: those of a step depend on what it saw, which leaves the window
    before the step itself does.
    """

    def __init__(self, model: InUnits, task: np.ndarray) -> None:
        super().__init__(model, task)
        assert model.spec.context_steps is not None
        self.model = model
        self._past = model.spec.context_steps - 1  # most steps that are held between decisions
        self._steps: Steps | None = None

    def begin_trial(self) -> None:
        """Nothing stays: every trial is a first one."""
        self.trial = self.timestep = 0
        self._steps = None

    def forget(self) -> None:
        """There is nothing to forget."""

    def memory(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def recall(self, memory: dict[str, Any]) -> None:
        """A trial leaves nothing behind."""
        self.begin_trial()

    @torch.no_grad()
    def _decide(self, current: Steps) -> torch.Tensor:
        steps = _joined(self._steps, current, self._past + 1)
        return self.model(steps, steps.timestep.shape[1] - 1)[:, -1]

    def _remember(self, done: Steps) -> None:
        self._steps = _joined(self._steps, done, self._past) if self._past else None


def _joined(before: Steps | None, one: Steps, most: int) -> Steps:
    """The last `most` of some steps and one more."""
    if before is None:
        return one
    joined = {
        f.name: torch.cat([getattr(before, f.name), getattr(one, f.name)], dim=1)[:, -most:]
        for f in fields(Steps)
        if f.name != "task"
    }
    return Steps(**joined, task=one.task)
