"""Jobs as processes, with a stub in place of agentic.train."""

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from reports import leave_run
from rich.console import Console

from agentic.interrupt import Interrupt
from agentic.jobs import Job
from agentic.launch import Launcher, read_record, spell_seconds

STUB = """
import os, pathlib, signal, sys, time

module, *settings = sys.argv[1:]
told = dict(setting.split("=", 1) for setting in settings)
run_dir = pathlib.Path(told["run_dir"])
run_dir.mkdir(parents=True, exist_ok=True)
with open(run_dir.parent / "order", "a") as order:
    print("begin", run_dir.name, os.environ["OMP_NUM_THREADS"], file=order, flush=True)
signals = []
if told["does"] == "wait" and not (run_dir / "saved").exists():
    def save(number, frame):
        signals.append(number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, save)
    (run_dir / "pid").write_text(str(os.getpid()))
    (run_dir / "pid").rename(run_dir / "waiting")
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)  # saving
    (run_dir / "saved").write_text(" ".join(map(str, signals)))
    sys.exit(128 + signals[0])
if told["does"] == "fail" and not (run_dir.parent / "mended").exists():
    print("a table\\nagentic-train: error: steps: got 0", file=sys.stderr)
    sys.exit(2)
if told["does"] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while told["does"] == "meet" and not (run_dir.parent / "met").exists():
    time.sleep(0.01)
if told["does"] != "nothing":
    made = pathlib.Path(__file__).with_name("results.json")
    (run_dir / "results.json").write_bytes(made.read_bytes())
with open(run_dir.parent / "order", "a") as order:
    print("end", run_dir.name, file=order, flush=True)
"""


