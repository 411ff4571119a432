"""A process that simulates some of a pool's environments, and the memory that it shares.

A bell lets it step, a message reset; it answers when it has done so. Numbers go through the shared
memory. Linux only, as the bell is an eventfd: who writes to a pipe is taken to be about to sleep,
and the reader is often woken on the writer's own core, where one steps after the other.

Axes: E environments, A actions, R numbers of a reading.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import numpy as np

from envs.dmc import quiet_simulator
from envs.engine import Engine

# Spawned: a fork would copy the locks of the parent's threads, held or not.
_CONTEXT = multiprocessing.get_context("spawn")
_COUNT_BYTES = 8  # of an answer
_FAILED = 0  # for an answer; a traceback follows
# Seconds that a process goes on asking before it sleeps: to be woken, above all on a virtual
# machine, takes up to half a millisecond, as long as a step of some environments. Who waits for
# answers has nothing else to do, and may be woken on the core of the process that answers.
_AWAKE_FOR_ANSWERS = 5e-3
_AWAKE = 5e-4


class Shared:
    """Arrays that processes share for as long as one of them holds them.

    Args:
        environments: E, of the whole pool.
        actions: A.
        numbers: R.
    """

    def __init__(self, environments: int, actions: int, numbers: int) -> None:
        self._shapes = ((environments, actions), (environments, numbers))
        # Files without a name: they vanish with the last process, however it ends.
        self._floats = [_CONTEXT.RawArray("d", rows * size) for rows, size in self._shapes]
        self._flags = _CONTEXT.RawArray("b", environments)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Control (E, A) float64, reading (E, R) float64 and resting (E,) bool."""
        control, reading = (
            np.frombuffer(memory, np.float64).reshape(shape)
            for memory, shape in zip(self._floats, self._shapes, strict=True)
        )
        return control, reading, np.frombuffer(self._flags, np.bool_)


class Worker:
    """The process of environments `rows`, as the pool sees it. It starts at once.

    It ends with `close`, and with the process that made it, however that ends.

    Args:
        tasks: Of its environments.
        shared: Of the whole pool.
        rows: The part of the arrays that is this worker's.
    """

    def __init__(self, tasks: Sequence[str], shared: Shared, rows: slice) -> None:
        self._rows = rows
        self._count = 0
        self._connection, end = _CONTEXT.Pipe()
        self._bell = Connection(os.eventfd(0))  # as a connection it can be given to a process
        self._process = _CONTEXT.Process(
            target=_work, args=(end, self._bell, tuple(tasks), shared, rows), daemon=True
        )
        # Ctrl-C reaches the whole group, and it is the parent that decides. The process inherits
        # what is blocked, so that there is no moment at which it could be interrupted. (What
        # `start` would start before it unblocks the signal again.)
        resource_tracker.ensure_running()
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        end.close()  # the worker's is now the only one, and ends with it
        self._answers = select.poll()
        self._answers.register(self._connection.fileno(), select.POLLIN)

    def begin(self, seeds: Sequence[int] = ()) -> None:
        """Let it take a step, or reset with `seeds`, one per environment of its own."""
        self._count += 1
        if not seeds:
            os.eventfd_write(self._bell.fileno(), 1)
            return
        # A process that has ended hears nothing; why it ended is there for `finish` to read.
        with contextlib.suppress(ConnectionError):
            self._connection.send_bytes(np.array([self._count, *seeds], np.int64).tobytes())

    def finish(self) -> None:
        """Wait until it has done what it began last.

        Raises:
            RuntimeError: The process failed or died.
        """
        done = None
        while done != self._count:  # an interrupted pool may have left an answer unread
            try:
                _await(self._answers, _AWAKE_FOR_ANSWERS)
                # In one call, not `recv_bytes`: who is interrupted has read all of it or nothing.
                answer = os.read(self._connection.fileno(), _COUNT_BYTES)
                if not answer:
                    raise EOFError
                done = int.from_bytes(answer, sys.byteorder)
                failure = self._connection.recv_bytes() if done == _FAILED else None
            except (EOFError, OSError):
                raise self._died() from None
            if failure is not None:
                raise RuntimeError(f"{self._name} failed:\n{failure.decode()}")

    def close(self) -> None:
        """End the process. May be called twice."""
        self._connection.close()
        self._bell.close()
        self._process.kill()  # unlike SIGTERM it also ends a process that is stopped
        self._process.join()

    @property
    def _name(self) -> str:
        return (
            f"process {self._process.pid} with environments {self._rows.start} to "
            f"{self._rows.stop - 1}"
        )

    def _died(self) -> RuntimeError:
        self._process.join(timeout=1)
        return RuntimeError(f"{self._name} died, exit code {self._process.exitcode}")


def _await(events: select.poll, awake: float) -> list[tuple[int, int]]:
    """What has happened, as soon as something has; after `awake` seconds it sleeps until then."""
    until = time.perf_counter() + awake
    while time.perf_counter() < until:
        if happened := events.poll(0):
            return happened
    return events.poll()


def _work(
    connection: Connection, bell: Connection, tasks: tuple[str, ...], shared: Shared, rows: slice
) -> None:
    """Body of the process: does what it is told, or sends one traceback as text."""
    quiet_simulator()
    ring = bell.fileno()
    either = select.poll()
    either.register(ring, select.POLLIN)
    either.register(connection.fileno(), select.POLLIN)
    try:
        engine = Engine(tasks)
        control, reading, resting = shared.arrays()
        engine.attach(control[rows], reading[rows], resting[rows])
        count = 0
        while True:
            # An interrupted step may still ring when the reset after it is already asked for.
            if any(ready == ring for ready, _ in _await(either, _AWAKE)):
                os.eventfd_read(ring)
                count += 1
                engine.step()
            else:
                count, *seeds = np.frombuffer(connection.recv_bytes(), np.int64).tolist()
                engine.reset(seeds)
            os.write(connection.fileno(), count.to_bytes(_COUNT_BYTES, sys.byteorder))
    except (EOFError, ConnectionError):
        pass  # the pool is gone
    except Exception:
        os.write(connection.fileno(), _FAILED.to_bytes(_COUNT_BYTES, sys.byteorder))
        connection.send_bytes(traceback.format_exc().encode())
