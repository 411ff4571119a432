"""Through Minari and back, with Minari's own writer and loader."""

import json
import shutil
from pathlib import Path

import gymnasium
import minari
import numpy as np
import pytest
from conftest import make_episode
from minari.data_collector import EpisodeBuffer
from minari.namespace import list_local_namespaces

from agentic import exchange
from agentic.episodes import buffer_dir, write_episode
from agentic.exchange import dataset_id, export, import_dataset
from agentic.loading import load_store
from agentic.store import EpisodeStore
from envs import TASKS, reward

SPEC = TASKS["cartpole_swingup"]
ID = "exorl/cartpole_swingup/td3-v0"


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch) -> Path:
    """Minari's folder, away from the home directory."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "minari"


def _store(data_dir: Path, *tasks: str, algorithm: str = "td3") -> EpisodeStore:
    specs = tuple(TASKS[task] for task in tasks)
    folder = buffer_dir(data_dir, specs[0].domain, algorithm)
    folder.mkdir(parents=True)
    for i in range(3):
        path = folder / f"episode_{i + 5:06d}_{specs[0].episode_steps}.npz"
        write_episode(path, make_episode(specs[0], i))
    return load_store(data_dir, specs, (algorithm,))


def test_what_minari_loads(tmp_path, datasets, monkeypatch):
    monkeypatch.setattr(exchange, "BATCH", 2)
    store = _store(tmp_path, "cartpole_swingup")
    assert export(store, None, "with_control") == [datasets / ID]
    dataset = minari.load_dataset(ID)
    assert dataset.id == ID
    assert (dataset.total_episodes, dataset.total_steps) == (3, 3000)
    assert dataset.spec.env_spec.id == "exorl/cartpole_swingup-v0"
    env = dataset.recover_environment()
    assert dataset.observation_space == env.observation_space
    assert dataset.action_space == env.action_space
    env.close()
    for i, episode in enumerate(dataset.iterate_episodes()):
        original = make_episode(SPEC, i)
        np.testing.assert_array_equal(episode.observations, original.observation)
        np.testing.assert_array_equal(episode.actions, original.action[1:])
        np.testing.assert_array_equal(episode.infos["physics"], original.physics)
        expected = reward(
            SPEC.name,
            observation=original.observation[1:],
            action=original.action[1:],
            physics=original.physics[1:],
        )
        np.testing.assert_array_equal(episode.rewards, expected.astype(np.float32))
        assert not episode.terminations.any()
        assert np.flatnonzero(episode.truncations).tolist() == [999]
    metadata = dataset.storage.metadata
    assert metadata["algorithm_name"] == "td3"
    assert metadata["relabel"] == "with_control"
    assert {"mujoco", "dm_control", "agentic-transformer"} <= set(metadata["versions"])
    files = [m["file"] for m in dataset.storage.get_episode_metadata(range(3))]
    assert files == [f"episode_{i:06d}_1000.npz" for i in (5, 6, 7)]
    assert ID in minari.list_local_datasets()
    assert {"exorl", "exorl/cartpole_swingup"} <= set(list_local_namespaces())


@pytest.mark.parametrize("by", ["id", "folder", "data folder"])
def test_round_trip(tmp_path, datasets, by):
    store = _store(tmp_path / "data", "cartpole_swingup")
    (folder,) = export(store, None, "with_control")
    source = {"id": ID, "folder": str(folder), "data folder": str(folder / "data")}[by]
    files = import_dataset(source, SPEC, tmp_path / "again", "copy")
    assert [f.name for f in files] == [f"episode_{i:06d}_1000.npz" for i in range(3)]
    assert files[0].parent == buffer_dir(tmp_path / "again", "cartpole", "copy")
    for i, path in enumerate(files):
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
        original = make_episode(SPEC, i)
        for name in ("observation", "action", "physics", "discount"):
            assert found[name].dtype == getattr(original, name).dtype
            np.testing.assert_array_equal(found[name], getattr(original, name))
        assert found["reward"].dtype == np.float32
        np.testing.assert_array_equal(found["reward"][1:, 0], store.parts[0].rewards[0].reward[i])
        assert found["reward"][0] == 0
    again = load_store(tmp_path / "again", (SPEC,), ("copy",))
    np.testing.assert_array_equal(again.returns, store.returns)


def test_one_dataset_per_task_and_chosen_rows_only(tmp_path):
    tasks = ("jaco_reach_top_left", "jaco_reach_bottom_right")
    store = _store(tmp_path / "data", *tasks, algorithm="icm.apt")
    chosen = load_store(tmp_path / "data", store.specs, ("icm.apt:first_500",))
    made = export(chosen, tmp_path / "out", "with_control")
    ids = [f"exorl/{task}/icm_apt-v0" for task in tasks]
    assert made == [tmp_path / "out" / name for name in ids]
    rewards = []
    for folder in made:
        dataset = minari.MinariDataset(folder / "data")
        assert dataset.total_episodes == 2
        rewards.append(np.array([e.rewards for e in dataset.iterate_episodes()]))
    assert not np.array_equal(*rewards)
    for k, found in enumerate(rewards):
        np.testing.assert_array_equal(found, store.parts[0].rewards[k].reward[:2])


def test_an_export_is_whole_or_not_there(tmp_path, datasets, monkeypatch):
    store = _store(tmp_path, "cartpole_swingup")
    from minari.dataset.minari_storage import MinariStorage

    def fail(*_):
        raise OSError(28, "No space left on device", "main_data.hdf5")

    with monkeypatch.context() as broken:
        broken.setattr(MinariStorage, "update_metadata", fail)
        with pytest.raises(ValueError, match="output: cannot write main_data.hdf5 .No space"):
            export(store, None, "with_control")
    assert not (datasets / ID).exists()
    assert [p.name for p in (datasets / ID).parent.iterdir()] == ["namespace_metadata.json"]
    export(store, None, "with_control")
    with pytest.raises(ValueError, match="is there already, expected a new dataset"):
        export(store, None, "with_control")
    with pytest.raises(ValueError, match="output: cannot write /proc/"):
        export(store, Path("/proc/minari"), "with_control")


def _record(name: str, observation: int = 5, steps: int = 1000, **changes: object) -> None:
    """A dataset of two episodes as Minari's users make them."""
    physics = np.zeros((steps + 1, 4))
    fields = {
        "observations": np.zeros((steps + 1, observation), np.float32),
        "actions": np.zeros((steps, 1), np.float32),
        "rewards": np.zeros(steps),
        "terminations": np.zeros(steps, bool),
        "truncations": np.arange(steps) == steps - 1,
        "infos": {"physics": physics},
    } | changes
    minari.create_dataset_from_buffers(
        name,
        [EpisodeBuffer(**fields), EpisodeBuffer(**fields)],
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (observation,)),
        action_space=gymnasium.spaces.Box(-1, 1, (1,)),
    )


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation": 4}, "observation space is Box.*expected a Box of shape .5,"),
        ({"steps": 200}, r"observation has shape \(201, 5\), expected \(1001, 5\)"),
        ({"infos": {}}, r"episode 0 lacks infos\['physics'\], expected .* \(1001, 4\)"),
        ({"infos": None}, r"lacks infos\['physics'\]"),
        ({"infos": {"physics": np.zeros((1001, 6))}}, r"physics has shape \(1001, 6\)"),
        ({"infos": {"physics": np.full((1001, 4), np.nan)}}, "physics is not finite in row 0"),
        ({"actions": np.full((1000, 1), 3.0)}, "action reaches 3"),
        ({"terminations": np.arange(1000) == 999}, "is terminated"),
    ],
)
def test_what_is_no_exorl_data_is_refused_with_nothing_written(tmp_path, changes, words):
    _record("other-v0", **changes)
    with pytest.raises(ValueError, match=f"source: .*{words}"):
        import_dataset("other-v0", SPEC, tmp_path / "data", "copy")
    assert not list(tmp_path.glob("data/**/*.npz"))
    assert not list(tmp_path.glob("data/cartpole/copy/.buffer*"))


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_what_others_record_is_taken(tmp_path):
    _record("other-v0")
    assert len(import_dataset("other-v0", SPEC, tmp_path, "copy")) == 2
    with pytest.raises(ValueError, match="name: .*copy/buffer holds episodes already"):
        import_dataset("other-v0", SPEC, tmp_path, "copy")


