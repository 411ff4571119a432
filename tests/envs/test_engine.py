"""The pool beside the environments that it stands for: the same numbers over whole episodes."""

import numpy as np
import pytest

from envs import DmcEnv, EnvPool, domain_tasks

# The formulas beside what dm_control computes from simulated quantities, in another order.
REWARD_TOLERANCE = 1e-12


class Beside:
    """A pool with every task of a domain, and a `DmcEnv` for each of its environments."""

    def __init__(self, domain):
        names = [task.name for task in domain_tasks(domain)]
        self.pool = EnvPool(names)
        self.singles = [DmcEnv(name) for name in names]
        self.shape = (len(names), self.pool.task.action_size)

    def reset(self, first_seed):
        seeds = range(first_seed, first_seed + len(self.singles))
        observation, physics = self.pool.reset(seeds)
        starts = [env.reset(seed=s) for env, s in zip(self.singles, seeds, strict=True)]
        assert np.array_equal(observation, [start[0] for start in starts])
        assert np.array_equal(physics, [start[1]["physics"] for start in starts])

    def step(self, action, but=()):
        """One step of both, compared where the index is not in `but`."""
        observation, reward, physics, done = self.pool.step(action)
        for e in (e for e in range(len(self.singles)) if e not in but):
            shown, paid, _, truncated, info = self.singles[e].step(action[e])
            assert np.array_equal(physics[e], info["physics"])
            assert np.array_equal(observation[e], shown)
            assert abs(reward[e] - paid) <= REWARD_TOLERANCE
            assert done == truncated
        assert np.array_equal(np.flatnonzero(self.pool.failed), but)
        return done


@pytest.mark.parametrize("domain", ["walker", "cheetah", "cartpole", "jaco"])
def test_whole_episodes_are_the_single_environments(domain):
    """All tasks in one pool; random actions beyond the limits, then long saturated ones."""
    beside = Beside(domain)
    rng = np.random.default_rng(0)
    beside.reset(0)
    while not beside.step(rng.uniform(-1.2, 1.2, beside.shape)):
        pass
    beside.reset(100)
    action = np.ones(beside.shape)
    while not beside.step(action):
        switched = rng.random(len(action)) < 0.1
        action = np.where(switched[:, None], rng.choice([-1.0, 1.0], beside.shape), action)


@pytest.mark.parametrize("domain", ["walker", "cheetah", "cartpole", "jaco"])
def test_nothing_is_left_of_what_was_before_a_reset(domain):
    beside = Beside(domain)
    rng = np.random.default_rng(1)

    def steps(count, but=()):
        for _ in range(count):
            beside.step(rng.uniform(-1, 1, beside.shape), but)

    beside.reset(0)
    steps(40)
    beside.reset(50)  # in mid-episode
    steps(40)
    beside.pool._engine._datas[1].qvel[:] = np.nan  # after a failure
    steps(40, but=(1,))
    beside.reset(0)
    steps(40)


@pytest.mark.parametrize("domain", ["walker", "cheetah", "cartpole", "jaco"])
def test_what_dm_control_refuses_is_a_failure(domain):
    """A warning of the simulator, in a state that is set right again at once."""
    beside = Beside(domain)
    beside.reset(0)
    action = np.zeros(beside.shape)
    beside.step(action)
    for data in (beside.pool._engine._datas[0], beside.singles[0]._env.physics.data.ptr):
        data.qpos[0] = 1e11
    with pytest.raises(RuntimeError, match="diverged"):
        beside.singles[0].step(action[0])
    beside.step(action, but=(0,))
    assert np.isfinite(beside.pool._reading).all()
