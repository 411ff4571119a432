"""What is told of stored episodes, against numpy on the same files."""

import io
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import make_episode
from rich.console import Console

from agentic import inspection
from agentic.config import DataConfig
from agentic.episodes import Episode, buffer_dir, write_episode
from agentic.inspection import draw_returns, duplicates, inspect, provenance, ranges
from agentic.loading import load_store
from agentic.store import EpisodeStore
from envs import TASKS, domain_tasks

SPEC = TASKS["jaco_reach_top_left"]
SKIP = DataConfig(on_bad_file="skip", workers=1)


def _write(data_dir: Path, algorithm: str, seeds: list[int]) -> list[Episode]:
    folder = buffer_dir(data_dir, "jaco", algorithm)
    folder.mkdir(parents=True, exist_ok=True)
    episodes = [make_episode(SPEC, seed) for seed in seeds]
    for i, episode in enumerate(episodes):
        write_episode(folder / f"episode_{i:06d}_250.npz", episode)
    return episodes


def _load(data_dir: Path, *algorithms: str) -> EpisodeStore:
    return load_store(data_dir, domain_tasks("jaco"), algorithms, SKIP)


def _text(store: EpisodeStore, data_dir: Path) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    inspect(store, data_dir, data_dir / "figure.png", console)
    return console.export_text()


@pytest.mark.parametrize("name", ["action", "observation"])
def test_ranges_are_numpys_whatever_the_batches(tmp_path, monkeypatch, name):
    episodes = _write(tmp_path, "rnd", [0, 1, 2]) + _write(tmp_path, "icm", [3, 4])
    first = 1 if name == "action" else 0
    if name == "action":
        edge = episodes[1].action
        edge[5:105, 2], edge[7, 3] = -1, 1
        path = buffer_dir(tmp_path, "jaco", "rnd") / "episode_000001_250.npz"
        write_episode(path, episodes[1])
    x_ND = np.concatenate([getattr(e, name)[first:] for e in episodes]).astype(np.float64)
    store = _load(tmp_path, "rnd", "icm")
    for batch_bytes in (1, 2**24):
        monkeypatch.setattr(inspection, "BATCH_BYTES", batch_bytes)
        found = ranges(store, name)
        np.testing.assert_array_equal(found.least, x_ND.min(axis=0))
        np.testing.assert_array_equal(found.most, x_ND.max(axis=0))
        np.testing.assert_allclose(found.mean, x_ND.mean(axis=0), rtol=1e-10)
        np.testing.assert_allclose(found.std, x_ND.std(axis=0), rtol=1e-10)
    if name == "action":
        assert found.at_bound[2] == pytest.approx(100 / 1250)
        assert found.at_bound[3] == pytest.approx(1 / 1250)
        assert found.at_bound[0] == 0


def test_ranges_are_of_the_chosen_rows_only(tmp_path):
    episodes = _write(tmp_path, "rnd", [0, 1, 2, 3])
    found = ranges(_load(tmp_path, "rnd:first_500"), "observation")
    chosen = np.concatenate([e.observation for e in episodes[:2]])
    np.testing.assert_array_equal(found.most, chosen.max(axis=0))


def test_a_small_spread_around_a_large_value_is_kept(tmp_path):
    (episode,) = _write(tmp_path, "rnd", [0])
    episode.observation[:, 0] = 4096 + np.arange(251, dtype=np.float32) / 1024
    write_episode(buffer_dir(tmp_path, "jaco", "rnd") / "episode_000000_250.npz", episode)
    found = ranges(_load(tmp_path, "rnd"), "observation")
    assert found.std[0] == pytest.approx(np.arange(251).std() / 1024, rel=1e-3)


def test_copies_are_found_across_algorithms(tmp_path):
    _write(tmp_path, "rnd", [0, 1, 0, 2])
    _write(tmp_path, "icm", [3, 0, 2])
    names = [f"episode_{i:06d}_250.npz" for i in range(4)]
    assert duplicates(_load(tmp_path, "rnd", "icm")) == [
        [f"rnd/{names[0]}", f"rnd/{names[2]}", f"icm/{names[1]}"],
        [f"rnd/{names[3]}", f"icm/{names[2]}"],
    ]
    assert "duplicates: 3 episodes" in _text(_load(tmp_path, "rnd", "icm"), tmp_path)


def test_equal_checksums_alone_are_no_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(zlib, "crc32", lambda *_: 7)
    _write(tmp_path, "rnd", [0, 1, 0])
    store = _load(tmp_path, "rnd")
    flat = store.parts[0].flat
    assert flat is not None
    assert set(flat.index.checksums) == {7}
    assert duplicates(store) == [[f"rnd/episode_00000{i}_250.npz" for i in (0, 2)]]


def test_everything_is_told(tmp_path):
    _write(tmp_path, "rnd", [0, 1])
    folder = buffer_dir(tmp_path, "jaco", "rnd")
    (folder / "episode_000002_250.npz").write_bytes(b"damaged")
    (folder / "episode_000003_9.npz").write_bytes(b"short")
    store = _load(tmp_path, "rnd")
    text = _text(store, tmp_path)
    for word in (
        "jaco: episodes of 250 steps",
        "rnd: not collected here (no collect.json)",
        "episode_000000_250.npz to episode_000001_250.npz",
        "rejected: ",
        "episode_000002_250.npz: not a readable npz",
        "left out: 1 files of 9 steps",
        "jaco_reach_bottom_right",
        "action 8",
        "observation 41",
    ):
        assert word in text, word
    row = next(line for line in text.splitlines() if line.startswith("│ rnd"))
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert [cell.strip() for cell in row.strip("│").split("│")][1:4] == [
        "2",
        "500",
        f"{size / 1e6:.1f} MB",
    ]
    median = np.median(store.returns[0])
    assert f"{median:.1f}" in text


def test_provenance_of_collected_and_of_damaged_notes(tmp_path):
    _write(tmp_path, "td3", [0])
    note = tmp_path / "jaco" / "td3" / "collect.json"
    for content, expected in (
        (
            json.dumps({"recipe": "td3", "seed": 5, "sessions": 2}),
            "recipe td3, sessions 2, last seed 5",
        ),
        (
            json.dumps({"recipe": "td3", "simulators": ["mujoco 3.5.0", "mujoco 3.6.0"]}),
            "(recipe td3, mujoco 3.5.0, mujoco 3.6.0)",
        ),
        ("{", "collect.json is damaged"),
    ):
        note.write_text(content)
        shutil.rmtree(tmp_path / "jaco" / "td3" / "store", ignore_errors=True)
        part = _load(tmp_path, "td3").parts[0]
        assert part.flat is not None
        assert expected in provenance(part, part.flat)


def test_the_figure_is_a_png_or_the_place_is_named(tmp_path):
    _write(tmp_path, "rnd", [0, 1])
    _write(tmp_path, "icm", [2])
    store = _load(tmp_path, "rnd", "icm")
    draw_returns(store, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")
    for bad in (Path("/proc/figure.png"), tmp_path):
        with pytest.raises(ValueError, match=f"output: cannot write {bad}"):
            draw_returns(store, bad)
