import numpy as np
import pytest
from conftest import make_episode, make_store

from agentic.episodes import buffer_dir, write_episode
from agentic.store import load_store, relabel, split
from envs import TASKS, EnvPool, expand

CARTPOLE = (TASKS["cartpole_swingup"],)


def test_load_aligns_rows(cartpole_data):
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    episode = make_episode(CARTPOLE[0], 3)
    assert store.episodes == 12
    assert store.steps == 1000
    assert np.array_equal(store.observation[3], episode.observation[:-1])
    assert np.array_equal(store.action[3], episode.action[1:])
    assert np.array_equal(store.reward[0, 3], relabel(CARTPOLE[0], episode))
    assert store.returns[0, 3] == store.reward[0, 3].sum(dtype=np.float64)


@pytest.mark.parametrize("task", ["cartpole_swingup", "walker_walk"])
def test_relabelled_reward_is_the_live_one_of_the_same_step(task):
    spec = TASKS[task]
    rng = np.random.default_rng(0)
    pool = EnvPool(task, 1)
    observation, physics = pool.reset([0])
    rows = {"observation": [observation], "physics": [physics], "action": [np.zeros((1, 0))]}
    live = []
    for _ in range(20):
        action = rng.uniform(-1, 1, (1, spec.action_size)).astype(np.float32)
        observation, reward, physics, _ = pool.step(action)
        rows["observation"].append(observation)
        rows["physics"].append(physics)
        rows["action"].append(action)
        live.append(reward[0])
    rows["action"][0] = np.zeros((1, spec.action_size), np.float32)
    arrays = {name: np.concatenate(values) for name, values in rows.items()}
    episode = type(make_episode(spec, 0, steps=1))(
        **arrays, reward=np.zeros((21, 1), np.float32), discount=np.ones((21, 1), np.float32)
    )
    assert relabel(spec, episode) == pytest.approx(live, abs=1e-6)


def test_jaco_reach_is_relabelled_for_all_four_targets(tmp_path):
    spec = TASKS["jaco_reach_top_left"]
    directory = buffer_dir(tmp_path, "jaco", "babble")
    directory.mkdir(parents=True)
    episode = make_episode(spec, 0)
    episode.observation[:, 30:33] = [0.09, -0.09, 0.001]  # the hand rests on bottom_right
    write_episode(directory / "episode_000000_250.npz", episode)
    store = load_store(tmp_path, expand("jaco_reach"), ("babble",))
    best = [spec.name for spec, r in zip(store.specs, store.returns[:, 0], strict=True) if r > 249]
    assert best == ["jaco_reach_bottom_right"]


def test_wrong_level_and_empty_folder_say_what_was_looked_for(tmp_path, cartpole_data):
    with pytest.raises(ValueError, match=r"looked for .*rnd/buffer/.*npz.*got .*cartpole with td3"):
        load_store(cartpole_data, CARTPOLE, ("rnd",))
    with pytest.raises(ValueError, match=r"data_dir: looked for .*with td3"):
        load_store(cartpole_data / "cartpole", CARTPOLE, ("td3",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="nothing in it"):
        load_store(tmp_path / "empty", CARTPOLE, ("td3",))


def test_an_algorithm_named_twice(cartpole_data):
    with pytest.raises(ValueError, match="algorithms: got .*expected each of them once"):
        load_store(cartpole_data, CARTPOLE, ("td3", "td3"))


def test_one_bad_file_is_named(cartpole_data):
    path = buffer_dir(cartpole_data, "cartpole", "td3") / "episode_000005_1000.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="episode_000005_1000.npz"):
        load_store(cartpole_data, CARTPOLE, ("td3",))


def test_statistics_by_hand():
    store = make_store([0.0, 4.0, 8.0])
    (row,) = store.return_quantiles()
    assert (row["min"], row["median"], row["max"], row["mean"]) == (0.0, 4.0, 8.0, 4.0)
    assert store.return_scale().tolist() == [8.0]
    mean, std = store.observation_units()
    assert mean.tolist() == [5.5] * 3
    assert std == pytest.approx(np.full(3, np.arange(12).std()), rel=1e-5)


def test_split_holds_out_a_spread_and_never_the_best():
    store = make_store([float(r) for r in range(20)])
    for share, count in ((0.1, 2), (0.3, 6), (0.5, 10)):
        training, held_out = split(store, share)
        assert sorted([*training, *held_out]) == list(range(20))
        assert len(held_out) == count
        assert 19 in training
    assert split(store, 0.1)[1].tolist() == [4, 14]
    two = make_store([1.0, 2.0, 3.0, 4.0], tasks=2)  # the second task's best is the first's worst
    assert {0, 3} <= set(split(two, 0.5)[0])
    training, held_out = split(store, 0.0)
    assert len(training) == 20
    assert len(held_out) == 0
