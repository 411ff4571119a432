"""Goal babbling for the jaco arm: the hand is driven to random places, without a reward.

Blind joint motions hardly ever bring the hand to a chosen place; a controller that does is a few
lines of textbook: joint velocities from the pseudo-inverse of the hand's Jacobian. One state log
then serves every reaching task.

Axes: E environments, G goals of an episode, T steps.
"""

import numpy as np

from agentic.explore import noise
from agentic.explore.recording import Controller
from envs import TaskSpec
from envs.rewards import JACO_TARGETS

JOINTS = 6  # of the arm; the other actions move the fingers
HAND_SITE = "jaco_arm/jaco_hand/pinchsite"  # the tool centre point that rewards measure
GOAL_LOW, GOAL_HIGH = (-0.2, -0.2, 0.02), (0.2, 0.2, 0.4)  # metres: where ExoRL starts the hand

TARGET_FRACTION = 0.5  # of the goals near one of the four targets
TARGET_SPREAD = 0.02  # metres around a target, per axis
HOLD_FRACTION = 0.5  # of the episodes with one goal throughout
GOALS = 5  # in each of the other episodes
NOISE_LOW, NOISE_HIGH = 0.03, 0.7  # pink action noise of an episode, log-uniform
SPEED = 3.0  # 1/s: desired hand velocity per metre of distance
DAMPING = 0.05  # metres: bounds the joint velocities near singular poses


class Servo:
    """Draws controllers that lead jaco's hand to random goals."""

    def __init__(self, task: TaskSpec) -> None:
        # Here, because they load an OpenGL backend, which only jaco needs.
        import mujoco

        from envs import jaco

        self.task = task
        self._env = jaco.load(task.name)  # keeps the memory of the model alive
        self._model = self._env.physics.model.ptr
        self._data = mujoco.MjData(self._model)
        self._site = self._model.site(HAND_SITE).id
        self._joint_speed = self._model.actuator_ctrlrange[:JOINTS, 1]  # rad/s at action 1

    def __call__(self, rng: np.random.Generator, environments: int) -> Controller:
        """A controller for one episode of `environments` environments."""
        shape = (environments, self.task.episode_steps, self.task.action_size)
        goal_EGX = _goals(rng, environments)
        holds = rng.random(environments) < HOLD_FRACTION
        switches = np.sort(rng.integers(self.task.episode_steps, size=(environments, GOALS - 1)))
        scale = np.exp(rng.uniform(np.log(NOISE_LOW), np.log(NOISE_HIGH), environments))
        disturbance = scale[:, None, None] * noise.coloured(rng, shape)
        disturbance[..., JOINTS:] = noise.pink(rng, (*shape[:2], shape[2] - JOINTS))

        def policy(t: int, observation: np.ndarray, physics: np.ndarray) -> np.ndarray:
            current = np.where(holds, 0, (switches <= t).sum(axis=1))
            goal = goal_EGX[np.arange(environments), current]
            action = disturbance[:, t].copy()
            action[:, :JOINTS] += self.towards(goal, physics)
            return action

        return policy

    def towards(self, goal: np.ndarray, physics: np.ndarray) -> np.ndarray:
        """Arm actions (E, 6) that move the hand to `goal` (E, 3), from states `physics` (E, P).

        Damped least squares, dq = J^T (J J^T + damping^2)^-1 dx (Wampler 1986).
        """
        hand, jacobian = self._hand(physics)
        square = jacobian @ jacobian.swapaxes(1, 2) + DAMPING**2 * np.eye(3)
        velocity = SPEED * (goal - hand)
        joints = (jacobian.swapaxes(1, 2) @ np.linalg.solve(square, velocity[..., None]))[..., 0]
        action = joints / self._joint_speed
        # Scaled as a whole, not clipped: the hand then keeps its direction.
        return action / np.maximum(1, np.abs(action).max(axis=1, keepdims=True))

    def _hand(self, physics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions (E, 3) of the hand and Jacobians (E, 3, 6) with respect to the arm's joints."""
        import mujoco

        model, data = self._model, self._data
        position = np.empty((len(physics), 3))
        jacobian = np.empty((len(physics), 3, model.nv))
        for e, state in enumerate(physics):
            data.qpos[:] = state[: model.nq]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_jacSite(model, data, jacobian[e], None, self._site)
            position[e] = data.site_xpos[self._site]
        return position, jacobian[..., :JOINTS]


def _goals(rng: np.random.Generator, environments: int) -> np.ndarray:
    """Goals (E, G, 3) in metres: some near a random target, the others anywhere in the box."""
    goals = rng.uniform(GOAL_LOW, GOAL_HIGH, (environments, GOALS, 3))
    targets = np.array(list(JACO_TARGETS.values()))
    near = targets[rng.integers(len(targets), size=goals.shape[:2])]
    near = near + rng.uniform(-TARGET_SPREAD, TARGET_SPREAD, near.shape)
    return np.where(rng.random((environments, GOALS, 1)) < TARGET_FRACTION, near, goals)
