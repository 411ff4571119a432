import pickle

import pytest
import torch
from conftest import make_model
from training import plain_state

from agentic import checkpoint


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_round_trip_with_the_default_safe_load(tmp_path):
    model = make_model(seed=1)
    path = tmp_path / "a.pt"
    checkpoint.save(path, plain_state(model))
    assert torch.load(path)["version"] == checkpoint.VERSION  # weights_only is torch's default
    again = checkpoint.restore_model(checkpoint.load(path), torch.device("cpu"))
    assert not again.training
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_unreadable_files_are_named_and_never_unpickled(tmp_path, capsys):
    whole = tmp_path / "whole.pt"
    checkpoint.save(whole, plain_state(make_model()))
    content = whole.read_bytes()
    evil = tmp_path / "evil.pt"
    evil.write_bytes(pickle.dumps({"format": checkpoint.FORMAT, "x": Evil()}))
    torch.save({"format": checkpoint.FORMAT, "version": 1, "x": Evil()}, tmp_path / "evil2.pt")
    for name, data in {"cut": content[: len(content) // 2], "empty": b"", "text": b"hi"}.items():
        (tmp_path / f"{name}.pt").write_bytes(data)
    for name in ("cut", "empty", "text", "evil", "evil2", "missing"):
        with pytest.raises(ValueError, match=f"{name}.pt") as caught:
            checkpoint.load(tmp_path / f"{name}.pt")
        assert "weights_only" not in str(caught.value)
    assert "unpickled" not in capsys.readouterr().out


def test_foreign_ones_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not a checkpoint of this software"):
        checkpoint.load(path)
    head = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION}
    path.write_bytes(checkpoint.packed(head | {"step": 1}))
    with pytest.raises(ValueError, match="a.pt lacks .*'spec'"):
        checkpoint.load(path)


def test_parameters_of_another_size(tmp_path):
    state = plain_state(make_model())
    state["averaged"] = make_model(width=32).state_dict()
    with pytest.raises(ValueError, match="parameters of another size"):
        checkpoint.restore_model(state, torch.device("cpu"))


def test_find_prefers_the_best_then_the_newest(tmp_path):
    with pytest.raises(ValueError, match=r"expected a checkpoint or a run directory"):
        checkpoint.find(tmp_path)
    with pytest.raises(ValueError, match="expected a run with"):
        checkpoint.newest(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for step in (5, 40, 300):
        checkpoint.step_path(tmp_path, step).touch()
    assert checkpoint.find(tmp_path) == checkpoint.step_path(tmp_path, 300)
    best = tmp_path / "checkpoints" / checkpoint.BEST
    best.touch()
    assert checkpoint.find(tmp_path) == best
    assert checkpoint.newest(tmp_path) == checkpoint.step_path(tmp_path, 300)
    assert checkpoint.find(tmp_path / "x.pt") == tmp_path / "x.pt"
