import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from agentic.jobs import ReproduceConfig, Section, check_settings, data_jobs, train_jobs
from agentic.launch import command_line
from agentic.runs import config_text, settings
from agentic.strict import build


@pytest.fixture(autouse=True)
def _hydra():
    with initialize_config_module("configs", version_base="1.3"):
        yield


def make_config(tmp_path, **changes):
    config = ReproduceConfig(
        section="main",
        tasks=("cartpole_swingup", "jaco_reach"),
        rows={"DT": ("method=dt",), "AT-4": ("trajectories=4",)},
        seeds=(0, 7),
        overrides=("steps=5",),
        only=None,
        collect=(),
        extra=(),
        data_dir=str(tmp_path / "data"),
        output=str(tmp_path / "out"),
        jobs=2,
        threads=1,
        plan=False,
        report=False,
    )
    return replace(config, **changes)


def test_all_rows_of_the_first_seed_on_all_tasks_come_first(tmp_path):
    extra = (Section(section="more", tasks=("walker_walk",), rows={"AT-8": ("trajectories=8",)}),)
    names = [job.name for job in train_jobs(make_config(tmp_path, extra=extra))]
    first = [
        "main/cartpole_swingup/DT",
        "main/cartpole_swingup/AT-4",
        "main/jaco_reach/DT",
        "main/jaco_reach/AT-4",
        "more/walker_walk/AT-8",
    ]
    assert names == [f"{name}/seed{seed}" for seed in (0, 7) for name in first]


def test_a_job_is_told_what_holds_for_all_then_for_its_section_and_its_row(tmp_path):
    extra = (Section(section="rnd", tasks=("walker_walk",), overrides=("algorithms=[rnd]",)),)
    job = train_jobs(make_config(tmp_path, extra=extra))[-1]
    assert job.settings == (
        "task=walker_walk",
        "seed=7",
        f"data_dir={tmp_path}/data",
        f"run_dir={tmp_path}/out/runs/rnd/walker_walk/AT-4/seed7",
        "steps=5",
        "algorithms=[rnd]",
        "trajectories=4",
    )
    assert job.module == "agentic.train"
    assert job.log == tmp_path / "out/runs/rnd/walker_walk/AT-4/seed7.log"
    assert not job.finished()
    job.result.parent.mkdir(parents=True)
    job.result.touch()
    assert job.finished()


def test_data_are_collected_once_a_domain_and_recipe(tmp_path, cartpole_data):
    walkers = ("walker_walk", "walker_run", "cartpole_swingup")
    extra = (
        Section(section="rnd", tasks=walkers[:2], collect=("recipe=rnd", "seconds=5")),
        Section(section="again", tasks=walkers),
    )
    config = make_config(tmp_path, tasks=walkers, extra=extra)
    jobs = data_jobs(config)
    assert [job.name for job in jobs] == [
        "data/walker-td3",
        "data/cartpole-td3",
        "data/walker-rnd",
    ]
    assert jobs[2].settings == (
        "task=walker_walk",
        f"data_dir={tmp_path}/data",
        "recipe=rnd",
        "seconds=5",
    )
    assert {job.module for job in jobs} == {"agentic.collect"}
    assert [job.finished() for job in jobs] == [False, True, False]  # cartpole's are there
    needs = {job.name.rsplit("/", 1)[0]: job.needs for job in train_jobs(config)}
    assert needs["main/walker_run/DT"] == "data/walker-td3"
    assert needs["rnd/walker_run/DT"] == "data/walker-rnd"
    assert needs["again/cartpole_swingup/AT-4"] == "data/cartpole-td3"


def test_only_some_rows(tmp_path):
    extra = (Section(section="more", tasks=("walker_walk",), rows={"AT-8": ()}),)
    config = make_config(tmp_path, extra=extra, only=("AT-4",))
    assert {job.name.split("/")[2] for job in train_jobs(config)} == {"AT-4"}
    assert [job.name for job in data_jobs(config)] == ["data/cartpole-td3", "data/jaco-babble"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": (1, 1)}, "seeds"),
        ({"seeds": ()}, "seeds"),
        ({"jobs": 0}, "jobs: got 0"),
        ({"only": ("BC",)}, "only: got 'BC'"),
        ({"tasks": ("walker_fly",)}, "task: got 'walker_fly'"),
        ({"rows": {"a/b": ()}}, "rows: got 'a/b'"),
        ({"rows": {"../x": ()}}, "rows: got '../x'"),
        ({"section": ".."}, "section: got '..'"),
        ({"only": ()}, r"only: got \[\]"),
        ({"rows": {}}, "tasks: got no row on any task"),
        ({"tasks": ()}, "tasks: got no row on any task"),
        ({"tasks": ("walker_run", "walker_run")}, "tasks: got walker_run twice"),
        (
            {"extra": (Section(section="main", tasks=("jaco_reach",), rows={"DT": ()}),)},
            "main/jaco_reach/DT is there twice",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        make_config(tmp_path, **changes)


def test_the_defaults_are_the_papers_table():
    values = OmegaConf.to_container(compose("reproduce"), resolve=True)
    config = build(ReproduceConfig, values)
    jobs = train_jobs(config)
    main = [job for job in jobs if job.name.startswith("step/")]
    assert len(main) == 3 * (6 * 4 + 2 * 2)
    assert {job.name.split("/")[2] for job in main} == {
        *("BC-10%", "DT", "AT-4", "AT-8", "AT-16", "AT-32")
    }
    assert len(jobs) == len(main) + 3 * (2 * 4 + 1)
    assert all("+experiment=small" in job.settings for job in jobs)


@pytest.mark.parametrize(
    "folder", ["plain", "größe", 'it\'s a "place" with=all, of {it}', "back\\slash\\'s"]
)
def test_a_command_reads_the_same_in_a_shell_and_in_hydra(tmp_path, folder):
    config = make_config(tmp_path, output=str(tmp_path / folder))
    job = train_jobs(config)[0]
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys; print(json.dumps([*sys.argv, os.environ['OMP_NUM_THREADS']]))"
    )
    line = command_line(job, 3, (sys.executable, str(program)))
    assert "\n" not in line
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    _, module, *settings, threads = json.loads(done.stdout)
    assert (module, tuple(settings), threads) == ("agentic.train", job.settings, "3")
    told = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(settings)}
    assert told["run_dir"] == str(job.result.parent)
    assert told["data_dir"] == config.data_dir


