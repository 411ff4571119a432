"""Processes that die, stop or fail among others, which must not hang and must say who it was."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import parallel.world as world_module
from parallel.collectives import all_reduce
from parallel.mesh import CubeMesh
from parallel.products import product_abt
from parallel.world import MainFailed, PeerLost, World, own_rank

_CONTEXT = multiprocessing.get_context("forkserver")
LOST = re.compile(
    r"PeerLost: lost rank (\d+) on axis ([xyz]) \(it died or hangs\); this is rank (\d)"
)


class Ranks:
    """`function(*arguments)` in processes with torchrun's environment; what each of them prints."""

    def __init__(self, folder: Path, size: int, function, *arguments, **given: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.outputs = [folder / str(rank) for rank in range(size)]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            output.touch()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **given,
            }
            process = _CONTEXT.Process(
                target=_process, args=(environment, output, function, arguments), daemon=True
            )
            process.start()
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def text(self, rank: int) -> str:
        return self.outputs[rank].read_text()

    def wait_for(self, word: str) -> None:
        """Until every rank has printed it."""
        until = time.monotonic() + 60
        while not all(word in output.read_text() for output in self.outputs):
            assert time.monotonic() < until, [output.read_text() for output in self.outputs]
            time.sleep(0.02)

    def codes(self, seconds: float, but: int | None = None) -> list[int]:
        """Exit codes, of all except one; all must have ended within the seconds."""
        until = time.monotonic() + seconds
        others = [process for rank, process in enumerate(self.processes) if rank != but]
        for process in others:
            process.join(max(until - time.monotonic(), 0))
        assert all(process.exitcode is not None for process in others), "hangs"
        return [process.exitcode for process in others]


def _process(environment, output, function, arguments):
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    function(*arguments)


def _loop(shape, timeout, raising=None):
    world = World.start("cpu", timeout=timeout)
    mesh = CubeMesh(*shape, timeout=timeout, world=world)
    a, b = (torch.ones(8, 8, requires_grad=True) for _ in range(2))
    for step in itertools.count():
        if step == 5:
            print("looping", flush=True)
            if world.rank == raising:
                raise KeyError("a mistake on one rank")
        product_abt(a, b, mesh, ("y", "x", "z")).sum().backward()


def _fault(folder, shape, number, *, timeout, within):
    """Sends the signal to the last rank; every other one must name it."""
    size = torch.Size(shape).numel()
    lost = size - 1
    with Ranks(folder, size, _loop, shape, timeout) as ranks:
        ranks.wait_for("looping")
        os.kill(ranks.processes[lost].pid, number)
        assert 0 not in ranks.codes(within, but=lost)
        found = [LOST.search(ranks.text(rank)) for rank in range(lost)]
        assert all(found), [ranks.text(rank) for rank in range(lost)]
    assert [int(match[3]) for match in found] == list(range(lost))
    assert {int(match[1]) for match in found} == {lost}
    axes = {match[2] for match in found}
    assert len(axes) == 1
    assert axes <= {axis for axis, side in zip("xyz", shape, strict=True) if side > 1}


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (1, 3, 1)])
def test_all_name_a_killed_rank_and_its_axis(tmp_path, shape):
    _fault(tmp_path, shape, signal.SIGKILL, timeout=30, within=30)


def test_all_name_a_stopped_rank_after_the_timeout(tmp_path):
    _fault(tmp_path, (2, 2, 1), signal.SIGSTOP, timeout=2, within=30)


@pytest.mark.slow
def test_seven_end_within_5_seconds_of_a_killed_one(tmp_path):
    _fault(tmp_path, (2, 2, 2), signal.SIGKILL, timeout=60, within=5)


@pytest.mark.slow
def test_seven_end_within_the_timeout_and_5_seconds_of_a_stopped_one(tmp_path):
    _fault(tmp_path, (2, 2, 2), signal.SIGSTOP, timeout=3, within=8)


