"""Nothing is written where a link in a folder from elsewhere leads."""

import os
from pathlib import Path


def within(path: Path, folder: Path, field: str) -> Path:
    """The path, which lies in the folder with all links followed.

    Args:
        path: below `folder` by its name; need not exist.
        folder: may be a link itself, or below one.
        field: the setting that says where the folder is, for the message.

    Raises:
        ValueError: a link between the two leads out of the folder.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"{field}: got {folder}, from where {path} leads to {real} by a link, expected a "
            "folder to write in"
        )
    return path


def unfollowed(path: str, flags: int) -> int:
    """An `opener` of `open` for files to write: a link is refused."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
