import numpy as np
import pytest
from conftest import make_episode

from agentic import relabel as relabelling
from agentic.config import DataConfig
from agentic.episodes import buffer_dir, write_episode
from agentic.loading import load_store
from agentic.relabel import relabel, rewards
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


def test_damaged_rewards_are_made_anew_and_leftovers_go(cartpole_data):
    flat = _flat(cartpole_data)
    returns = np.array(rewards(flat, SPEC, "with_control").returns)
    folder = flat.path / "rewards"
    (path,) = folder.glob("*.reward.npy")
    (folder / "cartpole_swingup.with_control.tmp").write_bytes(b"left by a kill")
    for damage in (
        lambda: path.unlink(),
        lambda: path.write_bytes(b""),
        lambda: np.save(path, np.zeros((12, 1000))),
        lambda: np.save(path, np.zeros((3, 250), np.float32)),
    ):
        damage()
        found = rewards(flat, SPEC, "with_control")
        assert np.array_equal(found.returns, returns)
        assert found.reward.sum(axis=1, dtype=np.float64) == pytest.approx(returns)
    assert len(list(folder.glob("*.npy"))) == 3
    assert list(folder.glob("*.tmp")) == []


def test_rewards_of_other_rows_or_formulas_are_not_taken(cartpole_data, monkeypatch):
    flat = _flat(cartpole_data)
    rewards(flat, SPEC, "with_control")
    calls = []
    plain = relabelling._relabel
    monkeypatch.setattr(relabelling, "_relabel", lambda *a: calls.append(1) or plain(*a))
    monkeypatch.setattr(relabelling, "FORMULAS", relabelling.FORMULAS + 1)
    rewards(flat, SPEC, "with_control")
    assert calls
    assert len(list((flat.path / "rewards").glob("*.npy"))) == 3  # the former ones are gone


def test_a_state_without_a_finite_reward_names_its_file(tmp_path):
    spec = TASKS["walker_walk"]
    directory = buffer_dir(tmp_path, "walker", "rnd")
    directory.mkdir(parents=True)
    for i in range(3):
        episode = make_episode(spec, i)
        if i == 1:
            episode.physics[500, 4:] = 1e308
        write_episode(directory / f"episode_{i:06d}_1000.npz", episode)
    with pytest.raises(
        ValueError, match=r"episode_000001_1000.npz: .*no finite walker_walk reward"
    ):
        load_store(tmp_path, (spec,), ("rnd",))


def test_changed_rewards_are_found(cartpole_data):
    flat = _flat(cartpole_data)
    assert relabelling.changed_rewards(flat, SPEC, "state_only") == []  # there are none
    rewards(flat, SPEC, "with_control")
    assert relabelling.changed_rewards(flat, SPEC, "with_control") == []
    for name in ("reward", "return_to_go", "returns"):
        (path,) = (flat.path / "rewards").glob(f"*.{name}.npy")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1  # the last row's
        path.write_bytes(content)
        assert relabelling.changed_rewards(flat, SPEC, "with_control") == [11]
        content[-1] ^= 1
        path.write_bytes(content)


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
