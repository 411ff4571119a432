"""Where one algorithm's episode files lie: ExoRL's buffer folder, or its zip as downloaded."""

import functools
import io
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentic.archive import open_zip, read_member
from agentic.episodes import FILE_NAME, buffer_dir, most_bytes
from envs import domain_tasks

_LIST_BYTES = 2**24  # of a zip's members: 40,000, ExoRL's most, take 4 MB


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One episode's file, and what tells whether it has changed."""

    name: str  # without folders
    index: int
    steps: int  # as the name says
    size: int  # bytes
    stamp: int  # nanoseconds of the last modification; in a zip the zip's


@dataclass(frozen=True, kw_only=True)
class Source:
    """The npz files of one exploration algorithm, by index; other names are left alone."""

    domain: str
    algorithm: str
    place: Path  # a folder or a zip
    files: tuple[SourceFile, ...]

    def path(self, file: SourceFile) -> str:
        """What messages call the file."""
        return f"{self.place}/{file.name}"

    @contextmanager
    def opened(self) -> Iterator[Callable[[SourceFile], BinaryIO]]:
        """Yields what opens a file.

        Raises:
            OSError: the place cannot be read; the function yielded raises it for one file, and
                ValueError for a damaged member of a zip.
        """
        if self.place.is_dir():
            yield lambda file: open(self.place / file.name, "rb")
        else:
            archive = _archive(self.place, self.place.stat().st_mtime_ns)
            yield lambda file: self._member(archive, file)

    def _member(self, archive: zipfile.ZipFile, file: SourceFile) -> BinaryIO:
        most = most_bytes(domain_tasks(self.domain)[0])
        try:
            info = archive.getinfo(f"buffer/{file.name}")
            return io.BytesIO(read_member(archive, info, most))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{self.path(file)}: damaged in the zip ({error})") from error


def find_source(data_dir: Path, domain: str, algorithm: str) -> Source | None:
    """The algorithm's `buffer` folder, else its `<algorithm>.zip` as published, else None.

    A folder without episodes gives way to the zip.

    Raises:
        ValueError: the zip cannot be read, or holds no episodes.
    """
    folder = buffer_dir(data_dir, domain, algorithm)
    if folder.is_dir():
        paths = (path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name))
        found = [file for file in map(_in_folder, paths) if file is not None]
        if found:
            return _source(domain, algorithm, folder, found)
    place = archive_path(data_dir, domain, algorithm)
    if not place.is_file():
        return None
    stamp = place.stat().st_mtime_ns
    try:
        infos = {info.filename: info for info in _archive(place, stamp).infolist()}
    except (OSError, ValueError) as error:
        raise ValueError(f"{place}: not a readable zip ({error})") from error
    found = [_in_zip(info, stamp) for name, info in infos.items() if _is_member(name)]
    if not found:
        raise ValueError(
            f"{place}: got a zip without any buffer/<name>_<index>_<length>.npz, expected ExoRL's; "
            "was the download cut off?"
        )
    return _source(domain, algorithm, place, found)


def check_level(data_dir: Path) -> None:
    """Refuses what lies inside the data: a domain's folder, or an algorithm's.

    Raises:
        ValueError: it is one; says what is expected.
    """
    if (data_dir / "buffer").is_dir():
        expected = data_dir / ".." / ".."
    elif any(data_dir.glob("*/buffer")):
        expected = data_dir / ".."
    else:
        return
    raise ValueError(
        f"data_dir: got {data_dir}, a folder inside the data, expected {expected.resolve()}, which "
        "holds <domain>/<algorithm>/buffer"
    )


def archive_path(data_dir: Path, domain: str, algorithm: str) -> Path:
    """Where ExoRL's published zip belongs."""
    return data_dir / domain / f"{algorithm}.zip"


@functools.lru_cache(maxsize=1)
def _archive(place: Path, stamp: int) -> zipfile.ZipFile:
    """The zip as it was modified at `stamp`; its directory of 40,000 members is read once."""
    return open_zip(open(place, "rb"), _LIST_BYTES)


def find_algorithms(data_dir: Path, domain: str) -> list[str]:
    """The algorithms of which `data_dir` holds a buffer or a zip."""
    folder = data_dir / domain
    if not folder.is_dir():
        return []
    names = {path.stem for path in folder.glob("*.zip")}
    return sorted(names | {path.parent.name for path in folder.glob("*/buffer")})


def file_order(name: str) -> tuple[int, str]:
    """Sorts files in the order of collection: by number, then by name."""
    return _numbers(name)["index"], name


def _source(domain: str, algorithm: str, place: Path, found: list[SourceFile]) -> Source:
    files = tuple(sorted(found, key=lambda file: file_order(file.name)))
    return Source(domain=domain, algorithm=algorithm, place=place, files=files)


def _numbers(name: str) -> dict[str, int]:
    match = FILE_NAME.fullmatch(name)
    assert match, "only such names are asked for"
    return {"index": int(match[1]), "steps": int(match[2])}


def _in_folder(path: Path) -> SourceFile | None:
    """None for what is no file; one that cannot be looked at is told when it is read."""
    size, stamp = -1, -1
    try:
        status = path.stat()
    except OSError:
        pass
    else:
        if not stat.S_ISREG(status.st_mode):
            return None
        size, stamp = status.st_size, status.st_mtime_ns
    return SourceFile(name=path.name, size=size, stamp=stamp, **_numbers(path.name))


def _is_member(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == "buffer" and FILE_NAME.fullmatch(file) is not None


def _in_zip(info: zipfile.ZipInfo, stamp: int) -> SourceFile:
    name = info.filename.rpartition("/")[2]
    return SourceFile(name=name, size=info.file_size, stamp=stamp, **_numbers(name))
