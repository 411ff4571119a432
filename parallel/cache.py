"""Key/value cache of one attention layer: a static buffer and a position."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the tokens seen so far.

    Args:
        batch: B.
        heads: H.
        capacity: most tokens it can hold.
        head_width: K.
        device, dtype: of the buffers.
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
        shape = (batch, heads, capacity, head_width)
        self.key_BHSK = torch.empty(shape, device=device, dtype=dtype)
        self.value_BHSK = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.key_BHSK.nbytes + self.value_BHSK.nbytes

    def append(self, key_BHSK: Tensor, value_BHSK: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new tokens; returns views of all keys and values up to them.

        Raises:
            ValueError: more tokens than the capacity.
        """
        new = key_BHSK.shape[2]
        end = self.length + new
        capacity = self.key_BHSK.shape[2]
        if end > capacity:
            raise ValueError(f"cache: got {end} tokens, expected at most its capacity {capacity}")
        self.key_BHSK[:, :, self.length : end] = key_BHSK
        self.value_BHSK[:, :, self.length : end] = value_BHSK
        self.length = end
        return self.key_BHSK[:, :, :end], self.value_BHSK[:, :, :end]

    def drop(self, tokens: int) -> None:
        """Forgets the oldest tokens."""
        kept = self.length - tokens
        for buffer in (self.key_BHSK, self.value_BHSK):
            buffer[:, :, :kept] = buffer[:, :, tokens : self.length].clone()
        self.length = kept

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of these tokens."""
        return self.key_BHSK[:, :, first:end].clone(), self.value_BHSK[:, :, first:end].clone()
