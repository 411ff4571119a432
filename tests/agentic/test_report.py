"""What a report leaves: tables, figures, one page, results.json."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from reports import leave_run, leave_table
from rich.console import Console

from agentic import report_figures
from agentic.report import write_report
from agentic.report_numbers import numbers
from agentic.report_runs import find_runs
from agentic.report_tables import NONE, Sheet, markdown, print_sheet, sheets, spell

TASKS = ("walker_walk", "cheetah_run", "jaco_reach")
VOID = {"meta", "img"}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    place = tmp_path_factory.mktemp("reproduction")
    leave_table(place, tasks=TASKS, seeds=(0, 1))
    return place


@pytest.fixture(scope="module")
def said(output):
    text = io.StringIO()
    write_report(output, TASKS, Console(file=text, width=100, markup=False))
    return text.getvalue()


class Page(HTMLParser):
    """Tags must close in order; keeps all attributes and the text of every cell."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.cells, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_page_holds_everything_and_refers_to_nothing(output, said):
    text = (output / "report" / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    sources = [value for name, value in page.attributes if name in ("src", "href", "srcset")]
    images = [base64.b64decode(s.removeprefix("data:image/png;base64,")) for s in sources]
    files = sorted((output / "report").glob("*.png"))
    assert {file.name for file in files} == {
        "step_trajectories.png",
        "step_trials.png",
        "step_learning.png",
    }
    assert sorted(images) == sorted(file.read_bytes() for file in files)
    assert all(image[:8] == b"\x89PNG\r\n\x1a\n" for image in images)
    assert not re.search(r"https?:|url\(|@import|//", text.split("base64")[0])
    assert "width=device-width" in text
    assert "color-scheme: light dark" in text
    assert "AT-32 - DT" in page.cells
    assert "hierarchical bootstrap" in page.text


def test_the_same_cells_are_in_all_forms(output, said):
    cells = Page((output / "report" / "report.html").read_text()).cells
    lines = (output / "report" / "table.md").read_text().splitlines()
    rows = [
        [c.strip(" *") for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    flat = [c for row in rows for c in row if c and not re.fullmatch("-+:?", c)]
    assert flat == [cell for cell in cells if cell]
    for cell in flat:
        assert cell in said or " " in cell  # headings are wrapped
    for line in lines:
        if line.startswith("|"):
            assert line.count("|") >= 4


def test_missing_cells_are_dashes_with_the_number_of_seeds(output, said):
    lines = (output / "report" / "table.md").read_text().splitlines()
    begin = next(k for k, line in enumerate(lines) if line == "### step: returns")
    rows = [line.strip("| ").split(" | ") for line in lines[begin + 2 : begin + 30]]
    missing = [row for row in rows if row[0] == "AT-8" and row[1] == "0"]
    assert len(missing) == 2
    assert all(set(row[2:]) == {NONE} for row in missing)
    assert len([row for row in rows if row[0] == "AT-8" and row[1] == "2"]) == 1


def test_the_largest_of_n_is_never_a_headline(output, said):
    runs, _ = find_runs(output / "runs")
    shown = sheets("step", numbers(runs, TASKS)["step"])
    for sheet in shown:
        assert "max" not in sheet.title
        places = [k for k, name in enumerate(sheet.columns) if name == "max of n"]
        for k in places:
            assert sheet.columns[k + 1] == "max of n, independent"
            assert k + 2 == len(sheet.columns)  # after all others
            assert "no skill" in sheet.caption
    assert shown[0].columns[2] == "last trial"
    assert sum("max of n" in sheet.columns for sheet in shown) == 3
    # Nor are the two parted on a narrow console.
    for width in (60, 80, 200):
        text = io.StringIO()
        for sheet in shown:
            print_sheet(sheet, Console(file=text, width=width))
        lines = text.getvalue().splitlines()
        headings = [
            line for line in lines if re.search("max of n ┃ +(max of n, )?independent ┃", line)
        ]
        assert len(headings) == 3
        assert all(
            line[-1] in "┓┃┩│┤┘" for line in lines if line[:1] in tuple("┏┃┡│├└")
        )  # none is cut


def test_results_json_has_every_trial_and_no_place_of_the_machine(output, said):
    text = (output / "report" / "results.json").read_text()
    content = json.loads(text)
    assert str(output) not in text
    assert "/somewhere" not in text
    assert len(content["runs"]) == 2 * (4 * 3 + 1)
    run = next(r for r in content["runs"] if (r["task"], r["row"]) == ("jaco_reach", "AT-4"))
    assert run["place"] == "step/jaco_reach/AT-4/seed0"
    assert len(run["results"]) == 4
    kept = np.array(run["results"][1]["returns_kept"])
    original = json.loads((output / "runs" / run["place"] / "results.json").read_text())
    np.testing.assert_allclose(kept, original["results"][1]["kept"]["returns"], atol=5e-4)
    assert {"evaluation_seed", "train_settings", "seed", "updates", "tokens"} <= run.keys()
    assert content["machine"].keys() == {"cpu", "cores", "memory_bytes", "gpu"}
    assert content["machine"]["cores"] >= 1
    assert content["evaluated_by"][0]["versions"]["numpy"] == np.__version__
    assert "hierarchical" in content["intervals"]["interval_over_seeds_and_contexts"]
    assert content["sections"]["step"]["rows"][0] == "BC-10%"
    # A line a context.
    assert re.search(r"\n +\[ \d+\.\d+, \d+\.\d+, \d+\.\d+ \],?\n", text)


def test_trials_that_were_not_run_are_null(tmp_path):
    leave_run(tmp_path, "AT-4", [[9, float("nan")], [1, 2]], [[1, 2], [1, 2]])
    write_report(tmp_path, TASKS, Console(file=io.StringIO()))
    content = json.loads((tmp_path / "report" / "results.json").read_text())
    assert content["runs"][0]["results"][0]["returns_kept"] == [[9.0, None], [1.0, 2.0]]


def test_names_are_escaped_and_remarks_are_shown(tmp_path):
    leave_run(tmp_path, "A<b>", [[2, 6]], [[2, 4]])
    leave_run(tmp_path, "A<b>", [[2, 6]], [[2, 4]], seed=1, train_settings="other")
    text = io.StringIO()
    write_report(tmp_path, TASKS, Console(file=text, width=200, markup=False))
    page = Page((tmp_path / "report" / "report.html").read_text())
    assert "b" not in page.tags
    assert "A<b>" in page.cells
    remark = "left out: step/walker_walk/A<b>/seed1, whose settings are not those of other seeds"
    for told in (text.getvalue(), page.text, (tmp_path / "report" / "table.md").read_text()):
        assert remark in told


def test_nothing_finished_is_said_so(tmp_path):
    with pytest.raises(ValueError, match="output: no finished runs below"):
        write_report(tmp_path, TASKS, Console(file=io.StringIO()))


def test_spelling():
    assert spell(None) == NONE
    assert spell({"mean": 1.26, "interval_over_seeds": None}) == f"1.3 ({NONE})"
    assert spell({"mean": 1.26, "interval_over_seeds": [-0.04, 2.5]}, 2) == "1.26 (-0.04 to 2.50)"
    assert spell({"mean": 126, "interval_over_seeds": [99.6, 150.2]}) == "126.0 (100 to 150)"


def test_markdown():
    sheet = Sheet(
        title="t",
        columns=("row", "n"),
        blocks=[("a", [("x", "1")]), ("", [("y", "2")])],
        caption="c",
    )
    assert markdown(sheet).splitlines() == [
        *("### t", "", "| row | n |", "| --- | ---: |"),
        *("| **a** |  |", "| x | 1 |", "| y | 2 |", "", "c"),
    ]


def test_figures_show_the_numbers(output):
    runs, _ = find_runs(output / "runs")
    found = numbers(runs, TASKS)["step"]
    (axis,) = report_figures.by_trajectories("step", found).axes
    lines = {line.get_label(): line for line in axis.lines}
    told = {
        c["trajectories"]: c["last"]["normalised"]["mean"]
        for c in found["cells"]
        if c["task"] == "walker_walk" and c["method"] == "at"
    }
    np.testing.assert_allclose(lines["walker_walk"].get_xdata(), [4, 8, 32])
    np.testing.assert_allclose(lines["walker_walk"].get_ydata(), [told[n] for n in (4, 8, 32)])
    (mean,) = axis.containers
    average = found["averages"][0]["rows"]
    expected = [average[row]["last"]["mean"] for row in ("AT-4", "AT-32")]
    np.testing.assert_allclose(mean.lines[0].get_ydata(), expected)
    for row in ("DT", "BC-10%"):
        level = average[row]["last"]["mean"]
        np.testing.assert_allclose(lines[f"{row}, mean"].get_ydata(), level)


def test_trials_are_drawn_with_their_intervals(output):
    runs, _ = find_runs(output / "runs")
    found = numbers(runs, TASKS)["step"]
    axes = report_figures.by_trial("step", found, runs).axes
    assert [axis.get_title() for axis in axes] == [f"step: {task}" for task in TASKS]
    drawn = {c.get_label(): c for c in axes[2].containers}
    assert set(drawn) == {f"AT-{n}, {context}" for n in (4, 32) for context in ("kept", "reset")}
    group = [run for run in runs if (run.task, run.row) == ("jaco_reach", "AT-4")]
    means = np.mean([[e["kept"]["returns"] for e in run.entries] for run in group], axis=(0, 1, 2))
    np.testing.assert_allclose(drawn["AT-4, kept"].lines[0].get_ydata(), means)
    low, high = drawn["AT-4, kept"].lines[2][0].get_segments()[1][:, 1]
    assert low < means[1] < high


def test_learning_curves(output):
    runs, _ = find_runs(output / "runs")
    found = numbers(runs, TASKS)["step"]
    axes = report_figures.learning("step", found, runs).axes
    assert len(axes) == 9
    assert len(axes[0].lines) == 10  # five rows of two seeds
    steps, losses = axes[0].lines[0].get_data()
    assert len(steps) == report_figures.POINTS
    assert steps[0] == np.mean([10, 20, 30, 40])
    assert losses[0] == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4]))
    np.testing.assert_allclose(axes[1].lines[0].get_ydata(), [2, 1, 2 / 3])
    np.testing.assert_allclose(axes[2].lines[0].get_data(), [[4000], [4.0]])  # the last trial


