"""The processes of a run: who is first, what it tells the others, and which one was lost.

They meet in a store of keys that torchrun keeps (rank 0 where something else started them). What
takes hours on one process, and the search for a dead one, go through the store and not through
collectives, which have a time limit and break with any of their members.
"""

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 2.0  # a living process answers within one poll, and within this on a busy machine
_HEARING_SECONDS = 1.0  # likewise for hearing the verdict
_PARTING_SECONDS = 2.0
_FAILED = "failed"  # no JSON

T = TypeVar("T")


class PeerLost(RuntimeError):
    """A collective failed: another process died, hung, or went another way."""


class MainFailed(RuntimeError):
    """Rank 0 failed at what the others wait for, and says itself why."""


def processes() -> int:
    """How many processes the run has, as torchrun tells; known before anything is started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """This process's number among them, likewise."""
    return int(os.environ.get("RANK", "0"))


def _meet(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Waits for all, and not inside the store, where a process would hear no signal."""
    store.set(f"here/{rank}", "")
    missing, until = list(range(size)), time.monotonic() + timeout
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if time.monotonic() > until:
            raise RuntimeError(f"waited {timeout:g} s for rank(s) {missing}")
        time.sleep(_POLL_SECONDS)


class World:
    """This process among all of a run.

    Args:
        store: the keys that all processes share; None: there is one process.
        rank: this process's number, from 0.
        size: how many there are.
        timeout: seconds that rank 0 may be silent while the others wait for it.

    Attributes:
        local_rank: number on its machine, which is the number of its GPU too.
        local_size: how many this machine has.
    """

    def __init__(
        self,
        store: dist.Store | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        timeout: float = 60.0,
    ) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        self._told = 0  # answers of `on_main` so far
        self._verdict: str | None = None
        if store is not None:
            ended = threading.Event()
            own = store.clone()  # type: ignore[attr-defined]  # not held up by another's wait
            watching = threading.Thread(target=self._watch, args=(own, ended), daemon=True)
            watching.start()
            # A thread inside the store would abort the interpreter that ends without it.
            atexit.register(watching.join, 1.0)
            atexit.register(ended.set)

    @classmethod
    def start(cls, device: str = "cpu", *, timeout: float) -> "World":
        """Meets the other processes, or stands alone where torchrun did not start this one.

        Args:
            device: "cpu" or "cuda"; one process for each GPU.
            timeout: seconds to wait for the others here, and in a collective of all.

        Raises:
            ValueError: there are more processes than GPUs, or no address to meet at.
            PeerLost: they have not met there.
        """
        if processes() == 1:
            return cls()
        limit = timedelta(seconds=timeout)
        if device == "cuda":
            local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
            if local > gpus:
                raise ValueError(
                    f"device: got {local} process(es) on a machine with {gpus} GPU(s), expected "
                    "one GPU for each"
                )
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            keys, rank, size = next(dist.rendezvous("env://", timeout=limit))
            # torchrun may start everything again, with the store that it has.
            keys = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), keys)
            _meet(keys, rank, size, timeout)
            dist.init_process_group(
                BACKENDS[device],
                store=dist.PrefixStore("group", keys),
                rank=rank,
                world_size=size,
                timeout=limit,
            )
        except RuntimeError as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = " ".join(str(error).split())
            raise PeerLost(
                f"rank {own_rank()} has not met the others of {processes()} process(es) at {place} "
                f"(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT): {reason}"
            ) from error
        return cls(dist.PrefixStore("world", keys), rank, size, timeout=timeout)

    @property
    def main(self) -> bool:
        """Is this the process that writes files and talks to the user?"""
        return self.rank == 0

    def on_main(self, work: Callable[[], T], ending: Callable[[], bool] = lambda: False) -> T:
        """What `work` returns on rank 0, for every process; plain values that JSON holds.

        The others wait as long as rank 0 lives, so that it may take longer than any collective may.

        Args:
            work: done by rank 0.
            ending: whether this process was told to end, as torchrun tells the others of a dead
                one. It then waits no longer than a living rank 0 can be silent.

        Raises:
            MainFailed: `work` failed on rank 0, which raises its own error.
            PeerLost: rank 0 is gone, or hangs.
        """
        if self.store is None:
            return json.loads(json.dumps(work()))
        key = f"main/{self._told}"
        self._told += 1
        if self.main:
            told = _FAILED
            try:
                told = json.dumps(work())
            finally:
                self.store.set(key, told)
                if told == _FAILED:
                    self._part()
        else:
            try:
                living = self._wait_for_main(self.store, key, ending)
                told = self.store.get(key).decode() if living else ""
            except RuntimeError as error:
                raise PeerLost(f"lost rank 0, waited for by rank {self.rank}: {error}") from error
            if not living:
                raise PeerLost(self.blame("main", [0]))
            if told == _FAILED:
                self._part()
                raise MainFailed
        return json.loads(told)

    def _wait_for_main(self, store: dist.Store, key: str, ending: Callable[[], bool]) -> bool:
        """Until rank 0 has told; False where it has given no sign of life meanwhile."""
        beats, heard = 0, time.monotonic()
        while not store.check([key]):
            counted = store.add("beats", 0)
            if counted != beats:
                beats, heard = counted, time.monotonic()
            if time.monotonic() - heard > (_ANSWER_SECONDS if ending() else self.timeout):
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def blame(self, axis: str, peers: list[int]) -> str:
        """Which process was lost, after a collective with `peers` along `axis` has failed.

        The first to ask waits for the answers of all, which threads give whatever their processes
        do; the others hear its verdict. So all name the same process, also those who only lost a
        peer that had given up. Rank 0 waits until they have heard it, since it may keep the store.
        Never raises, and takes 4 s at most.
        """
        # Not in this thread: a store that hangs has no time limit.
        if self._verdict is None:
            asking = threading.Thread(target=self._ask, args=(axis, peers), daemon=True)
            asking.start()
            asking.join(_ANSWER_SECONDS + _HEARING_SECONDS)
        if self.main:
            waiting = threading.Thread(target=self._wait_for_hearers, daemon=True)
            waiting.start()
            waiting.join(_HEARING_SECONDS)
        told = self._verdict or f"lost one of rank(s) {peers} on axis {axis}"
        return f"{told}; this is rank {self.rank}"

    def _ask(self, axis: str, peers: list[int]) -> None:
        if self.store is None:
            return
        until = time.monotonic() + _ANSWER_SECONDS + _HEARING_SECONDS
        with contextlib.suppress(RuntimeError):  # the store may be what was lost
            number = self.store.add("reports", 1)
            self.store.set(f"report/{number}", json.dumps([self.rank, axis, peers]))
            if number == 1:
                self.store.set("verdict", self._judge(self.store))
        while self._verdict is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS / 2)

    def _wait_for_hearers(self) -> None:
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            for rank in range(self.size):
                while self.store.check([f"living/{rank}"]) and not self.store.check(
                    [f"heard/{rank}"]
                ):
                    time.sleep(_POLL_SECONDS / 2)

    def _judge(self, store: dist.Store) -> str:
        silent, until = set(range(self.size)), time.monotonic() + _ANSWER_SECONDS
        while silent and time.monotonic() < until:
            time.sleep(_POLL_SECONDS / 2)
            silent = {rank for rank in silent if not store.check([f"living/{rank}"])}
        keys = [f"report/{number + 1}" for number in range(store.add("reports", 0))]
        reports = [json.loads(store.get(key)) for key in keys if store.check([key])]
        rank, axis, peers = reports[0]
        if not silent:
            return f"no process is lost: axis {axis} failed first, on rank {rank} with {peers}"
        axes = [axis for _, axis, peers in reports if silent & set(peers)]
        where = f"on axis {axes[0]}" if axes else f"noticed on axis {axis}"
        return f"lost rank {', '.join(map(str, sorted(silent)))} {where} (it died or hangs)"

    def _watch(self, store: dist.Store, ended: threading.Event) -> None:
        """A thread's work: tell at the first report that this process lives; hear the verdict.

        Rank 0 tells all the time, since others may wait for it.
        """
        with contextlib.suppress(RuntimeError):  # the store ends with the run
            while not store.check(["report/1"]):
                if self.main:
                    store.add("beats", 1)
                if ended.wait(_POLL_SECONDS):
                    return
            store.set(f"living/{self.rank}", "")
            while not store.check(["verdict"]):
                if ended.wait(_POLL_SECONDS):
                    return
            self._verdict = store.get("verdict").decode()
            store.set(f"heard/{self.rank}", "")

    def close(self) -> None:
        """Leaves the others, after work that went well; a process that failed just ends."""
        if self.store is not None:
            self._part()
            dist.destroy_process_group()

    def _part(self) -> None:
        """Rank 0 goes last, since it may keep the store."""
        assert self.store is not None
        gone, until = self.store.add("gone", 1), time.monotonic() + _PARTING_SECONDS
        while self.main and gone < self.size and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            gone = self.store.add("gone", 0)
