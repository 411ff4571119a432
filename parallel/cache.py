"""Key/value cache of one attention layer: static buffers and a position."""

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 512  # most tokens of a tile on a CPU


class KVCache:
    """Keys and values of the tokens seen so far, in tiles of consecutive tokens.

    On a CPU a tile's values are stored (K, C), so that both products of attention run along
    contiguous memory (`parallel.decode`). On a GPU one tile holds everything, as kernels take it.

    Args:
        batch: B.
        heads: H.
        capacity: most tokens it can hold.
        head_width: K.
        device, dtype: of the buffers.

    Attributes:
        key_PNCK, value_PNCK: P tiles of C tokens, for N = B·H; values of tokens that are not there
            are zero.
    """

    def __init__(
        self,
        *,
        batch: int,
        heads: int,
        capacity: int,
        head_width: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.batch = batch
        self.heads = heads
        self.capacity = capacity
        self.length = 0
        cpu = device.type == "cpu"
        tiles = max(-(-capacity // TILE), 1) if cpu else 1
        shape = (tiles, batch * heads, -(-capacity // tiles), head_width)
        self.key_PNCK = torch.empty(shape, device=device, dtype=dtype)
        self.value_PNCK = torch.zeros_like(self.key_PNCK)
        if cpu:
            self.value_PNCK = self.value_PNCK.view(*shape[:2], shape[3], shape[2]).transpose(2, 3)

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.key_PNCK.nbytes + self.value_PNCK.nbytes

    @property
    def tile(self) -> int:
        """C, the tokens of a tile."""
        return self.key_PNCK.shape[2]

    def append(self, key_BHSK: Tensor, value_BHSK: Tensor) -> None:
        """Adds new tokens.

        Raises:
            ValueError: more tokens than the capacity.
        """
        end = self.length + key_BHSK.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"cache: got {end} tokens, expected at most its capacity {self.capacity}"
            )
        for buffer_PNCK, new_BHSK in ((self.key_PNCK, key_BHSK), (self.value_PNCK, value_BHSK)):
            new_NSK = new_BHSK.flatten(0, 1)
            for tile, inside, tokens in self._spans(self.length, end):
                buffer_PNCK[tile, :, inside] = new_NSK[:, tokens]
        self.length = end

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values (B, H, end - first, K) of these tokens.

        Raises:
            ValueError: tokens that are not there.
        """
        if not 0 <= first <= end <= self.length:
            raise ValueError(
                f"cache: got tokens {first} to {end}, expected a range in [0, {self.length}]"
            )
        key_BHSK, value_BHSK = (self._read(b, first, end) for b in (self.key_PNCK, self.value_PNCK))
        return key_BHSK, value_BHSK

    def drop(self, tokens: int) -> None:
        """Forgets the oldest tokens; the others move to the front.

        Raises:
            ValueError: more tokens than there are.
        """
        if not 0 <= tokens <= self.length:
            raise ValueError(f"cache: got {tokens} tokens to drop, expected 0 to {self.length}")
        end, self.length = self.length, 0
        for first in range(tokens, end, self.tile):  # a copy at a time, never ahead of the source
            parts = (first, min(first + self.tile, end))
            self.append(*(self._read(b, *parts) for b in (self.key_PNCK, self.value_PNCK)))
        for tile, inside, _ in self._spans(self.length, end):
            self.value_PNCK[tile, :, inside] = 0

    def _read(self, buffer_PNCK: Tensor, first: int, end: int) -> Tensor:
        _, N, _, K = buffer_PNCK.shape
        out_NSK = buffer_PNCK.new_empty(N, end - first, K)
        for tile, inside, tokens in self._spans(first, end):
            out_NSK[:, tokens] = buffer_PNCK[tile, :, inside]
        return out_NSK.unflatten(0, (self.batch, self.heads))

    def _spans(self, first: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """The tiles that hold these tokens: tile, places inside it, places from `first` on."""
        at = first
        while at < end:
            tile, begin = divmod(at, self.tile)
            count = min(self.tile - begin, end - at)
            yield tile, slice(begin, begin + count), slice(at - first, at - first + count)
            at += count
