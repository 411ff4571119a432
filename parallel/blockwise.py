"""A whole transformer layer, block by block (Liu & Abbeel 2023, arXiv:2305.19370).

Exact attention and feed-forward of one block of queries after the other; no score matrix and no
feed-forward activation exists for more than one block. For the backward pass only the layer's
input, its attention output and the log-sum-exp are kept; the rest is computed again, block by
block, and the gradients are those of the whole. Sums over blocks are in fp32 (fp64 for fp64).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.attention import Scope, as_slice, attend, attend_backward
from parallel.blocks import BlockSettings, BlockSizes, cut
from parallel.gradients import WeightGradients, sum_dtype
from parallel.kernels import Attended, Kernel, kernel_for
from parallel.sublayers import Dropout, LayerSize, Masks, Weights, finish, key_value, query


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pass through one layer: everything but the numbers."""

    size: LayerSize
    scope: Scope
    blocks: BlockSettings
    dropout: Dropout | None

    def kernel(self, device: torch.device, dtype: torch.dtype) -> Kernel:
        """What computes the attention of a block."""
        return kernel_for(device, dtype, self.size.head_width)

    def masks(self, rows: range, x_BSD: Tensor) -> Masks | None:
        """Dropout's, of these rows of the output."""
        return None if self.dropout is None else self.dropout.masks(rows, x_BSD)

    def block_sizes(self, x_BSD: Tensor) -> BlockSizes:
        """For this input."""
        B, S, _ = x_BSD.shape
        return self.blocks.sizes(
            self.size,
            batch=B,
            sequence=S,
            element_bytes=x_BSD.element_size(),
            device=x_BSD.device,
        )


@torch.compiler.disable  # fixed by hand; the compiler works on what stands around it
def blockwise_layer(job: Job, weights: Weights, x_BSD: Tensor) -> Tensor:
    """The layer's output (B, R, D) at the R rows of the job's scope, for x (B, S, D).

    Raises:
        ValueError: no sequence at all.
    """
    if not len(x_BSD):
        raise ValueError("x: got a batch of 0 sequences, expected at least 1")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_BSD, *weights)):
        return _BlockwiseLayer.apply(job, x_BSD, *weights)
    return _forward(job, weights, x_BSD, keep=False)[0]


class _BlockwiseLayer(torch.autograd.Function):
    """Takes weights as inputs and returns their gradients, so that wrappers like DDP see them."""

    @staticmethod
    def forward(ctx: Any, job: Job, x_BSD: Tensor, *weights: Tensor) -> Tensor:  # noqa: D102
        y_BRD, out_BHRK, lse_BHR = _forward(job, Weights(*weights), x_BSD, keep=True)
        ctx.job = job
        ctx.save_for_backward(x_BSD, out_BHRK, lse_BHR, *weights)
        device = x_BSD.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        return y_BRD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BRD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x_BSD, out_BHRK, lse_BHR, *weights = ctx.saved_tensors
        sums = WeightGradients(Weights(*weights), ctx.needs_input_grad[2:])
        with torch.autocast(**ctx.autocast, cache_enabled=False):
            dx_BSD = _backward(ctx.job, sums, x_BSD, out_BHRK, lse_BHR, dy_BRD)
        return None, dx_BSD, *sums.total()