@pytest.mark.parametrize("word", ["null", "1", "true", "1e3", "a b", "x'", "x\\"])
def test_a_folder_is_always_a_string_to_hydra(tmp_path, word):
    config = make_config(tmp_path, data_dir=word)
    settings = train_jobs(config)[0].settings
    told = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(settings)}
    assert str(told["data_dir"]) == word
    assert told["data_dir"] is not None
    assert not isinstance(told["data_dir"], bool | int | float)


RND = {"section": "rnd", "tasks": ("walker_walk",), "collect": ("recipe=rnd",)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": ("stepz=5",)}, "main/cartpole_swingup/DT: stepz: unknown setting"),
        (
            {"rows": {"X": ("method=xt",)}},
            "rows: main/cartpole_swingup/X: method: got 'xt'",
        ),
        ({"rows": {"X": ("steps=0",)}}, "main/cartpole_swingup/X: steps: got 0"),
        ({"rows": {"X": ("method=dt", "trajectories=4")}}, "X: chain.trajectories: got 4"),
        ({"rows": {"X": ("run_dir=x",)}}, "rows: got 'run_dir=x' in main/cartpole_swingup/X"),
        ({"overrides": ("++seed=5",)}, r"rows: got '\+\+seed=5'"),
        ({"overrides": ("~run_dir",)}, r"rows: got '~run_dir'"),
        ({"overrides": ("hydra.mode=MULTIRUN",)}, "rows: .*: hydra.mode: is hydra's own"),
        ({"overrides": ("hydra.sweep.dir=/x",)}, "rows: .*: hydra.sweep.dir: is hydra's own"),
        ({"overrides": ("--multirun",)}, "rows: .*got '--multirun', expected name=value"),
        ({"overrides": ("precision=${oc.env:HOME}",)}, "rows: .*: precision: got .*oc.env"),
        ({"collect": ("data_dir=/x",)}, "collect: got 'data_dir=/x'"),
        ({"collect": ("hydra.run.dir=/x",)}, "collect: .*: hydra.run.dir: is hydra's own"),
        ({"extra": (Section(**RND),)}, r"algorithms: got \['td3'\] in rnd/walker_walk/DT"),
        (
            {"extra": (Section(**RND, overrides=("algorithms=[td3]",)),)},
            "expected 'rnd' among them",
        ),
    ],
)
def test_settings_that_jobs_would_refuse_are_refused_before_any(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        check_settings(make_config(tmp_path, **changes))


def test_finished_runs_of_other_settings_are_no_runs_of_this_row(tmp_path):
    config = make_config(tmp_path, rows={"DT": ("method=dt",)}, tasks=("cartpole_swingup",))
    job = train_jobs(config)[1]
    run_dir = job.result.parent
    run_dir.mkdir(parents=True)
    values = OmegaConf.to_container(compose("train", list(job.settings)), resolve=True)
    (run_dir / "config.yaml").write_text(config_text(settings(values, [])))
    other = replace(config, overrides=("steps=6",), data_dir=str(tmp_path / "moved"))
    check_settings(other)  # agentic-train refuses what is only begun
    job.result.touch()
    check_settings(replace(config, data_dir=str(tmp_path / "moved")))
    with pytest.raises(ValueError, match=r"output: .*DT/seed7 is finished, with other settings"):
        check_settings(other)


def test_settings_that_jobs_take_are_no_matter(tmp_path):
    sound = Section(**RND, overrides=("algorithms=[rnd:first_10%]",))
    check_settings(make_config(tmp_path, extra=(sound,), overrides=("+experiment=paper",)))
    values = OmegaConf.to_container(compose("reproduce"), resolve=True)
    check_settings(build(ReproduceConfig, values))


def test_data_that_are_there_are_not_collected_and_must_be_named(tmp_path):
    config = make_config(tmp_path, collect=None)
    assert data_jobs(config) == []
    assert {job.needs for job in train_jobs(config)} == {None}
    with pytest.raises(ValueError, match=r"algorithms: got null in main/cartpole_swingup/DT"):
        check_settings(config)
    check_settings(replace(config, overrides=("algorithms=[proto:even_10%]",)))
