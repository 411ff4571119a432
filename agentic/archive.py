"""Zips from elsewhere: what one says of itself is checked before anything of it is read."""

import io
import stat
import struct
import zipfile
from typing import BinaryIO

# An encrypted one cannot be read, and other methods than these inflate without a bound.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1  # of a member's flags


def open_zip(file: BinaryIO, most: int) -> zipfile.ZipFile:
    """Opens a zip whose members have plain names and can be read in bounded memory.

    Args:
        file: the zip; closed with the archive.
        most: bytes of its list of members, and of a read from it.

    Raises:
        ValueError: it is no such zip; names the member.
        OSError: the system cannot read it.
    """
    try:
        archive = _Zip(_Bounded(file, most))
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(str(error)) from error
    found: set[str] = set()
    for info in archive.infolist():
        if reason := _unfit(info, found):
            raise ValueError(f"member {info.filename[:100]!r} {reason}")
        found.add(info.filename)
    return archive


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """A member's content, inflated.

    Raises:
        ValueError: it is damaged, or declares more than `most` bytes; names the member.
        OSError: the system cannot read it.
    """
    if info.file_size > most:
        raise ValueError(
            f"member {info.filename} inflates to {info.file_size:,} bytes, expected at most "
            f"{most:,}"
        )
    try:
        return archive.read(info)
    except Exception as error:  # damage shows in zipfile, zlib and struct alike
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, and not of the content
        raise ValueError(f"member {info.filename} is damaged ({error})") from error


def _unfit(info: zipfile.ZipInfo, found: set[str]) -> str | None:
    """Why no honest zip of arrays has such a member."""
    name = info.filename
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        return "leads out of the zip"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "is a link"
    if name in found:
        return "is there twice"
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if info.compress_type not in _METHODS:
        return f"is compressed by method {info.compress_type}, expected deflate or none"
    return None


class _Zip(zipfile.ZipFile):
    """Closes its file as well."""

    def __init__(self, file: "_Bounded") -> None:
        super().__init__(file)
        self.file = file

    def close(self) -> None:
        super().close()
        if hasattr(self, "file"):  # not where it turned out to be no zip
            self.file.close()


class _Bounded(io.BufferedReader):
    """Hands out at most so many bytes at once: zipfile believes any length that a zip declares."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        super().__init__(file)  # type: ignore[arg-type]
        self.most = most

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = self.most + 1
        content = super().read(min(size, self.most + 1))
        if len(content) > self.most:
            raise ValueError(f"a part of it is longer than {self.most:,} bytes")
        return content

    def seek(self, target: int, whence: int = 0, /) -> int:
        if whence == 0 and not 0 <= target < 2**63:
            raise ValueError("a part of it lies outside the file")
        return super().seek(target, whence)
