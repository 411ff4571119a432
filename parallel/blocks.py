"""Block sizes of the blockwise layer, and functions of single rows computed in blocks."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor

from parallel.sublayers import LayerSize


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Rows of one query block, of one key block, and of one feed-forward block."""

    query: int
    key: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """Block sizes as the user fixes them; None: chosen by the rule.

    Raises:
        ValueError: a size below 1.
    """

    query: int | None = None
    key: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for field in ("query", "key", "rows"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"block_{field}: got {value}, expected a positive integer or null")

    def sizes(
        self, size: LayerSize, *, batch: int, sequence: int, element_bytes: int
    ) -> BlockSizes:
        """The rule, shown by `benchmarks/tune_blocks.py`."""
        rows = _power_of_two(
            _cache_bytes() // (batch * size.feed_forward * element_bytes), low=128, high=1024
        )
        query = 2048 if sequence >= 32768 else 1024
        return BlockSizes(query=self.query or query, key=self.key or 2048, rows=self.rows or rows)


def _cache_bytes() -> int:
    """Bytes of the last cache level that a core has to itself, as far as the system tells."""
    names = os.sysconf_names
    found = os.sysconf("SC_LEVEL2_CACHE_SIZE") if "SC_LEVEL2_CACHE_SIZE" in names else 0
    return found if found > 0 else 2**20


def _power_of_two(n: int, low: int, high: int) -> int:
    """The largest power of two up to n, within limits."""
    return min(max(1 << max(n, 1).bit_length() - 1, low), high)


def cut(rows: range, size: int) -> Iterator[range]:
    """Consecutive parts of at most `size`."""
    for first in range(rows.start, rows.stop, size):
        yield range(first, min(first + size, rows.stop))


def in_blocks(function: Callable[[Tensor], Tensor], x_BSD: Tensor, rows: int) -> Tensor:
    """`function` of every row of x, block by block; keeps nothing but x for the backward pass."""
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in x_BSD.split(rows, dim=1)], dim=1)
    checkpoint = torch.utils.checkpoint.checkpoint
    parts = [checkpoint(function, part, use_reentrant=False) for part in x_BSD.split(rows, dim=1)]
    return torch.cat(parts, dim=1)
