"""Softmax attention in three ways: materialised, by PyTorch, and block by block.

The first two take whole sequences and a `Scope`; `attend` takes one block of queries and the keys,
and `attend_backward` gives its gradients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels import Attended, Kernel, merge_


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which positions of a sequence are computed, and what they see.

    The layer's output has one row for each of the positions start, start + stride, ... All
    positions are keys. Padding stands on the right: position s of sequence b is padding where
    s >= lengths[b]; nothing sees it, and its own attention is zero. Padding must be finite.
    """

    causal: bool = True
    start: int = 0
    stride: int = 1
    lengths: tuple[int, ...] | None = None

    def positions(self, sequence: int, rows: range | None = None) -> range:
        """Positions of these output rows (default: of all) in a sequence of that length."""
        every = range(self.start, sequence, self.stride)
        return every if rows is None else every[rows.start : rows.stop]

    def check(self, batch: int, sequence: int) -> None:
        """Raises ValueError for a scope that does not fit (batch, sequence)."""
        if self.stride < 1 or not 0 <= self.start < sequence:
            raise ValueError(
                f"scope: got start {self.start}, stride {self.stride}, expected a stride of 1 or "
                f"more and a start in [0, {sequence})"
            )
        if self.lengths is not None and (
            len(self.lengths) != batch or not all(0 <= n <= sequence for n in self.lengths)
        ):
            raise ValueError(
                f"scope.lengths: got {self.lengths}, expected {batch} lengths in [0, {sequence}]"
            )


def as_slice(places: range) -> slice:
    """The slice that takes these places of an axis; there is at least one."""
    return slice(places.start, places[-1] + 1, places.step)


def materialised_attention(q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, scope: Scope) -> Tensor:
    """Of all positions; builds the matrix of all scores: the plain definition."""
    score_BHSS = q_BHSK @ k_BHSK.transpose(2, 3) / math.sqrt(q_BHSK.shape[3])
    S = k_BHSK.shape[2]
    if scope.causal:
        future = torch.ones(S, S, dtype=torch.bool, device=k_BHSK.device).triu(1)
        score_BHSS = score_BHSS.masked_fill(future, -math.inf)
    padding_BS = _padding(scope, k_BHSK)
    if padding_BS is not None:
        # A finite floor: a sequence that is nothing but padding must have finite gradients.
        floor = torch.finfo(score_BHSS.dtype).min
        score_BHSS = score_BHSS.masked_fill(padding_BS[:, None, None], floor)
    return _zero(score_BHSS.softmax(dim=3) @ v_BHSK, padding_BS)


def sdpa_attention(q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, scope: Scope) -> Tensor:
    """Of all positions, by `torch.nn.functional.scaled_dot_product_attention`."""
    padding_BS = _padding(scope, k_BHSK)
    # A causal token sees none of the padding behind it.
    mask = None if scope.causal or padding_BS is None else ~padding_BS[:, None, None]
    out_BHSK = F.scaled_dot_product_attention(
        q_BHSK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=scope.causal
    )
    return _zero(out_BHSK, padding_BS)


def _padding(scope: Scope, k_BHSK: Tensor) -> Tensor | None:
    """(B, S) True at padding; None where there is none."""
    if scope.lengths is None:
        return None
    length_B = torch.tensor(scope.lengths, device=k_BHSK.device)
    return torch.arange(k_BHSK.shape[2], device=k_BHSK.device) >= length_B[:, None]


def _zero(out_BHSK: Tensor, padding_BS: Tensor | None) -> Tensor:
    return out_BHSK if padding_BS is None else out_BHSK.masked_fill(padding_BS[:, None, :, None], 0)


@dataclass(frozen=True)
class Piece:
    """A block of queries and keys that a kernel takes: all pairs, or a causal square."""

    queries: slice
    keys: slice
    causal: bool


