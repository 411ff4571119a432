"""What is logged: every number once, and nothing that ends a training."""

import errno
import json
import os

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentic import metrics
from agentic.metrics import MetricLog


def _board(run_dir):
    board = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "histograms": 0})
    return board.Reload()


def _points(run_dir, name):
    return [(event.step, event.value) for event in _board(run_dir).Scalars(name)]


def _lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_shows_what_was_logged(tmp_path):
    with MetricLog(tmp_path, 0, "steps: 2") as log:
        log.scalars(1, {"loss": 0.5, "rate": float("nan")})
        log.histogram(1, "weights", torch.tensor([-2.0, 0.0, 0.0, 1.0, float("inf")]))
        log.note(1, {"chains": ["a"]})
    board = _board(tmp_path)
    assert _points(tmp_path, "loss") == [(1, 0.5)]
    (shown,) = board.Histograms("weights")
    histogram = shown.histogram_value
    assert (shown.step, histogram.num, histogram.min, histogram.max) == (1, 4, -2, 1)
    assert sum(histogram.bucket) == 4
    assert board.Tensors("config/text_summary")[0].tensor_proto.string_val == [b"    steps: 2"]
    assert [sorted(line) for line in _lines(tmp_path)] == [
        ["loss", "rate", "step"],
        ["chains", "step"],
    ]


def test_what_the_lost_part_of_a_run_has_logged_is_gone(tmp_path):
    with MetricLog(tmp_path, 0) as log:
        log.scalars(1, {"loss": 1.0})
        log.scalars(2, {"loss": 2.0})
        lines = log.lines  # a checkpoint of step 2
        log.scalars(2, {"rollout": 7.0})
        log.scalars(3, {"loss": 9.0})
    assert lines == 2
    with MetricLog(tmp_path, 2, lines=lines) as log:
        log.scalars(2, {"rollout": 8.0})
        log.scalars(3, {"loss": 3.0})
        assert log.lines == 4
    for name, points in {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)], "rollout": [(2, 8.0)]}.items():
        assert _points(tmp_path, name) == points
        assert [(line["step"], line[name]) for line in _lines(tmp_path) if name in line] == points


def test_a_line_that_a_crash_has_cut_off_is_gone(tmp_path):
    with MetricLog(tmp_path, 0) as log:
        log.scalars(1, {"loss": 1.0})
    for torn in (b'{"step": 1, "lo', b'{"step": 1}'):  # the second may lack its end
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(torn)
        with MetricLog(tmp_path, 1):
            pass
        assert _lines(tmp_path) == [{"step": 1, "loss": 1.0}]


@pytest.fixture
def room(monkeypatch):
    """Bytes that may still be written, of which a write takes what it can."""
    left = {"bytes": 10**9}
    opened = open

    class Limited:
        def __init__(self, *arguments, **named):
            self._file = opened(*arguments, **named)
            self.truncate, self.close = self._file.truncate, self._file.close

        def write(self, content):
            taken = min(len(content), left["bytes"])
            if taken == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left["bytes"] -= taken
            return self._file.write(content[:taken])

    monkeypatch.setattr(metrics, "open", Limited, raising=False)
    return left


def test_a_full_disk_leaves_lines_out_and_says_so_once(tmp_path, room):
    told = []
    with MetricLog(tmp_path, 0, tell=told.append) as log:
        log.scalars(1, {"loss": 1.0})
        room["bytes"] = 20  # a part of a record
        for step in (2, 3):
            log.scalars(step, {"loss": float(step)})
        assert log.lines == 1
        assert len(told) == 2
        for line, name in zip(told, ("events.out.tfevents", "metrics.jsonl"), strict=True):
            assert line.startswith(f"step 2: {tmp_path}/{name}")
            assert "No space left on device; training goes on" in line
        room["bytes"] = 10**9
        log.scalars(4, {"loss": 4.0})
        assert len(told) == 2
    assert [line.split(": ")[1] for line in told[2:]] == ["2 records are missing"] * 2
    assert _points(tmp_path, "loss") == [(1, 1.0), (4, 4.0)]
    assert [line["loss"] for line in _lines(tmp_path)] == [1.0, 4.0]
