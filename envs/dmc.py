"""One task as a `gymnasium.Env`, with observations and actions exactly as ExoRL stores them."""

import functools
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import gymnasium
import numpy as np

from envs.rewards import reward
from envs.tasks import TaskSpec, get_task

FRAME_SHAPE = (240, 320)  # height, width: multiples of 16, as video encoders want them
_REMEDY = (
    "expected MUJOCO_GL=egl (Debian's package libegl1) or MUJOCO_GL=osmesa (libosmesa6), set "
    "before Python starts"
)


def quiet_simulator() -> None:
    """Keep dm_control from logging what users can do nothing about, for this process.

    A deprecated attribute in cheetah's own model, and jaco's retries in finding a start pose.
    """
    from absl import logging

    logging.set_verbosity(logging.ERROR)


def without_rendering() -> None:
    """Make this process and its children need no OpenGL, whatever MUJOCO_GL says.

    To be called before the first environment is made: MuJoCo and dm_control choose their OpenGL
    backend when they are imported, and even where nothing is drawn, one that is missing or
    misspelled fails then.
    """
    os.environ["MUJOCO_GL"] = "disable"


class DmcEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A dm_control task with flat float32 observations in the order of ExoRL's files.

    Actions (A,) lie in [-1, 1]; values beyond are clipped. An episode is never terminated; it is
    truncated at the step limit of its task. `info["physics"]` is the simulator state (P,) float64
    that belongs to the returned observation.

    All randomness comes from `np_random`: `reset(seed=s)` gives the same episodes in any instance,
    and `reset()` goes on with the stream.

    Args:
        task: A key of `envs.TASKS`.
        render_mode: "rgb_array", or None for no rendering, which then needs no OpenGL.

    Raises:
        ValueError: The task or the render mode is unknown.
        RuntimeError: dm_control can't be imported with this MUJOCO_GL setting, or can't render.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}
    _CAMERA: ClassVar[int] = 0  # the side view of every domain

    def __init__(self, task: str, render_mode: str | None = None) -> None:
        self.task = get_task(task)
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode: got {render_mode!r}, expected None or 'rgb_array'")
        self.render_mode = render_mode
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": round(1 / self.task.control_seconds),  # real time
        }
        self.observation_space = gymnasium.spaces.Box(
            -np.inf, np.inf, (self.task.observation_size,), np.float32
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self.task.action_size,), np.float32)

        self._env, self._random = _load(self.task)
        if render_mode is not None:
            _check_rendering()
        limits = self._env.action_spec()
        # Centre and half-width rather than low and width: native [-1, 1] then stays bit-exact.
        self._action_centre = (limits.maximum + limits.minimum) / 2
        self._action_scale = (limits.maximum - limits.minimum) / 2
        self._running = False
        self._closed = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode. Returns observation (O,) and info; `options` are ignored.

        Raises:
            RuntimeError: The environment is closed.
        """
        if self._closed:
            raise RuntimeError("reset: the environment is closed")
        super().reset(seed=seed)
        self._random.seed(self.np_random.integers(2**32, size=4, dtype=np.uint32))
        observation = _flatten(self._env.reset())
        self._running = True
        return observation, self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply `action` (A,) for one control step.

        Returns:
            Observation (O,) and reward of the state reached, False, whether the time limit is
            reached, and info.

        Raises:
            ValueError: The action has another shape or is not finite.
            RuntimeError: No episode is running, or the simulation diverged; reset first.
        """
        if not self._running:
            raise RuntimeError("step: no episode is running; call reset first")
        control = self._control(action)
        try:
            timestep = self._env.step(control)
            observation = _flatten(timestep)
            if not np.isfinite(observation).all():
                raise RuntimeError("the observation is not finite")
        except RuntimeError as error:  # dm_control's PhysicsError is one
            self._running = False
            raise RuntimeError(
                f"step: the simulation of {self.task.name} diverged; call reset ({error})"
            ) from error
        truncated = bool(timestep.last())
        self._running = not truncated
        return observation, float(timestep.reward), False, truncated, self._info()

    def render(self) -> np.ndarray:
        """Return the current frame (240, 320, 3), uint8.

        Raises:
            RuntimeError: The environment was made without rendering or is closed, or OpenGL is not
                available.
        """
        if self.render_mode is None:
            raise RuntimeError("render: the environment was made with render_mode=None")
        if self._closed:
            raise RuntimeError("render: the environment is closed")
        physics = self._env.physics
        # On a CPU, drawing without shadows, mirrors and multisampling is about ten times faster.
        # The first two are read when the first frame creates the OpenGL context.
        physics.model.vis.quality.shadowsize = 0
        physics.model.vis.quality.offsamples = 0
        try:
            frame = physics.render(
                *FRAME_SHAPE,
                camera_id=self._CAMERA,
                render_flag_overrides={"shadow": False, "reflection": False},
            )
        except Exception as error:  # each OpenGL backend fails in its own way
            raise RuntimeError(
                f"render: got {_setting()}, with which OpenGL fails ({error}); {_REMEDY}"
            ) from error
        return np.array(frame)

    def close(self) -> None:
        """Free the simulation and its OpenGL context. May be called twice."""
        if not self._closed:
            self._env.physics.free()
        self._running, self._closed = False, True

    def _info(self) -> dict[str, Any]:
        return {"physics": self._env.physics.get_state()}

    def _control(self, action: np.ndarray) -> np.ndarray:
        """Check and clip an action, and scale it to the actuators' native range."""
        action = np.asarray(action)
        if action.shape != self.action_space.shape:
            raise ValueError(
                f"action: got shape {action.shape}, expected {self.action_space.shape}"
            )
        if not np.isfinite(action).all():
            raise ValueError(f"action: got {action}, expected finite values in [-1, 1]")
        clipped = np.clip(action, -1, 1).astype(np.float32)
        return self._action_centre + self._action_scale * clipped


