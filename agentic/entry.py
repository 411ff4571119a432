"""What every command shares: hydra in front, one clear line for the user when something is off."""

import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import hydra
import torch.distributed as dist
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from agentic.foreign_config import guard
from agentic.interpolation import plain
from agentic.memory import bound_kernels, ran_out, spell_failure
from agentic.wording import one_line
from envs import quiet_simulator
from parallel.world import MainFailed, PeerLost, own_rank, processes

_GRACE_SECONDS = 3
_SILENT_SECONDS = 10


def run(
    command: str,
    config_name: str,
    task: Callable[[dict[str, Any]], None],
    *,
    spread: bool = False,
) -> None:
    """Runs `task` on the composed configuration, as the command line `command`.

    Only what is `spread` may run in several processes of torchrun.

    A ValueError, an OSError or a configuration that hydra refuses ends the process with exit
    code 2 and one line on standard error. Programming errors keep their traceback. Ctrl-C and
    SIGTERM end it with 130 and 143, after everything has been closed. Where memory ran out there is
    one line as well.

    Of several processes, only rank 0 tells what all have found before they met; later each tells
    its own, with its rank in front. A process that ends because of another one has exit code 3:
    with one line that names a lost process, with none where rank 0 has failed and says so itself.
    SIGTERM waits 3 s, since torchrun sends it to those who can still name the lost process.
    """
    # Without it hydra prints its own multi-line report and exits before a caller can word it.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    bound_kernels()
    quiet_simulator()
    signal.signal(signal.SIGTERM, _terminate if processes() == 1 else _terminate_soon)

    def call(config: DictConfig) -> None:
        # Told here as well, since hydra would add lines of its own to an exception of the task.
        with _told(command):
            task(plain(config))

    with _told(command):
        if processes() > 1 and not spread:
            raise ValueError(
                f"torchrun: got {processes()} processes, expected {command} in one; WORLD_SIZE is "
                "set"
            )
        guard(sys.argv[1:])
        hydra.main(version_base="1.3", config_path="pkg://configs", config_name=config_name)(call)()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as tidily as Ctrl-C does."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _terminate_soon(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, _terminate)
    signal.alarm(_GRACE_SECONDS)


@contextmanager
def _told(command: str) -> Iterator[None]:
    """Ends the process with one line for errors that are the user's to mend."""
    try:
        yield
        sys.stdout.flush()
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        if isinstance(error, BrokenPipeError) and _unread():
            sys.exit(128 + signal.SIGPIPE)
        _end(2, f"{command}: error: {one_line(error)}", by_all=dist.is_initialized())
    except PeerLost as error:
        _end(3, f"{command}: error: {one_line(error)}", by_all=True)
    except MainFailed:
        _end(3, "")
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        _end(2, f"{command}: error: {spell_failure(error)}", by_all=dist.is_initialized())
    except Terminated as error:
        _end(128 + signal.SIGTERM, "; ".join([f"{command}: terminated", *_notes(error)]))
    except KeyboardInterrupt as error:
        _end(128 + signal.SIGINT, "; ".join([f"{command}: interrupted", *_notes(error)]))


@contextmanager
def going_on(command_line: str) -> Iterator[None]:
    """Has an interruption say which command goes on with the work."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(f"go on with {command_line}")
        raise


def same_command(command: str) -> str:
    """The command line that was given, for a shell."""
    return shlex.join([command, *sys.argv[1:]])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _unread() -> bool:
    """Whether the reader of the output has seen enough, as `| head` has; the rest goes nowhere."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _end(code: int, told: str, *, by_all: bool = False) -> NoReturn:
    """Ends the process with a line of every rank, or of rank 0."""
    if processes() == 1:
        print(told, file=sys.stderr)
        sys.exit(code)
    if own_rank() > 0 and not by_all:
        if code > 128:
            told = ""
        else:
            # The first to end makes torchrun end the others, and rank 0 still has to say why.
            # This one goes on only where rank 0 has found nothing wrong.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_SILENT_SECONDS)
            by_all = True
    if told:
        print(f"[rank {own_rank()}] {told}" if by_all else told, file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Everything is closed but the groups, and those with a lost member can hang.
    os._exit(code)