@pytest.fixture
def launch(tmp_path):
    """Runs jobs given as (name, what it does); the launcher, and what it printed."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    made = leave_run(tmp_path / "made", "AT-4", None, [[5.0], [5.5]])
    (tmp_path / "results.json").write_bytes((made / "results.json").read_bytes())

    def run(*wanted, at_once=1, threads=1):
        text = io.StringIO()
        console = Console(file=text, width=200, markup=False)
        launcher = Launcher(threads, console, (sys.executable, str(stub)))
        jobs = [make_job(tmp_path, *each) for each in wanted]
        with Interrupt(quiet=True) as interrupt:
            launcher.run(jobs, at_once, interrupt)
        launcher.signal = interrupt.signal
        return launcher, text.getvalue()

    return run


def make_job(tmp_path, name, does="finish", needs=None):
    run_dir = tmp_path / name
    return Job(
        name=f"step/walker_walk/{name}/seed0",
        module="agentic.train",
        settings=(f"run_dir={run_dir}", f"does={does}"),
        log=tmp_path / f"{name}.log",
        result=run_dir / "results.json",
        data_dir="data",
        needs=needs,
    )


def _order(tmp_path):
    return (tmp_path / "order").read_text().splitlines()


def test_jobs_run_in_order_with_their_threads_and_finished_ones_are_skipped(launch, tmp_path):
    launcher, said = launch(("a",), ("b",), threads=3)
    assert _order(tmp_path) == ["begin a 3", "end a", "begin b 3", "end b"]
    assert launcher.failures == []
    assert "[1/2] step/walker_walk/a/seed0 begins" in said
    assert re.search(r"step/walker_walk/a/seed0 finished, \d+ s, last trial 5\.2\b", said)
    assert re.search(r"step/walker_walk/b/seed0 finished, \d+ s, last trial 5\.2\n", said)
    launcher, said = launch(("a",), ("b",), ("c",))
    assert "2 of 3 jobs are finished already" in said
    assert _order(tmp_path)[4:] == ["begin c 1", "end c"]


def test_the_time_left_is_told_by_what_finished_jobs_took(launch, tmp_path):
    launch(("a",))
    session = {"seconds": 600.0, "cpu_seconds": 1.0, "peak_bytes": 1, "code": 0}
    (tmp_path / "a.json").write_text(json.dumps({"sessions": [session]}))
    _, said = launch(("a",), ("b",), ("c",))
    # b and c are of other rows: the next takes as long as these two did on average
    assert re.search(r"b/seed0 finished, \d+ s, last trial 5\.2, about 5 min left\n", said)
    assert re.search(r"c/seed0 finished, \d+ s, last trial 5\.2\n", said)


def test_two_at_a_time(launch, tmp_path):
    # Each of the first two waits for the other to have begun.
    thread = threading.Thread(target=_release, args=(tmp_path, "ab"))
    thread.start()
    launch(("a", "meet"), ("b", "meet"), ("c",), at_once=2)
    thread.join()
    order = _order(tmp_path)
    assert sorted(order[:2]) == ["begin a 1", "begin b 1"]
    assert order.index("begin c 1") > min(order.index("end a"), order.index("end b"))


def _release(tmp_path, names):
    while not all((tmp_path / name).exists() for name in names):
        time.sleep(0.01)
    (tmp_path / "met").touch()


def test_a_failing_job_ends_no_other_and_is_tried_again(launch, tmp_path):
    launcher, said = launch(("a", "fail"), ("b",), ("c", "kill"), ("d", "nothing"))
    told = {failure.job.name.split("/")[2]: failure.reason for failure in launcher.failures}
    assert told == {
        "a": "agentic-train: error: steps: got 0 (exit code 2)",
        "c": "said nothing (killed by SIGKILL)",
        "d": "said nothing (exit code 0)",
    }
    assert (tmp_path / "b" / "results.json").exists()
    assert "a table" in (tmp_path / "a.log").read_text()
    (tmp_path / "mended").touch()
    assert "[1/4] step/walker_walk/a/seed0 begins" in said
    launcher, said = launch(("a", "fail"), ("b",))
    assert "[1/1] step/walker_walk/a/seed0 is taken up again" in said
    assert launcher.failures == []
    assert [session["code"] for session in read_record(tmp_path / "a.json")] == [2, 0]
    assert len(read_record(tmp_path / "b.json")) == 1


def test_jobs_without_their_data_are_not_begun(launch, tmp_path):
    needs = "step/walker_walk/data/seed0"
    launcher, _ = launch(("data", "fail"), ("a", "finish", needs), ("b",))
    assert [failure.job.name.split("/")[2] for failure in launcher.failures] == ["data", "a"]
    assert launcher.failures[1].reason == f"its data are missing: {needs} has failed"
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "b" / "results.json").exists()


def test_time_and_memory_of_every_session(launch, tmp_path):
    launch(("a",))
    (session,) = read_record(tmp_path / "a.json")
    assert session.keys() == {"seconds", "cpu_seconds", "peak_bytes", "code"}
    assert session["seconds"] > 0
    assert 0 < session["cpu_seconds"]
    assert 2**20 < session["peak_bytes"] < 2**30  # a bare interpreter's
    assert read_record(tmp_path / "z.json") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_job_once_and_the_next_call_goes_on(launch, tmp_path, number):
    wanted = [("a", "wait"), ("b", "wait"), ("c", "wait")]

    def interrupt():
        while not all((tmp_path / name / "waiting").exists() for name in "ab"):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    launcher, said = launch(*wanted, at_once=2)
    thread.join()
    assert launcher.signal == number
    assert launcher.failures == []
    assert f"{number.name}: 2 jobs are saving and ending" in said
    assert not (tmp_path / "c").exists()  # nothing is begun any more
    for name in "ab":
        assert (tmp_path / name / "saved").read_text() == str(int(number))
        assert [session["code"] for session in read_record(tmp_path / f"{name}.json")] == [
            128 + number
        ]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "saved").touch()
    launcher, _ = launch(*wanted, at_once=2)
    assert launcher.failures == []
    assert all((tmp_path / name / "results.json").exists() for name in "abc")


def test_a_second_signal_reaches_the_jobs_too_and_waits_for_them(launch, tmp_path):
    def interrupt():
        while not (tmp_path / "a" / "waiting").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(("a", "wait"))
    thread.join()
    assert (tmp_path / "a" / "saved").read_text() == f"{int(signal.SIGINT)} {int(signal.SIGTERM)}"


def test_a_job_of_another_call_is_left_alone(launch, tmp_path):
    with open(tmp_path / "a.log", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        launcher, _ = launch(("a",), ("b",))
    (failure,) = launcher.failures
    assert failure.reason == "is running already, begun by another process"
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "b" / "results.json").exists()
    launcher, _ = launch(("a",))
    assert launcher.failures == []


def test_a_running_job_holds_its_place(launch, tmp_path):
    held = []

    def look():
        while not (tmp_path / "a" / "waiting").exists():
            time.sleep(0.01)
        with open(tmp_path / "a.log", "ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look)
    thread.start()
    launch(("a", "wait"))
    thread.join()
    assert held == [True]


def test_time_left_is_that_of_the_same_row(launch, tmp_path):
    for name, seconds in (("a", 600), ("b", 6000)):
        job = make_job(tmp_path, name)
        job.result.parent.mkdir()
        job.result.write_text("{}")
        record = {"seconds": seconds, "cpu_seconds": 1, "peak_bytes": 1, "code": 0}
        job.record.write_text(json.dumps({"sessions": [record]}))
    jobs = [make_job(tmp_path, name) for name in "ab"]
    launcher = Launcher(1, Console(file=io.StringIO()))
    with Interrupt(quiet=True) as interrupt:
        launcher.run(jobs, 1, interrupt)
    again = make_job(tmp_path, "a")
    other = make_job(tmp_path, "x")
    assert launcher._left([again], []) == 600
    assert launcher._left([again, other], []) == 600 + 3300


def test_spelled_seconds():
    assert [spell_seconds(s) for s in (7.4, 99, 100, 3600, 11100)] == [
        *("7 s", "99 s", "2 min", "60 min", "3 h 05 min")
    ]


def test_what_another_process_finished_meanwhile_is_not_begun(launch, tmp_path):
    def finish():
        while not (tmp_path / "a" / "waiting").exists():
            time.sleep(0.01)
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "results.json").touch()
        os.kill(int((tmp_path / "a" / "waiting").read_text()), signal.SIGTERM)

    thread = threading.Thread(target=finish)
    thread.start()
    _, said = launch(("a", "wait"), ("b",))
    thread.join()
    assert "[2/2] step/walker_walk/b/seed0 is finished already" in said
    assert not (tmp_path / "b.log").exists()


def test_jobs_end_with_a_launcher_that_is_killed(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    program = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from rich.console import Console
from agentic.interrupt import Interrupt
from agentic.launch import Launcher
from test_launch import make_job

launcher = Launcher(1, Console(), (sys.executable, "stub.py"))
with Interrupt() as interrupt:
    launcher.run([make_job(Path({str(tmp_path)!r}), "a", "wait")], 1, interrupt)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    while not (tmp_path / "a" / "waiting").exists():
        assert launcher.poll() is None
        time.sleep(0.01)
    launcher.kill()
    launcher.wait()
    for _ in range(1000):
        if (tmp_path / "a" / "saved").exists():
            break
        time.sleep(0.01)
    assert (tmp_path / "a" / "saved").read_text() == str(int(signal.SIGTERM))
    (session,) = read_record(tmp_path / "a.json")
    assert set(session.values()) == {None}
