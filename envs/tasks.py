"""The ExoRL tasks of four domains: names, sizes and time limits.

Every task has a reward in [0, 1] per step and ends only at its time limit, so the largest return
equals the number of steps. Sizes are those of the arrays in ExoRL's files.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task. Immutable; use the entries of `TASKS`."""

    name: str  # "<domain>_<task>", as in ExoRL
    domain: str  # walker, cheetah, cartpole or jaco: tasks of one domain share states and data
    episode_steps: int  # control steps per episode, T
    observation_size: int  # O
    action_size: int  # A, every component in [-1, 1]
    physics_size: int  # P = positions + velocities of the simulator state
    control_seconds: float  # time between two actions

    @property
    def max_return(self) -> float:
        """Largest return of an episode: a reward of 1 at every step."""
        return float(self.episode_steps)


_SIZES = {
    # domain: (T, O, A, P, seconds)
    "walker": (1000, 24, 6, 18, 0.025),
    "cheetah": (1000, 17, 6, 18, 0.01),
    "cartpole": (1000, 5, 1, 4, 0.01),
    "jaco": (250, 42, 9, 18, 0.04),
}
_NAMES = (
    # those of the paper's tables
    "walker_stand",
    "walker_walk",
    "walker_run",
    "cheetah_run",
    "cartpole_swingup",
    "jaco_reach_top_left",
    "jaco_reach_top_right",
    "jaco_reach_bottom_left",
    "jaco_reach_bottom_right",
    # the other ones that ExoRL has in these domains
    "walker_flip",
    "cheetah_run_backward",
    "cheetah_flip",
    "cheetah_flip_backward",
    "cartpole_balance",
    "cartpole_balance_sparse",
    "cartpole_swingup_sparse",
)
_GROUPS = {
    group: tuple(name for name in _NAMES if name.startswith(beginning))
    for group, beginning in (
        ("jaco_reach", "jaco_reach_"),
        ("walker_all", "walker_"),
        ("cheetah_all", "cheetah_"),
    )
}
# ExoRL's tasks in domains that are not simulated here, and those with several rewards at once.
_ONLY_IN_EXORL = (
    *(f"quadruped_{name}" for name in ("stand", "walk", "run", "jump", "roll", "roll_fast")),
    *(f"quadruped_{name}" for name in ("escape", "fetch", "multitask")),
    *(f"hopper_{name}" for name in ("stand", "hop", "hop_backward", "flip", "flip_backward")),
    *(f"point_mass_maze_reach_{y}_{x}" for y in ("top", "bottom") for x in ("left", "right")),
    "walker_multitask",
    "jaco_reach_multitask",
)


def _spec(name: str) -> TaskSpec:
    domain = name.split("_", 1)[0]
    steps, observation, action, physics, seconds = _SIZES[domain]
    return TaskSpec(
        name=name,
        domain=domain,
        episode_steps=steps,
        observation_size=observation,
        action_size=action,
        physics_size=physics,
        control_seconds=seconds,
    )


TASKS: dict[str, TaskSpec] = {name: _spec(name) for name in _NAMES}


def get_task(name: str) -> TaskSpec:
    """Return the spec of one task.

    Raises:
        ValueError: `name` is not one of `TASKS`.
    """
    if name not in TASKS:
        raise _unknown(name, TASKS)
    return TASKS[name]


def expand(name: str) -> tuple[TaskSpec, ...]:
    """Return the specs that a task name stands for.

    "jaco_reach" stands for its four corners (the paper's table averages them), "walker_all" and
    "cheetah_all" for the four tasks of their domains; every other name stands for itself.

    Raises:
        ValueError: `name` is neither a task nor a group.
    """
    if name not in TASKS and name not in _GROUPS:
        raise _unknown(name, (*TASKS, *_GROUPS))
    return tuple(TASKS[task] for task in _GROUPS.get(name, (name,)))


def domain_tasks(domain: str) -> tuple[TaskSpec, ...]:
    """Return the tasks of a domain: those whose rewards one recorded state can be given.

    Raises:
        ValueError: No task belongs to `domain`.
    """
    if domain not in _SIZES:
        raise ValueError(f"domain: got {domain!r}, expected one of {', '.join(_SIZES)}")
    return tuple(spec for spec in TASKS.values() if spec.domain == domain)


def _unknown(name: str, expected: Iterable[str]) -> ValueError:
    elsewhere = " (a task of ExoRL that is not supported here)" if name in _ONLY_IN_EXORL else ""
    return ValueError(f"task: got {name!r}{elsewhere}, expected one of {', '.join(expected)}")
