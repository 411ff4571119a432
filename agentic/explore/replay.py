"""What off-policy learners learn from: the last transitions, one row of numbers each.

Axes: E environments, U updates in a row, B batch, W all numbers of a transition.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Replay:
    """Up to `capacity` rows (W,) float32; a full replay forgets the oldest.

    Args:
        capacity: rows.
        widths: of the parts of a row, which add up to W; `Tensor.split` takes a batch apart by
            them.
    """

    def __init__(self, capacity: int, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        # One tensor, so that a batch is one gather. The system hands out memory as rows are
        # written.
        self.rows = torch.empty(capacity, sum(self.widths))
        self.stored = 0  # rows ever added, forgotten ones included

    def add(self, rows: Tensor) -> None:
        """Adds rows (E, W), no more than the capacity at once."""
        assert len(rows) <= len(self.rows)
        self.rows[(self.stored + torch.arange(len(rows))) % len(self.rows)] = rows
        self.stored += len(rows)

    def draw(self, updates: int, batch: int, generator: torch.Generator) -> Tensor:
        """Indices (U, B) of rows, uniform and with replacement."""
        filled = min(self.stored, len(self.rows))
        return torch.randint(filled, (updates, batch), generator=generator)
