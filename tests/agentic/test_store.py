import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from conftest import make_episode, make_store

from agentic.config import ChainConfig, DataConfig
from agentic.episodes import buffer_dir, write_episode
from agentic.flat import FlatStore
from agentic.loading import load_store
from agentic.relabel import relabel
from agentic.sampler import ChainSampler
from agentic.store import HELD_BYTES, split
from envs import TASKS, EnvPool, expand

CARTPOLE = (TASKS["cartpole_swingup"],)


def test_load_aligns_rows(cartpole_data):
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    episode, r_T = make_episode(CARTPOLE[0], 3), relabel(CARTPOLE[0], make_episode(CARTPOLE[0], 3))
    every, three = np.arange(1000), np.array(3)
    assert (store.episodes, store.steps) == (12, 1000)
    for steps in (every, None):
        assert np.array_equal(store.observation(three, steps), episode.observation[:-1])
        assert np.array_equal(store.action(three, steps), episode.action[1:])
        assert np.array_equal(store.reward(0, three, steps), r_T)
    assert store.returns[0, 3] == r_T.sum(dtype=np.float64)
    to_go_T = np.cumsum(r_T[::-1], dtype=np.float64)[::-1]
    assert store.return_to_go(0, three, every) == pytest.approx(to_go_T, rel=1e-6)


def test_units_are_those_of_the_observations_acted_in(cartpole_data):
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    acted_in = [make_episode(CARTPOLE[0], i).observation[:-1] for i in range(12)]
    mean, std = store.observation_units
    assert mean == pytest.approx(np.concatenate(acted_in).mean(axis=0), abs=1e-6)
    assert std == pytest.approx(np.concatenate(acted_in).std(axis=0), rel=1e-5)


@pytest.fixture
def two_algorithms(cartpole_data):
    """Beside `td3`, `rnd` with four other episodes, numbered against the order of their names."""
    directory = buffer_dir(cartpole_data, "cartpole", "rnd")
    directory.mkdir(parents=True)
    for i in range(4):
        name = f"2022010{9 - i}T000000_{i}_1000.npz"
        write_episode(directory / name, make_episode(CARTPOLE[0], 100 + i))
    return cartpole_data


def test_algorithms_are_mixed_with_a_part_of_each(two_algorithms):
    store = load_store(two_algorithms, CARTPOLE, ("rnd:first_50%", "td3:even_3k"))
    taken = [make_episode(CARTPOLE[0], i) for i in (100, 101, 2, 6, 10)]
    assert [len(part.rows) for part in store.parts] == [2, 3]
    e_EN, t_N = np.array([[4, 0, 2, 1, 3]]), np.array([0, 999, 17, 4, 5])
    expected = [[taken[e].action[t + 1] for e, t in zip(e_EN[0], t_N, strict=True)]]
    assert np.array_equal(store.action(e_EN, t_N), expected)
    assert store.returns[0, 2] == relabel(CARTPOLE[0], taken[2]).sum(dtype=np.float64)


def test_mixed_chains_are_those_of_one_folder(two_algorithms, tmp_path):
    config = ChainConfig(
        trajectories=3,
        count="uniform",
        window_share=0.5,
        window_steps=50,
        window_batch=50,
        best_from=0.5,
        spread="drawn",
        loss_on="last",
    )
    mixed = load_store(two_algorithms, CARTPOLE, ("td3", "rnd"))
    directory = buffer_dir(tmp_path / "one", "cartpole", "all")
    directory.mkdir(parents=True)
    for e in range(16):
        episode = make_episode(CARTPOLE[0], e if e < 12 else 88 + e)
        write_episode(directory / f"episode_{e:06d}_1000.npz", episode)
    one = load_store(tmp_path / "one", CARTPOLE, ("all",))
    samplers = [
        ChainSampler(store, np.arange(16), config, batch_steps=3000, seed=5)
        for store in (mixed, one)
    ]
    for i in range(8):
        (steps, weight_BL), (other, other_BL) = (sampler.batch(i) for sampler in samplers)
        assert torch.equal(weight_BL, other_BL)
        for name, value in vars(steps).items():
            assert torch.equal(value, getattr(other, name)), name


