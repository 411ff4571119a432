"""Acting in lockstep, one call per environment step; the transformer with a key/value cache."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentic.model import CACHE_TYPES, AgenticTransformer, InUnits
from agentic.tokens import Steps


class LockstepPolicy:
    """C contexts that act in lockstep, trial after trial; deterministic.

    Args:
        model: put into evaluation mode by the caller.
        task: (C,) index of each context's task among the model's.
    """

    def __init__(self, model: InUnits, task: np.ndarray) -> None:
        self.spec = model.spec
        self.device, self.dtype = model.device, model.return_scale.dtype
        self.task_C = torch.as_tensor(task, device=self.device)
        self.trial = -1  # place in the context
        self.timestep = 0
        self.current: Steps | None = None

    def begin_trial(self) -> None:
        """Another trial of the same context."""
        raise NotImplementedError

    def forget(self) -> None:
        """Empties the context: the next trial is a first one."""
        raise NotImplementedError

    def act(self, observation: np.ndarray, return_to_go: np.ndarray) -> np.ndarray:
        """Actions (C, A) float32 for observations (C, O) and remaining target returns (C,)."""
        contexts = len(observation)
        one = torch.ones(contexts, 1, device=self.device, dtype=self.dtype)
        self.current = Steps(
            return_to_go=self._tensor(return_to_go)[:, None],
            observation=self._tensor(observation)[:, None],
            action=one.new_zeros(contexts, 1, self.spec.action_size),
            reward=one * 0,
            completion=one * 0,
            timestep=(one * self.timestep).long(),
            trajectory=(one * self.trial).long(),
            task=self.task_C,
            valid=one.bool(),
        )
        return self._decide(self.current).cpu().numpy()

    def record(self, action: np.ndarray, reward: np.ndarray, completed: np.ndarray) -> None:
        """What the last decision led to: action (C, A), reward (C,), target reached (C,)."""
        assert self.current is not None, "record follows act"
        self._remember(
            replace(
                self.current,
                action=self._tensor(action)[:, None],
                reward=self._tensor(reward)[:, None],
                completion=self._tensor(completed)[:, None],
            )
        )
        self.timestep += 1

    def memory(self) -> dict[str, Any]:
        """What the trial that has just ended added to the context, in plain types and tensors."""
        raise NotImplementedError

    def recall(self, memory: dict[str, Any]) -> None:
        """Passes through a trial again by what it added, instead of acting.

        Raises:
            ValueError: it is not what `memory` gave, of as many contexts.
        """
        raise NotImplementedError

    def _decide(self, current: Steps) -> torch.Tensor:
        """Actions (C, A) for the step that has just begun."""
        raise NotImplementedError

    def _remember(self, done: Steps) -> None:
        """Takes the last step with its outcome."""
        raise NotImplementedError

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, dtype=self.dtype, device=self.device)


class Policy(LockstepPolicy):
    """Every trial stays in the context, as keys and values.

    Args:
        model, task: see `LockstepPolicy`.
        trials: most trials that a context will see.
        remember: most trials that it holds, this one included: as another begins, the oldest one's
            keys and values are forgotten (what later tokens took from them stays); None: all.
        cache: number type of the keys and values, fp32 | bf16.

    Raises:
        ValueError: more trials than a trajectory embedding has rows.
    """

    def __init__(
        self,
        model: AgenticTransformer,
        task: np.ndarray,
        trials: int,
        remember: int | None = None,
        cache: str = "fp32",
    ) -> None:
        super().__init__(model, task)
        spec = model.spec
        if spec.tokens.trajectory_embedding and trials > spec.trajectories:
            raise ValueError(
                f"trials: got {trials}, expected at most {spec.trajectories}, the trajectories "
                "that this model's trajectory embedding was trained with"
            )
        self.model = model
        self.remember = remember
        steps = min(trials, remember or trials) * spec.episode_steps
        self.caches = model.caches(len(task), steps, CACHE_TYPES[cache])
        self.trial_start = 0  # cached tokens of the trials before
        self.previous: Steps | None = None

    def begin_trial(self) -> None:
        """All that came before stays in the context, but for what is beyond its size."""
        self.trial += 1
        self.timestep = 0
        if self.remember is not None and self.trial >= self.remember:
            length = self.caches[0].length
            # Interleaved, the last step's outcome is no token yet: it belongs to the next call.
            forgotten = min(length, self.spec.episode_steps * self.spec.tokens_per_step)
            for cache in self.caches:
                cache.drop(forgotten)
            if forgotten == length:
                self.previous = None
        self.trial_start = self.caches[0].length

    def forget(self) -> None:
        """See `LockstepPolicy.forget`."""
        for cache in self.caches:
            cache.drop(cache.length)
        self.previous = None
        self.trial = -1

    def _decide(self, current: Steps) -> torch.Tensor:
        return self.model.decode(self.previous, current, self.caches)

    def _remember(self, done: Steps) -> None:
        self.previous = done

    def memory(self) -> dict[str, Any]:
        """The trial's keys and values, and its last step."""
        assert self.previous is not None, "a trial has ended"
        return {
            "caches": [cache.read(self.trial_start, cache.length) for cache in self.caches],
            "previous": {f.name: getattr(self.previous, f.name) for f in fields(Steps)},
        }

    def recall(self, memory: dict[str, Any]) -> None:
        """See `LockstepPolicy.recall`."""
        self._check(memory)
        self.begin_trial()
        for cache, (key, value) in zip(self.caches, memory["caches"], strict=True):
            cache.append(key.to(self.device), value.to(self.device))
        self.previous = Steps(**memory["previous"]).to(self.device)

    def _check(self, memory: Any) -> None:
        """Raises ValueError for what is not a trial's keys, values and last step."""
        C, spec = len(self.task_C), self.spec
        caches = memory.get("caches") if isinstance(memory, dict) else None
        if not isinstance(caches, list) or len(caches) != len(self.caches):
            raise ValueError(f"memory: expected keys and values of {len(self.caches)} layers")
        for cache, pair in zip(self.caches, caches, strict=True):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError("memory: expected keys and values, one of each in a layer")
            key = pair[0]
            S = key.shape[2] if isinstance(key, Tensor) and key.dim() == 4 else 0
            for tensor in pair:
                shape = (C, cache.heads, S, cache.key_PNCK.shape[3])
                _expect("keys and values", tensor, shape, self.caches[0].key_PNCK.dtype)
        previous = memory.get("previous")
        names = {f.name for f in fields(Steps)}
        if not isinstance(previous, dict) or previous.keys() != names:
            raise ValueError(f"memory: expected the last step's {sorted(names)}")
        shapes = {
            "observation": (C, 1, spec.observation_size),
            "action": (C, 1, spec.action_size),
            "task": (C,),
        }
        integers = dict.fromkeys(("timestep", "trajectory", "task"), torch.int64)
        dtypes = integers | {"valid": torch.bool}
        for name in names:
            _expect(name, previous[name], shapes.get(name, (C, 1)), dtypes.get(name, self.dtype))
        places = {"task": self.task_C.cpu(), "trajectory": self.trial + 1}
        places["timestep"] = spec.episode_steps - 1
        for name, place in places.items():
            if (previous[name] != place).any():
                raise ValueError(f"memory: {name}: got {previous[name].tolist()}, expected {place}")


def _expect(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise ValueError(f"memory: {name}: got no tensor")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"memory: {name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
        )
    if not tensor.isfinite().all():
        raise ValueError(f"memory: {name}: got numbers that are not finite")