def test_rollouts_of_tasks_that_are_learned_together_are_averaged(tmp_path):
    metrics = [
        {"step": 5, f"rollout/jaco_reach_{c}/trial_{k}": v + k}
        for c, v in (("top_left", 1.0), ("top_right", 3.0))
        for k in (2, 10)
    ]
    merged = [
        {k: v for line in metrics[:2] for k, v in line.items()},
        {k: v for line in metrics[2:] for k, v in line.items()},
    ]
    kept = [[[2, 6]]] * 4
    leave_run(tmp_path, "AT-4", kept, kept, task="jaco_reach", metrics=merged)
    (run,), _ = find_runs(tmp_path / "runs")
    assert report_figures._curves(run)[2] == [(5, 12.0)]


def test_rows_of_equally_many_trajectories_are_drawn(tmp_path):
    for seed in (0, 1):
        leave_run(tmp_path, "AT-4", [[2, 6]], [[2, 4]], seed=seed)
        leave_run(tmp_path, "AT-4-long", [[2, 8]], [[2, 4]], seed=seed)
    runs, _ = find_runs(tmp_path / "runs")
    figure = report_figures.by_trajectories("step", numbers(runs, TASKS)["step"])
    line = next(line for line in figure.axes[0].lines if line.get_label() == "walker_walk")
    assert line.get_xydata().tolist() == [[4, 0.5], [4, 0.75]]
    write_report(tmp_path, TASKS, Console(file=io.StringIO()))


