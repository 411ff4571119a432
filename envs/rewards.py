"""Rewards of all tasks from recorded states, in numpy, over any leading axes.

A recorded episode is relabelled for another task of its domain by evaluating that task's reward
on its states. Going through the simulator costs 0.1-1 ms a state; these formulas cost less than a
microsecond and agree with it. Sources: `dm_control.suite` (walker.py, cheetah.py, cartpole.py),
`dm_control.utils.rewards.tolerance`, and custom_dmc_tasks (walker.py, cheetah.py, jaco.py) of
ExoRL and of URLB, which it comes from.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from envs.planar import angular_momentum, horizontal_velocity, planar_body
from envs.tasks import get_task

# World positions (x, y, z) of ExoRL's reach targets, metres, and the distance that counts as there.
JACO_TARGETS: dict[str, tuple[float, float, float]] = {
    "jaco_reach_top_left": (-0.09, 0.09, 0.001),
    "jaco_reach_top_right": (0.09, 0.09, 0.001),
    "jaco_reach_bottom_left": (-0.09, -0.09, 0.001),
    "jaco_reach_bottom_right": (0.09, -0.09, 0.001),
}
TARGET_RADIUS = 0.05

_TCP = slice(30, 33)  # columns of the jaco observation: the tool centre point's world position
_STAND_HEIGHT = 1.2  # metres
# What earns all of the reward for moving; below zero: in the other direction.
_SPEED = {  # of the centre of mass along x, m/s
    "walker_walk": 1.0,
    "walker_run": 8.0,
    "cheetah_run": 10.0,
    "cheetah_run_backward": -10.0,
}
_SPIN = {  # angular momentum about y, kg m^2/s
    "walker_flip": 5.0,
    "cheetah_flip": 5.0,
    "cheetah_flip_backward": -5.0,
}
_NEAR_CENTRE = 0.25  # metres
_NEAR_UPRIGHT = 0.995  # cosine of the pole's angle
_BLOCK = 4096  # states at a time: the arrays of a formula then stay in the processor's cache


def reward(
    task: str,
    *,
    observation: np.ndarray | None,
    action: np.ndarray | None,
    physics: np.ndarray | None,
) -> np.ndarray:
    """Return the rewards of reached states.

    Walker, cheetah and cartpole read `physics`, jaco reads `observation`; the other one may be
    None. Only `cartpole_swingup` and `cartpole_balance` reward small actions.

    Args:
        task: A key of `envs.TASKS`.
        observation: (..., O), the observation of the state reached.
        action: (..., A) in [-1, 1], the action that led there: the rewards are those of the live
            environment. None counts as zero control, as in ExoRL's own relabelling, which pays
            these two tasks more than the environment does.
        physics: (..., P) positions and velocities of the state reached, kept in float64.

    Returns:
        (...,) float64 in [0, 1].

    Raises:
        ValueError: The task is unknown, or an array that it reads is missing or has another size.
    """
    spec = get_task(task)
    if spec.domain == "jaco":
        seen = _read("observation", observation, spec.observation_size)
        return _by_blocks(partial(_jaco, task), seen[..., _TCP])
    state = _read("physics", physics, spec.physics_size)
    if spec.domain == "walker":
        return _by_blocks(partial(_walker, task), state)
    if spec.domain == "cheetah":
        return _by_blocks(partial(_progress, task), state)
    if task.endswith("_sparse"):
        return _by_blocks(_cartpole_sparse, state)
    if action is None:
        return _by_blocks(_cartpole, state)
    control = _read("action", action, spec.action_size)
    if control.shape[:-1] != state.shape[:-1]:
        expected = (*state.shape[:-1], spec.action_size)
        raise ValueError(f"action: got shape {control.shape}, expected {expected}, as of physics")
    return _by_blocks(_cartpole, state, control)


def _read(name: str, array: np.ndarray | None, size: int) -> np.ndarray:
    if array is None:
        raise ValueError(f"{name}: got None, expected an array (..., {size})")
    array = np.asarray(array)
    if array.ndim == 0 or array.shape[-1] != size:
        raise ValueError(f"{name}: got shape {array.shape}, expected (..., {size})")
    return array


def _by_blocks(formula: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """`formula` of float64 blocks (n, k) of every array (..., k), put together again."""
    rows = [array.reshape(-1, array.shape[-1]) for array in arrays]
    result = np.empty(len(rows[0]))
    for start in range(0, len(result), _BLOCK):
        block = slice(start, start + _BLOCK)
        result[block] = formula(*(row[block].astype(np.float64, copy=False) for row in rows))
    return result.reshape(arrays[0].shape[:-1])


def _gaussian(x: np.ndarray) -> np.ndarray:
    """The suite's default falloff, 0.1**(x**2): 1 at x = 0 and 0.1 at one margin, x = 1."""
    return np.exp(np.log(0.1) * np.square(x))


