"""Ctrl-C and SIGTERM, taken up where it suits the work."""

import signal
from types import FrameType
from typing import Any

from tqdm import tqdm


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag that loops read between two steps.

    Args:
        told: whether the user hears of it; several processes say it once.
    """

    def __init__(self, *, told: bool = True) -> None:
        self.told = told
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
        if self.told:
            tqdm.write(f"{self.signal.name}: saving and ending; once more to end without saving")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
