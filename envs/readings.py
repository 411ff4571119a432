"""What is read from the simulator after a step, and the observations that it makes.

A reading is a row of numbers: the state (positions, velocities), what a domain's observation shows
beyond it, and MuJoCo's counters of warnings. Observations are columns of it.

Axes: E environments, O observation, P physics, R numbers of a reading.
"""

from typing import Any

import numpy as np

from envs.tasks import TaskSpec

_PINCH_SITE = "jaco_arm/jaco_hand/pinchsite"
_ARM_JOINTS, _JOINTS = 6, 9  # jaco's; the others are its fingers'
_WARNINGS = 7  # kinds that MuJoCo counts; the number is asserted below


class Layout:
    """The rows of readings of one domain.

    Args:
        task: Any task of the domain.
        model: MuJoCo's model of it.
    """

    def __init__(self, task: TaskSpec, model: Any) -> None:
        self._domain, self._physics_size = task.domain, task.physics_size
        beyond = {"walker": 9 * 7 + 1, "cheetah": 0, "cartpole": 9, "jaco": 3 * 6 + 3 + 9}
        self.size = task.physics_size + beyond[task.domain] + _WARNINGS
        self._columns = np.array(_columns(task.domain))
        assert self._columns.shape == (task.observation_size,)
        if task.domain == "jaco":
            self._site = model.site(_PINCH_SITE).id
            # Torques count about the joints' axes, and so are the third of each sensor's three.
            assert np.array_equal(model.jnt_axis, np.tile([0.0, 0.0, 1.0], (_JOINTS, 1)))

    def views(self, data: Any) -> list[np.ndarray]:
        """The parts of one environment's reading as they stand in its MjData, flat and in order."""
        parts = [data.qpos, data.qvel]
        if self._domain == "walker":
            parts += [data.xmat[1:].reshape(-1), data.xpos[1, 2:]]
        elif self._domain == "cartpole":
            parts += [data.xmat[2]]
        elif self._domain == "jaco":
            parts += [data.sensordata, data.site_xpos[self._site], data.site_xmat[self._site]]
        parts.append(data.warning.number)
        assert sum(part.size for part in parts) == self.size
        return parts

    def physics(self, reading: np.ndarray) -> np.ndarray:
        """The states (E, P) float64 in readings (E, R), copied."""
        return reading[:, : self._physics_size].copy()

    def observation(self, reading: np.ndarray) -> np.ndarray:
        """What readings (E, R) show, (E, O) float64; ExoRL's are its float32."""
        shown = reading[:, self._columns]
        if self._domain == "jaco":
            sines, cosines = shown[:, 0 : 2 * _ARM_JOINTS : 2], shown[:, 1 : 2 * _ARM_JOINTS : 2]
            np.sin(sines, out=sines)
            np.cos(cosines, out=cosines)
            torques = shown[:, 2 * _ARM_JOINTS : 3 * _ARM_JOINTS]
            torques[:] = np.sign(torques) * np.log1p(np.abs(torques))
        return shown

    def warned(self, reading: np.ndarray) -> np.ndarray:
        """Where the simulator found something wrong since the reset, (E,) bool."""
        return np.any(reading[:, -_WARNINGS:] != 0, axis=1)


def _columns(domain: str) -> list[int]:
    """The columns of a reading that an observation of `domain` consists of, in its order."""
    if domain == "walker":  # of every link's rotation xx and xz, height, velocities
        rotations = [18 + 9 * link + entry for link in range(7) for entry in (0, 2)]
        return [*rotations, 18 + 9 * 7, *range(9, 18)]
    if domain == "cheetah":  # all but the place
        return [*range(1, 18)]
    if domain == "cartpole":  # place, of the pole's rotation zz and xz, velocities
        return [0, 4 + 8, 4 + 2, 2, 3]
    # jaco: arm angles twice (sine and cosine), torques, velocities; hand angles, velocities, place
    angles = [joint for joint in range(_ARM_JOINTS) for _ in range(2)]
    torques = [18 + 3 * joint + 2 for joint in range(_ARM_JOINTS)]
    velocities = range(_JOINTS, _JOINTS + _ARM_JOINTS)
    hand = [*range(_ARM_JOINTS, _JOINTS), *range(_JOINTS + _ARM_JOINTS, 18)]
    return [*angles, *torques, *velocities, *hand, *range(18 + 3 * 6, 18 + 3 * 6 + 12)]
