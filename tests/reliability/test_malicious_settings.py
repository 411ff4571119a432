"""Settings made to harm, on the command line and in files: refused by name, and nothing is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from training import make_config, make_model

from agentic.foreign_config import guard
from agentic.interpolation import check_calls, plain
from agentic.runs import config_text, read_config
from agentic.texts import parse_json, read_json, read_yaml

ROOT = Path(__file__).parents[2]
TOUCH = {
    "_target_": "pathlib.Path.touch",
    "self": {"_target_": "pathlib.Path", "_args_": ["PWNED"]},
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experimental-rerun=x.pickle"], "--experimental-rerun: got x.pickle"),
        (["--exp", "x.pickle"], "--experimental-rerun: got x.pickle"),
        (["--config-path=/x"], "--config-path: got /x"),
        (["-cn", "x"], "--config-name: got x"),
        (["+hydra.callbacks.x._target_=os.system"], "hydra.callbacks.x._target_: is hydra's own"),
        (["hydra.job_logging.x=1"], "hydra.job_logging.x: is hydra's own"),
        (["hydra.job.env_set.A=1"], "hydra.job.env_set.A: is hydra's own"),
        (["hydra.searchpath=[file:///x]"], "hydra.searchpath: is hydra's own"),
        (["++hydra={}"], "hydra: is hydra's own"),
        (["hydra/sweeper=x"], "hydra/sweeper: is hydra's own"),
        (["+task@hydra.callbacks.x=walker_walk"], "task: is hydra's own"),
        (["+hydra/launcher@task=basic"], "hydra/launcher: is hydra's own"),
        (["hydra.run.dir=${oc.env:HOME}"], "hydra.run.dir: got .*oc.env:HOME"),
        (["data_dir=${oc.env:HOME}"], "data_dir: got .*oc.env:HOME"),
        (["+x=[{a: '${oc.decode:${oc.env:X}}'}]"], "x: got "),
        (["data_dir=${hydra:runtime.cwd}"], "data_dir: got "),
        (["data_dir=${now:%Y}"], "data_dir: got "),
        (["data_dir=${${x}:HOME}"], "settings: got 'data_dir=.*HOME"),
        (["steps"], "settings: got 'steps', expected name=value"),
        (["steps=["], "settings: got 'steps=\\[', expected name=value"),
        (["x=" + "[" * 5000], "settings: got 'x=\\["),
        (["-m", "seed=range(0,1000000000)"], "seed=range.*: got a sweep of too many jobs"),
        (["-m", "seed=shuffle(range(0,1000000000))"], "too many jobs"),
        (["-m", "seed=range(0,1,1e-300)"], "too many jobs"),
        (["-m", *[f"x{k}=0,1,2,3,4,5,6,7,8,9" for k in range(5)]], "too many jobs"),
    ],
)
def test_a_command_line_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        guard(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["steps=3", "chain.trajectories=${trajectories}", "algorithms=[rnd:first_1M]"],
        ["-m", "seed=0,1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=600"],
        ["-m", "seed=range(0,10)", "hydra.sweep.dir=runs/${now:%Y}", "hydra.sweep.subdir=a"],
        ["--cfg", "job", "--config-dir", "x", "+mine=a"],
        ["hydra.run.dir=.", "hydra.output_subdir=null"],
    ],
)
def test_what_is_needed_is_left_alone(arguments):
    guard(arguments)


def test_what_the_commands_run_by_is_sound():
    with initialize_config_module("configs", version_base="1.3"):
        for name in ("train", "evaluate", "collect", "data", "reproduce"):
            arguments = ["checkpoint=x"] if name == "evaluate" else []
            values = plain(compose(name, arguments))
        train = plain(compose("train", ["trajectories=7"]))
    assert train["chain"]["trajectories"] == 7
    assert "hydra" not in values


def composed(**values):
    return OmegaConf.create(values)


def test_names_of_other_settings_are_taken():
    values = plain(composed(a=3, b="${a}", c={"d": "x${b}y", "e": ["${.0}", "${..d}"][1:]}))
    assert values == {"a": 3, "b": 3, "c": {"d": "x3y", "e": ["x3y"]}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": "${oc.env:HOME}"}, "a: got '\\${oc.env:HOME}'"),
        ({"a": {"b": ["${oc.env:HOME,x}"]}}, "a.b.0: got"),
        ({"a": "${nowhere}"}, "a: Interpolation key 'nowhere' not found"),
        ({"a": "${b}", "b": "${a}"}, "refers to itself"),
        ({"a": "${a}"}, "a: refers to itself"),
        ({"a": {"b": "${a}"}}, "refers to itself"),
        ({"a": "${b.${c}}", "b": {"x": 1}, "c": "x"}, "a: got"),
    ],
)
def test_settings_that_look_elsewhere_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        plain(composed(**values))


def test_names_of_names_do_not_multiply():
    texts = {f"x{k}": f"${{x{k - 1}}}" * 10 for k in range(1, 40)}
    with pytest.raises(ValueError, match="longer than 1,000,000 characters"):
        plain(composed(x0="a" * 10, **texts))
    parts = {f"x{k}": [f"${{x{k - 1}}}"] * 10 for k in range(1, 40)}
    with pytest.raises(ValueError, match="longer than 1,000,000 characters"):
        plain(composed(x0=[1], **parts))


def test_a_function_that_is_allowed_allows_no_other():
    check_calls("a", "${now:%Y}-${b}", allowed=("now",))
    for text in ("${now:%Y}${oc.env:X}", "${now:${oc.env:X}}"):
        with pytest.raises(ValueError, match="a: got"):
            check_calls("a", text, allowed=("now",))


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}, *a{k - 1}, *a{k - 1}]\n" for k in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "it has an alias in line 2"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "alias in line 3"),
        ("!!python/object/apply:os.system ['touch PWNED']", "could not determine a constructor"),
        ("!!python/name:os.system ''", "could not determine a constructor"),
        ("[" * 100_000, "nested too deeply"),
        ("x" * (2**20 + 1), "longer than 1,048,576 bytes"),
        ("!!timestamp x", "AttributeError"),
        ("!!bool x", "KeyError"),
        ("a: " + "9" * 5000, "ValueError"),
        ("\0", "special characters are not allowed"),
    ],
)
def test_yaml_is_plain_or_refused(tmp_path, text, words):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_yaml(tmp_path / "x.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "[" * 100_000, "{", "9" * 5000, "\ud800"])
def test_json_is_plain_or_refused(tmp_path, text):
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match="."):
        read_json(tmp_path / "x.json")
    assert parse_json("NaN", finite=False) != 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_dir": "${oc.env:HOME}"}, "data_dir: got '\\${oc.env:HOME}', expected a value"),
        ({"steps": "${seed}"}, "steps: got"),
        ({"steps": 1e18}, "steps: got 1e\\+18, expected int"),
        ({"hydra": {"callbacks": TOUCH}}, "hydra: unknown setting"),
    ],
)
def test_a_runs_own_settings_are_plain(tmp_path, change, words):
    values = yaml.safe_load(config_text(make_config(make_model()))) | change
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=f"resume: {tmp_path}/config.yaml .*{words}"):
        read_config(tmp_path)


FILES = {
    "callbacks": ("mine/x.yaml", f"# @package _global_\nhydra: {{callbacks: {{x: {TOUCH}}}}}"),
    "package": ("mine/x.yaml", f"# @package hydra.callbacks.x\n{yaml.safe_dump(TOUCH)}"),
    "defaults": ("mine/x.yaml", "defaults:\n- override /hydra/launcher: basic\nsteps: 1"),
    "moved": ("mine/x.yaml", "defaults:\n- y@_global_.hydra.callbacks.x: z\nsteps: 1"),
    "choice": ("mine/x.yaml", "defaults:\n- /task: ${oc.env:HOME}\n"),
    "logging": ("mine/x.yaml", "# @package hydra.job_logging\nhandlers: {x: {(): os.getpid}}"),
    "bomb": ("mine/x.yaml", BOMB),
    "tag": ("mine/x.yaml", "steps: !!python/object/apply:os.getpid []"),
    "hydra": ("hydra/launcher/x.yaml", "_target_: x"),
    "environment": ("mine/x.yaml", "# @package _global_\ndata_dir: ${oc.env:HOME}"),
}
CHOSEN = {"hydra": ["hydra/launcher=x"]}


IN_PROCESS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from agentic import entry
for arguments in json.loads(sys.argv[2]):
    sys.argv = ["agentic-train", *arguments]
    try:
        entry.run("agentic-train", "train", lambda values: print("has run", file=sys.stderr))
    except SystemExit as ended:
        print("exit", ended.code, file=sys.stderr)
"""


