"""Training over processes is the training of one process, whatever they share."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import make_model, make_store
from ranks import run_ranks
from training import make_config

from agentic import checkpoint
from agentic.metrics import MetricLog
from agentic.scale import ParallelConfig
from agentic.tokens import Steps
from agentic.trainer import Trainer
from parallel import shards
from parallel.mesh import CubeMesh
from parallel.world import World

CASES = {  # copies, (x, y, z), keys
    "serial": (1, (1, 1, 1), "gather"),
    "data": (2, (1, 1, 1), "gather"),
    "x": (1, (2, 1, 1), "gather"),
    "y": (1, (1, 2, 1), "gather"),
    "z": (1, (1, 1, 2), "gather"),
    "ring": (1, (2, 1, 1), "ring"),
    "cube": (1, (2, 2, 2), "gather"),
    "data x ring": (2, (2, 1, 1), "ring"),
    "data x cube": (2, (1, 2, 1), "gather"),
    "wide": (1, (4, 1, 1), "ring"),
}


def _size(case):
    copies, (x, y, z), _ = CASES[case]
    return copies * x * y * z


class Wide:
    """A stream in double precision, that tells which micro-batches it has made."""

    def __init__(self, stream):
        self._stream, self.taken = stream, []
        self.load_state_dict, self.state_dict = stream.load_state_dict, stream.state_dict
        self.close, self.sampler = stream.close, stream.sampler

    @property
    def position(self):
        return self._stream.position

    def __next__(self):
        self.taken.append(self._stream.position + self._stream._rank)
        return _widened(*next(self._stream))


def _widened(steps, weight_BL):
    fields = {name: getattr(steps, name) for name in Steps.__dataclass_fields__}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in fields.items()}
    return Steps(**wide), weight_BL.double()


def _trainer(case, run_dir, steps, dtype=torch.float64, **changes):
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    copies, (x, y, z), keys = CASES[case]
    model = make_model(
        kind="blockwise", past_action="dropout", trajectories=2, layer_dropout=0.2, width=16
    ).to(dtype)
    config = make_config(model, steps=steps, **changes)
    config = dataclasses.replace(config, parallel=ParallelConfig(kind="cube", keys=keys))
    size = _size(case)
    rank = torch.distributed.get_rank() if size > 1 else 0
    store = torch.distributed.FileStore(str(run_dir / "meeting"), size) if size > 1 else None
    world = World(store, rank, size)
    mesh = CubeMesh(x, y, z, dp=copies, world=world)
    data = make_store([float(r) for r in range(10)], steps=5)
    trainer = Trainer(
        config, model, data, np.arange(8), np.arange(8, 10), run_dir, world=world, mesh=mesh
    )
    if dtype == torch.float64:
        trainer.stream = Wide(trainer.stream)
        batch = trainer.validation.batch
        trainer.validation.batch = lambda index: _widened(*batch(index))
    return trainer


def _train(rank, case, run_dir, steps, resume=None, dtype=torch.float64):
    """Whole parameters after training, and what was logged and taken on the way."""
    trainer = _trainer(case, run_dir, steps, dtype)
    if resume is not None:
        trainer.load_state(checkpoint.load(resume, trainer.layout))
    if trainer.world.main:
        with MetricLog(run_dir, trainer.step) as log:
            trainer.train(log, progress=False)
    else:
        trainer.train(None)
    whole = {
        f"{key} {name}": value.numpy()
        for key, model in (("model", trainer.model), ("averaged", trainer.averaged.module))
        for name, value in trainer._whole(key, model).items()
    }
    taken = trainer.stream.taken if dtype == torch.float64 else None
    return whole, taken


def _logged(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/gradient_norm", "validation/loss")
    return [[line["step"], *(line[n] for n in names if n in line)] for line in lines]


def _run(case, run_dir, steps=10, **given):
    run_dir.mkdir(exist_ok=True)
    if _size(case) == 1:
        return [_train(0, case, run_dir, steps, **given)]
    return run_ranks(_size(case), _train, case, run_dir, steps, *given.values())


def _apart(ours, theirs):
    return max(np.abs(ours[name] - theirs[name]).max() for name in theirs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ten steps of a case, trained once: what each process has, and the directory."""
    done = {}

    def run(case):
        if case not in done:
            run_dir = tmp_path_factory.mktemp(case.replace(" ", "_"))
            done[case] = _run(case, run_dir), run_dir
        return done[case]

    return run


