import copy

import pytest
from trials import make_entry

from agentic.entries import check, check_entries

ABOUT = {
    "train_trajectories": 4,
    "train_steps": 100,
    "train_settings": "a",
    "evaluation_seed": 1,
}
KEPT = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]


@pytest.fixture
def entry():
    return make_entry(KEPT, KEPT, about=ABOUT)


def test_what_an_evaluation_makes_is_taken(entry):
    stopped = make_entry([[1.0, float("nan"), float("nan")], KEPT[1]], None, about=ABOUT)
    check_entries([entry, stopped, make_entry(None, KEPT, about=ABOUT)])
    check_entries([entry | {"unknown": 1}])
    check_entries([])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["task"], 3, "results.0.task: got '3', expected str"),
        (["train_seed"], True, "train_seed: got 'True', expected int"),
        (["train_seed"], 10**40, "train_seed: got '10000.*expected int up to 1e"),
        (["target", "return"], float("inf"), "target.return: got 'inf'"),
        (["target"], [], "target: got '..', expected a mapping"),
        (["contexts"], 3, "kept.returns: expected 3 lists of 3 returns"),
        (["trials"], 2, "kept.returns: expected 2 lists of 2"),
        (["contexts"], 0, "got .0, 3. contexts and trials, expected 1 or more"),
        (["kept", "returns", 1], [1.0, None, 3.0], "left out before the last"),
        (["kept", "returns", 0], [None, None, None], "left out before the last"),
        (["kept", "last", "mean"], "1", "kept.last.mean: got '1', expected float"),
        (["kept", "by_trial"], {}, "kept.by_trial: got '{}', expected a list"),
        (["dataset"], {"max": 1.0}, "dataset.median: missing"),
        (["max_beside", "dataset"], [1.0], "max_beside.dataset: got"),
    ],
)
def test_another_form_is_named(entry, path, value, words):
    changed = copy.deepcopy(entry)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=words):
        check_entries([changed])


def test_an_entry_has_one_of_the_contexts(entry):
    with pytest.raises(ValueError, match="results.1: has neither kept nor reset"):
        check_entries([entry, entry | {"kept": None, "reset": None}])


def test_a_long_value_is_shown_in_part():
    with pytest.raises(ValueError, match="^a: got 'x{100}', expected int") as caught:
        check("a", "x" * 10_000, int)
    assert len(str(caught.value)) < 200
