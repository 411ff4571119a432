"""Rewards of all nine tasks from recorded states, in numpy, over any leading axes.

A recorded episode is relabelled for another task of its domain by evaluating that task's reward
on its states. Going through the simulator costs 0.1-1 ms a state; these formulas cost a few
microseconds and agree with it. Sources: `dm_control.suite` (walker.py, cheetah.py, cartpole.py),
`dm_control.utils.rewards.tolerance` and ExoRL's jaco.py.
"""

import functools
from typing import NamedTuple

import numpy as np

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
_MOVE_SPEED = {"walker_walk": 1.0, "walker_run": 8.0}  # m/s
_CHEETAH_SPEED = 10.0  # m/s


def reward(
    task: str,
    *,
    observation: np.ndarray | None,
    action: np.ndarray | None,
    physics: np.ndarray | None,
) -> np.ndarray:
    """Return the rewards of reached states.

    Walker, cheetah and cartpole read `physics`, jaco reads `observation`; the other one may be
    None. Only cartpole swingup rewards small actions.

    Args:
        task: A key of `envs.TASKS`.
        observation: (..., O), the observation of the state reached.
        action: (..., A) in [-1, 1], the action that led there; None counts as zero control, as in
            ExoRL's own relabelling, which pays cartpole more than the environment does.
        physics: (..., P) positions and velocities of the state reached, kept in float64.

    Returns:
        (...,) float64 in [0, 1].

    Raises:
        ValueError: The task is unknown, or the array that it reads is missing or has another size.
    """
    spec = get_task(task)
    if spec.domain == "jaco":
        return _jaco(task, _read("observation", observation, spec.observation_size))
    state = _read("physics", physics, spec.physics_size)
    if spec.domain == "cheetah":
        return _cheetah(state)
    if spec.domain == "walker":
        return _walker(task, state)
    control = None if action is None else _read("action", action, spec.action_size)[..., 0]
    return _cartpole(state, control)


def _read(name: str, array: np.ndarray | None, size: int) -> np.ndarray:
    if array is None:
        raise ValueError(f"{name}: got None, expected an array (..., {size})")
    array = np.asarray(array, dtype=np.float64)
    if array.ndim == 0 or array.shape[-1] != size:
        raise ValueError(f"{name}: got shape {array.shape}, expected (..., {size})")
    return array


def _gaussian(x: np.ndarray) -> np.ndarray:
    """The suite's default falloff, 0.1**(x**2): 1 at x <= 0 and 0.1 at one margin, x = 1."""
    return 0.1 ** np.square(np.maximum(x, 0.0))


def _walker(task: str, state: np.ndarray) -> np.ndarray:
    """Stand, times (5 m + 1) / 6 for walk and run with m = clip(v / speed, 0, 1).

    Stand is (3 G((1.2 - h) / 0.6) + (1 + cos tilt) / 2) / 4 with h the torso's height, v the
    x velocity of the whole body's centre of mass. `suite/walker.py`, PlanarWalker.get_reward; its
    linear falloff from 1 at the target to 0.5 at half of it continues to 0 at standstill.
    """
    height = _body("walker").height + state[..., 0]
    upright = (1 + np.cos(state[..., 2])) / 2
    stand = (3 * _gaussian((_STAND_HEIGHT - height) / (_STAND_HEIGHT / 2)) + upright) / 4
    if task == "walker_stand":
        return stand
    move = np.clip(_horizontal_velocity("walker", state) / _MOVE_SPEED[task], 0, 1)
    return stand * (5 * move + 1) / 6


def _cheetah(state: np.ndarray) -> np.ndarray:
    """clip(v / 10, 0, 1), v the centre of mass's x velocity. `suite/cheetah.py`, get_reward."""
    return np.clip(_horizontal_velocity("cheetah", state) / _CHEETAH_SPEED, 0, 1)


