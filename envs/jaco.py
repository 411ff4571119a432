"""ExoRL's jaco reach: a Kinova arm brings its hand to one of four fixed points above the table.

Built from the parts of `dm_control.manipulation`. It differs from that package's own reach task in
two ways: the target stands still, and the observation doesn't tell where it is. So one recorded
state has a reward under each of the four tasks.
"""

from collections.abc import Mapping

import numpy as np
from dm_control import composer
from dm_control.composer import initializers
from dm_control.composer.variation import distributions
from dm_control.manipulation.shared import (
    arenas,
    cameras,
    constants,
    observations,
    robots,
    workspaces,
)
from dm_control.utils import rewards

from envs.rewards import JACO_TARGETS, TARGET_RADIUS

# Where the tool centre point starts, metres: a box above the middle of the table.
SPAWN_LOWER = (-0.2, -0.2, 0.02)
SPAWN_UPPER = (0.2, 0.2, 0.4)
EPISODE_SECONDS = 10.0


class Reach(composer.Task):
    """Reward for a tool centre point near `target` (3,), metres in world coordinates.

    The observables are those of the arm, then those of the hand: joint angles as (sin, cos) 12,
    joint torques 6, joint velocities 6; finger angles 3, finger velocities 3, TCP position 3, TCP
    rotation 9.
    """

    def __init__(self, target: tuple[float, float, float]) -> None:
        settings = observations.PERFECT_FEATURES
        self._arena = arenas.Standard()
        self._arm = robots.make_arm(obs_settings=settings)
        self._hand = robots.make_hand(obs_settings=settings)
        self._arm.attach(self._hand)
        self._arena.attach_offset(self._arm, offset=robots.ARM_OFFSET)

        world = self._arena.mjcf_model.worldbody
        self._target = workspaces.add_target_site(
            body=world,
            radius=TARGET_RADIUS,
            visible=True,
            rgba=constants.RED,
            name="target",
            pos=target,
        )
        world.add("camera", **cameras.FRONT_CLOSE._asdict())  # for videos only, never observed

        self._place_hand = initializers.ToolCenterPointInitializer(
            self._hand,
            self._arm,
            position=distributions.Uniform(SPAWN_LOWER, SPAWN_UPPER),
            quaternion=workspaces.DOWN_QUATERNION,
        )
        self.control_timestep = constants.CONTROL_TIMESTEP

    @property
    def root_entity(self) -> composer.Entity:
        """The arena, which everything is attached to."""
        return self._arena

    @property
    def task_observables(self) -> Mapping:
        """None beyond the robot's own: the target stays hidden."""
        return {}

    def initialize_episode(self, physics, random_state: np.random.RandomState) -> None:
        """Close the fingers by a random amount and put the hand, pointing down, into the box."""
        self._hand.set_grasp(physics, close_factors=random_state.uniform())
        self._place_hand(physics, random_state)

    def get_reward(self, physics) -> float:
        """Return 1 within the target's radius, falling to 0.1 one radius further out."""
        hand = physics.bind(self._hand.tool_center_point).xpos
        distance = np.linalg.norm(hand - physics.bind(self._target).xpos)
        return float(rewards.tolerance(distance, bounds=(0, TARGET_RADIUS), margin=TARGET_RADIUS))


def load(task: str) -> composer.Environment:
    """Build the dm_control environment of `task`, a key of `rewards.JACO_TARGETS`.

    The start pose is solved by inverse kinematics, which logs a warning when a draw does not
    converge and draws again.
    """
    return composer.Environment(
        Reach(JACO_TARGETS[task]),
        time_limit=EPISODE_SECONDS,
        max_reset_attempts=10,
        # The model never changes: compiling it anew took an eighth of an episode's time.
        recompile_mjcf_every_episode=False,
    )
