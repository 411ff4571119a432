"""Where one algorithm's episode files lie: ExoRL's buffer folder, or its zip as downloaded."""

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentic.episodes import FILE_NAME, buffer_dir


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One episode's file, and what tells whether it has changed."""

    name: str  # without folders
    index: int
    steps: int  # as the name says
    size: int  # bytes
    stamp: int  # nanoseconds of the last modification; in a zip the member's CRC


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
        """Yields what opens a file; a zip's directory is read once for all of them.

        Raises:
            OSError, zipfile.BadZipFile: the place cannot be read; the function yielded raises the
                same, and zlib.error, for one file.
        """
        if self.place.is_dir():
            yield lambda file: open(self.place / file.name, "rb")
        else:
            with zipfile.ZipFile(self.place) as archive:
                yield lambda file: io.BytesIO(archive.read(f"buffer/{file.name}"))


def find_source(data_dir: Path, domain: str, algorithm: str) -> Source | None:
    """The algorithm's `buffer` folder, else its `<algorithm>.zip` as published, else None.

    Raises:
        ValueError: the zip cannot be read.
    """
    folder = buffer_dir(data_dir, domain, algorithm)
    if folder.is_dir():
        found = [_in_folder(path) for path in folder.iterdir() if FILE_NAME.fullmatch(path.name)]
        return _source(domain, algorithm, folder, found)
    archive = data_dir / domain / f"{algorithm}.zip"
    if archive.is_file():
        try:
            with zipfile.ZipFile(archive) as opened:
                found = [_in_zip(info) for info in opened.infolist() if _is_member(info.filename)]
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(f"{archive}: not a readable zip ({error})") from error
        return _source(domain, algorithm, archive, found)
    return None


def find_algorithms(data_dir: Path, domain: str) -> list[str]:
    """The algorithms of which `data_dir` holds a buffer, a zip or an ingested store."""
    folder = data_dir / domain
    if not folder.is_dir():
        return []
    names = {path.stem for path in folder.glob("*.zip")}
    names |= {path.parent.name for kind in ("buffer", "store") for path in folder.glob(f"*/{kind}")}
    return sorted(names)


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


def _in_folder(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(
        name=path.name, size=status.st_size, stamp=status.st_mtime_ns, **_numbers(path.name)
    )


def _is_member(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == "buffer" and FILE_NAME.fullmatch(file) is not None


def _in_zip(info: zipfile.ZipInfo) -> SourceFile:
    name = info.filename.rpartition("/")[2]
    return SourceFile(name=name, size=info.file_size, stamp=info.CRC, **_numbers(name))
