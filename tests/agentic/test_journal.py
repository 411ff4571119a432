import pytest
import torch

from agentic.journal import Journal, continues

SETTINGS = {"cases": [{"checkpoint": "abc", "targets": (1.0, "return:5")}]}


def _content(value):
    return {"returns": torch.full((2,), value), "memory": {"caches": [(torch.ones(3), None)]}}


def test_trials_come_back_in_order_and_bit_by_bit(tmp_path):
    part = Journal(tmp_path, SETTINGS).part("keep")
    assert list(part.kept()) == []
    for k in range(3):
        part.keep(k, _content(0.1 * k))
    again = list(Journal(tmp_path, SETTINGS).part("keep").kept())
    assert [float(t["returns"][0]) for t in again] == [
        float(torch.tensor(0.1 * k)) for k in range(3)
    ]
    assert torch.equal(again[0]["memory"]["caches"][0][0], torch.ones(3))
    assert list(Journal(tmp_path, SETTINGS).part("reset").kept()) == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_trials_behind_a_gap_do_not_count(tmp_path):
    part = Journal(tmp_path, SETTINGS).part("keep")
    for k in (0, 2):
        part.keep(k, _content(float(k)))
    assert len(list(part.kept())) == 1


def test_another_evaluation_is_refused_by_name_and_closing_leaves_nothing(tmp_path):
    assert not continues(tmp_path, SETTINGS)
    journal = Journal(tmp_path, SETTINGS)
    assert continues(tmp_path, SETTINGS)
    assert not continues(tmp_path, {"cases": []})
    with pytest.raises(ValueError, match=f"output: {tmp_path} holds an unfinished evaluation"):
        Journal(tmp_path, {"cases": []})
    journal.part("keep").keep(0, _content(1.0))
    journal.close()
    assert list(tmp_path.iterdir()) == []
    Journal(tmp_path, {"cases": []})


def test_killed_in_closing_nothing_is_left_that_another_evaluation_takes(tmp_path, monkeypatch):
    journal = Journal(tmp_path, SETTINGS)
    journal.part("keep").keep(0, _content(1.0))
    with monkeypatch.context() as patch:
        patch.setattr("agentic.journal.shutil.rmtree", lambda directory: None)
        journal.close()
    assert not continues(tmp_path, SETTINGS)
    assert list(Journal(tmp_path, {"cases": []}).part("keep").kept()) == []


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"nonsense", lambda b: b""]
)
def test_a_damaged_trial_is_named(tmp_path, damage):
    part = Journal(tmp_path, SETTINGS).part("keep")
    part.keep(0, _content(1.0))
    path = part.directory / "trial_000.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"output: {path} is damaged"):
        list(part.kept())


def test_a_damaged_note_is_no_unfinished_evaluation_of_ours(tmp_path):
    Journal(tmp_path, SETTINGS)
    (tmp_path / "unfinished" / "settings.json").write_text("{")
    assert not continues(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="other settings"):
        Journal(tmp_path, SETTINGS)
