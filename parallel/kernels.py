"""Attention of one block of queries to one block of keys, and its gradient.

A kernel's forward gives the output and its log-sum-exp, by which blocks are merged into the whole
(`merge_`). Its backward takes the output and log-sum-exp of *all* keys, and gives exactly this
block's part of the gradients. No kernel may be handed an empty block: PyTorch's CPU kernel dies of
it. Axis letters: B batch, H heads, Q queries, S keys, K head width.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class Kernel(Protocol):
    """`causal` needs as many keys as queries: query i sees keys 0 to i."""

    name: str

    def forward(
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, Q, K) in the inputs' dtype, log-sum-exp (B, H, Q) in fp32 or fp64."""
        ...

    def backward(
        self,
        grad_BHQK: Tensor,
        q_BHQK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        out_BHQK: Tensor,
        lse_BHQ: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the block's queries, keys and values."""
        ...


class CpuFlash:
    """PyTorch's flash attention for CPUs, fp32, fp64 and bf16.

    Its threads share out batches, heads and (forward only) queries; with a single sequence and few
    heads they would wait, so a block is cut into as many parts as are missing, given as a batch.
    """

    name = "cpu flash"
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
        self,
        grad_BHQK: Tensor,
        q_BHQK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        out_BHQK: Tensor,
        lse_BHQ: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = _missing_parts(q_BHQK)
        if causal or parts == 1 or q_BHQK.shape[2] % parts or q_BHQK.shape[2] < 64 * parts:
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

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out = aten._scaled_dot_product_flash_attention(q_BHQK, k_BHSK, v_BHSK, 0.0, causal, False)
        return out[0], out[1]

    def backward(  # noqa: D102
        self,
        grad_BHQK: Tensor,
        q_BHQK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        out_BHQK: Tensor,
        lse_BHQ: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
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

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out_BHQK, lse_BHQ, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHQK, k_BHSK, v_BHSK, None, True, 0.0, causal
        )
        return out_BHQK, lse_BHQ[:, :, : q_BHQK.shape[2]]  # it comes padded to a multiple of 32

    def backward(  # noqa: D102
        self,
        grad_BHQK: Tensor,
        q_BHQK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        out_BHQK: Tensor,
        lse_BHQ: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
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


class Lean:
    """Plain PyTorch for every device and dtype, in tiles of keys; computes in fp32 or fp64."""

    name = "plain"
    TILE = 512

    def forward(  # noqa: D102
        self, q_BHQK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        query = _wide(q_BHQK) / math.sqrt(q_BHQK.shape[3])
        out_BHQK = torch.zeros_like(query)
        total_BHQ1 = query.new_zeros(*query.shape[:3], 1)
        top_BHQ1 = query.new_full(total_BHQ1.shape, -math.inf)
        for first in range(0, k_BHSK.shape[2], self.TILE):
            key, value = (_wide(t[:, :, first : first + self.TILE]) for t in (k_BHSK, v_BHSK))
            seen = slice(first if causal else 0, None)  # queries that see anything of the tile
            score_BHQS = self._scores(query[:, :, seen], key, causal)
            # Every query has seen the first tile, so that its maximum is finite from then on.
            top = torch.maximum(top_BHQ1[:, :, seen], score_BHQS.amax(3, keepdim=True))
            shrink = (top_BHQ1[:, :, seen] - top).exp_()
            weight_BHQS = score_BHQS.sub_(top).exp_()
            total_BHQ1[:, :, seen].mul_(shrink).add_(weight_BHQS.sum(3, keepdim=True))
            out_BHQK[:, :, seen].mul_(shrink).add_(weight_BHQS @ value)
            top_BHQ1[:, :, seen] = top
        out_BHQK.div_(total_BHQ1)
        return out_BHQK.to(q_BHQK.dtype), total_BHQ1.log_().add_(top_BHQ1).squeeze(3)

    def backward(  # noqa: D102
        self,
        grad_BHQK: Tensor,
        q_BHQK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        out_BHQK: Tensor,
        lse_BHQ: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = 1 / math.sqrt(q_BHQK.shape[3])
        query, grad = _wide(q_BHQK) * scale, _wide(grad_BHQK)
        delta_BHQ1 = (grad * out_BHQK).sum(3, keepdim=True)
        dq_BHQK = torch.zeros_like(query)
        dk_BHSK, dv_BHSK = (torch.empty_like(t, dtype=query.dtype) for t in (k_BHSK, v_BHSK))
        for first in range(0, k_BHSK.shape[2], self.TILE):
            tile = slice(first, first + self.TILE)
            key, value = _wide(k_BHSK[:, :, tile]), _wide(v_BHSK[:, :, tile])
            seen = slice(first if causal else 0, None)
            weight_BHQS = self._scores(query[:, :, seen], key, causal)
            weight_BHQS.sub_(lse_BHQ[:, :, seen, None]).exp_()
            dv_BHSK[:, :, tile] = weight_BHQS.transpose(2, 3) @ grad[:, :, seen]
            dscore_BHQS = grad[:, :, seen] @ value.transpose(2, 3)
            dscore_BHQS.sub_(delta_BHQ1[:, :, seen]).mul_(weight_BHQS)
            dk_BHSK[:, :, tile] = dscore_BHQS.transpose(2, 3) @ query[:, :, seen]
            dq_BHQK[:, :, seen] += dscore_BHQS @ key
        return dq_BHQK.mul_(scale), dk_BHSK, dv_BHSK

    @staticmethod
    def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
        """(B, H, Q, S); if causal, the first query stands at the tile's first key."""
        score_BHQS = query @ key.transpose(2, 3)
        if causal:
            size = key.shape[2]
            future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu_(1)
            score_BHQS[:, :, :size].masked_fill_(future, -math.inf)
        return score_BHQS


def kernel_for(device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """The fastest kernel that takes these tensors; its `name` says which."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cpu" and dtype in (torch.float32, torch.float64, torch.bfloat16):
        return CpuFlash()
    if device.type == "cuda" and half and head_width % 8 == 0 and head_width <= 256:
        return CudaFlash()
    if device.type == "cuda" and dtype == torch.float32 and head_width % 4 == 0:
        return CudaEfficient()
    return Lean()


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


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