def _forward(
    job: Job, weights: Weights, x_BSD: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, and if asked for the attention output and log-sum-exp of all its rows."""
    B, S, D = x_BSD.shape
    R = len(job.scope.positions(S))
    blocks = job.block_sizes(x_BSD)
    k_BHSK, v_BHSK = _keys_values(job, weights, x_BSD)
    kept_out = kept_lse = None
    if keep:
        kept_out = k_BHSK.new_zeros(B, R, job.size.heads, job.size.head_width).transpose(1, 2)
        kept_lse = k_BHSK.new_zeros(B, job.size.heads, R, dtype=sum_dtype(k_BHSK))
    y_BRD = x_BSD.new_empty(B, R, D)
    for rows in cut(range(R), blocks.query):
        positions = job.scope.positions(S, rows)
        q_BHQK = query(weights, job.size, x_BSD[:, as_slice(positions)])
        out_BHQK = torch.zeros_like(q_BHQK.transpose(1, 2)).transpose(1, 2)
        for sequences, within, keys in _sequences(job.scope, S, positions):
            out, lse = attend(
                job.kernel(x_BSD.device, k_BHSK.dtype),
                q_BHQK[sequences, :, : len(within)],
                k_BHSK[sequences, :, :keys],
                v_BHSK[sequences, :, :keys],
                within,
                job.scope.causal,
            )
            out_BHQK[sequences, :, : len(within)] = out
            if kept_lse is not None:
                kept_lse[sequences, :, rows.start : rows.start + len(within)] = lse
        if kept_out is not None:
            kept_out[:, :, as_slice(rows)] = out_BHQK
        for part in cut(rows, blocks.rows):
            y_BRD[:, as_slice(part)] = finish(
                weights,
                x_BSD[:, as_slice(job.scope.positions(S, part))],
                out_BHQK[:, :, part.start - rows.start : part.stop - rows.start],
                job.masks(part, x_BSD),
            )
    return y_BRD, kept_out, kept_lse


def _backward(
    job: Job,
    sums: WeightGradients,
    x_BSD: Tensor,
    out_BHRK: Tensor,
    lse_BHR: Tensor,
    dy_BRD: Tensor,
) -> Tensor:
    """Gradient of x; those of the weights go to `sums`."""
    S, R = x_BSD.shape[1], dy_BRD.shape[1]
    blocks, kernel = job.block_sizes(x_BSD), job.kernel(x_BSD.device, out_BHRK.dtype)
    k_BHSK, v_BHSK = _keys_values(job, sums.weights, x_BSD)
    dk_BHSK, dv_BHSK = (torch.zeros_like(t, dtype=lse_BHR.dtype) for t in (k_BHSK, v_BHSK))
    dx_BSD = torch.zeros_like(x_BSD)
    for rows in cut(range(R), blocks.query):
        positions = job.scope.positions(S, rows)
        x_BQD = x_BSD[:, as_slice(positions)]
        parts = [
            (part, slice(part.start - rows.start, part.stop - rows.start))
            for part in cut(rows, blocks.rows)
        ]
        dx_BQD = torch.empty_like(x_BQD)
        q_BHQK, dout_BHQK = (torch.empty_like(out_BHRK[:, :, as_slice(rows)]) for _ in range(2))
        for part, here in parts:
            q_BHQK[:, :, here] = query(sums.weights, job.size, x_BQD[:, here])
            dx_BQD[:, here], dout_BHQK[:, :, here] = sums.finish(
                x_BQD[:, here],
                out_BHRK[:, :, as_slice(part)],
                job.masks(part, x_BSD),
                dy_BRD[:, as_slice(part)],
            )
        dq_BHQK = torch.zeros_like(q_BHQK, dtype=lse_BHR.dtype)
        for sequences, within, keys in _sequences(job.scope, S, positions):
            here = slice(0, len(within))
            there = slice(rows.start, rows.start + len(within))
            attend_backward(
                kernel,
                dout_BHQK[sequences, :, here],
                Attended(
                    q_BHQK[sequences, :, here],
                    k_BHSK[sequences, :, :keys],
                    v_BHSK[sequences, :, :keys],
                    out_BHRK[sequences, :, there],
                    lse_BHR[sequences, :, there],
                ),
                dq_BHQK[sequences, :, here],
                dk_BHSK[sequences, :, :keys],
                dv_BHSK[sequences, :, :keys],
                within,
                job.scope.causal,
                blocks.key,
            )
        for _, here in parts:
            dx_BQD[:, here] += sums.query(
                job.size, x_BQD[:, here], dq_BHQK[:, :, here].to(q_BHQK.dtype)
            )
        del dq_BHQK
        dx_BSD[:, as_slice(positions)] = dx_BQD
    for rows in cut(range(S), blocks.rows):
        places = as_slice(rows)
        dk, dv = (t[:, :, places].to(k_BHSK.dtype) for t in (dk_BHSK, dv_BHSK))
        dx_BSD[:, places] += sums.key_value(job.size, x_BSD[:, places], dk, dv)
    return dx_BSD


def _keys_values(job: Job, weights: Weights, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions, each (B, H, S, K)."""
    B, S, _ = x_BSD.shape
    k_BHSK = v_BHSK = x_BSD[:0]
    for rows in cut(range(S), job.block_sizes(x_BSD).rows):
        k, v = key_value(weights, job.size, x_BSD[:, as_slice(rows)])
        if rows.start == 0:
            k_BHSK, v_BHSK = (k.new_empty(B, k.shape[1], S, k.shape[3]) for _ in range(2))
        k_BHSK[:, :, as_slice(rows)], v_BHSK[:, :, as_slice(rows)] = k, v
    return k_BHSK, v_BHSK


def _sequences(scope: Scope, sequence: int, positions: range) -> Iterator[tuple[slice, range, int]]:
    """Which of these positions and how many keys are no padding, for groups of sequences."""
    if scope.lengths is None:
        yield slice(None), positions, sequence
        return
    for b, length in enumerate(scope.lengths):
        within = range(positions.start, min(positions.stop, length), positions.step)
        if within:
            yield slice(b, b + 1), within, length
