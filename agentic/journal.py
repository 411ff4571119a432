"""Finished trials on disk, so that an interrupted evaluation goes on behind the last of them."""

import io
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from agentic import plain
from agentic.episodes import write_atomically
from agentic.texts import read_json
from agentic.within import within

FOLDER = "unfinished"
SETTINGS = "settings.json"


class Journal:
    """The folder `<output>/unfinished` of one evaluation.

    Args:
        output: where the evaluation's results will lie.
        settings: all that they depend on, in plain types.

    Raises:
        ValueError: there is an unfinished evaluation with other settings, or a link out of it.
    """

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.directory = within(output / FOLDER, output, "output")
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
        return Part(within(self.directory / name, self.directory, "output"))

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

    def kept(self) -> Iterator[Any]:
        """The trials so far, in order; what they hold is for the reader to check.

        Raises:
            ValueError: a file is damaged.
        """
        for trial in itertools.count():
            path = self._path(trial)
            if not path.exists():
                return
            try:
                # Read where it is asked for, and not kept: keys and values are large.
                yield plain.load(path.read_bytes())
            except (ValueError, OSError) as error:
                raise self.damaged(trial, str(error)) from error

    def damaged(self, trial: int, reason: str) -> ValueError:
        """What to say of a trial that is not what was written."""
        return ValueError(
            f"output: {self._path(trial)} is damaged ({reason}), expected a finished trial; "
            "deleting it has the trial run again"
        )

    def _path(self, trial: int) -> Path:
        return self.directory / f"trial_{trial:03d}.pt"


def continues(output: Path, settings: dict[str, Any]) -> bool:
    """Whether `output` holds an unfinished evaluation with these settings."""
    try:
        before = read_json(output / FOLDER / SETTINGS)
    except (OSError, ValueError):
        return False
    return before == json.loads(json.dumps(settings))
