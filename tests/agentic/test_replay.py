"""Verification finds what was changed, and the simulator agrees with what it made itself."""

from pathlib import Path

import numpy as np
import pytest
from played_data import play
from rich.console import Console

from agentic.flat import FlatStore
from agentic.loading import load_store
from agentic.replay import changed_rows, replay, spread, verify
from envs import TASKS, domain_tasks
from envs.simulator import Simulator


def _stored(data_dir: Path, task: str, episodes: int) -> FlatStore:
    store = load_store(play(data_dir, task, episodes), (TASKS[task],), ("random",))
    flat = store.parts[0].flat
    assert flat is not None
    return flat


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory) -> FlatStore:
    return _stored(tmp_path_factory.mktemp("data"), "cartpole_swingup", 3)


def _arrays(flat: FlatStore, row: int) -> list[np.ndarray]:
    return [np.array(flat.arrays[name][row]) for name in ("observation", "action", "physics")]


@pytest.mark.parametrize("task", ["walker_stand", "cheetah_run", "jaco_reach_top_left"])
def test_own_episodes_are_repeated(tmp_path, task):
    flat = _stored(tmp_path, task, 1)
    simulators = [Simulator(spec.name) for spec in domain_tasks(TASKS[task].domain)]
    found = replay(simulators, *_arrays(flat, 0))
    assert found.reward.shape == (len(simulators), TASKS[task].episode_steps)
    assert found.one_step.max() < 1e-10
    assert found.open_loop.max() < 1e-6
    assert found.observation.max() < 1e-6
    assert found.reward.max() < 1e-6


def test_every_difference_shows_where_it_is(cartpole):
    simulators = [Simulator("cartpole_swingup")]
    observation, action, physics = _arrays(cartpole, 0)
    exact = replay(simulators, observation, action, physics)
    assert exact.one_step.max() == exact.open_loop.max() == exact.observation.max() == 0
    assert exact.reward.max() < 1e-12  # with the very action that led to a state

    seen = observation.copy()
    seen[500, 2] += 0.25
    found = replay(simulators, seen, action, physics)
    assert np.flatnonzero(found.observation > 0.1).tolist() == [499]
    assert found.one_step.max() == found.open_loop.max() == 0

    state = physics.copy()
    state[500, 3] += 0.25  # reached with one step's difference, left with about the same
    found = replay(simulators, observation, action, state)
    assert np.flatnonzero(found.one_step > 0.1).tolist() == [499, 500]
    assert np.flatnonzero(found.open_loop > 0.1).tolist() == [499]
    assert np.flatnonzero(found.observation > 0.1).tolist() == [499]

    taken = action.copy()
    taken[500] = -np.sign(taken[500])
    found = replay(simulators, observation, taken, physics)
    assert np.flatnonzero(found.one_step > 1e-3).tolist() == [499]
    assert found.open_loop[:499].max() == 0
    assert found.open_loop[500:].min() > 1e-6  # never corrected


def test_rewards_are_the_simulators_own(cartpole, monkeypatch):
    from agentic import replay as module

    monkeypatch.setattr(module, "reward", lambda *_, action, **__: np.zeros(len(action)))
    found = replay([Simulator("cartpole_swingup")], *_arrays(cartpole, 0))
    assert found.reward.max() > 0.01


def test_spread_is_even_and_within_bounds():
    assert spread([3, 5, 7, 9, 11], 3) == [3, 7, 11]
    assert spread([3, 5], 9) == [3, 5]
    assert spread([3, 5], 0) == spread([], 4) == []


def test_changed_rows_are_named_and_not_played(tmp_path):
    flat = _stored(tmp_path, "cartpole_swingup", 3)
    path = flat.path / "physics.npy"
    stored = np.load(path, mmap_mode="r+")
    stored[1, 10, 0] = np.nan
    stored.flush()
    again = FlatStore.open(flat.path, TASKS["cartpole_swingup"])
    assert changed_rows(again) == [1]
    console = Console(record=True, width=100)
    assert not verify(again, 3, console)
    text = console.export_text()
    assert "row 1, episode_000001_1000.npz, is not what was stored" in text
    assert "2 of 3 checksums" in text
    assert "2 episodes played again" in text
    assert "nan" not in text


def test_rows_out_of_use_are_passed_over(tmp_path):
    flat = _stored(tmp_path, "cartpole_swingup", 2)
    index = flat.path / "index.json"
    index.write_text(index.read_text().replace("episode_000000_1000.npz", ""))
    again = FlatStore.open(flat.path, TASKS["cartpole_swingup"])
    console = Console(record=True, width=100)
    assert verify(again, 5, console)
    assert "1 of 1 checksums" in console.export_text()


@pytest.mark.parametrize("name", ["moments", "rewards/*.return_to_go", "rewards/*.returns"])
def test_a_flipped_bit_anywhere_is_found(tmp_path, name):
    flat = _stored(tmp_path, "cartpole_swingup", 3)
    console = Console(record=True, width=200)
    assert verify(flat, 0, console)
    (path,) = flat.path.glob(f"{name}.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not verify(FlatStore.open(flat.path, TASKS["cartpole_swingup"]), 0, console)
    assert "row 2, episode_000002_1000.npz" in console.export_text()
