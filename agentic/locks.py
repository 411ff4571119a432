"""One process at a time in a folder."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentic.within import unfollowed


@contextmanager
def locked(folder: Path, taken: Callable[[], None]) -> Iterator[None]:
    """Holds an existing folder for this process; the lock goes with the process.

    Args:
        folder: gets a file `.lock`.
        taken: is called when another process holds it, before waiting for that; may raise.

    Raises:
        OSError: the folder cannot be written.
    """
    with open(folder / ".lock", "w", opener=unfollowed) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