def test_reads_are_forgotten_now_and_then(cartpole_data, monkeypatch):
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    released = []
    monkeypatch.setattr(FlatStore, "release", lambda self: released.append(self.path))
    every = np.arange(1000)
    for _ in range(HELD_BYTES // (1000 * 20) + 1):
        store.observation(np.array([3]), every)
    assert len(released) == 4  # every read counts for its bytes and the 64 KiB mapped around it


def test_lengths_other_than_the_tasks_are_counted_or_refused(cartpole_data):
    directory = buffer_dir(cartpole_data, "cartpole", "td3")
    short = make_episode(CARTPOLE[0], 1, steps=37)
    for index in (12, 13):
        write_episode(directory / f"episode_{index:06d}_37.npz", short)
    write_episode(directory / "episode_000014_0.npz", make_episode(CARTPOLE[0], 1, steps=0))
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    assert store.episodes == 12
    assert store.parts[0].summary == (
        "12 episodes; left out for their number of steps: 1 of 0, 2 of 37"
    )
    strict = DataConfig(on_other_length="error")
    with pytest.raises(
        ValueError, match=r"episode_000012_37.npz: 37 steps, expected 1000.*3 of 15"
    ):
        load_store(cartpole_data, CARTPOLE, ("td3",), strict)


def test_an_empty_buffer_gives_way_to_the_zip_and_a_full_one_hides_it(cartpole_data):
    directory = buffer_dir(cartpole_data, "cartpole", "td3")
    archive = cartpole_data / "cartpole" / "td3.zip"
    with zipfile.ZipFile(archive, "w") as writing:
        for path in sorted(directory.iterdir())[:5]:
            writing.write(path, f"buffer/{path.name}")
    told = []
    assert load_store(cartpole_data, CARTPOLE, ("td3",), tell=told.append).episodes == 12
    assert any("td3.zip beside it is not" in text for text in told)
    for path in directory.iterdir():
        path.unlink()
    assert load_store(cartpole_data, CARTPOLE, ("td3",)).episodes == 5
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"td3.zip: .*(not a readable zip|cut off)"):
        load_store(cartpole_data, CARTPOLE, ("td3",))


def test_files_that_are_gone_are_not_learned_from(cartpole_data):
    load_store(cartpole_data, CARTPOLE, ("td3",))
    directory = buffer_dir(cartpole_data, "cartpole", "td3")
    (directory / "episode_000003_1000.npz").unlink()
    (directory / "episode_000004_1000.npz").rename(directory / "episode_000099_1000.npz")
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    assert store.episodes == 11
    assert np.array_equal(store.action(np.array(10)), make_episode(CARTPOLE[0], 4).action[1:])


def test_what_is_mapped_stays_when_a_file_changes(cartpole_data):
    running = load_store(cartpole_data, CARTPOLE, ("td3",))
    before = np.array(running.action(np.array(3))), np.array(running.reward(0, np.array(3)))
    path = buffer_dir(cartpole_data, "cartpole", "td3") / "episode_000003_1000.npz"
    write_episode(path, make_episode(CARTPOLE[0], 300))
    changed = load_store(cartpole_data, CARTPOLE, ("td3",))
    assert np.array_equal(changed.action(np.array(3)), make_episode(CARTPOLE[0], 300).action[1:])
    assert np.array_equal(running.action(np.array(3)), before[0])
    assert np.array_equal(running.reward(0, np.array(3)), before[1])


def test_a_store_elsewhere_leaves_the_download_alone(cartpole_data, tmp_path):
    data = DataConfig(store_dir=str(tmp_path / "elsewhere"))
    load_store(cartpole_data, CARTPOLE, ("td3",), data)
    assert not (cartpole_data / "cartpole" / "td3" / "store").exists()
    assert (tmp_path / "elsewhere" / "cartpole" / "td3" / "store" / "index.json").is_file()
    (tmp_path / "file").touch()
    blocked = DataConfig(store_dir=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="data.store_dir: cannot write .*file"):
        load_store(cartpole_data, CARTPOLE, ("td3",), blocked)


@pytest.mark.parametrize("task", ["cartpole_swingup", "walker_walk"])
def test_relabelled_reward_is_the_live_one_of_the_same_step(task):
    spec = TASKS[task]
    rng = np.random.default_rng(0)
    pool = EnvPool([task])
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
    for deep in ("cartpole", "cartpole/td3"):
        with pytest.raises(ValueError, match=f"got .*{deep}, a folder inside.*expected .*/data,"):
            load_store(cartpole_data / deep, CARTPOLE, ("td3",))
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
    mean, std = store.observation_units
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


def test_a_store_that_is_deleted_under_a_training_stays_readable(cartpole_data):
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    before = store.observation(np.arange(12))
    shutil.rmtree(cartpole_data)
    store._forget(2 * HELD_BYTES)  # pages are given back, and read again
    assert np.array_equal(store.observation(np.arange(12)), before)


@pytest.mark.parametrize("name", ["action.npy", "rewards/*.reward.npy"])
def test_a_store_that_is_cut_off_under_a_training_is_told(cartpole_data, name):
    store = load_store(cartpole_data, CARTPOLE, ("td3",))
    (path,) = (cartpole_data / "cartpole" / "td3" / "store").glob(name)
    size = path.stat().st_size
    os.truncate(path, 5000)  # a read of its end would be a fault that ends the process
    with pytest.raises(ValueError, match=f"{path}: got 5,000 bytes, expected the {size:,}"):
        store.action(np.arange(12))
