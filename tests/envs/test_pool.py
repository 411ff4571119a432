import os

import numpy as np
import pytest

from envs import TASKS, DmcEnv, EnvPool
from envs.pool import worthwhile_workers


def test_equals_single_environments():
    task, seeds = "walker_walk", [4, 2**40, 4]
    pool, singles = EnvPool([task] * 3), [DmcEnv(task) for _ in range(3)]
    observation, physics = pool.reset(seeds)
    starts = [env.reset(seed=seed) for env, seed in zip(singles, seeds, strict=True)]
    np.testing.assert_array_equal(observation, [start[0] for start in starts])
    np.testing.assert_array_equal(physics, [start[1]["physics"] for start in starts])
    assert (observation.dtype, physics.dtype) == (np.float32, np.float64)
    rng = np.random.default_rng(0)
    for _ in range(10):
        action = rng.uniform(-1, 1, (3, 6)).astype(np.float32)
        observation, reward, physics, done = pool.step(action)
        rows = [env.step(row) for env, row in zip(singles, action, strict=True)]
        np.testing.assert_array_equal(observation, [row[0] for row in rows])
        np.testing.assert_allclose(reward, [row[1] for row in rows], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(physics, [row[4]["physics"] for row in rows])
        assert (reward.shape, reward.dtype) == ((3,), np.float64)
        assert done is False
    assert not pool.failed.any()


def test_returned_arrays_are_the_callers():
    pool = EnvPool(["cartpole_swingup"] * 2)
    first, _ = pool.reset([0, 1])
    kept = first.copy()
    pool.step(np.ones((2, 1)))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("task", ["cartpole_swingup", "jaco_reach_top_left"])
def test_done_at_exactly_the_step_limit(task):
    pool, spec = EnvPool([task]), TASKS[task]
    pool.reset([0])
    for step in range(1, spec.episode_steps + 1):
        *_, done = pool.step(np.zeros((1, spec.action_size)))
        assert done == (step == spec.episode_steps)
    with pytest.raises(RuntimeError, match="call reset first"):
        pool.step(np.zeros((1, spec.action_size)))


def break_action(pool):
    action = np.ones((3, 1))
    action[1] = np.nan
    return action


def break_simulation(pool):
    pool._engine._datas[1].qvel[:] = np.nan
    return np.ones((3, 1))


@pytest.mark.parametrize("broken_action", [break_action, break_simulation])
def test_a_failure_stays_where_it_is(broken_action):
    healthy, pool = EnvPool(["cartpole_swingup"] * 3), EnvPool(["cartpole_swingup"] * 3)
    healthy.reset([0, 1, 2])
    pool.reset([0, 1, 2])
    for p in (healthy, pool):
        last_observation, _, last_physics, _ = p.step(np.ones((3, 1)))

    done, step = False, 1
    while not done:
        action = broken_action(pool) if step == 1 else np.ones((3, 1))
        observation, reward, physics, done = pool.step(action)
        expected, expected_reward, _, _ = healthy.step(np.ones((3, 1)))
        np.testing.assert_array_equal(pool.failed, [False, True, False])
        np.testing.assert_array_equal(observation[[0, 2]], expected[[0, 2]])
        np.testing.assert_array_equal(reward[[0, 2]], expected_reward[[0, 2]])
        assert reward[1] == 0
        np.testing.assert_array_equal(observation[1], last_observation[1])
        np.testing.assert_array_equal(physics[1], last_physics[1])
        step += 1
    assert step == 1000

    pool.reset([0, 1, 2])
    assert not pool.failed.any()
    np.testing.assert_array_equal(pool.step(np.ones((3, 1)))[0], last_observation)


def test_all_failed_still_runs_to_the_end():
    pool = EnvPool(["cartpole_swingup"] * 2)
    pool.reset([0, 1])
    total, done, steps = np.zeros(2), False, 0
    while not done:
        _, reward, _, done = pool.step(np.full((2, 1), np.inf))
        total, steps = total + reward, steps + 1
    assert steps == 1000
    assert pool.failed.all()
    assert (total == 0).all()


def test_errors():
    with pytest.raises(ValueError, match="tasks: got none, expected at least one"):
        EnvPool([])
    with pytest.raises(ValueError, match="task: got 'walker', expected one of walker_stand"):
        EnvPool(["walker"])
    with pytest.raises(
        ValueError, match="tasks: got walker_run, cheetah_run, expected tasks of one domain"
    ):
        EnvPool(["walker_run", "cheetah_run", "walker_run"])
    with pytest.raises(ValueError, match="workers: got 0, expected at least 1"):
        EnvPool(["walker_walk"], workers=0)
    pool = EnvPool(["walker_walk"] * 2)
    with pytest.raises(RuntimeError, match="call reset first"):
        pool.step(np.zeros((2, 6)))
    with pytest.raises(ValueError, match="seeds: got 3, expected 2"):
        pool.reset([0, 1, 2])
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=rf"seeds: got {seed}, expected 0 to 2\*\*63 - 1"):
            pool.reset([0, seed])
    pool.reset([0, 2**63 - 1])
    pool.reset(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"action: got shape \(6,\), expected \(2, 6\)"):
        pool.step(np.zeros(6))
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="call reset first"):
        pool.step(np.zeros((2, 6)))
    with pytest.raises(RuntimeError, match="reset: the pool is closed"):
        pool.reset([0, 1])


def test_tasks_of_one_domain_share_a_pool():
    names = ["cartpole_balance", "cartpole_swingup", "cartpole_balance_sparse", "cartpole_balance"]
    with EnvPool(names) as pool:
        assert pool.task is TASKS["cartpole_balance"]
        assert pool.tasks == tuple(TASKS[name] for name in names)
        assert len(pool) == 4
        _, physics = pool.reset([0, 0, 0, 1])
        assert np.array_equal(physics[0], physics[2])  # they begin alike, and are paid differently
        assert not np.array_equal(physics[0], physics[1])
        _, reward, _, _ = pool.step(np.ones((4, 1)))
        assert reward[2] == 1
        assert 0.5 < reward[0] < 1
        assert reward[1] < 0.5
    with pytest.raises(RuntimeError, match="reset: the pool is closed"):
        pool.reset([0, 0, 0, 1])


def test_an_interrupted_step_needs_a_reset(monkeypatch):
    pool = EnvPool(["cartpole_swingup"] * 2)
    pool.reset([0, 1])

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pool._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.step(np.ones((2, 1)))
    with pytest.raises(RuntimeError, match="call reset first"):
        pool.step(np.ones((2, 1)))
    pool.reset([0, 1])
    pool.step(np.ones((2, 1)))


def test_other_processes_are_only_woken_for_steps_that_take_longer():
    cores = len(os.sched_getaffinity(0))
    assert worthwhile_workers("walker", 64) == cores
    assert worthwhile_workers("jaco", 64) == cores
    assert worthwhile_workers("walker", 1) == worthwhile_workers("jaco", 3) == 1
    assert worthwhile_workers("cartpole", 64) == worthwhile_workers("cheetah", 64) == 1
    with EnvPool(["cartpole_swingup"] * 2, workers=None) as pool:
        assert pool._workers == []