def _walker(task: str, state: np.ndarray) -> np.ndarray:
    """Stand; for the others times (5 m + 1) / 6, m the progress.

    Stand is (3 G((1.2 - h) / 0.6) + (1 + cos tilt) / 2) / 4 with h the torso's height.
    `suite/walker.py`, PlanarWalker.get_reward; ExoRL's has the flip.
    """
    missing = _STAND_HEIGHT - planar_body("walker").height - state[:, 0]
    high = _gaussian(np.maximum(missing, 0) / (_STAND_HEIGHT / 2))
    upright = (1 + np.cos(state[:, 2])) / 2
    stand = (3 * high + upright) / 4
    if task == "walker_stand":
        return stand
    return stand * (5 * _progress(task, state) + 1) / 6


def _progress(task: str, state: np.ndarray) -> np.ndarray:
    """clip(v / target, 0, 1), v the speed or the spin of the whole body: cheetah's reward.

    Walker's linear falloff from 1 at the target to 0.5 at half of it continues to 0 at standstill.
    `suite/cheetah.py`, get_reward; URLB's cheetah.py has the other directions.
    """
    domain = get_task(task).domain
    if task in _SPEED:
        return np.clip(horizontal_velocity(domain, state) / _SPEED[task], 0, 1)
    return np.clip(angular_momentum(domain, state) / _SPIN[task], 0, 1)


def _cartpole(state: np.ndarray, control: np.ndarray | None = None) -> np.ndarray:
    """(1 + cos a)/2 * (1 + G(x/2))/2 * (4 + max(0, 1 - u**2))/5 * (1 + G(a'/5))/2.

    State (x, a, x', a') with a the pole's angle from upright, u the action (n, 1).
    `suite/cartpole.py`, Balance._get_reward with sparse=False.
    """
    upright = (np.cos(state[:, 1]) + 1) / 2
    centred = (1 + _gaussian(state[:, 0] / 2)) / 2
    slow = (1 + _gaussian(state[:, 3] / 5)) / 2
    small = 1.0 if control is None else (4 + np.maximum(0, 1 - np.square(control[:, 0]))) / 5
    return upright * small * slow * centred


def _cartpole_sparse(state: np.ndarray) -> np.ndarray:
    """1 where |x| <= 0.25 and cos a >= 0.995, else 0. The same function with sparse=True."""
    centred = np.abs(state[:, 0]) <= _NEAR_CENTRE
    return (centred & (np.cos(state[:, 1]) >= _NEAR_UPRIGHT)).astype(np.float64)


def _jaco(task: str, hand: np.ndarray) -> np.ndarray:
    """G((d - 0.05) / 0.05), d the tool centre point's distance to the target. ExoRL's jaco.py."""
    offset = hand - JACO_TARGETS[task]
    distance = np.sqrt(np.einsum("nk,nk->n", offset, offset))
    return _gaussian(np.maximum(distance / TARGET_RADIUS - 1, 0))