def runs(folder, *commands):
    """What each command line says, one after the other in one process."""
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(ROOT), json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.stderr.splitlines()


def test_a_folder_of_settings_says_values_alone(tmp_path):
    commands = []
    for name, (place, text) in FILES.items():
        file = tmp_path / name / place
        file.parent.mkdir(parents=True)
        file.write_text(text)
        chosen = CHOSEN.get(name, ["+mine=x"])
        commands.append([f"--config-dir={tmp_path / name}", *chosen])
    (tmp_path / "sound" / "mine").mkdir(parents=True)
    (tmp_path / "sound" / "mine" / "x.yaml").write_text(
        "# @package _global_\ndefaults:\n- override /model: small\nsteps: 7\nchains: ${steps}\n"
    )
    commands.append([f"--config-dir={tmp_path / 'sound'}", "+mine=x"])
    commands.append([f"--config-dir={tmp_path / 'sound'}", "task=../../bomb/mine/x"])
    told = runs(tmp_path, *commands)
    errors = [line for line in told if line.startswith("agentic-train: error: ")]
    assert [line for line in told if line not in errors and not line.startswith("exit 2")] == [
        "has run"
    ]
    for name, line in zip(FILES, errors, strict=False):
        place = "data_dir: got" if name == "environment" else f"--config-dir: {tmp_path / name}"
        assert place in line, name
    assert len(errors) == len(FILES) + 1
    assert not list(tmp_path.rglob("PWNED"))
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "sound"}


def test_hydras_words_become_ours(tmp_path):
    expected = {
        "stepz=3": "stepz: unknown setting, expected one that --cfg job shows",
        "optimizer.lr=1": "optimizer.lr: unknown setting, expected one that --cfg job shows",
        "model=huge": "model: got 'huge', expected one of ['small']",
        "task=wolker": "task: got 'wolker', expected one of walker_stand",
        "~nothing": "nothing: unknown setting, cannot be taken out",
        "+steps=3": "steps: is there already, expected steps=value",
        "steps=1,2": "steps: got '1,2', expected one value, a list [a,b] or, with -m, one job",
        "steps=range(1,3)": "steps: got 'range(1,3)', expected one value, a list",
        "steps==3": "settings: got 'steps==3', expected name=value",
        "data_dir=${nope}": "data_dir: Interpolation key 'nope' not found",
    }
    told = [line for line in runs(tmp_path, *[[text] for text in expected]) if "error" in line]
    for line, words in zip(told, expected.values(), strict=True):
        assert line.startswith(f"agentic-train: error: {words}")
