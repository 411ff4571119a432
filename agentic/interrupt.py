"""Ctrl-C and SIGTERM, taken up where it suits the work."""

import signal
from types import FrameType
from typing import Any

from agentic.console import say


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag that loops read between two steps.

    Args:
        quiet: says nothing, as one of several processes that all get the signal.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._set)
        return self

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if not self.quiet:
            say(f"{self.signal.name}: saving and ending; once more to end without saving")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