def test_a_dataset_that_is_missing_or_damaged(tmp_path, datasets):
    with pytest.raises(ValueError, match=f"source: got 'nowhere-v0'.*{datasets}/nowhere-v0/data"):
        import_dataset("nowhere-v0", SPEC, tmp_path, "copy")
    (folder,) = export(_store(tmp_path, "cartpole_swingup"), None, "with_control")
    for name in ("main_data.hdf5", "metadata.json"):
        broken = tmp_path / name
        shutil.copytree(folder, broken)
        content = (broken / "data" / name).read_bytes()
        (broken / "data" / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=f"source: {broken}/data is no dataset of cartpole"):
            import_dataset(str(broken), SPEC, tmp_path, "copy")
    metadata = folder / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"total_episodes": 4}))
    with pytest.raises(ValueError, match="is no dataset of cartpole_swingup"):
        import_dataset(str(folder), SPEC, tmp_path, "copy")
    assert not list(tmp_path.glob("cartpole/copy/**/*.npz"))


def test_an_import_that_cannot_be_written(tmp_path):
    (folder,) = export(_store(tmp_path, "cartpole_swingup"), None, "with_control")
    with pytest.raises(ValueError, match="data_dir: cannot write /proc/"):
        import_dataset(str(folder), SPEC, Path("/proc/data"), "copy")


def test_names_are_those_that_minari_takes():
    assert dataset_id(SPEC, "td3") == ID
    assert dataset_id(SPEC, "a b/ü.2") == "exorl/cartpole_swingup/a_b_ü_2-v0"
