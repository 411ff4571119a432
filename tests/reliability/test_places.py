"""Commands in a sandbox: names and links in data lead nowhere but to the folders of the command."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import make_episode
from reports import leave_run
from rich.console import Console
from training import make_config, make_model, save_checkpoint

from agentic import checkpoint
from agentic.collect_config import CollectConfig
from agentic.collector import collect
from agentic.config import DataConfig
from agentic.curves import write_curves
from agentic.episodes import buffer_dir, write_episode
from agentic.evaluate import _beside
from agentic.inspection import draw_returns
from agentic.journal import Journal
from agentic.loading import load_store
from agentic.metrics import MetricLog
from agentic.report import write_report
from agentic.results import read_entries
from agentic.runs import open_run
from agentic.selection import Selection
from agentic.within import within
from envs import TASKS

SPEC = TASKS["cartpole_swingup"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sandbox(tmp_path):
    """The folder `work` of a command, beside what must stay as it is; what there is beside it."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "precious").write_text("precious")
    directory = buffer_dir(tmp_path / "work" / "data", "cartpole", "td3")
    directory.mkdir(parents=True)
    for i in range(3):
        write_episode(directory / f"episode_{i:06d}_1000.npz", make_episode(SPEC, i))

    def around():
        outside = (p for p in tmp_path.rglob("*") if "work" not in p.relative_to(tmp_path).parts)
        return {p: (p.read_bytes() if p.is_file() else b"", p.lstat().st_mtime_ns) for p in outside}

    before = around()
    yield tmp_path / "work"
    assert around() == before


def load(data_dir):
    return load_store(data_dir, (SPEC,), ("td3",))


