"""Which checkpoints stay, and which one a run goes on from when some are damaged."""

import pytest
import torch
from conftest import make_model
from training import make_trainer, plain_state, run_trainer, save_checkpoint

from agentic import checkpoint
from agentic.judge import case_of
from agentic.protocol import RolloutConfig
from agentic.recovery import newest_sound
from agentic.seal import Damaged


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path):
    path.write_bytes(b"")


def _saved(run_dir, *steps):
    """Checkpoints of an untrained model."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    state = plain_state(make_model())
    for step in steps:
        checkpoint.save(checkpoint.step_path(run_dir, step), state | {"step": step})
    return [checkpoint.step_path(run_dir, step) for step in steps]


def _names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("harm", [_flip, _cut, _empty])
def test_a_run_goes_on_from_the_one_before_a_damaged_one(harm, tmp_path, capsys):
    straight = make_trainer(tmp_path)
    run_trainer(straight)
    harm(checkpoint.step_path(tmp_path, 12))
    capsys.readouterr()
    resumed = make_trainer(tmp_path)
    assert resumed.resume() == checkpoint.step_path(tmp_path, 10)
    (told,) = capsys.readouterr().out.splitlines()
    assert f"{checkpoint.step_path(tmp_path, 12)} is damaged" in told
    assert told.endswith(", now step_000000012.pt.damaged; going on from step_000000010.pt")
    assert resumed.step == 10
    run_trainer(resumed)
    for name, value in straight.state()["averaged"].items():
        assert torch.equal(resumed.state()["averaged"][name], value)
    assert _names(tmp_path) == [
        "step_000000010.pt",
        "step_000000012.pt",
        "step_000000012.pt.damaged",
    ]


def test_a_damaged_one_never_pushes_out_a_good_one(tmp_path):
    trainer = make_trainer(tmp_path, keep_checkpoints=1)
    trainer.update()
    good, bad = _saved(tmp_path, 1, 300)
    checkpoint.save(good, trainer.state())
    _flip(bad)
    resumed = make_trainer(tmp_path, keep_checkpoints=1)
    assert resumed.resume() == good
    resumed.update()
    resumed.save()
    assert _names(tmp_path) == ["step_000000002.pt", "step_000000300.pt.damaged"]
    assert newest_sound(tmp_path, print) == checkpoint.step_path(tmp_path, 2)


def test_several_damaged_ones_are_told_in_one_line_and_keep_their_bytes(tmp_path):
    files = _saved(tmp_path, 100, 200, 300)
    for path in files[1:]:
        _flip(path)
    before = [path.read_bytes() for path in files]
    taken = files[2].with_name("step_000000300.pt.damaged")
    taken.touch()  # as another time's
    told = []
    assert newest_sound(tmp_path, told.append) == files[0]
    assert len(told) == 1
    assert "step_000000300.pt is damaged: its checksum is another" in told[0]
    assert "step_000000200.pt is damaged: its checksum is another" in told[0]
    assert checkpoint.step_files(tmp_path) == files[:1]
    names = ["step_000000200.pt.damaged", "step_000000300.pt.damaged2"]
    aside = [files[0].with_name(name).read_bytes() for name in names]
    assert [files[0].read_bytes(), *aside] == before
    assert not taken.read_bytes()
    assert newest_sound(tmp_path, told.append) == files[0]
    assert len(told) == 1


def test_where_all_are_damaged_all_are_named_and_stay(tmp_path):
    files = _saved(tmp_path, 100, 200)
    for path in files:
        _cut(path)
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="has no sound checkpoint") as caught:
        trainer.resume()
    assert all(str(path) in str(caught.value) for path in files)
    assert "\n" not in str(caught.value)
    assert checkpoint.step_files(tmp_path) == files
    with pytest.raises(ValueError, match=r"expected a run with checkpoints/step_\*.pt"):
        newest_sound(tmp_path / "none", print)


def test_one_of_another_software_or_run_is_an_error_and_not_damage(tmp_path):
    good, other = _saved(tmp_path, 100, 200)
    state = plain_state(make_model())
    other.write_bytes(checkpoint.packed(state | {"format": checkpoint.FORMAT, "version": 9}))
    with pytest.raises(ValueError, match="200.pt has version 9, which is of a newer version"):
        newest_sound(tmp_path, print)
    torch.save({"weights": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="200.pt is not a checkpoint of this software"):
        newest_sound(tmp_path, print)
    _saved(tmp_path, 200)  # a whole one, of a model with more trajectories
    with pytest.raises(ValueError, match="200.pt: parameters of another size: model."):
        make_trainer(tmp_path, method="bc").resume()
    assert checkpoint.step_files(tmp_path) == [good, other]


def test_a_damaged_best_one_is_named_with_another_to_give(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    best = save_checkpoint(folder / checkpoint.BEST)
    step = save_checkpoint(checkpoint.step_path(tmp_path, 300))
    config = RolloutConfig(contexts=1, trials=1, target=1.0)
    assert case_of(checkpoint.find(tmp_path), None, config, 0, "cpu").path == best
    _flip(best)
    assert checkpoint.find(tmp_path) == best  # what a run directory means does not change
    with pytest.raises(Damaged, match=f"{best} is damaged.*the newest other one is {step}"):
        case_of(checkpoint.find(tmp_path), None, config, 0, "cpu")
    step.unlink()
    with pytest.raises(Damaged, match=f"{best} is damaged: its checksum is another$"):
        case_of(checkpoint.find(tmp_path), None, config, 0, "cpu")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_and_the_best_are_kept(keep, tmp_path):
    trainer = make_trainer(tmp_path, keep_checkpoints=keep)
    best = tmp_path / "checkpoints" / checkpoint.BEST
    checkpoint.save(best, trainer.state())
    for step in (2, 11, 105, 1000):
        trainer.step = step
        trainer.save()
        kept = [path.name for path in checkpoint.step_files(tmp_path)]
        there = [f"step_{k:09d}.pt" for k in (2, 11, 105, 1000) if k <= step]
        assert kept == there[-keep:]
        assert best.is_file()
    assert checkpoint.load(best)["step"] == 0


def test_killed_before_the_older_one_goes_there_are_two_and_then_one(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, keep_checkpoints=1)
    trainer.update()
    trainer.save()
    trainer.update()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove", _killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    assert _names(tmp_path) == ["step_000000001.pt", "step_000000002.pt"]
    resumed = make_trainer(tmp_path, keep_checkpoints=1)
    assert resumed.resume() == checkpoint.step_path(tmp_path, 2)
    resumed.update()
    resumed.save()
    assert _names(tmp_path) == ["step_000000003.pt"]
    assert checkpoint.load(checkpoint.newest(tmp_path))["step"] == 3


def test_killed_while_it_writes_the_older_one_stays(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, keep_checkpoints=1)
    trainer.update()
    trainer.save()
    trainer.update()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    assert [path.name for path in checkpoint.step_files(tmp_path)] == ["step_000000001.pt"]
    assert newest_sound(tmp_path, print) == checkpoint.step_path(tmp_path, 1)


def _killed(*_):
    raise KeyboardInterrupt
