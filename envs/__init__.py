"""The ExoRL tasks: live environments, and rewards of recorded states.

Importing this package registers `exorl/<task>-v0` with gymnasium for every task. It loads neither
dm_control nor OpenGL; making an environment does.
"""

import gymnasium

from envs.dmc import DmcEnv, quiet_simulator, without_rendering
from envs.pool import EnvPool
from envs.rewards import reward
from envs.tasks import TASKS, TaskSpec, domain_tasks, expand

__all__ = [
    "TASKS",
    "DmcEnv",
    "EnvPool",
    "TaskSpec",
    "domain_tasks",
    "expand",
    "quiet_simulator",
    "reward",
    "without_rendering",
]

for _task in TASKS.values():
    gymnasium.register(
        id=f"exorl/{_task.name}-v0",
        entry_point="envs.dmc:DmcEnv",
        kwargs={"task": _task.name},
        max_episode_steps=_task.episode_steps,  # the environment's own limit, for who reads specs
    )
