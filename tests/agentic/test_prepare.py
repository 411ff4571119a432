"""What several processes settle before a training begins."""

import dataclasses
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import make_model, make_store
from rich.console import Console
from training import make_config

from agentic import prepare, runs
from agentic.interrupt import Interrupt
from agentic.scale import ParallelConfig
from parallel.world import World

CONFIG = SimpleNamespace(data_dir="data")


def _opened(monkeypatch, mine, theirs):
    """What rank 0, who prepares its data, and rank 1 get."""
    monkeypatch.setattr(prepare, "prepare_data", lambda *_: mine)
    monkeypatch.setattr(prepare, "open_data", lambda *_: theirs)
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        return [
            threads.submit(prepare.shared_data, CONFIG, None, World(store, rank, 2))
            for rank in range(2)
        ]


def test_the_same_data_are_opened_by_all(monkeypatch):
    mine, theirs = make_store([0.1, 0.7, 1 / 3]), make_store([0.1, 0.7, 1 / 3])
    first, second = _opened(monkeypatch, mine, theirs)
    assert first.result() is mine
    assert second.result() is theirs


def test_a_run_that_has_begun_collects_no_other_data(tmp_path):
    config = make_config(make_model(), data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="data_dir: looked for .*cartpole/td3/buffer/.*got"):
        prepare.shared_data(config, Console(), World(), begun=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("returns", [[0.1, 0.7], [0.1, 0.7, 0.33]])
def test_other_data_on_another_rank_are_refused(returns, monkeypatch):
    first, second = _opened(monkeypatch, make_store([0.1, 0.7, 1 / 3]), make_store(returns))
    assert first.result().episodes == 3
    with pytest.raises(ValueError, match=f"got {len(returns)} episodes in data on rank 1, .* 3 of"):
        second.result()


@pytest.mark.parametrize(
    ("overridden", "values", "expected"),
    [
        ([], {"kind": "none"}, {"kind": "ring", "dp": 2, "keys": "ring", "timeout": 7.0}),
        (["parallel=data"], {"kind": "data"}, {"kind": "data"}),
        (
            ["parallel=cube", "parallel.timeout=9"],
            {"kind": "cube", "timeout": 9},
            {"kind": "cube", "timeout": 9.0},
        ),
        (  # settings of the kind that the run has
            ["parallel.timeout=9", "parallel.dp=null"],
            {"kind": "none", "timeout": 9, "dp": None},
            {"kind": "ring", "keys": "ring", "timeout": 9.0},
        ),
    ],
)
def test_a_resumed_run_is_spread_as_before_or_as_said(overridden, values, expected, tmp_path):
    spread = ParallelConfig(kind="ring", dp=2, keys="ring", timeout=7.0)
    config = dataclasses.replace(make_config(make_model(kind="blockwise")), parallel=spread)
    (tmp_path / runs.CONFIG_FILE).write_text(runs.config_text(config))
    given = {"resume": str(tmp_path), "parallel": values}
    resumed = runs.settings(given, [f"resume={tmp_path}", *overridden])
    assert resumed.parallel == ParallelConfig(**expected)
    assert resumed.learning == config.learning


def test_a_signal_to_all_is_told_by_one(capsys):
    for quiet in (True, False):
        with Interrupt(quiet=quiet) as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupt.signal == signal.SIGTERM
        assert ("saving and ending" in capsys.readouterr().out) != quiet


def test_several_processes_need_a_kind_and_a_sane_timeout():
    assert ParallelConfig().sides(1) == (1, (1, 1, 1))
    with pytest.raises(
        ValueError, match="for parallel=none, expected 1; choose parallel=data, ring"
    ):
        ParallelConfig().sides(2)
    for timeout in (0.0, -1.0, 1e300):
        with pytest.raises(ValueError, match=r"parallel.timeout: got .*, expected seconds above 0"):
            ParallelConfig(timeout=timeout)
