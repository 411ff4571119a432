"""Attention of spread rows in one process; over several, `test_cube` compares whole layers."""

import pytest
import torch

from benchmarks.processes import pretended
from parallel.attention import Scope, materialised_attention
from parallel.cube_attention import SpreadAttention
from parallel.kernels import kernel_for
from parallel.mesh import CubeMesh
from parallel.rows import RowLayout
from parallel.traffic import Traffic


def test_gradients_of_half_precision_are_summed_in_single_precision():
    S, B, H, K = 512, 2, 2, 8
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(S, B, H, K, generator=generator).to(torch.bfloat16) for _ in range(4)
    )
    exact = [t.double().permute(1, 2, 0, 3).requires_grad_() for t in (q, k, v)]
    out = materialised_attention(*exact, Scope())
    out.backward(dout.double().permute(1, 2, 0, 3))
    attention = SpreadAttention(
        layout=RowLayout.of(CubeMesh(), batch=B, length=S, block=256),
        kernel=kernel_for(torch.device("cpu"), q.dtype, K),
        causal=True,
        ring=False,
        block_key=1,  # as many sums as there can be
    )
    kv = torch.stack([k, v], dim=2)
    own, lse = attention.forward(q, kv)
    assert (own.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    dq, dkv = attention.backward(dout, q, kv, own, lse)
    for ours, theirs in zip((dq, *dkv.unbind(2)), exact, strict=True):
        assert ours.dtype == torch.float32
        error = ours.double() - theirs.grad.permute(2, 0, 1, 3)
        assert error.norm() < 0.01 * theirs.grad.norm()


@pytest.mark.parametrize(("sides", "axis"), [((2, 1, 1), "x"), ((1, 1, 2), "z")])
def test_keys_are_gathered_one_head_at_a_time(sides, axis):
    S, H, K = 32, 3, 8
    with pretended(2):
        mesh = CubeMesh(*sides, timeout=None)
        attention = SpreadAttention(
            layout=RowLayout.of(mesh, batch=1, length=S),
            kernel=kernel_for(torch.device("cpu"), torch.float32, K),
            causal=True,
            ring=False,
            block_key=S,
        )
        with Traffic(mesh) as traffic:
            attention.forward(torch.ones(S // 2, 1, H, K), torch.ones(S // 2, 1, 2, H, K))
    assert traffic.calls(axis, "all-gather") == traffic.calls() == H
