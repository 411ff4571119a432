"""Exact attention of rows that are spread over a cube: keys and values come to the queries.

A process has the queries of its own rows, for its own heads (cut along y). The keys of a slab are
gathered along z. Those of the other slabs are gathered as well, along x, one head at a time; or
they go round in a ring along x (Liu et al. 2023, arXiv:2310.01889), and what the queries see of
them is merged by log-sum-exp while the next ones are under way. Axis letters: R own rows, S rows
that keys and values are there of, B sequences, H heads, K head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.attention import attend, attend_backward
from parallel.collectives import all_gather, pass_on, reduce_scatter
from parallel.gradients import sum_dtype
from parallel.kernels import Attended, Kernel, merge_
from parallel.rows import RowLayout

Stripes = tuple[range, ...]  # positions that keys are there of, in their order


class Queries(NamedTuple):
    """Queries of the own rows, and what their gradient is made of, each (B, H, R, ...)."""

    q_BHRK: Tensor
    dout_BHRK: Tensor
    out_BHRK: Tensor
    lse_BHR: Tensor
    dq_BHRK: Tensor  # to which is added


@dataclass(frozen=True, kw_only=True)
class SpreadAttention:
    """Attention of one layer.

    Attributes:
        layout: of the rows.
        kernel: computes one block of queries and keys.
        causal: whether a position sees none after it.
        ring: whether the keys of other slabs go round, or are gathered.
        block_key: most keys of one call in the backward pass.
    """

    layout: RowLayout
    kernel: Kernel
    causal: bool
    ring: bool
    block_key: int

    def forward(self, q_RBHK: Tensor, kv_RB2HK: Tensor) -> tuple[Tensor, Tensor]:
        """Output (R, B, H, K) and log-sum-exp (B, H, R) of the own rows."""
        q_BHRK = _heads_first(q_RBHK)
        out_BHRK = torch.zeros_like(q_BHRK, dtype=sum_dtype(q_BHRK))
        lse_BHR = torch.full_like(out_BHRK[..., 0], -torch.inf)
        for heads in self._groups_of_heads(q_RBHK.shape[2]):
            for stripes, kv_SB2HK in self._rounds(kv_RB2HK[:, :, :, heads]):
                k_BHSK, v_BHSK = map(_heads_first, kv_SB2HK.unbind(2))
                for rows, keys, positions, causal in self._seen(stripes):
                    more = attend(
                        self.kernel,
                        q_BHRK[:, heads, rows],
                        k_BHSK[:, :, keys],
                        v_BHSK[:, :, keys],
                        positions,
                        causal,
                    )
                    merge_(out_BHRK[:, heads, rows], lse_BHR[:, heads, rows], *more)
        return out_BHRK.permute(2, 0, 1, 3).to(q_RBHK.dtype), lse_BHR

    def backward(
        self,
        dout_RBHK: Tensor,
        q_RBHK: Tensor,
        kv_RB2HK: Tensor,
        out_RBHK: Tensor,
        lse_BHR: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the own queries, and of the own keys and values, in fp32 or fp64."""
        wide = sum_dtype(q_RBHK)
        dq_RBHK = torch.zeros_like(q_RBHK, dtype=wide)
        every = dq_RBHK, dout_RBHK, q_RBHK, out_RBHK
        parts = []
        for heads in self._groups_of_heads(q_RBHK.shape[2]):
            dq_BHRK, dout_BHRK, q_BHRK, out_BHRK = (_heads_first(t[:, :, heads]) for t in every)
            dkv_SB2HK: Tensor | None = None
            for stripes, kv_SB2HK in self._rounds(kv_RB2HK[:, :, :, heads]):
                if dkv_SB2HK is None:
                    dkv_SB2HK = torch.zeros_like(kv_SB2HK, dtype=wide)
                queries = Queries(q_BHRK, dout_BHRK, out_BHRK, lse_BHR[:, heads], dq_BHRK)
                self._add_gradients(queries, stripes, kv_SB2HK, dkv_SB2HK)
                if self._goes_round:  # the sums go with their keys, and end at home
                    for part in dkv_SB2HK.split(len(self.layout.blocks[0])):  # in place
                        part.copy_(pass_on(part, self.layout.mesh, "x")())
            assert dkv_SB2HK is not None
            parts.append(self._brought_home(dkv_SB2HK))
        return dq_RBHK, parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    def _add_gradients(
        self, queries: Queries, stripes: Stripes, kv_SB2HK: Tensor, dkv_SB2HK: Tensor
    ) -> None:
        """Adds what the keys of these stripes give to the gradients of queries, keys and values."""
        k_BHSK, v_BHSK = map(_heads_first, kv_SB2HK.unbind(2))
        dk_BHSK, dv_BHSK = map(_heads_first, dkv_SB2HK.unbind(2))
        for rows, keys, positions, causal in self._seen(stripes):
            q, dout, out, lse, dq = (t[:, :, rows] for t in queries)
            attend_backward(
                self.kernel,
                dout,
                Attended(q, k_BHSK[:, :, keys], v_BHSK[:, :, keys], out, lse),
                dq,
                dk_BHSK[:, :, keys],
                dv_BHSK[:, :, keys],
                positions,
                causal,
                self.block_key,
            )

    @property
    def _goes_round(self) -> bool:
        return self.ring and not self.layout.kept_on_x

    def _groups_of_heads(self, heads: int) -> Iterator[slice]:
        """One head at a time where keys are gathered, so that those of one exist in whole."""
        alone = self.layout.mesh.sizes["z"] > 1 or not self.layout.kept_on_x
        size = 1 if alone and not self._goes_round else heads
        for first in range(0, heads, size):
            yield slice(first, first + size)

    def _rounds(self, kv_RB2HK: Tensor) -> Iterator[tuple[Stripes, Tensor]]:
        """Keys and values of positions, until all of them have been there."""
        layout, mesh = self.layout, self.layout.mesh
        kv_SB2HK = kv_RB2HK
        if mesh.sizes["z"] > 1:
            kv_SB2HK = layout.join_z(all_gather(kv_RB2HK, mesh, "z"))
        if layout.kept_on_x:
            yield layout.slab, kv_SB2HK
        elif not self.ring:
            yield (range(layout.padded),), layout.join_x(all_gather(kv_SB2HK, mesh, "x"))
        else:
            x = mesh.sizes["x"]
            for step in range(x):
                coming = pass_on(kv_SB2HK, mesh, "x") if step < x - 1 else None
                yield layout.slab_of((mesh.place["x"] - step) % x), kv_SB2HK
                if coming is not None:
                    kv_SB2HK = coming()

    def _brought_home(self, dkv_SB2HK: Tensor) -> Tensor:
        """Sums of gradients from where keys were used to the rows that they are of."""
        layout, mesh = self.layout, self.layout.mesh
        if not (layout.kept_on_x or self.ring):
            cut = layout.cut_x(dkv_SB2HK)
            dkv_SB2HK = reduce_scatter(cut, mesh, "x")
        if mesh.sizes["z"] > 1:
            return reduce_scatter(layout.cut_z(dkv_SB2HK), mesh, "z")
        return dkv_SB2HK

    def _seen(self, stripes: Stripes) -> Iterator[tuple[slice, slice, range, bool]]:
        """Own rows, the keys that they see some of, the rows' places among them, whether causal."""
        first = 0
        for block in self.layout.blocks:
            positions = self.layout.part(block, "z")
            rows = slice(first, first + len(positions))
            first, offset = rows.stop, 0
            for stripe in stripes:
                keys = slice(offset, offset + len(stripe))
                offset = keys.stop
                places = range(positions.start - stripe.start, positions.stop - stripe.start)
                if not self.causal or stripe.stop <= positions.start:
                    yield rows, keys, places, False
                elif stripe.start <= positions.start:
                    yield rows, keys, places, True


def _heads_first(x_RBHK: Tensor) -> Tensor:
    """The same numbers as (B, H, R, K)."""
    return x_RBHK.permute(1, 2, 0, 3)
