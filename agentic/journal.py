"""Finished trials on disk, so that an interrupted evaluation goes on behind the last of them."""

import io
import itertools
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from agentic.episodes import write_atomically

FOLDER = "unfinished"
SETTINGS = "settings.json"


class Journal:
    """The folder `<output>/unfinished` of one evaluation.

    Args:
        output: where the evaluation's results will lie.
        settings: all that they depend on, in plain types.

    Raises:
        ValueError: there is an unfinished evaluation with other settings.
    """

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.directory = output / FOLDER
        note = self.directory / SETTINGS
        if note.exists() and not continues(output, settings):
            raise ValueError(
                f"output: {output} holds an unfinished evaluation with other settings, expected "
                f"the same ones or another folder (deleting {self.directory} gives it up)"
            )
        if self.directory.exists() and not note.exists():  # left by an interrupted `close`
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(note, (json.dumps(settings, indent=1) + "\n").encode())

    def part(self, name: str) -> "Part":
        """One rollout's trials."""
        return Part(self.directory / name)

    def close(self) -> None:
        """The results are written: none of this is needed any more."""
        # First: trials without their settings are nobody's, should this be interrupted.
        (self.directory / SETTINGS).unlink()
        shutil.rmtree(self.directory)


class Part:
    """The finished trials of one rollout, a file each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, trial: int, content: dict[str, Any]) -> None:
        """Writes a trial, whole or not at all."""
        self.directory.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_atomically(self._path(trial), buffer.getvalue())

    def kept(self) -> Iterator[dict[str, Any]]:
        """The trials so far, in order.

        Raises:
            ValueError: a file is damaged.
        """
        for trial in itertools.count():
            path = self._path(trial)
            if not path.exists():
                return
            try:
                # Mapped: keys and values are only read where they are needed.
                yield torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
                raise ValueError(
                    f"output: {path} is damaged ({type(error).__name__}), expected a finished "
                    "trial; deleting it has the trial run again"
                ) from error

    def _path(self, trial: int) -> Path:
        return self.directory / f"trial_{trial:03d}.pt"


def continues(output: Path, settings: dict[str, Any]) -> bool:
    """Whether `output` holds an unfinished evaluation with these settings."""
    try:
        before = json.loads((output / FOLDER / SETTINGS).read_text())
    except (OSError, ValueError):
        return False
    return before == json.loads(json.dumps(settings))
