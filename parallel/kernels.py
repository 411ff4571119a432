"""Attention of one block of queries to one block of keys, and its gradient.

A kernel's forward gives the output and its log-sum-exp, by which blocks are merged into the whole
(`merge_`). Its backward takes the output and log-sum-exp of *all* keys, and gives exactly this
block's part of the gradients. No kernel may be handed an empty block: PyTorch's CPU kernel dies of
it. Axis letters: B batch, H heads, Q queries, S keys, K head width.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class Attended(NamedTuple):
    """A block's queries, keys and values, and its queries' output and log-sum-exp over all keys."""

    q_BHQK: Tensor
    k_BHSK: Tensor
    v_BHSK: Tensor
    out_BHQK: Tensor
    lse_BHQ: Tensor


class Kernel(Protocol):
    """`causal` needs as many keys as queries: query i sees keys 0 to i.

    Attributes:
        name: what the user is told.
        largest_square: rows of a causal square from which on its backward pass is faster cut into
            smaller squares and blocks without a mask; None: never.
    """

    name: str
    largest_square: int | None

    def forward(
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, Q, K) in the inputs' dtype, log-sum-exp (B, H, Q) in fp32 or fp64."""
        ...

    def backward(
        self, grad_BHQK: Tensor, block: Attended, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the block's queries, keys and values."""
        ...


class CpuFlash:
    """PyTorch's flash attention for CPUs, fp32, fp64 and bf16.

    Its threads share out batches, heads and (forward only) queries; with a single sequence and few
    heads they would wait, so a block is cut into as many parts as are missing, given as a batch.
    """

    name = "cpu flash"
    largest_square: int | None = 256
    _forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    _backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        parts = _missing_parts(q_BHQK)
        if causal or parts == 1 or q_BHQK.shape[2] > 64 or k_BHSK.shape[2] < 1024 * parts:
            return self._forward(q_BHQK, k_BHSK, v_BHSK, 0.0, causal)
        # Few queries (decoding): the keys are cut instead.
        whole = k_BHSK.shape[2] // parts * parts
        out_PHQK, lse_PHQ = self._forward(
            q_BHQK.expand(parts, -1, -1, -1),
            _as_batch(k_BHSK[:, :, :whole], parts),
            _as_batch(v_BHSK[:, :, :whole], parts),
        )
        pieces = list(zip(out_PHQK.split(1), lse_PHQ.split(1), strict=True))
        if whole < k_BHSK.shape[2]:
            pieces.append(self._forward(q_BHQK, k_BHSK[:, :, whole:], v_BHSK[:, :, whole:]))
        out_BHQK, lse_BHQ = pieces[0][0].to(lse_PHQ.dtype), pieces[0][1]
        for piece in pieces[1:]:
            merge_(out_BHQK, lse_BHQ, *piece)
        return out_BHQK.to(q_BHQK.dtype), lse_BHQ

    def backward(  # noqa: D102
        self, grad_BHQK: Tensor, block: Attended, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHQK, k_BHSK, v_BHSK, out_BHQK, lse_BHQ = block
        rows, most = q_BHQK.shape[2], _missing_parts(q_BHQK)
        parts = max(p for p in range(1, most + 1) if p == 1 or (rows % p == 0 and rows >= 64 * p))
        if causal or parts == 1:
            return self._backward(
                grad_BHQK, q_BHQK, k_BHSK, v_BHSK, out_BHQK, lse_BHQ.contiguous(), 0.0, causal
            )
        dq_PHQK, dk_PHSK, dv_PHSK = self._backward(
            _as_batch(grad_BHQK, parts),
            _as_batch(q_BHQK, parts),
            k_BHSK.expand(parts, -1, -1, -1),
            v_BHSK.expand(parts, -1, -1, -1),
            _as_batch(out_BHQK, parts),
            _as_batch(lse_BHQ, parts).contiguous(),
            0.0,
            False,
        )
        dq_BHQK = dq_PHQK.transpose(0, 1).flatten(1, 2)[None]
        wide = lse_BHQ.dtype
        return (
            dq_BHQK,
            dk_PHSK.sum(0, keepdim=True, dtype=wide),
            dv_PHSK.sum(0, keepdim=True, dtype=wide),
        )


class CudaFlash:
    """FlashAttention as PyTorch ships it: fp16 and bf16, head width a multiple of 8 up to 256."""

    name = "cuda flash"
    largest_square: int | None = None

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out = aten._scaled_dot_product_flash_attention(q_BHQK, k_BHSK, v_BHSK, 0.0, causal, False)
        return out[0], out[1]

    def backward(  # noqa: D102
        self, grad_BHQK: Tensor, block: Attended, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHQK, k_BHSK, v_BHSK, out_BHQK, lse_BHQ = block
        unused = torch.empty(2, dtype=torch.uint64, device=q_BHQK.device)  # dropout's random state
        return aten._scaled_dot_product_flash_attention_backward(
            grad_BHQK,
            q_BHQK,
            k_BHSK,
            v_BHSK,
            out_BHQK,
            lse_BHQ.contiguous(),
            None,
            None,
            q_BHQK.shape[2],
            k_BHSK.shape[2],
            0.0,
            causal,
            unused,
            unused[:0],
        )


class CudaEfficient:
    """PyTorch's memory-efficient attention on CUDA: fp32, head width a multiple of 4."""

    name = "cuda efficient"
    largest_square: int | None = None

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out_BHQK, lse_BHQ, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHQK, k_BHSK, v_BHSK, None, True, 0.0, causal
        )
        return out_BHQK, lse_BHQ[:, :, : q_BHQK.shape[2]]  # it comes padded to a multiple of 32

    def backward(  # noqa: D102
        self, grad_BHQK: Tensor, block: Attended, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHQK, k_BHSK, v_BHSK, out_BHQK, lse_BHQ = block
        padded = torch.nn.functional.pad(lse_BHQ, (0, -lse_BHQ.shape[2] % 32), value=math.inf)
        unused = torch.zeros((), dtype=torch.int64, device=q_BHQK.device)  # dropout's random state
        dq_BHQK, dk_BHSK, dv_BHSK, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_BHQK,
            q_BHQK,
            k_BHSK,
            v_BHSK,
            None,
            out_BHQK,
            padded,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
        )
        return dq_BHQK, dk_BHSK, dv_BHSK


class Plain:
    """Plain PyTorch for every device and dtype, tile by tile; computes in fp32 or fp64.

    One head at a time: a tile of scores of 512 KiB stays in a core's own cache between the product
    that makes it and the one that uses it.
    """

    name = "plain"
    largest_square: int | None = None
    QUERIES, KEYS = 512, 256  # of a tile

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        q_NQK, k_NSK, v_NSK = (_wide(t).flatten(0, 1) for t in (q_BHQK, k_BHSK, v_BHSK))
        q_NQK = q_NQK / math.sqrt(q_NQK.shape[2])
        out_NQK = torch.zeros_like(q_NQK)
        total_NQ1 = q_NQK.new_zeros(*q_NQK.shape[:2], 1)
        top_NQ1 = torch.full_like(total_NQ1, -math.inf)
        for n, queries, keys in self._tiles(q_NQK, k_NSK, causal):
            score_QS = q_NQK[n, queries] @ k_NSK[n, keys].T
            if causal:
                _hide_future_(score_QS, queries, keys)
            # A query has seen key 0 in its first tile, so that its maximum is finite.
            top_Q1 = torch.maximum(top_NQ1[n, queries], score_QS.amax(1, keepdim=True))
            shrink_Q1 = (top_NQ1[n, queries] - top_Q1).exp_()
            weight_QS = score_QS.sub_(top_Q1).exp_()
            total_NQ1[n, queries].mul_(shrink_Q1).add_(weight_QS.sum(1, keepdim=True))
            out_NQK[n, queries].mul_(shrink_Q1).addmm_(weight_QS, v_NSK[n, keys])
            top_NQ1[n, queries] = top_Q1
        out_NQK.div_(total_NQ1)
        lse_NQ = total_NQ1.log_().add_(top_NQ1).squeeze(2)
        shape = q_BHQK.shape
        return out_NQK.view(shape).to(q_BHQK.dtype), lse_NQ.view(shape[:3])

    def backward(  # noqa: D102
        self, grad_BHQK: Tensor, block: Attended, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHQK, k_BHSK, v_BHSK, out_BHQK, lse_BHQ = block
        scale = 1 / math.sqrt(q_BHQK.shape[3])
        inputs = (grad_BHQK, q_BHQK, k_BHSK, v_BHSK, out_BHQK)
        grad_NQK, q_NQK, k_NSK, v_NSK, out_NQK = (_wide(t).flatten(0, 1) for t in inputs)
        lse_NQ1 = lse_BHQ.flatten(0, 1)[..., None]
        delta_NQ1 = (grad_NQK * out_NQK).sum(2, keepdim=True)
        dq_NQK, dk_NSK, dv_NSK = (torch.zeros_like(t) for t in (q_NQK, k_NSK, v_NSK))
        for n, queries, keys in self._tiles(q_NQK, k_NSK, causal):
            query_QK, grad_QK, key_SK = q_NQK[n, queries], grad_NQK[n, queries], k_NSK[n, keys]
            score_QS = torch.addmm(lse_NQ1[n, queries], query_QK, key_SK.T, beta=-1, alpha=scale)
            if causal:
                _hide_future_(score_QS, queries, keys)
            weight_QS = score_QS.exp_()
            dv_NSK[n, keys].addmm_(weight_QS.T, grad_QK)
            dscore_QS = torch.addmm(delta_NQ1[n, queries], grad_QK, v_NSK[n, keys].T, beta=-1)
            dscore_QS.mul_(weight_QS)
            dk_NSK[n, keys].addmm_(dscore_QS.T, query_QK, alpha=scale)
            dq_NQK[n, queries].addmm_(dscore_QS, key_SK, alpha=scale)
        return dq_NQK.view(q_BHQK.shape), dk_NSK.view(k_BHSK.shape), dv_NSK.view(v_BHSK.shape)

    def _tiles(
        self, q_NQK: Tensor, k_NSK: Tensor, causal: bool
    ) -> Iterator[tuple[int, slice, slice]]:
        """Head, queries and keys of every tile that is not all future; key 0 comes first."""
        N, Q, _ = q_NQK.shape
        for n in range(N):
            for first_query in range(0, Q, self.QUERIES):
                end = min(first_query + self.QUERIES, Q)
                for first_key in range(0, end if causal else k_NSK.shape[1], self.KEYS):
                    begin = max(first_query, first_key) if causal else first_query
                    keys = slice(first_key, min(first_key + self.KEYS, k_NSK.shape[1]))
                    yield n, slice(begin, end), keys


def kernel_for(device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """The fastest kernel that takes these tensors; its `name` says which."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cpu" and dtype in (torch.float32, torch.float64, torch.bfloat16):
        return CpuFlash()
    if device.type == "cuda" and half and head_width % 8 == 0 and head_width <= 256:
        # Ampere's generation is the first that FlashAttention runs on.
        if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0):
            return CudaFlash()
    if device.type == "cuda" and dtype == torch.float32 and head_width % 4 == 0:
        return CudaEfficient()
    return Plain()


def merge_(out_BHQK: Tensor, lse_BHQ: Tensor, more_BHQK: Tensor, more_lse_BHQ: Tensor) -> None:
    """Merges the attention to further keys into `out_BHQK` and `lse_BHQ`, in place."""
    both_BHQ = torch.logaddexp(lse_BHQ, more_lse_BHQ)
    out_BHQK.mul_((lse_BHQ - both_BHQ).exp_()[..., None])
    out_BHQK.addcmul_(more_BHQK.to(out_BHQK.dtype), (more_lse_BHQ - both_BHQ).exp_()[..., None])
    lse_BHQ.copy_(both_BHQ)


def _missing_parts(q_BHQK: Tensor) -> int:
    """Into how many parts a single sequence must be cut to keep all threads busy."""
    B, H = q_BHQK.shape[:2]
    return max(torch.get_num_threads() // H, 1) if B == 1 else 1


def _as_batch(x_1HS: Tensor, parts: int) -> Tensor:
    """(1, H, S, ...) as (parts, H, S/parts, ...), without a copy."""
    return x_1HS[0].unflatten(1, (parts, -1)).transpose(0, 1)


def _hide_future_(score_QS: Tensor, queries: slice, keys: slice) -> None:
    if keys.stop - 1 > queries.start:
        future = torch.ones(score_QS.shape, dtype=torch.bool, device=score_QS.device)
        score_QS.masked_fill_(future.triu_(queries.start - keys.start + 1), -math.inf)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
