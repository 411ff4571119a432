"""What older versions have written is read, and what newer ones have written is refused."""

import copy
import dataclasses

import pytest
import torch
import yaml
from conftest import make_model
from training import make_trainer, plain_state, run_trainer

from agentic import checkpoint, migrations, runs
from agentic.seal import Damaged


def _older_layout(state, path, *, first=False):
    """Writes a state as version 1 did; as the first of them, which knew less, if asked."""
    state = copy.deepcopy(state)
    config = state["config"]
    del state["skipped"], state["logged"], config["optimizer"]["skip_limit"]
    if first:
        for name in ("stream", "rolled", "spent", "updated"):
            del state[name]
        del state["data"]["returns"]
        for name in ("block_query", "block_key", "block_rows"):
            del config["layer"][name], state["spec"]["layer"][name]
        del config["data"], config["parallel"], config["context_steps"]
        del config["clocks"]["rollout_share"], state["spec"]["context_steps"]
        state["torch_rng"] = {"cpu": torch.get_rng_state()}
    torch.save(state | {"format": checkpoint.FORMAT, "version": 1}, path)


@pytest.mark.parametrize("first", [False, True])
def test_a_run_of_version_1_goes_on_to_the_last_bit(tmp_path, first):
    straight = make_trainer(tmp_path / "straight")
    run_trainer(straight)
    half = checkpoint.load(checkpoint.step_path(tmp_path / "straight", 10))
    older = make_trainer(tmp_path / "older")
    _older_layout(half, checkpoint.step_path(tmp_path / "older", 10), first=first)
    place = older.resume()
    assert (older.step, older.stream.position, older.rollouts.done) == (10, 20, 10 if first else 0)
    run_trainer(older)
    ends = [checkpoint.load(checkpoint.newest(run.run_dir)) for run in (straight, older)]
    for name, value in ends[0]["averaged"].items():
        assert torch.equal(ends[1]["averaged"][name], value)
    assert checkpoint.load(place)["version"] == migrations.VERSION
    assert torch.load(checkpoint.newest(tmp_path / "older"))["version"] == 2


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (3, "has version 3, which is of a newer version of this software, expected at most 2"),
        (0, "has version 0, expected 1 to 2"),
        (True, "has version True, expected 1 to 2"),
        (1.0, "has version 1.0, expected 1 to 2"),
        ("2", "has version '2', expected 1 to 2"),
        (None, "has version None, expected 1 to 2"),
    ],
)
def test_other_versions_are_refused_by_name(version, told, tmp_path):
    path = tmp_path / "step_000000300.pt"
    path.write_bytes(checkpoint.packed(plain_state(make_model()) | _head(version)))
    with pytest.raises(ValueError, match=f"checkpoint: {path} {told}") as caught:
        checkpoint.load(path)
    assert not isinstance(caught.value, Damaged)  # it is whole, and is never moved aside


def _head(version):
    return {"format": checkpoint.FORMAT, "version": version}


def test_version_2_without_its_checksum_is_damaged(tmp_path):
    state = plain_state(make_model()) | _head(2)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(Damaged, match="a.pt is damaged: it has no checksum"):
        checkpoint.load(tmp_path / "a.pt")
    torch.save(state | {"version": 1}, tmp_path / "a.pt")
    assert checkpoint.load(tmp_path / "a.pt")["step"] == 0


def _windows(settings, fraction, share, steps):
    """The settings with the older recipe of windows."""
    chain = settings["chain"] | {
        "window_fraction": fraction,
        "window_share": share,
        "window_steps": steps,
    }
    del chain["window_batch"]
    return settings | {"chain": chain}


@pytest.mark.parametrize(
    ("fraction", "share", "expected"), [(0.9, 0.5, 0.95), (0, 0.25, 0.25), (1.0, 0.5, 1.0)]
)
def test_the_older_recipe_of_windows_becomes_one_share(fraction, share, expected):
    now = plain_state(make_model())["config"]
    older = _windows(now, fraction, share, 1500)
    before = copy.deepcopy(older)
    settings, told = migrations.settings(older)
    assert older == before
    changes = {"window_share": expected, "window_steps": 1000, "window_batch": 1500}
    assert settings["chain"] == now["chain"] | changes
    words = f"chain.window_fraction={fraction} became chain.window_share={expected:g}"
    assert told == [words]
    assert migrations.settings(now) == (now, [])


@pytest.mark.parametrize("chain", [None, 3, [], {"window_fraction": "x"}])
def test_settings_that_are_nonsense_are_left_to_be_refused(chain):
    values, told = migrations.settings({"chain": chain})
    assert set(values) == {"chain"}
    assert not told
    assert migrations.settings(chain)[0] == chain or isinstance(chain, dict)


def test_an_older_run_is_resumed_and_says_what_became_of_its_settings(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    for _ in range(3):
        trainer.update()
    state = trainer.state()
    state["config"] = _windows(state["config"], 0.5, 0.5, 10)
    _older_layout(state, checkpoint.step_path(tmp_path, 3))
    text = yaml.safe_dump(yaml.safe_load(runs.config_text(trainer.config)))
    values = _windows(yaml.safe_load(text), 0.5, 0.5, 10)
    (tmp_path / runs.CONFIG_FILE).write_text(yaml.safe_dump(values))
    config = runs.read_config(tmp_path)
    chain = dataclasses.replace(trainer.config.chain, window_share=0.75)
    assert config.chain == chain
    resumed = make_trainer(tmp_path, chain=chain)
    assert resumed.resume() == checkpoint.step_path(tmp_path, 3)
    told = "step_000000003.pt is of an older version: chain.window_fraction=0.5 became chain"
    assert told in capsys.readouterr().out
    assert resumed.step == 3