@pytest.mark.parametrize(
    "case",
    ["data", "x", "y", "z", "cube", "data x ring"]
    + [pytest.param(case, marks=pytest.mark.slow) for case in ("ring", "data x cube", "wide")],
)
def test_ten_steps_are_those_of_one_process(case, runs):
    ((whole, taken),), serial_dir = runs("serial")
    answers, run_dir = runs(case)
    for own, _ in answers:
        assert own.keys() == whole.keys()
        assert _apart(own, whole) < 1e-9
    assert np.allclose(np.hstack(_logged(run_dir)), np.hstack(_logged(serial_dir)), rtol=1e-9)
    # Every micro-batch is taken by one copy, by all of its processes.
    by_copy = {tuple(own) for _, own in answers}
    assert len(by_copy) == CASES[case][0]
    assert sorted(index for own in by_copy for index in own) == taken
    # One writes.
    assert len(list(run_dir.glob("events.out.*"))) == 1
    assert (run_dir / "checkpoints" / "step_000000010").exists() == (case != "data")


@pytest.mark.parametrize(
    ("first", "then"),
    [("cube", "serial"), ("serial", "z"), ("data x ring", "y"), ("z", "data")]
    + [
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in [("cube", "wide"), ("wide", "cube"), ("serial", "cube"), ("cube", "data")]
    ],
)
def test_a_run_goes_on_with_other_processes(first, then, runs, tmp_path):
    ((whole, _),), _ = runs("serial")
    _, run_dir = runs(first)
    half, newest = checkpoint.step_files(run_dir)
    # In one process, the state that all of them had together.
    model = checkpoint.load(newest)["model"]
    theirs = {name: value for name, value in whole.items() if name.startswith("model")}
    assert _apart({f"model {name}": value.numpy() for name, value in model.items()}, theirs) < 1e-9
    assert checkpoint.load(half)["step"] == 5
    for own, _ in _run(then, tmp_path / "on", resume=half):
        assert _apart(own, whole) < 1e-9


def test_resumed_equals_straight_to_the_last_bit_in_a_cube(runs, tmp_path):
    straight, run_dir = runs("x")
    resumed = _run("x", tmp_path / "resumed", resume=checkpoint.step_files(run_dir)[0])
    for (ours, _), (theirs, _) in zip(resumed, straight, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("case", ["data", "x"])
def test_all_go_on_from_the_newest_sound_one(case, runs, tmp_path):
    _, run_dir = runs(case)
    shutil.copytree(run_dir / "checkpoints", tmp_path / "checkpoints")
    half, newest = checkpoint.step_files(tmp_path)
    harmed = newest if newest.is_file() else shards.files(newest / "tensors_1")[-1]
    harmed.write_bytes(harmed.read_bytes()[:-1])
    told = run_ranks(2, _resumes, case, tmp_path)
    assert [place for place, *_ in told] == [str(half)] * 2
    assert [step for _, step, _ in told] == [5, 5]
    said = f"{harmed} is damaged"
    assert [said in output for *_, output in told] == [True, False]
    names = sorted(path.name for path in half.parent.iterdir())
    assert names == [half.name, f"{newest.name}.damaged"]


def _resumes(rank, case, run_dir):
    trainer = _trainer(case, run_dir, 10)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        place = trainer.resume()
    return str(place), trainer.step, said.getvalue()


@pytest.mark.parametrize("case", ["data", "x"])
def test_a_signal_to_one_ends_all_after_the_same_step(case, tmp_path):
    assert run_ranks(2, _ended, case, tmp_path) == [(signal.SIGTERM, 3)] * 2
    assert checkpoint.load(checkpoint.newest(tmp_path))["step"] == 3


def _ended(rank, case, run_dir):
    """The last process gets a signal in its third step."""
    trainer = _trainer(case, run_dir, 10)
    update = trainer.update

    def interrupted():
        if rank == 1 and trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update()

    trainer.update = interrupted
    return trainer.train(None, progress=False), trainer.step