@pytest.mark.parametrize(
    "link", ["cartpole/td3/store", "cartpole/td3/store/rewards", "cartpole/td3", "cartpole"]
)
def test_a_store_is_not_made_behind_a_link(sandbox, link):
    data, place = sandbox / "data", sandbox / "data" / link
    target = sandbox.parent / "beside"
    if place.exists():
        target = sandbox / "moved"
        place.rename(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    with pytest.raises(ValueError, match=f"^data.store_dir: .* leads to {target}"):
        load(data)
    assert not list(target.rglob("*.npy"))


@pytest.mark.parametrize("link", ["cartpole/td3/store", "cartpole/td3", "cartpole"])
def test_a_whole_store_behind_a_link_is_read(sandbox, link):
    data, place, target = sandbox / "data", sandbox / "data" / link, sandbox / "moved"
    returns = load(data).returns.tolist()
    place.rename(target)
    place.symlink_to(target)
    files = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert load(data).returns.tolist() == returns
    with pytest.raises(ValueError, match=f"^data.store_dir: .* leads to {target}"):  # new rewards
        load_store(data, (TASKS["cartpole_balance"],), ("td3",))
    directory = buffer_dir(data, "cartpole", "td3")
    write_episode(directory / "episode_000003_1000.npz", make_episode(SPEC, 3))
    with pytest.raises(ValueError, match=f"^data.store_dir: .* leads to {target}"):
        load(data)
    there = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    stores = {path for path in there if "store" in path.parts or link.endswith("store")}
    assert {p: there[p] for p in stores} == {p: t for p, t in files.items() if p in stores}


@pytest.mark.parametrize("name", ["observation.npy", ".lock", "rewards/.lock"])
def test_a_file_of_a_store_is_not_written_through_a_link(sandbox, name):
    place = sandbox / "data" / "cartpole" / "td3" / "store" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(sandbox.parent / "beside" / "precious")
    with pytest.raises((ValueError, OSError), match="symbolic links|damaged"):
        load(sandbox / "data")


@pytest.mark.parametrize("name", ["index.json", "rewards/cartpole_swingup.with_control.x.tmp"])
def test_what_is_replaced_is_the_link(sandbox, name):
    place = sandbox / "data" / "cartpole" / "td3" / "store" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(sandbox.parent / "beside" / "missing")
    assert load(sandbox / "data").episodes == 3
    assert not place.is_symlink()


def test_data_that_are_a_link_themselves_are_taken(sandbox):
    (sandbox / "link").symlink_to(sandbox / "data")
    assert load(sandbox / "link").episodes == 3
    assert within(sandbox / "link" / "x", sandbox / "link", "a") == sandbox / "link" / "x"


def test_data_behind_a_link_are_read_where_the_store_is_elsewhere(sandbox):
    (sandbox / "data" / "cartpole").rename(sandbox / "moved")
    (sandbox / "data" / "cartpole").symlink_to(sandbox / "moved")
    config = DataConfig(store_dir=str(sandbox / "stores"))
    assert load_store(sandbox / "data", (SPEC,), ("td3",), config).episodes == 3
    assert not (sandbox / "moved" / "td3" / "store").exists()


@pytest.mark.parametrize("name", ["..", ".", "../x", "/x", ".hidden", "a/../b"])
def test_an_algorithm_is_the_name_of_a_folder(name):
    with pytest.raises(ValueError, match="algorithms: got"):
        Selection.parse(name)


def test_collections_stay_in_the_data(sandbox):
    config = CollectConfig(recipe="random", reward_task=SPEC.name, episodes=1, seconds=9, workers=0)
    (sandbox / "data" / "cartpole" / "random").symlink_to("../../../beside")
    with pytest.raises(ValueError, match="data_dir: .* leads to .*/beside/buffer by a link"):
        collect(config, sandbox / "data", seed=0)


def test_a_figure_replaces_a_link(sandbox):
    figure = sandbox / "inspect.png"
    figure.symlink_to(sandbox.parent / "beside" / "precious")
    draw_returns(load(sandbox / "data"), figure)
    assert not figure.is_symlink()


def test_a_runs_folders_are_in_the_run(sandbox):
    run = sandbox / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to("../../beside")
    config = make_config(make_model(), resume=str(run))
    with pytest.raises(ValueError, match="resume: .* leads to .*/beside"), ExitStack() as held:
        open_run(config, held)
    (run / "evaluations").symlink_to("../../beside")
    with pytest.raises(ValueError, match="checkpoint: .* leads to .*/beside by a link"):
        _beside(run / "best.pt", 0, {}, Console())


def test_names_in_results_are_no_paths(sandbox):
    output = sandbox / "output"
    place = leave_run(output, "AT", [[1.0, 2.0]] * 2, None, place="anywhere", layout="../../../x")
    file = place / "results.json"
    content = json.loads(file.read_text())
    for entry in content["results"]:
        entry["layout"] = "../../../../beside/x"
    file.write_text(json.dumps(content))
    write_report(output, ("walker_walk",), Console(quiet=True))
    drawn = sorted(path.name for path in (output / "report").glob("*.png"))
    assert drawn
    assert all(name.startswith(".._.._.._.._beside_x_td3_") for name in drawn)


@pytest.mark.parametrize("name", ["..", "../x", "/x", "a/b", ".x", ""])
def test_an_import_is_into_a_folder_of_that_name(sandbox, name):
    done = subprocess.run(
        [sys.executable, "-m", "agentic.data", "import", "source=nowhere", f"name='{name}'"],
        cwd=sandbox,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(sandbox)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert f"name: got '{name}', expected the name of one folder" in done.stderr


def test_an_evaluation_stays_in_its_folder(sandbox):
    save_checkpoint(sandbox / "best.pt", task=SPEC.name)
    settings = ["contexts=1", "trials=1", "context=keep", "output=out", "workers=1"]
    done = subprocess.run(
        [sys.executable, "-m", "agentic.evaluate", "checkpoint=best.pt", *settings],
        cwd=sandbox,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(sandbox), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    made = {path.name for path in sandbox.iterdir()} - {".cache", ".config"}  # matplotlib's
    assert made == {"best.pt", "data", "out"}


def test_a_log_is_not_cut_through_a_link(sandbox):
    (sandbox / "metrics.jsonl").symlink_to("../beside/precious")
    with pytest.raises(OSError, match="symbolic links"):
        MetricLog(sandbox, 0)


@pytest.mark.parametrize("link", ["unfinished", "unfinished/00_keep"])
def test_trials_are_not_kept_behind_a_link(sandbox, link):
    place = sandbox / link
    if link != "unfinished":
        Journal(sandbox, {})
    place.symlink_to(sandbox.parent / "beside")
    with pytest.raises(ValueError, match="^output: .* leads to .*/beside by a link"):
        Journal(sandbox, {}).part("00_keep")


def test_curves_are_not_drawn_behind_a_link(sandbox):
    entries = read_entries(leave_run(sandbox, "AT-4", [[1, 2]], [[1, 2]]) / "results.json")
    (sandbox / "curves").symlink_to("../beside")
    with pytest.raises(ValueError, match="^output: .* leads to .*/beside/.* by a link"):
        write_curves(entries, sandbox)


def test_a_checkpoint_that_is_a_link_is_removed_alone(tmp_path):
    other, link = tmp_path / "other", tmp_path / "step_000000001"
    other.mkdir()
    (other / checkpoint.STATE).write_text("precious")
    link.symlink_to(other)
    checkpoint.remove(link)
    assert not link.is_symlink()
    assert (other / checkpoint.STATE).read_text() == "precious"


def test_nothing_is_swept_behind_a_link(tmp_path):
    other, folder = tmp_path / "other", tmp_path / "run" / checkpoint.FOLDER
    name = f".step_000000001.pt.{32 * 'a'}.tmp"
    for place in (other, folder / "own"):
        place.mkdir(parents=True)
        (place / name).write_text("unfinished")
    (folder / "link").symlink_to(other)
    checkpoint.sweep(tmp_path / "run")
    assert (other / name).exists()
    assert not (folder / "own" / name).exists()
