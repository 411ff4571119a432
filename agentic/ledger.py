"""What an ingest has done and has still to do: the index of a flat store while it changes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentic.flat import Index, Rejected, write_index
from agentic.sources import SourceFile

_UNUSED = ("", 0, 0, 0)  # name, size, stamp and checksum of a row out of use


def missing(index: Index, wanted: Sequence[SourceFile]) -> list[SourceFile]:
    """The wanted files that the index does not know as they are now."""
    known = set(zip(index.names, index.sizes, index.stamps, strict=True))
    known |= {(r.name, r.size, r.stamp) for r in index.rejected}
    return [file for file in wanted if (file.name, file.size, file.stamp) not in known]


class Ledger:
    """The rows of a store and the files that were refused.

    Args:
        index: as it is on disk.
        todo: files about to be read: what the index says about them holds no longer.
    """

    def __init__(self, index: Index, todo: Sequence[SourceFile]) -> None:
        changing = {file.name for file in todo}
        self._index = index
        entries = zip(index.names, index.sizes, index.stamps, index.checksums, strict=True)
        self._rows = [_UNUSED if entry[0] in changing else entry for entry in entries]
        self._rejected = {r.name: r for r in index.rejected if r.name not in changing}

    def enter(self, file: SourceFile, row: int, checksum: int) -> None:
        """The file's episode is in this row."""
        self._rows += [_UNUSED] * (row + 1 - len(self._rows))
        self._rows[row] = (file.name, file.size, file.stamp, checksum)

    def reject(self, file: SourceFile, reason: str, *, lasting: bool) -> None:
        """The file holds no sound episode; a reason that may pass has it read again next time."""
        self._rejected[file.name] = Rejected(
            name=file.name, size=file.size, stamp=file.stamp if lasting else -1, reason=reason
        )

    def save(self, path: Path, *, finished: bool = False, **changes: str | None) -> Index:
        """Writes the index to the store's folder; the rows that it names must be on disk."""
        names, sizes, stamps, checksums = (
            zip(*self._rows, strict=True) if self._rows else ((), (), (), ())
        )
        index = replace(
            self._index,
            finished=finished,
            names=names,
            sizes=sizes,
            stamps=stamps,
            checksums=checksums,
            rejected=tuple(self._rejected.values()),
            **changes,  # type: ignore[arg-type]
        )
        write_index(path, index)
        return index