@pytest.mark.parametrize(
    "shape", [(2, 2, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_an_exception_on_one_rank_hangs_nobody(tmp_path, shape):
    size = torch.Size(shape).numel()
    with Ranks(tmp_path, size, _loop, shape, 60, 1) as ranks:
        ranks.wait_for("looping")
        assert 0 not in ranks.codes(30)
        assert "KeyError: 'a mistake on one rank'" in ranks.text(1)
        for rank in set(range(size)) - {1}:
            found = LOST.search(ranks.text(rank))
            assert found, ranks.text(rank)
            assert found[1] == "1"


def _loop_with_a_slow_listener(slow, *arguments):
    if own_rank() == slow:
        world_module._POLL_SECONDS = 0.6
    _loop(*arguments)


def test_rank_0_waits_until_a_slow_one_has_heard_who_was_lost(tmp_path):
    """Here it keeps the store, which ends with it."""
    with Ranks(tmp_path, 4, _loop_with_a_slow_listener, 3, (2, 2, 1), 60, 1) as ranks:
        ranks.wait_for("looping")
        assert 0 not in ranks.codes(30)
        for rank in (0, 2, 3):
            found = LOST.search(ranks.text(rank))
            assert found, ranks.text(rank)
            assert found[1] == "1"


def _sizes_that_do_not_fit(rank):
    told = []
    for place in range(dist.get_world_size()):
        if rank == place:  # nobody else comes: a collective would wait
            for sides in (
                {"x": 2, "y": 2, "z": 2},
                {"x": 2},
                {"x": 2, "dp": 3},
                {"x": 4, "y": 0},
            ):
                with pytest.raises(ValueError, match="cube: got") as refused:
                    CubeMesh(**sides)
                told.append(str(refused.value))
        dist.barrier()
    return told


def test_a_wrong_number_of_processes_is_refused_by_each_rank_alone():
    for eight, two, six, none in run_ranks(4, _sizes_that_do_not_fit):
        assert eight == ("cube: got dp=1, x=2, y=2, z=2 for 4 process(es), expected 8 process(es)")
        assert "expected 2 process(es)" in two
        assert "expected 6 process(es)" in six
        assert none == "cube: got y=0, expected 1 or more"


def _timeouts(rank):
    mesh = CubeMesh(x=2, y=2, timeout=7)
    return {
        axis: mesh.group(axis)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for axis in mesh.sizes
    }


def test_every_axis_has_the_timeout_that_was_asked_for():
    for timeouts in run_ranks(4, _timeouts):
        assert timeouts == dict.fromkeys(("dp", "y", "z", "x", "cube"), 7.0)


def _long_work():
    world = World.start("cpu", timeout=1)
    mesh = CubeMesh(x=world.size, timeout=1, world=world)
    told = world.on_main(lambda: time.sleep(3) or {"score": [1.5, float("inf")]})
    print(told, all_reduce(torch.ones(1), mesh, "x"), world.on_main(lambda: "second"))
    world.close()


def test_work_on_main_may_take_longer_than_the_timeout(tmp_path):
    with Ranks(tmp_path, 3, _long_work) as ranks:
        assert ranks.codes(60) == [0, 0, 0], [ranks.text(rank) for rank in range(3)]
        for rank in range(3):
            assert ranks.text(rank) == "{'score': [1.5, inf]} tensor([3.]) second\n"


def _failing_work():
    world = World.start("cpu", timeout=30)
    with contextlib.suppress(MainFailed):
        world.on_main(lambda: {}["a mistake of main"])
        print("went on")
    print(f"quiet: {world.rank}")


def test_a_failure_on_main_ends_all(tmp_path):
    with Ranks(tmp_path, 3, _failing_work) as ranks:
        assert ranks.codes(30) == [1, 0, 0]
        assert "KeyError: 'a mistake of main'" in ranks.text(0)
        assert [ranks.text(rank) for rank in (1, 2)] == ["quiet: 1\n", "quiet: 2\n"]


def _waiting():
    world = World.start("cpu", timeout=30)
    print("looping", flush=True)
    world.on_main(lambda: time.sleep(60))


def test_nobody_waits_for_a_main_that_died(tmp_path):
    with Ranks(tmp_path, 3, _waiting) as ranks:
        ranks.wait_for("looping")
        ranks.processes[0].kill()
        assert ranks.codes(30, but=0) == [1, 1]
        assert all("PeerLost: lost rank 0" in ranks.text(rank) for rank in (1, 2))


def _waiting_beside(ending):
    world = World.start("cpu", timeout=2)
    print("looping", flush=True)
    world.on_main(lambda: time.sleep(60), lambda: ending)


@pytest.mark.parametrize("ending", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_a_main_that_is_gone_where_torchrun_keeps_the_store(
    tmp_path, number, ending
):
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(kept.port)}
    with Ranks(tmp_path, 3, _waiting_beside, ending, **agent) as ranks:
        ranks.wait_for("looping")
        os.kill(ranks.processes[0].pid, number)
        assert ranks.codes(30, but=0) == [1, 1]
        for rank in (1, 2):
            assert "PeerLost: lost rank 0 on axis main (it died or hangs)" in ranks.text(rank)


@pytest.mark.parametrize(
    ("reports", "axis"),
    [
        ([(0, "x", [2]), (1, "y", [2]), (3, "z", [1])], "x"),  # 2 died: the first has its axis
        ([(0, "z", [1]), (1, "x", [2]), (3, "y", [2])], "x"),  # 2 hangs: 0 ran out of time first
        ([(0, "z", [1]), (1, "y", [0]), (3, "y", [1])], None),  # 2 was met by nobody
    ],
)
def test_those_who_lost_a_survivor_name_the_dead_one_too(reports, axis):
    store = dist.HashStore()
    living = {rank: World(store, rank, 4) for rank in (0, 1, 3)}
    with ThreadPoolExecutor() as threads:
        told = []
        for rank, *report in reports:
            told.append(threads.submit(living[rank].blame, *report))
            time.sleep(0.1)
    where = "noticed on axis z" if axis is None else f"on axis {axis}"
    for (rank, *_), text in zip(reports, told, strict=True):
        assert text.result() == f"lost rank 2 {where} (it died or hangs); this is rank {rank}"


def test_no_process_is_accused_where_all_live():
    store = dist.HashStore()
    one, two = World(store, 0, 2), World(store, 1, 2)
    expected = "no process is lost: axis x failed first, on rank 1 with [0]; this is rank"
    assert [two.blame("x", [0]), one.blame("x", [1])] == [f"{expected} 1", f"{expected} 0"]


def test_a_store_that_is_gone_leaves_the_axis_to_name():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = World(dist.TCPStore("127.0.0.1", kept.port), 1, 4)
    del kept
    before = time.monotonic()
    assert world.blame("y", [0, 2]) == "lost one of rank(s) [0, 2] on axis y; this is rank 1"
    assert time.monotonic() - before < 10


@pytest.fixture
def of_two(monkeypatch):
    """This is the first of two processes, whose store torchrun keeps."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": kept.port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return kept


def test_who_does_not_come_is_named(of_two):
    with pytest.raises(
        PeerLost, match=rf"others of 2 .* at 127.0.0.1:{of_two.port} .* s for.*\[1\]"
    ):
        World.start("cpu", timeout=0.3)


def test_nobody_to_meet_is_told(of_two, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(PeerLost, match=r"rank 0 has not met the others .* at 127.0.0.1:1 "):
        World.start("cpu", timeout=0.3)


def test_who_waits_for_the_others_can_be_ended(of_two):
    def end(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            World.start("cpu", timeout=20)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_one_process_alone_needs_no_store(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.start("cpu", timeout=1)
    assert (world.rank, world.size, world.main, world.store) == (0, 1, True, None)
    assert world.on_main(lambda: {"a": (1, 2)}) == {"a": [1, 2]}  # as every rank of many gets it
    assert not dist.is_initialized()
    world.close()