def _load(task: TaskSpec) -> tuple[Any, np.random.RandomState]:
    """Return the dm_control environment and the generator that its resets draw from."""
    # Imported here: dm_control loads an OpenGL backend at import, and `import envs` must not.
    try:
        with warnings.catch_warnings():
            # That there is no display matters to who renders, and is an error then.
            warnings.filterwarnings("ignore", module="glfw")
            from dm_control import suite
    except (ImportError, AttributeError, RuntimeError) as error:
        # What a missing library raises depends on the backend.
        raise RuntimeError(
            f"got {_setting()}, with which dm_control can't be imported ({error}); {_REMEDY}, or "
            "MUJOCO_GL=disable, which draws nothing"
        ) from error
    if task.domain == "jaco":
        from envs import jaco

        env = jaco.load(task.name)
        return env, env.random_state
    name = task.name.removeprefix(f"{task.domain}_")
    in_suite = (task.domain, name) in suite.ALL_TASKS
    env = suite.load(
        task.domain,
        name if in_suite else "run",
        environment_kwargs={"flat_observation": True},  # keeps dm_control's order of the parts
    )
    if not in_suite:  # ExoRL's own flips and backward runs differ from "run" in their rewards only
        env.task.get_reward = functools.partial(_reward, task.name)
    return env, env.task.random


def _reward(task: str, physics: Any) -> float:
    """The reward of a live state by the formula, for tasks that read the state only."""
    return float(reward(task, observation=None, action=None, physics=physics.get_state()))


def _check_rendering() -> None:
    """Raise RuntimeError where rendering can't work: GLFW without a display, or none chosen."""
    from dm_control import _render

    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    headless = sys.platform.startswith("linux") and not display
    # Asked before the first frame: a second attempt with GLFW aborts the whole process.
    if _render.BACKEND in (None, "off") or (_render.BACKEND == "glfw" and headless):
        why = "without a display" if _render.BACKEND == "glfw" else "at all"
        raise RuntimeError(f"render_mode: got {_setting()}, which can't draw {why}; {_REMEDY}")


def _setting() -> str:
    """How the environment chooses the OpenGL backend."""
    chosen = os.environ.get("MUJOCO_GL")
    return "no MUJOCO_GL" if chosen is None else f"MUJOCO_GL={chosen}"


def _flatten(timestep: Any) -> np.ndarray:
    return join_parts(timestep.observation.values())


def join_parts(parts: Iterable[Any]) -> np.ndarray:
    """Join the parts of an observation in dm_control's order, as ExoRL does: (O,) float32."""
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)
