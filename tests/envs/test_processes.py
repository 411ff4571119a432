"""Pools in several processes: the same results, and nobody is left behind or waited for."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from envs import EnvPool

NAMES = ["cartpole_swingup", "cartpole_balance", "cartpole_swingup", "cartpole_balance_sparse"]

# Plays without end; after an interrupt it goes on for a little, and ends without closing the pool.
SCRIPT = """
import numpy as np
from envs import EnvPool


def main():
    pool = EnvPool(["cartpole_swingup"] * 4, workers=3)
    action = np.ones((4, 1))
    try:
        done = True
        while True:
            if done:
                pool.reset(range(4))
                print("playing", flush=True)
            *_, done = pool.step(action)
    except KeyboardInterrupt:
        pool.reset(range(4))
        observation = [pool.step(action)[0] for _ in range(3)][-1]
        alone = EnvPool(["cartpole_swingup"] * 4)
        alone.reset(range(4))
        expected = [alone.step(action)[0] for _ in range(3)][-1]
        print("same" if np.array_equal(observation, expected) else "different", flush=True)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def playing(tmp_path):
    """Starts the script as `python ARGUMENTS`, in a group of its own; returns once it plays."""
    (tmp_path / "script.py").write_text(SCRIPT)
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"MUJOCO_GL": "disable", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "playing\n", process.communicate()[1]
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def play(pool):
    """Everything that a pool returns, with failures here and there and a reset in between."""
    rng = np.random.default_rng(0)
    seen = [*pool.reset([3, 1, 4, 1])]
    for t in range(60):
        action = rng.uniform(-1.1, 1.1, (4, 1))
        if t in (10, 20):
            action[t // 10] = np.nan
        seen += [*pool.step(action)[:3], pool.failed.copy()]
        if t == 40:
            seen += [*pool.reset([2**40, 6, 5, 3])]
    return seen


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_results_do_not_depend_on_the_number_of_processes(workers):
    with EnvPool(NAMES) as alone, EnvPool(NAMES, workers=workers) as pool:
        assert len(pool._workers) == min(workers, len(NAMES)) - 1
        expected, seen = play(alone), play(pool)
        assert any(array.any() for array in expected if array.dtype == bool)
        for first, second in zip(expected, seen, strict=True):
            assert np.array_equal(first, second)
    assert not any(worker._process.is_alive() for worker in pool._workers)


def kill_the_other(pool):
    """Returns what is said about it from then on."""
    process = pool._workers[0]._process
    os.kill(process.pid, signal.SIGKILL)
    return f"process {process.pid} with environments 2 to 3 died, exit code -9"


def test_a_killed_process_is_an_error():
    with EnvPool(NAMES, workers=2) as pool:
        pool.reset(range(4))
        message = kill_the_other(pool)
        with pytest.raises(RuntimeError, match=message):
            pool.step(np.zeros((4, 1)))
        with pytest.raises(RuntimeError, match="call reset first"):
            pool.step(np.zeros((4, 1)))
        with pytest.raises(RuntimeError, match=message):
            pool.reset(range(4))


def test_a_process_killed_at_its_start_is_an_error():
    with EnvPool(NAMES, workers=2) as pool:
        message = kill_the_other(pool)
        with pytest.raises(RuntimeError, match=message):
            pool.reset(range(4))


def test_an_error_in_a_process_comes_with_its_traceback():
    with EnvPool(NAMES, workers=2) as pool:
        worker = pool._workers[0]
        worker.begin([-1, 0])
        with pytest.raises(RuntimeError, match=r"2 to 3 failed:\nTraceback[\s\S]*seed"):
            worker.finish()


def test_a_process_that_cannot_start_says_why(monkeypatch):
    EnvPool(NAMES).close()  # from here on this process does not read the variable
    with monkeypatch.context() as patched:
        patched.setenv("MUJOCO_GL", "nonsense")
        pool = EnvPool(NAMES, workers=2)
    with pool:
        pool._workers[0]._process.join()
        with pytest.raises(RuntimeError, match=r"2 to 3 failed:\nTraceback[\s\S]*=nonsense"):
            pool.reset(range(4))


@pytest.mark.timeout(20)
def test_a_stopped_process_can_be_closed():
    pool = EnvPool(NAMES, workers=2)
    pool.reset(range(4))
    process = pool._workers[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
    pool.close()
    assert not process.is_alive()


def interrupt(call, line):
    """Raises KeyboardInterrupt when the pool comes to this line; whether it ended before that."""
    passed = 0

    def inside(frame, event, _):
        nonlocal passed
        passed += event == "line"
        if passed == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return inside

    def trace(frame, *_):
        ours = ("envs/pool.py", "envs/processes.py", "multiprocessing/connection.py")
        return inside if frame.f_code.co_filename.endswith(ours) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["step", "reset"])
def test_after_an_interrupt_anywhere_a_reset_helps(call):
    action = np.ones((4, 1))
    with EnvPool(NAMES) as alone, EnvPool(NAMES, workers=3) as pool:
        alone.reset(range(4))
        expected = alone.step(action)
        line, ended = 0, False
        while not ended:
            line += 1
            pool.reset(range(4, 8))
            calls = {"step": lambda: pool.step(-action), "reset": lambda: pool.reset(range(4))}
            ended = interrupt(calls[call], line)
            pool.reset(range(4))
            for first, second in zip(expected, pool.step(action), strict=True):
                assert np.array_equal(first, second)
        assert line > 50


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"]])
def test_ctrl_c_is_for_the_parent_only(playing, arguments):
    process = playing(*arguments)
    os.killpg(process.pid, signal.SIGINT)
    # The pipes end with their last holder: no process is left, and none has written an error.
    output, errors = process.communicate()
    assert output.splitlines()[-1:] == ["same"], errors
    assert errors == ""
    assert process.returncode == 0


def test_processes_end_with_a_killed_parent(playing):
    process = playing("script.py")
    process.kill()
    _, errors = process.communicate()
    assert errors == ""
    assert process.returncode == -signal.SIGKILL
