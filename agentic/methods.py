"""What a method's name stands for: a model, and how it acts."""

import numpy as np

from agentic.cloning import BehaviourCloning
from agentic.model import AgenticTransformer, InUnits, ModelSpec
from agentic.policy import LockstepPolicy, Policy
from agentic.window_policy import WindowPolicy


def fresh_model(spec: ModelSpec) -> InUnits:
    """The model of the specification, untrained."""
    return BehaviourCloning(spec) if spec.method == "bc" else AgenticTransformer(spec)


def policy_of(
    model: InUnits, task: np.ndarray, trials: int, remember: int | None, cache: str
) -> LockstepPolicy:
    """How the model acts; see `Policy` for the arguments.

    A model that sees its last steps alone has no trials to remember, and no cache.
    """
    if model.spec.context_steps is not None:
        return WindowPolicy(model, task)
    assert isinstance(model, AgenticTransformer)
    return Policy(model, task, trials, remember, cache)
