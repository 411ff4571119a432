"""agentic-data as a user types it, in a shell of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import minari
import numpy as np
import pytest
from played_data import play

from agentic import data
from agentic.episodes import buffer_dir, episode_files, read_episode
from envs import TASKS

TASK = "task=jaco_reach_top_left"
ID = "exorl/jaco_reach_top_left/random-v0"


def _run(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    quiet = {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "agentic.data", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | quiet | variables,
        timeout=250,
    )


def _fails(returncode: int, errors: str, *words: str) -> None:
    """One line on standard error that has all the words, and an exit code of 2."""
    assert returncode == 2, errors
    (line,) = errors.strip().splitlines()
    for word in words:
        assert word in line


@pytest.fixture
def main(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, str]]:
    """The same without a process of its own: exit code and standard error."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # what the command sets goes with the test
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))  # not at home
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "disable"))

    def call(cwd: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["agentic-data", *arguments])
        with pytest.raises(SystemExit) as ended:
            data.main()
        return ended.value.code, capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with 3 random jaco episodes, inspected once."""
    place = tmp_path_factory.mktemp("workplace")
    play(place / "data", "jaco_reach_top_left", 3)
    done = _run(place, "inspect", TASK)
    assert done.returncode == 0, done.stderr
    for word in (
        "jaco: episodes of 250 steps",
        "collected here (recipe random",
        "duplicates: 0 episodes",
        "jaco_reach_bottom_right",
        "histograms of the returns: data/jaco/inspect.png",
        "observation 41",
    ):
        assert word in done.stdout
    assert (place / "data/jaco/inspect.png").stat().st_size > 0
    assert sorted(p.name for p in place.iterdir()) == ["data"]
    return place


def test_verify_and_what_it_means(workplace):
    done = _run(workplace, "verify", TASK, "episodes=2")
    assert done.returncode == 0, done.stderr
    for word in ("3 of 3 checksums are right", "2 episodes played again", "open loop amplifies"):
        assert word in done.stdout


def test_verify_ends_with_1_for_changed_rows_only(workplace, tmp_path):
    shutil.copytree(workplace / "data/jaco", tmp_path / "data/jaco")
    stored = np.load(tmp_path / "data/jaco/random/store/action.npy", mmap_mode="r+")
    stored[1, 5, 0] *= 0.5
    stored.flush()
    done = _run(tmp_path, "verify", TASK)
    assert done.returncode == 1, done.stderr
    assert "row 1, episode_000001_250.npz, is not what was stored" in done.stdout
    assert "2 episodes played again" in done.stdout


@pytest.mark.parametrize("through", ["output", "variable"])
def test_export_then_import(workplace, tmp_path, monkeypatch, through):
    home = {"HOME": str(tmp_path / "home")}
    place = home | ({"MINARI_DATASETS_PATH": str(tmp_path)} if through == "variable" else {})
    relative = os.path.relpath(tmp_path, workplace)
    told = (f"output={relative}",) if through == "output" else ()
    done = _run(workplace, "export", TASK, "algorithms=[random]", *told, **place)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == (tmp_path / ID).resolve()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    assert minari.load_dataset(ID).total_episodes == 3

    source = f"source={relative}/{ID}" if through == "output" else f"source={ID}"
    done = _run(workplace, "import", TASK, source, f"name={through}", **place)
    assert done.returncode == 0, done.stderr
    assert f"3 episodes in data/jaco/{through}/buffer" in done.stdout
    spec = TASKS["jaco_reach_top_left"]
    pairs = zip(
        episode_files(buffer_dir(workplace / "data", "jaco", "random")),
        episode_files(buffer_dir(workplace / "data", "jaco", through)),
        strict=True,
    )
    for one, other in pairs:
        original, copy = read_episode(one, spec), read_episode(other, spec)
        for name in ("observation", "action", "physics"):
            np.testing.assert_array_equal(getattr(original, name), getattr(copy, name))
        np.testing.assert_allclose(original.reward, copy.reward, atol=1e-6)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["action: got None", "inspect", "export"]),
        ([TASK], ["action: got None"]),
        (["look", TASK], ["action: got look", "verify"]),
        (["inspect", "task=walker_fly"], ["task: got 'walker_fly'", "walker_walk"]),
        (["inspect", "task=quadruped_walk"], ["quadruped_walk' (a task of ExoRL that is not"]),
        (["inspect", "data_dir=nowhere"], ["data_dir: looked for nowhere/cartpole"]),
        (["inspect", "algorithms=[rnd]"], ["data_dir: looked for data/cartpole/rnd/buffer"]),
        (["export", "data_dir=nowhere"], ["data_dir: looked for nowhere/cartpole"]),
        (["verify", "algorithms=[rnd]"], ["data/cartpole/rnd/store", "found none"]),
        (["verify", "algorithms=[]"], ["data_dir: looked for data/cartpole"]),
        (["verify", "episodes=-1"], ["episodes: got -1"]),
        (["import"], ["source: got None", "for import"]),
        (["verify", "source=x"], ["source: got x", "null for other actions"]),
        (["import", "source=nowhere-v0"], ["source: got 'nowhere-v0'"]),
        (["import", "source=x", "name=../x"], ["name: got '../x'"]),
        (["inspect", "data.on_bad_file=maybe"], ["data.on_bad_file: got 'maybe'"]),
    ],
)
def test_bad_input_gets_one_line(tmp_path, main, arguments, words):
    _fails(*main(tmp_path, *arguments), *words)


def test_one_line_in_a_shell_too(tmp_path):
    done = _run(tmp_path, "look", TASK)
    _fails(done.returncode, done.stderr, "agentic-data: error: action: got look")


def test_places_that_cannot_be_written(workplace, main):
    for action in ("inspect", "export"):
        told = main(workplace, action, TASK, "output=/proc/x")
        _fails(*told, "output: cannot write /proc/x")


def test_a_damaged_store_is_named(workplace, tmp_path, main):
    shutil.copytree(workplace / "data/jaco", tmp_path / "data/jaco")
    physics = tmp_path / "data/jaco/random/store/physics.npy"
    physics.write_bytes(physics.read_bytes()[:-8])
    for action in ("inspect", "verify", "export"):
        _fails(
            *main(tmp_path, action, TASK, "algorithms=[random]"),
            "physics.npy: damaged",
            "delete its folder",
        )


def test_without_minari_it_says_what_to_install(workplace, main, monkeypatch):
    for name in ["minari", *(name for name in sys.modules if name.startswith("minari."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for name in ("agentic.exchange", "agentic.foreign"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("agentic.exchange", raising=False)
    for arguments in (["export", TASK], ["import", TASK, "source=x"]):
        _fails(*main(workplace, *arguments), "minari", "pip install '.[minari]'")
