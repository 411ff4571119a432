"""The checksum inside a checkpoint: SHA-256 of all that stands before it, as the zip's comment.

Whatever reads zip archives, `torch.load` among it, reads a sealed one as it read the bare one.
"""

import hashlib
import io
import re
from pathlib import Path

_MARK = b"sha256 "
_COMMENT = re.compile(_MARK + rb"[0-9a-f]{64}")
LENGTH = len(_MARK) + 64


class Damaged(ValueError):
    """Bytes are not those that were written."""


def sealed(archive: io.BytesIO) -> bytes:
    """A zip archive without a comment, with its checksum as the comment; made without a copy."""
    archive.seek(-2, io.SEEK_END)
    comment = archive.read()
    assert comment == b"\0\0", "the length of the comment ends an archive that has none"
    archive.seek(-2, io.SEEK_END)
    archive.write(LENGTH.to_bytes(2, "little"))
    digest = hashlib.sha256(archive.getbuffer()).hexdigest()
    archive.write(_MARK + digest.encode())
    return archive.getvalue()


def is_sealed(content: bytes) -> bool:
    """Whether the content ends with a checksum, which is right.

    Raises:
        Damaged: it is wrong.
    """
    if _COMMENT.fullmatch(content, max(0, len(content) - LENGTH)) is None:
        return False
    body = memoryview(content)[:-LENGTH]
    if hashlib.sha256(body).hexdigest().encode() != content[-64:]:
        raise Damaged("its checksum is another")
    return True


def digest_of(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