def _cartpole(state: np.ndarray, control: np.ndarray | None) -> np.ndarray:
    """(1 + cos a)/2 * (1 + G(|x|/2))/2 * (4 + max(0, 1 - u**2))/5 * (1 + G(|a'|/5))/2.

    State (x, a, x', a') with a the pole's angle from upright, u the action.
    `suite/cartpole.py`, Balance._get_reward with sparse=False.
    """
    upright = (np.cos(state[..., 1]) + 1) / 2
    centred = (1 + _gaussian(np.abs(state[..., 0]) / 2)) / 2
    slow = (1 + _gaussian(np.abs(state[..., 3]) / 5)) / 2
    small = 1.0 if control is None else (4 + np.maximum(0, 1 - np.square(control))) / 5
    return upright * small * slow * centred


def _jaco(task: str, observation: np.ndarray) -> np.ndarray:
    """G((d - 0.05) / 0.05), d the tool centre point's distance to the target. ExoRL's jaco.py."""
    distance = np.linalg.norm(observation[..., _TCP] - JACO_TARGETS[task], axis=-1)
    return _gaussian((distance - TARGET_RADIUS) / TARGET_RADIUS)


class _Body(NamedTuple):
    """Constants of a planar body of N links: what the centre of mass needs from the model."""

    height: float  # torso height at position zero, metres
    root_x: int  # column of the root's x in the positions
    angles: np.ndarray  # (nq, N) in {-1, 0, 1}: link angles about +y = positions @ angles
    offsets_x: np.ndarray  # (N,) and
    offsets_z: np.ndarray  # (N,): see `_body`


def _horizontal_velocity(domain: str, state: np.ndarray) -> np.ndarray:
    """Centre-of-mass x velocity (...,), MuJoCo's `subtreelinvel` sensor of the torso.

    The centre of mass is root + sum_i R(angle_i) offset_i; R turns about y, so the x component
    of its derivative is root' + sum_i angle_i' * (offset_z cos angle_i - offset_x sin angle_i).
    """
    body = _body(domain)
    positions, velocities = np.split(state, 2, axis=-1)
    angles, rates = positions @ body.angles, velocities @ body.angles
    arms = body.offsets_z * np.cos(angles) - body.offsets_x * np.sin(angles)
    return velocities[..., body.root_x] + np.sum(rates * arms, axis=-1)


@functools.cache
def _body(domain: str) -> _Body:
    """Read a planar body's constants from the compiled suite model.

    Link i carries its own mass m_i and everything hung on it. Turning link i about its hinge moves
    its centre of mass and the hinges of its children, each weighted with the mass that follows:
    offset_i = (m_i com_i - M_i hinge_i + sum_children M_c (position_c + hinge_c)) / M, M_i being
    the mass of the subtree of i, M of the whole, all in the frame of link i.
    """
    # Imported here: these need a loadable OpenGL backend, and the other rewards do not.
    import mujoco
    from dm_control.suite import cheetah, walker

    xml, assets = {"cheetah": cheetah, "walker": walker}[domain].get_model_and_assets()
    model = mujoco.MjModel.from_xml_string(xml, assets)
    # The formula holds for upright link frames at position zero and hinges about the y axis.
    assert np.array_equal(model.body_quat, np.tile([1.0, 0, 0, 0], (model.nbody, 1)))
    assert not model.qpos0.any()

    angles = np.zeros((model.nq, model.nbody))
    hinge = np.zeros((model.nbody, 3))
    for joint, body in enumerate(model.jnt_bodyid):
        if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_HINGE:
            assert abs(model.jnt_axis[joint, 1]) == 1
            angles[joint, body] = model.jnt_axis[joint, 1]
            hinge[body] = model.jnt_pos[joint]

    offsets = np.zeros((model.nbody, 3))
    for body in range(1, model.nbody):  # parents come before their children
        parent, mass = model.body_parentid[body], model.body_subtreemass[body]
        angles[:, body] += angles[:, parent]
        offsets[body] += model.body_mass[body] * model.body_ipos[body] - mass * hinge[body]
        offsets[parent] += mass * (model.body_pos[body] + hinge[body])
    offsets /= model.body_subtreemass[0]

    return _Body(
        height=float(model.body("torso").pos[2]),
        root_x=int(model.joint("rootx").qposadr[0]),
        angles=angles[:, 1:],  # without the world, which neither moves nor has mass
        offsets_x=offsets[1:, 0],
        offsets_z=offsets[1:, 2],
    )