def pieces(
    positions: range, keys: int, causal: bool, largest_square: int | None = None
) -> Iterator[Piece]:
    """Cuts the attention of queries at `positions` to keys 0 to `keys` into blocks.

    What lies in the future of all queries is in no block. The causal blocks need no mask even
    where queries are `stride` positions apart: the keys of one phase of the stride are as many as
    the queries, and query i sees the first i + 1 of them if they stand at the queries' own
    positions, the first i of any other phase. Without `largest_square`, which cuts causal squares
    further, the first piece holds every query.
    """
    everyone = range(len(positions))
    if not causal:
        yield Piece(as_slice(everyone), slice(0, keys), False)
        return
    yield from _square(everyone, positions, largest_square)
    if positions.start > 0:
        yield Piece(as_slice(everyone), slice(0, positions.start), False)
    for phase in range(1, positions.step):
        places = range(positions.start + phase, positions[-1], positions.step)
        if places:
            yield from _square(everyone[1:], places, largest_square)


def _square(queries: range, keys: range, largest: int | None) -> Iterator[Piece]:
    """A causal square, cut in halves until it is no larger than asked for."""
    if largest is None or len(queries) <= largest:
        yield Piece(as_slice(queries), as_slice(keys), True)
        return
    half = -(-len(queries) // (2 * largest)) * largest
    yield from _square(queries[:half], keys[:half], largest)
    yield Piece(as_slice(queries[half:]), as_slice(keys[:half]), False)
    yield from _square(queries[half:], keys[half:], largest)


def attend(
    kernel: Kernel, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, positions: range, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of the queries at `positions` (at least one) to all keys that they see.

    Returns:
        The output in the queries' dtype, and the log-sum-exp in fp32 or fp64.
    """
    with torch.autocast(q_BHQK.device.type, enabled=False):  # dtypes are the kernel's own matter
        return _attend(kernel, q_BHQK, k_BHSK, v_BHSK, positions, causal)


def _attend(
    kernel: Kernel, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, positions: range, causal: bool
) -> tuple[Tensor, Tensor]:
    first, *more = pieces(positions, k_BHSK.shape[2], causal)
    out_BHQK, lse_BHQ = kernel.forward(
        q_BHQK, k_BHSK[:, :, first.keys], v_BHSK[:, :, first.keys], first.causal
    )
    if more:
        out_BHQK = out_BHQK.to(lse_BHQ.dtype)  # merged in high precision
    for piece in more:
        merge_(
            out_BHQK[:, :, piece.queries],
            lse_BHQ[:, :, piece.queries],
            *kernel.forward(
                q_BHQK[:, :, piece.queries],
                k_BHSK[:, :, piece.keys],
                v_BHSK[:, :, piece.keys],
                piece.causal,
            ),
        )
    return out_BHQK.to(q_BHQK.dtype), lse_BHQ


def attend_backward(
    kernel: Kernel,
    grad_BHQK: Tensor,
    attended: Attended,
    dq_BHQK: Tensor,
    dk_BHSK: Tensor,
    dv_BHSK: Tensor,
    positions: range,
    causal: bool,
    block_key: int,
) -> None:
    """Adds the gradients of `attend` to `dq`, `dk` and `dv`, in their dtype.

    `block_key` limits the keys of one call and with it the temporaries.
    """
    with torch.autocast(grad_BHQK.device.type, enabled=False):
        for piece in pieces(positions, dk_BHSK.shape[2], causal, kernel.largest_square):
            queries = piece.queries
            for keys in [piece.keys] if piece.causal else _cut(piece.keys, block_key):
                block = Attended(
                    attended.q_BHQK[:, :, queries],
                    attended.k_BHSK[:, :, keys],
                    attended.v_BHSK[:, :, keys],
                    attended.out_BHQK[:, :, queries],
                    attended.lse_BHQ[:, :, queries],
                )
                dq, dk, dv = kernel.backward(grad_BHQK[:, :, queries], block, piece.causal)
                dq_BHQK[:, :, queries] += dq
                dk_BHSK[:, :, keys] += dk
                dv_BHSK[:, :, keys] += dv
                del dq, dk, dv  # before the next call makes its own


def _cut(keys: slice, size: int) -> Iterator[slice]:
    step = keys.step or 1
    for first in range(keys.start, keys.stop, size * step):
        yield slice(first, min(first + size * step, keys.stop), step)
