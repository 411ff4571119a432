"""What a learner keeps beside the episodes, so that an interrupted collection goes on learning."""

import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentic import plain
from agentic.episodes import episode_files, sweep, write_atomically

FORMAT = "agentic-learner"
VERSION = 1


def _checksum(content: bytes) -> bytes:
    """CRC-32, at the end of the file."""
    return zlib.crc32(content).to_bytes(4, "little")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One worker's learner in a recipe's folder, and its share of the episodes there.

    Attributes:
        folder: <data_dir>/<domain>/<recipe>, the buffer's parent.
        worker: which of `workers` learners this is.
        workers: how many share the folder.
    """

    folder: Path
    worker: int = 0
    workers: int = 1

    @property
    def path(self) -> Path:
        """The learner's file."""
        return self.folder / f"learner_{self.worker}.pt"

    def episodes(self) -> list[Path]:
        """This worker's share of the buffer, by index.

        With several workers not quite the episodes that it made: their files come in the order in
        which they finish. Learning from the others' experience as well does no harm.
        """
        return episode_files(self.folder / "buffer")[self.worker :: self.workers]

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the file by a dict of plain types and tensors, whole or not at all."""
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, "version": VERSION, **state}, buffer)
        content = buffer.getvalue()
        write_atomically(self.path, content + _checksum(content))

    def load(self) -> dict[str, Any]:
        """The last state saved; nothing but plain types and tensors is ever unpickled.

        Raises:
            ValueError: there is none, or it is damaged or of another version; names the file.
        """
        if not self.path.is_file():
            raise ValueError(f"{self.path} is missing")
        content = self.path.read_bytes()
        content, checksum = content[:-4], content[-4:]
        if _checksum(content) != checksum:
            raise ValueError(f"{self.path} is damaged")
        try:
            state = plain.load(content)
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged ({error})") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self.path} is not a learner")
        if (state.get("format"), state.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{self.path} is not a learner of this version")
        return state

    def sweep(self) -> None:
        """Removes what a process that was killed while it saved has left."""
        sweep(self.folder, self.path.name)
