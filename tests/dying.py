"""Processes that are killed, forked from one that has imported everything already."""

import importlib
import itertools
import os
import signal
import sys
from pathlib import Path

from ranks import CONTEXT

from agentic import episodes


def start(function, *arguments):
    """A process of its own group that calls a function at the top of a module."""
    process = CONTEXT.Process(target=_own_group, args=(function, arguments))
    process.start()
    return process


def run(function, *arguments, timeout=200):
    """The exit code of such a process; what is left of its group is killed."""
    process = start(function, *arguments)
    process.join(timeout)
    alive = process.exitcode is None
    end(process)
    assert not alive, f"not ended in {timeout} s"
    return process.exitcode


def end(process):
    """Kills the group."""
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _own_group(function, arguments):
    os.setsid()
    function(*arguments)


def command(place, name, settings, at=None):
    """`agentic-<name>` in the folder `place`, with its output in `<place>/output`.

    It is killed at its write number `at`, after a line on that in `<place>/deaths`.
    """
    os.chdir(place)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ["COLUMNS"] = "100"
    sys.argv = [f"agentic-{name}", *settings]
    if at is not None:
        _die_at(at)
    importlib.import_module(f"agentic.{name}").main()


def _die_at(at):
    """Counts the moments around everything that is written whole or not at all."""
    moments = itertools.count(1)
    fsync, replace = os.fsync, os.replace

    def moment(what, path):
        if next(moments) == at:
            with open("deaths", "a") as deaths:
                deaths.write(f"{what} {Path(path).relative_to(Path.cwd())}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def synced(file):
        descriptor = file if isinstance(file, int) else file.fileno()
        moment("before fsync of", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(file)

    def replaced(old, new):
        moment("before replace of", Path(new).absolute())
        replace(old, new)
        moment("after replace of", Path(new).absolute())

    class HalfWritten:
        """A file whose every write has a moment in its middle."""

        def __init__(self, path, mode, **more):
            self.file = open(path, mode, **more)
            self.path = Path(path).absolute()

        def write(self, content):
            half = len(content) // 2
            self.file.write(content[:half])
            self.file.flush()
            moment("in the middle of", self.path)
            self.file.write(content[half:])

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    os.fsync, os.replace = synced, replaced
    episodes.open = HalfWritten
