import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_episode

from agentic import collector
from agentic.collect_config import CollectConfig, small_rnd
from agentic.episodes import buffer_dir, episode_files, read_episode, write_episode
from agentic.locks import locked
from envs import TASKS

SPEC = TASKS["jaco_reach_top_left"]


def _config(**changes):
    values = {
        "recipe": "random",
        "reward_task": SPEC.name,
        "episodes": 8,
        "seconds": 60.0,
        "workers": 0,
    } | changes
    return CollectConfig(**values)


def test_writes_exorls_files_and_says_what_they_are_worth(tmp_path):
    returns = collector.collect(_config(), tmp_path, seed=0)
    files = episode_files(buffer_dir(tmp_path, "jaco", "random"))
    assert [p.name for p in files] == [f"episode_{i:06d}_250.npz" for i in range(8)]
    episodes = [read_episode(path, SPEC) for path in files]
    assert set(returns) == {name for name in TASKS if name.startswith("jaco")}
    assert returns[SPEC.name] == pytest.approx([e.reward.sum() for e in episodes], abs=1e-3)
    record = json.loads((tmp_path / "jaco" / "random" / "collect.json").read_text())
    assert record["finished"]
    assert not collector.unfinished(_config(), tmp_path)


def test_the_same_seed_collects_the_same_and_more_is_added(tmp_path):
    for place in ("a", "b"):
        collector.collect(_config(), tmp_path / place, seed=0)
    first, second = (episode_files(buffer_dir(tmp_path / p, "jaco", "random")) for p in "ab")
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(read_episode(one, SPEC).physics, read_episode(other, SPEC).physics)
    before = [path.read_bytes() for path in first]
    collector.collect(_config(episodes=4), tmp_path / "a", seed=0)
    files = episode_files(buffer_dir(tmp_path / "a", "jaco", "random"))
    assert len(files) == 12
    assert [path.read_bytes() for path in files[:8]] == before
    assert len({read_episode(path, SPEC).physics.tobytes() for path in files}) == 12


