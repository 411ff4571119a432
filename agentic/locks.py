"""One process at a time in a folder."""

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentic.console import say
from agentic.within import unfollowed

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(folder: Path, taken: Callable[[], None]) -> Iterator[bool]:
    """Holds an existing folder for this process; the lock goes with the process.

    Yields whether it is held: a file system without locks keeps nobody out, which is said.

    Args:
        folder: gets a file `.lock`.
        taken: is called when another process holds it, before waiting for that; may raise.

    Raises:
        OSError: the folder cannot be written.
    """
    with open(folder / LOCK, "w", opener=unfollowed) as file:
        try:
            _hold(file, taken)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(f"{folder}: no locks on this file system ({error.strerror}), start nothing twice")
            held = False
        else:
            held = True
        yield held


def _hold(file: IO[str], taken: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        taken()
        fcntl.flock(file, fcntl.LOCK_EX)
