import io

import numpy as np
from rich.console import Console
from trials import NOT_RUN, make_entry, make_trials

from agentic import results
from agentic.table import print_table

CORNERS = [f"jaco_reach_{y}_{x}" for y in ("top", "bottom") for x in ("left", "right")]


def _print(entries, width=80):
    text = io.StringIO()
    print_table(entries, results.summarise(entries), Console(file=text, width=width, markup=False))
    return text.getvalue()


def _row(text, label):
    """The cells of the (only) row of that label."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {label} ")]
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def _entry(task="walker_walk", seed=0, kept=((1, 300), (3, 500)), **changes):
    about = {"train_seed": seed, "checkpoint": f"runs/{seed}"}
    return make_entry(
        np.array(kept), np.array([[1, 100], [1, 200]]), task=task, about=about, **changes
    )


def test_every_number_stands_in_its_row():
    entry = _entry()
    text = _print([entry])
    assert _row(text, "first trial") == ["2.0 (1.0 to 3.0)"]
    assert _row(text, "last trial") == ["400.0 (300 to 500)"]
    assert _row(text, "mean of trials") == ["201.0 (150 to 252)"]
    assert _row(text, "gain per trial") == ["398.0 (299 to 497)"]
    assert _row(text, "reached the target") == ["2 of 2"]
    assert _row(text, "first trial, reset") == ["1.0 (1.0 to 1.0)"]
    assert _row(text, "last trial, reset") == ["150.0 (100 to 200)"]
    assert _row(text, "kept - reset, last") == ["250.0 (200 to 300)"]
    assert _row(text, "max of 2, kept") == ["400.0 (300 to 500)"]
    assert _row(text, "max of 2, reset") == ["150.0 (100 to 200)"]
    assert _row(text, "max of 2, dataset") == ["7.0"]
    assert _row(text, "random policy") == ["2.0"]
    assert _row(text, "dataset p90") == ["8.0"]
    assert _row(text, "last / dataset max") == ["4000%"]
    assert "walker_walk: trial by trial 2.0  400.0, target 10.0" in text
    assert "walker_walk, reset: trial by trial 1.0  150.0, target 10.0" in text
    assert "over training seeds: n/a (one seed)" in text
    assert "failed" not in text


def test_one_context_has_no_interval():
    assert _row(_print([make_entry([[1, 2]], [[1, 1]])]), "last trial") == ["2.0 (n/a)"]


def test_only_what_was_played_is_shown_and_says_what_it_is():
    reset = _print([make_entry(None, [[1, 2]])])
    assert _row(reset, "last trial, reset") == ["2.0 (n/a)"]
    assert _row(reset, "last / dataset max") == ["20%"]
    assert "reset: the context is emptied" in reset
    for label in ("last trial ", "kept", "gain"):
        assert f"│ {label}" not in reset
    kept = _print([make_entry([[1, 2]], None)])
    assert _row(kept, "last trial") == ["2.0 (n/a)"]
    assert "reset" not in kept


def test_trials_that_were_not_run_and_failed_ones_are_told():
    kept = make_trials([[1, 5, NOT_RUN], [3, NOT_RUN, NOT_RUN]], failed=[(0, 1)])
    text = _print([make_entry(kept, None)])
    assert "trial by trial 2.0  5.0 (1 of 2)  not run, target" in text
    assert "walker_walk: 1 of 3 trials failed" in text


def test_average_of_tasks():
    text = _print([_entry("walker_walk"), _entry("walker_run", kept=((1, 0), (3, 200)))])
    assert _row(text, "last trial") == ["400.0 (300 to 500)", "100.0 (0 to 200)", "250.0"]
    assert _row(text, "random policy")[-1] == "2.0"


def test_tables_stay_within_the_terminal_and_names_are_whole():
    entries = [_entry(task) for task in CORNERS]
    text = _print(entries)
    framed = [line for line in text.splitlines() if line[:1] in "┏┃┡│├└"]
    assert max(map(len, framed)) <= 80
    assert "…" not in text
    assert text.count("│ last trial ") == 2
    assert text.count("average") == 1
    assert _print(entries, width=200).count("│ last trial ") == 1


def test_a_table_per_checkpoint_and_target():
    text = _print([_entry(), _entry(asked="0.9x"), _entry(seed=1)])
    for heading in ("runs/0, target 1x", "runs/0, target 0.9x", "runs/1, target 1x"):
        assert text.count(heading) == 1
    assert text.count("│ first trial ") == 3


def test_over_seeds():
    entries = [_entry(seed=s, kept=((1, 300), (3, 500 + 100 * s))) for s in range(3)]
    text = _print(entries)
    (row,) = results.summarise(entries)
    raw = row["statistics"]["raw"]["walker_walk"]
    for label, told in (("  last", raw["kept"]["last"]), ("  max, reset", raw["reset"]["max"])):
        (mean, iqm) = (
            "{:.1f} ({:.0f} to {:.0f})".format(told[k]["value"], *told[k]["interval_over_seeds"])
            for k in ("mean", "iqm")
        )
        line, _ = (line for line in text.splitlines() if line.startswith(f"│ {label} "))
        assert [cell.strip() for cell in line.strip("│").split("│")[2:]] == [mean, iqm]
    assert raw["kept"]["last"]["mean"]["value"] == 450.0
    assert "interquartile mean" in text
    assert "over seeds" in text
    assert "n/a" not in text


def test_a_seed_twice_is_not_a_second_seed():
    text = _print([_entry(), _entry() | {"checkpoint": "runs/0/earlier"}])
    assert "over training seeds n/a" in text
    assert "interquartile" not in text
