"""Which part of an algorithm's episodes to learn from: `rnd`, `rnd:first_1M`, `rnd:even_25%`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_PATTERN = re.compile(r"([^:/.][^:/]*)(?::(first|even)_(\d{1,12}(?:\.\d{1,12})?)([kM%]?))?")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "%": 0.01}
EXPECTED = (
    "<algorithm>, or <algorithm>:first_<amount> or <algorithm>:even_<amount> with an amount of "
    "steps (250000, 250k, 1M) or a share (25%)"
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Some of one algorithm's episodes, whole ones only.

    ExoRL's own training reads `first_1M`: files in the order of their numbers until they hold
    1,000,000 steps, the first tenth of a published run.
    """

    algorithm: str
    how: str = "all"  # all; first: the run's beginning; even: evenly spread over the run
    amount: float = 0.0  # steps, or a share
    share: bool = False  # what `amount` is

    @staticmethod
    def parse(text: str) -> "Selection":
        """Reads `text`.

        Raises:
            ValueError: it is not of the expected form, or selects nothing.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"algorithms: got {text!r}, expected {EXPECTED}")
        algorithm, how, amount, unit = match.groups()
        if how is None:
            return Selection(algorithm=algorithm)
        share = unit == "%"
        value = float(amount) * _UNITS[unit]
        if value <= 0 or (share and value > 1):
            raise ValueError(f"algorithms: got {text!r}, expected more than nothing, at most 100%")
        return Selection(algorithm=algorithm, how=how, amount=value, share=share)

    def take(self, episodes: Sequence[T], steps: int) -> list[T]:
        """The selected ones of `episodes`, which are in the order of the run and have `steps` each.

        At least one; all of them where the amount is larger.
        """
        if self.how == "all" or not episodes:
            return list(episodes)
        wanted = self.amount * len(episodes) if self.share else self.amount / steps
        count = min(max(1, round(wanted)), len(episodes))
        if self.how == "first":
            return list(episodes[:count])
        return [episodes[(2 * i + 1) * len(episodes) // (2 * count)] for i in range(count)]


def parse_all(texts: Sequence[str]) -> list[Selection]:
    """Reads a mixture.

    Raises:
        ValueError: it is empty, one is not of the expected form, or an algorithm comes twice.
    """
    selections = [Selection.parse(text) for text in texts]
    names = [selection.algorithm for selection in selections]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"algorithms: got {list(texts)}, expected each of them once, at least one")
    return selections