def test_names_are_shown_as_they_are(tmp_path):
    names = ["_x", "a$\\foo$b", "A|B", "<b>&", "[red]x"]
    for name in names:
        metrics = [{"step": 1, "train/loss": 1.0}]
        leave_run(tmp_path, name, [[2, 6]], [[2, 4]], section="$\\oops$", metrics=metrics)
    text = io.StringIO()
    write_report(tmp_path, TASKS, Console(file=text, width=100, markup=False))
    table = (tmp_path / "report" / "table.md").read_text()
    page = Page((tmp_path / "report" / "report.html").read_text())
    for name in names:
        assert f"│ {name} " in text.getvalue()
        assert name.replace("|", r"\|") in table
        assert name in page.cells
    rows = [line.replace(r"\|", "") for line in table.splitlines() if line.startswith("| A")]
    assert {row.count("|") for row in rows} == {10, 7, 4}
    found = numbers(find_runs(tmp_path / "runs")[0], TASKS)["$\\oops$"]
    drawn = report_figures.learning("$\\oops$", found, find_runs(tmp_path / "runs")[0])
    shown = [label.get_text().strip() for label in drawn.legends[0].get_texts()]
    assert [label.replace(r"\$", "$") for label in shown] == sorted(names)


def test_rows_of_other_numbers_of_trials_are_told_apart(tmp_path):
    leave_run(tmp_path, "AT-4", [[2, 6, 5]], [[2, 4, 1]])
    leave_run(tmp_path, "DT", None, [[2, 4]], method="dt", trajectories=1)
    runs, _ = find_runs(tmp_path / "runs")
    shown = {s.title.partition(": ")[2]: s for s in sheets("step", numbers(runs, TASKS)["step"])}
    told = "n: 2 trials in each of 1 contexts (DT), 3 trials in each of 1 contexts (AT-4)"
    for title in ("average over 1 task, normalised", "returns"):
        assert told in shown[title].caption
    beside = shown["what the returns are read beside"]
    assert told in beside.caption
    assert beside.blocks[0][1][0][-1] == "8.0"  # of 0 to 10, the largest of 3 on average
