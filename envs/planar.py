"""Planar bodies, walker and cheetah: motion of the whole from the state, without the simulator.

States are (n, P): positions, then velocities. A body is N links that turn about the y axis; its
constants are read from the compiled model of `dm_control.suite`. ExoRL's models of its own tasks
have the same links (its cheetah.xml draws a longer ground, and that is all).
"""

import functools
from typing import NamedTuple

import numpy as np


class PlanarBody(NamedTuple):
    """Constants of a body of N links.

    R(angle) being the turn of a link, link b's centre of mass lies at
    centre + sum_i R(angle_i) w_bi, with vectors w_bi = (x, z) that never change, and the body's
    own centre of mass at root + sum_i R(angle_i) offset_i.
    """

    height: float  # of the torso at position zero, metres
    root_x: int  # column of the root's x in the positions
    angles: np.ndarray  # (N, P/2) in {-1, 0, 1}: link angles about +y = angles @ positions
    offset_x: np.ndarray  # (N,) metres
    offset_z: np.ndarray  # (N,)
    inertia: np.ndarray  # (N,) kg m^2: every link's own, about its centre of mass
    coupling: np.ndarray  # (2N, 2N) kg m^2: sums over b of m_b w_bi w_bj, see `angular_momentum`


def horizontal_velocity(domain: str, state: np.ndarray) -> np.ndarray:
    """Centre-of-mass x velocity (n,), m/s: MuJoCo's `subtreelinvel` sensor of the torso.

    R turns about y, so that the x component of the derivative of root + sum_i R(angle_i) offset_i
    is root' + sum_i angle_i' (offset_z cos angle_i - offset_x sin angle_i).
    """
    body = planar_body(domain)
    angles, rates, root = _split(body, state)
    lever = body.offset_z[:, None] * np.cos(angles)
    lever -= body.offset_x[:, None] * np.sin(angles)
    return root + np.einsum("in,in->n", rates, lever)


def angular_momentum(domain: str, state: np.ndarray) -> np.ndarray:
    """Angular momentum (n,) about +y and the centre of mass, kg m^2/s.

    MuJoCo's `subtree_angmom` of the torso, sum_b I_b angle_b' + m_b (r_b x r_b')_y with r_b from
    the centre of mass. A planar product a x (R(angle) w)' is angle' a . R(angle) w, so it is
    sum_j angle_j' (I_j + sum_i sum_b m_b (R(angle_i) w_bi) . (R(angle_j) w_bj)); the inner sums
    are a quadratic form, `coupling`, of all cosines and sines.
    """
    body = planar_body(domain)
    angles, rates, _ = _split(body, state)
    turns = np.concatenate([np.cos(angles), np.sin(angles)])
    turns *= body.coupling @ turns
    cosines, sines = np.split(turns, 2)
    return np.einsum("in,in->n", rates, cosines + sines + body.inertia[:, None])


def _split(body: PlanarBody, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Angles and rates of the links, both (N, n), and the root's x velocity (n,)."""
    positions, velocities = np.split(state.T, 2)
    return body.angles @ positions, body.angles @ velocities, velocities[body.root_x]


@functools.cache
def planar_body(domain: str) -> PlanarBody:
    """Read the constants of "walker" or "cheetah" from the compiled suite model.

    A link turns about its hinge, not about the origin of its frame: the origin lies at
    parent's origin + R_parent (position + hinge) - R_link hinge.
    """
    # Imported here: these need a loadable OpenGL backend, and the other rewards do not.
    import mujoco
    from dm_control.suite import cheetah, walker

    xml, assets = {"cheetah": cheetah, "walker": walker}[domain].get_model_and_assets()
    model = mujoco.MjModel.from_xml_string(xml, assets)
    # The formulas hold for upright link frames at position zero and hinges about the y axis.
    assert np.array_equal(model.body_quat, np.tile([1.0, 0, 0, 0], (model.nbody, 1)))
    assert not model.qpos0.any()

    angles = np.zeros((model.nbody, model.nq))
    hinge = np.zeros((model.nbody, 3))
    for joint, body in enumerate(model.jnt_bodyid):
        if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_HINGE:
            assert abs(model.jnt_axis[joint, 1]) == 1
            angles[body, joint] = model.jnt_axis[joint, 1]
            hinge[body] = model.jnt_pos[joint]

    # [b, i]: what link b's origin, and then its centre of mass, owes to the angle of link i.
    place = np.zeros((model.nbody, model.nbody, 3))
    for body in range(1, model.nbody):  # parents come before their children
        parent = model.body_parentid[body]
        angles[body] += angles[parent]
        place[body] = place[parent]
        place[body, parent] += model.body_pos[body] + hinge[body]
        place[body, body] -= hinge[body]
    place[np.diag_indices(model.nbody)] += model.body_ipos

    # Without the world, which neither moves nor has mass, and as complex numbers x + iz: turning
    # by an angle about +y multiplies with exp(-i angle).
    place, mass = place[1:, 1:, 0] + 1j * place[1:, 1:, 2], model.body_mass[1:]
    offset = mass @ place / mass.sum()
    products = np.einsum("b,bi,bj->ij", mass, (place - offset).conj(), place - offset)
    rotation = np.zeros((model.nbody, 9))
    for body in range(model.nbody):
        mujoco.mju_quat2Mat(rotation[body], model.body_iquat[body])
    inertia = (rotation[:, 3:6] ** 2 * model.body_inertia).sum(axis=1)  # the yy component

    return PlanarBody(
        height=float(model.body("torso").pos[2]),
        root_x=int(model.joint("rootx").qposadr[0]),
        angles=angles[1:],
        offset_x=offset.real,
        offset_z=offset.imag,
        inertia=inertia[1:],
        coupling=np.block([[products.real, products.imag], [-products.imag, products.real]]),
    )