def test_an_interrupted_collection_leaves_whole_files_and_is_completed(tmp_path, monkeypatch):
    write, written = collector.write_episode, []

    def interrupted(path, episode):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        write(path, episode)

    monkeypatch.setattr(collector, "write_episode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(_config(), tmp_path, seed=0)
    monkeypatch.undo()
    directory = buffer_dir(tmp_path, "jaco", "random")
    assert sorted(directory.iterdir()) == written
    assert collector.unfinished(_config(), tmp_path)
    collector.collect(_config(), tmp_path, seed=0)
    assert len(episode_files(directory)) == 8
    assert not collector.unfinished(_config(), tmp_path)


def test_rounds_are_completed_one_by_one(tmp_path, monkeypatch):
    collector.collect(_config(), tmp_path, seed=0)
    write = collector.write_episode
    directory = buffer_dir(tmp_path, "jaco", "random")

    def interrupted(path, episode):
        if len(episode_files(directory)) == 11:
            raise KeyboardInterrupt
        write(path, episode)

    monkeypatch.setattr(collector, "write_episode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(_config(), tmp_path, seed=0)
    monkeypatch.undo()
    assert len(collector.worth(_config(), tmp_path)[SPEC.name]) == 3
    returns = collector.collect(_config(), tmp_path, seed=0)
    files = episode_files(directory)
    assert len(files) == 16
    # What is told is the round's worth, of both sessions, and not the former round's.
    for name, values in returns.items():
        episodes = [read_episode(path, SPEC) for path in files[8:]]
        expected = [collector.relabel(TASKS[name], episode).sum() for episode in episodes]
        assert values == pytest.approx(expected)


def test_a_learner_that_does_not_fit_is_refused_and_nothing_begins(tmp_path):
    config = _config(recipe="rnd", rnd=replace(small_rnd(), environments=1, hidden=8), episodes=1)
    collector.collect(config, tmp_path, seed=0)
    note = collector.record_path(tmp_path, "jaco", "rnd")
    before = note.read_bytes()
    with pytest.raises(ValueError, match=r"rnd.hidden: got 9, expected 8"):
        collector.collect(replace(config, rnd=replace(config.rnd, hidden=9)), tmp_path, seed=0)
    assert note.read_bytes() == before
    assert len(episode_files(buffer_dir(tmp_path, "jaco", "rnd"))) == 1


def test_two_processes_never_write_into_one_folder(tmp_path):
    directory = buffer_dir(tmp_path, "jaco", "random")
    directory.mkdir(parents=True)
    with (
        locked(directory.parent, lambda: None),
        pytest.raises(ValueError, match="another process is collecting into"),
    ):
        collector.collect(_config(), tmp_path, seed=0)
    assert episode_files(directory) == []


def test_the_note_lists_all_simulators_that_played(tmp_path, monkeypatch):
    listed = []
    for number in ("3.5.0", "3.6.0", "3.5.0"):
        monkeypatch.setattr(collector, "version", {"dm_control": "1.0.9", "mujoco": number}.get)
        collector.collect(_config(episodes=1), tmp_path, seed=0)
        note = json.loads((tmp_path / "jaco" / "random" / "collect.json").read_text())
        listed.append(note["simulators"])
    first, second = (f"dm_control 1.0.9, mujoco {number}" for number in ("3.5.0", "3.6.0"))
    assert listed == [[first], [first, second], [first, second]]
    note = collector.record_path(tmp_path, "jaco", "random")
    older = json.loads(note.read_text())
    del older["simulators"]
    note.write_text(json.dumps(older))
    record = collector.read_record(note)
    assert record is not None
    assert record.simulators == ()


def test_the_time_limit_ends_it(tmp_path):
    collector.collect(_config(episodes=10**6, seconds=0.0), tmp_path, seed=0)
    assert len(episode_files(buffer_dir(tmp_path, "jaco", "random"))) == 1


@pytest.mark.parametrize("zipped", [False, True])
def test_nothing_is_collected_into_a_download(tmp_path, zipped):
    directory = buffer_dir(tmp_path, "jaco", "random")
    directory.mkdir(parents=True)
    path = directory / "episode_000000_250.npz"
    write_episode(path, make_episode(SPEC, 0))
    if zipped:
        with zipfile.ZipFile(tmp_path / "jaco" / "random.zip", "w") as writing:
            writing.write(path, f"buffer/{path.name}")
        path.unlink()
        directory.rmdir()
    assert not collector.unfinished(_config(), tmp_path)
    with pytest.raises(ValueError, match="holds episodes that were not collected here"):
        collector.collect(_config(), tmp_path, seed=0)
    assert len(episode_files(directory)) == (0 if zipped else 1)
    for inside in ("jaco", "jaco/random")[: 1 if zipped else 2]:
        if not zipped:
            with pytest.raises(ValueError, match="a folder inside the data"):
                collector.collect(_config(), tmp_path / inside, seed=0)


def test_a_download_needs_no_collection(cartpole_data):
    wanted = _config(recipe="td3", reward_task="cartpole_swingup")
    assert not collector.unfinished(wanted, cartpole_data)
    assert collector.unfinished(wanted, cartpole_data / "elsewhere")


def test_clear_errors(tmp_path):
    with pytest.raises(ValueError, match=r"recipe: got 'ppo', expected one of"):
        collector.collect(_config(recipe="ppo"), tmp_path, seed=0)
    (tmp_path / "jaco").write_text("a file")
    with pytest.raises(ValueError, match="data_dir: cannot make .*jaco/random/buffer"):
        collector.collect(_config(), tmp_path, seed=0)
    record = tmp_path / "damaged" / "jaco" / "random" / "collect.json"
    record.parent.mkdir(parents=True)
    record.write_text("{")
    with pytest.raises(ValueError, match="collect.json is damaged"):
        collector.collect(_config(), tmp_path / "damaged", seed=0)
