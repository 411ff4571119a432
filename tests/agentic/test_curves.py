import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trials import NOT_RUN, make_entry

from agentic import curves

KEPT = [[1, 5, 3], [3, 1, 7]]
RESET = [[1, 4, 1], [2, 2, 3]]


def test_figure_shows_both_curves_with_intervals_and_the_levels_of_the_data():
    entry = make_entry(KEPT, RESET)
    (axis,) = curves.draw(entry, "walker_walk").axes
    kept, reset = axis.containers
    np.testing.assert_allclose(kept.lines[0].get_ydata(), [2, 3, 5])
    np.testing.assert_allclose(kept.lines[0].get_xdata(), [1, 2, 3])
    np.testing.assert_allclose(reset.lines[0].get_ydata(), [1.5, 3, 2])
    for container, context in ((kept, "kept"), (reset, "reset")):
        ends = [segment[:, 1] for segment in container.lines[2][0].get_segments()]
        told = [row["interval_over_contexts"] for row in entry[context]["by_trial"]]
        np.testing.assert_allclose(ends, told)
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert set(labels) == {
        "context kept",
        "context reset",
        "dataset max",
        "dataset p90",
        "random",
        "target",
    }
    levels = {
        line.get_label(): line.get_ydata()[0]
        for line in axis.lines
        if len(set(line.get_ydata())) == 1
    }
    assert {levels[name] for name in ("dataset max", "dataset p90", "random")} == {10.0, 8.0, 2.0}
    assert (levels["dataset max"], levels["random"]) == (10.0, 2.0)
    assert levels["target"] == entry["target"]["return"]


def test_trials_that_no_context_has_run_are_left_out():
    entry = make_entry([[1, 5, NOT_RUN], [3, NOT_RUN, NOT_RUN]], None)
    (axis,) = curves.draw(entry, "walker_walk").axes
    (kept,) = axis.containers
    np.testing.assert_allclose(kept.lines[0].get_ydata(), [2, 5])


def test_files(tmp_path):
    entries = [make_entry(KEPT, RESET), make_entry(None, RESET, task="walker_run")]
    paths = curves.write_curves(entries, tmp_path)
    assert paths == [tmp_path / "curves" / f"{n}.png" for n in ("walker_walk", "walker_run")]
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(list(tmp_path.glob("events.out.tfevents*"))) == 1
    board = EventAccumulator(str(tmp_path)).Reload()
    assert board.Tags()["images"] == ["evaluation/walker_walk", "evaluation/walker_run"]
    (image,) = board.Images("evaluation/walker_walk")
    assert (image.width, image.height) == (600, 400)

    def logged(tag):
        return [(event.step, event.value) for event in board.Scalars(f"evaluation/{tag}")]

    assert logged("walker_walk/kept/mean") == [(1, 2.0), (2, 3.0), (3, 5.0)]
    assert logged("walker_run/reset/mean") == [(1, 1.5), (2, 3.0), (3, 2.0)]
    for k, end in enumerate(("low", "high")):
        rows = entries[0]["kept"]["by_trial"]
        expected = [(i + 1, row["interval_over_contexts"][k]) for i, row in enumerate(rows)]
        assert logged(f"walker_walk/kept/{end}") == expected
    assert not any("walker_run/kept" in tag for tag in board.Tags()["scalars"])


def test_one_context_has_no_ends(tmp_path):
    curves.write_curves([make_entry([[1, 2]], None)], tmp_path)
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert tags == ["evaluation/walker_walk/kept/mean"]


def test_names_tell_entries_of_a_task_apart():
    entries = [
        make_entry(KEPT, None),
        make_entry(KEPT, None, asked="quantile:0.9"),
        make_entry(KEPT, None, about={"train_seed": 1}),
        make_entry(KEPT, None, task="walker_run"),
        make_entry(KEPT, None, task="walker_run", about={"checkpoint": "a copy"}),
        make_entry(KEPT, None, task="walker_stand"),
    ]
    assert curves.names(entries) == [
        "walker_walk_seed0_target1x",
        "walker_walk_seed0_targetquantile-0.9",
        "walker_walk_seed1_target1x",
        "walker_run_1",
        "walker_run_2",
        "walker_stand",
    ]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "curves").write_text("a file")
    with pytest.raises(ValueError, match="output: cannot write"):
        curves.write_curves([make_entry(KEPT, None)], tmp_path)
