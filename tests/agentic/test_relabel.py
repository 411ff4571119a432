import numpy as np
import pytest
from conftest import make_episode

from agentic import relabel as relabelling
from agentic.config import DataConfig
from agentic.episodes import buffer_dir, write_episode
from agentic.relabel import relabel, rewards
from agentic.store import load_store
from envs import TASKS, domain_tasks, reward

SPEC = TASKS["cartpole_swingup"]


def _flat(data_dir):
    return load_store(data_dir, (SPEC,), ("td3",)).parts[0].flat


@pytest.mark.parametrize("mode", ["with_control", "state_only"])
def test_every_row_is_relabelled_as_its_episode(cartpole_data, mode, monkeypatch):
    monkeypatch.setattr(relabelling, "BATCH_STEPS", 5000)  # batches of 5, 5 and 2 rows
    flat = _flat(cartpole_data)
    found = rewards(flat, SPEC, mode, workers=3)
    for i in range(12):
        row = flat.rows[f"episode_{i:06d}_1000.npz"]
        expected = relabel(SPEC, make_episode(SPEC, i), mode)
        assert np.array_equal(found.reward[row], expected)
        assert found.returns[row] == expected.sum(dtype=np.float64)
        assert found.return_to_go[row, 0] == pytest.approx(found.returns[row])
        assert found.return_to_go[row, -1] == pytest.approx(expected[-1], abs=1e-4)


def test_exorls_own_mode_pays_cartpole_more():
    episode = make_episode(SPEC, 0)
    exact, exorl = (relabel(SPEC, episode, mode) for mode in relabelling.MODES)
    ignored = reward(SPEC.name, observation=None, action=None, physics=episode.physics[1:]).astype(
        np.float32
    )
    assert np.array_equal(exorl, ignored)
    assert (exorl >= exact).all()
    assert exorl.sum() > exact.sum()


def test_the_mode_of_the_settings_is_what_is_learned_from(cartpole_data):
    exact = load_store(cartpole_data, (SPEC,), ("td3",))
    exorl = load_store(cartpole_data, (SPEC,), ("td3",), DataConfig(relabel="state_only"))
    assert (exorl.returns > exact.returns).all()


def test_rewards_are_computed_once_and_again_when_a_row_changes(cartpole_data, monkeypatch):
    calls = []
    plain = relabelling._relabel
    monkeypatch.setattr(relabelling, "_relabel", lambda *a: calls.append(1) or plain(*a))
    before = load_store(cartpole_data, (SPEC,), ("td3",)).returns
    assert len(calls) == 1
    assert np.array_equal(load_store(cartpole_data, (SPEC,), ("td3",)).returns, before)
    assert len(calls) == 1
    path = buffer_dir(cartpole_data, "cartpole", "td3") / "episode_000003_1000.npz"
    write_episode(path, make_episode(SPEC, 300))
    after = load_store(cartpole_data, (SPEC,), ("td3",)).returns
    assert len(calls) == 2
    assert np.flatnonzero(after[0] != before[0]).tolist() == [3]


def test_half_written_rewards_are_made_anew(cartpole_data):
    flat = _flat(cartpole_data)
    returns = np.array(rewards(flat, SPEC, "with_control").returns)
    folder = flat.path / "rewards"
    (folder / "cartpole_swingup.with_control.json").unlink()
    (folder / "cartpole_swingup.with_control.reward.npy").write_bytes(b"")
    assert np.array_equal(rewards(flat, SPEC, "with_control").returns, returns)
    (folder / "cartpole_swingup.with_control.json").write_text("{")
    assert np.array_equal(rewards(flat, SPEC, "with_control").returns, returns)
    assert [p.name for p in folder.iterdir() if "tmp" in p.name] == []


def test_all_tasks_of_a_domain_from_one_store(tmp_path):
    specs = domain_tasks("jaco")
    directory = buffer_dir(tmp_path, "jaco", "babble")
    directory.mkdir(parents=True)
    for i in range(3):
        write_episode(directory / f"episode_{i:06d}_250.npz", make_episode(specs[0], i))
    store = load_store(tmp_path, specs, ("babble",))
    for k, spec in enumerate(specs):
        expected = [relabel(spec, make_episode(spec, i)).sum(dtype=np.float64) for i in range(3)]
        assert store.returns[k].tolist() == expected


def test_an_unknown_mode_is_named(cartpole_data):
    with pytest.raises(ValueError, match="data.relabel: got 'exact', expected one of"):
        rewards(_flat(cartpole_data), SPEC, "exact")
