import os
import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
from conftest import make_episode

from agentic.episodes import (
    Episode,
    buffer_dir,
    episode_files,
    read_episode,
    write_atomically,
    write_episode,
)
from envs import TASKS

SPEC = TASKS["cartpole_swingup"]


def _savez(path, **arrays):
    np.savez(path, **arrays)
    return path


def _arrays(episode):
    return {f.name: getattr(episode, f.name) for f in fields(Episode)}


def test_round_trip_keeps_every_bit_and_dtype(tmp_path):
    episode = make_episode(SPEC, 0)
    path = tmp_path / "episode_000000_1000.npz"
    write_episode(path, episode)
    again = read_episode(path, SPEC)
    for name, array in _arrays(episode).items():
        assert getattr(again, name).dtype == array.dtype
        assert np.array_equal(getattr(again, name), array)
    assert again.steps == 1000


def test_written_file_has_exorls_arrays(tmp_path):
    path = tmp_path / "episode_000000_1000.npz"
    write_episode(path, make_episode(SPEC, 0))
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive) == {"observation", "action", "reward", "discount", "physics"}
        assert archive["physics"].dtype == np.float64
        assert archive["reward"].shape == (1001, 1)


def test_extra_arrays_and_multi_task_rewards_are_accepted(tmp_path):
    arrays = _arrays(make_episode(SPEC, 0))
    arrays |= {"skill": np.zeros((1001, 16)), "reward": np.zeros((1001, 4), np.float32)}
    read_episode(_savez(tmp_path / "e_0_1000.npz", **arrays), SPEC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action": np.zeros((1000, 1), np.float32)}, r"action has shape \(1000, 1\)"),
        ({"observation": np.zeros((1001, 17), np.float32)}, r"observation has shape"),
        ({"physics": np.zeros(1001)}, r"physics has shape \(1001,\)"),
        ({"action": np.full((1001, 1), 3.0, np.float32)}, "action reaches 3"),
        ({"observation": np.full((1001, 5), np.nan, np.float32)}, "observation is not finite"),
        ({"observation": np.full((1001, 5), 1e300)}, "observation is not finite"),
        ({"reward": np.zeros((1001, 1), np.int64)}, "reward has dtype int64"),
        (
            {"action": np.array([[None]] * 1001)},
            "action is not an array .* dtype object",
        ),
    ],
)
def test_oddly_shaped_or_filled_arrays_name_file_and_array(tmp_path, change, words):
    path = _savez(tmp_path / "episode_000003_1000.npz", **(_arrays(make_episode(SPEC, 0)) | change))
    with pytest.raises(ValueError, match=words) as caught:
        read_episode(path, SPEC)
    assert "episode_000003_1000.npz" in str(caught.value)


def test_short_and_empty_episodes_are_named(tmp_path):
    for steps in (37, 0):
        path = tmp_path / f"episode_000000_{steps}.npz"
        write_episode(path, make_episode(SPEC, 0, steps=steps))
        with pytest.raises(ValueError, match=rf"{steps}.npz: observation has shape \({steps + 1}"):
            read_episode(path, SPEC)


def test_missing_array_truncated_empty_and_corrupt_files(tmp_path):
    whole = tmp_path / "whole_0_1000.npz"
    write_episode(whole, make_episode(SPEC, 0))
    content = whole.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    cases = {"cut": content[: len(content) // 2], "empty": b"", "text": b"no zip", "flip": flipped}
    for name, data in cases.items():
        path = tmp_path / f"{name}_0_1000.npz"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}_0_1000.npz"):
            read_episode(path, SPEC)
    arrays = _arrays(make_episode(SPEC, 0))
    del arrays["physics"]
    with pytest.raises(ValueError, match="physics"):
        read_episode(_savez(tmp_path / "m_0_1000.npz", **arrays), SPEC)


def test_array_that_is_no_npy_member(tmp_path):
    path = tmp_path / "a_0_1000.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("observation", "action", "reward", "discount", "physics"):
            archive.writestr(f"{name}.npy", b"not an array")
    with pytest.raises(ValueError, match="a_0_1000.npz"):
        read_episode(path, SPEC)


def test_both_file_name_forms_in_order_of_index(tmp_path):
    names = ["episode_000010_1000.npz", "20210101T000000_2_1000.npz", "notes.txt", "x.npz"]
    for name in names:
        (tmp_path / name).touch()
    assert [p.name for p in episode_files(tmp_path)] == [names[1], names[0]]
    assert episode_files(tmp_path / "missing") == []
    assert buffer_dir(tmp_path, "walker", "rnd") == tmp_path / "walker" / "rnd" / "buffer"


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full") as caught:
        write_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_action_a_hair_outside_is_accepted(tmp_path):
    episode = make_episode(SPEC, 0)
    action = episode.action.copy()
    action[5] = np.float32(1 + 5e-7)
    path = tmp_path / "e_0_1000.npz"
    write_episode(path, replace(episode, action=action))
    read_episode(path, SPEC)
