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
    """Rows of one block.

    Attributes:
        query: queries that pass attention together.
        key: keys of one call in attention's backward pass, beyond the block's own; forward, a
            kernel takes all keys and cuts them itself.
        rows: of the projections and the feed-forward.
    """

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
        self,
        size: LayerSize,
        *,
        batch: int,
        sequence: int,
        element_bytes: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> BlockSizes:
        """The rule, shown by `benchmarks/tune_blocks.py`.

        On a CPU, 2048 queries and keys: PyTorch's kernel takes its largest tiles from 768 queries
        on, and the keys' gradients, which are added once for each block of queries, then cost 2 %
        of it. Feed-forward rows: as many as keep the hidden activations in a core's own cache, but
        no fewer than a matrix product needs to be fast. A GPU needs more rows to be filled; that
        part of the rule has not been measured.
        """
        query, key, rows = 4096, 16384, 4096
        if device.type != "cuda":
            hidden_row = batch * size.feed_forward * element_bytes
            query, key, rows = 2048, 2048, _power_of_two(_cache_bytes() // hidden_row, 256, 1024)
        chosen = {"query": query, "key": key, "rows": rows}
        return BlockSizes(
            **{name: getattr(self, name) or min(chosen[name], sequence) for name in chosen}
        )


def _cache_bytes() -> int:
    """Bytes of the last cache level that a core has to itself, as far as the system tells."""
    names = getattr(os, "sysconf_names", {})  # not on every system
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
