import pytest
import torch

from parallel.attention import attend, attend_backward, pieces
from parallel.kernels import Attended, CpuFlash, CudaEfficient, CudaFlash, Plain, kernel_for, merge_

KERNELS = (CpuFlash(), Plain())
SHAPES = [(1, 1, True), (5, 9, False), (600, 600, True), (530, 1100, False)]


def _random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _inputs(Q, S, dtype=torch.float64, B=2, H=3, K=8):
    sizes = (Q, Q, S, S)
    return [_random(B, H, n, K, seed=i).to(dtype) for i, n in enumerate(sizes)]


def _dense(q, k, v, visible_QS):
    score = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    score = score.masked_fill(~visible_QS, -torch.inf)
    return score.softmax(3) @ v, score.logsumexp(3)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize(("Q", "S", "causal"), SHAPES)
def test_kernels_equal_the_definition(kernel, Q, S, causal):
    grad, q, k, v = _inputs(Q, S)
    visible = torch.ones(Q, S, dtype=torch.bool).tril() if causal else torch.ones(1, 1).bool()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = _dense(*leaves, visible)
    out, lse = kernel.forward(q, k, v, causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        kernel.backward(grad, Attended(q, k, v, out, lse), causal),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exp_is_wide(kernel, dtype):
    _, q, k, v = _inputs(4, 6, dtype)
    out, lse = kernel.forward(q, k, v, False)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("largest", [None, 1, 2, 3, 4])
@pytest.mark.parametrize(("first", "stride"), [(0, 1), (3, 1), (0, 4), (5, 4), (2, 3), (11, 7)])
def test_pieces_hold_every_visible_pair_once_and_no_other(first, stride, largest):
    S = 60
    positions = range(first, S, stride)[:7]
    seen = torch.zeros(len(positions), S, dtype=torch.int64)
    for piece in pieces(positions, S, causal=True, largest_square=largest):
        block = seen[piece.queries, piece.keys]
        block += torch.ones_like(block).tril() if piece.causal else 1
    position_Q1 = torch.tensor(positions)[:, None]
    assert torch.equal(seen, (torch.arange(S) <= position_Q1).long())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize(("first", "stride"), [(0, 1), (8, 1), (8, 4), (1, 3)])
@pytest.mark.parametrize("block_key", [1, 3, 1000])
def test_attention_of_a_block_of_queries(kernel, first, stride, block_key, monkeypatch):
    monkeypatch.setattr(kernel, "largest_square", 2)
    S = 30
    positions = range(first, S, stride)[:4]
    grad, q, k, v = _inputs(len(positions), S)
    visible = torch.arange(S) <= torch.tensor(positions)[:, None]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, _ = _dense(*leaves, visible)
    out, lse = attend(kernel, q, k, v, positions, True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    attended = Attended(q, k, v, out, lse)
    attend_backward(kernel, grad, attended, dq, dk, dv, positions, True, block_key)
    for ours, theirs in zip((dq, dk, dv), torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("Q", [1, 4, 130, 256])
@pytest.mark.parametrize("threads", [3, 4])
def test_cutting_for_more_threads_changes_nothing(batch, heads, Q, threads):
    grad, q, k, v = _inputs(Q, 4099, B=batch, H=heads)
    kernel = CpuFlash()
    alone = kernel.forward(q, k, v, False)
    alone_grads = kernel.backward(grad, Attended(q, k, v, *alone), False)
    torch.set_num_threads(threads)
    try:
        together = kernel.forward(q, k, v, False)
        grads = kernel.backward(grad, Attended(q, k, v, *alone), False)
    finally:
        torch.set_num_threads(1)
    for ours, theirs in zip(together + grads, alone + alone_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [8, 64])
def test_merging_many_blocks_stays_as_exact_as_one_call(dtype, blocks):
    _, q, k, v = _inputs(50, 1024, dtype)
    exact, _ = _dense(q.double(), k.double(), v.double(), torch.ones(1, 1).bool())
    kernel = CpuFlash()
    whole, _ = kernel.forward(q, k, v, False)
    (out, lse), *more = (
        kernel.forward(q, *block, False)
        for block in zip(k.chunk(blocks, 2), v.chunk(blocks, 2), strict=True)
    )
    out = out.float()
    for piece in more:
        merge_(out, lse, *piece)
    assert (out.to(dtype) - exact).norm() <= 2 * (whole - exact).norm()


def test_the_kernel_is_chosen_by_device_dtype_and_head_width():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert isinstance(kernel_for(cpu, torch.float32, 7), CpuFlash)
    assert isinstance(kernel_for(cpu, torch.float16, 64), Plain)
    assert isinstance(kernel_for(cuda, torch.bfloat16, 128), CudaFlash)
    assert isinstance(kernel_for(cuda, torch.bfloat16, 12), Plain)
    assert isinstance(kernel_for(cuda, torch.bfloat16, 264), Plain)
    assert isinstance(kernel_for(cuda, torch.float32, 128), CudaEfficient)
    assert isinstance(kernel_for(cuda, torch.float64, 128), Plain)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(CudaFlash(), torch.bfloat16), (CudaEfficient(), torch.float32)]
)
def test_calls_of_cuda_kernels_fit_their_signatures(kernel, dtype):
    """Shapes and arguments, checked without a GPU; values are checked by the tests marked cuda."""
    shape = (2, 3, 70, 16)
    grad, q = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 3, 90, 16, dtype=dtype, device="meta") for _ in range(2))
    out, lse = kernel.forward(q, k, v, False)
    assert (out.shape, lse.shape) == (shape, shape[:3])
    dq, dk, dv = kernel.backward(grad, Attended(q, k, v, out, lse), False)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="these are CUDA's own attention kernels: no CPU has them to be tested on",
)
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        (CudaFlash(), torch.bfloat16, 2e-2),
        (CudaEfficient(), torch.float32, 2e-5),
        (Plain(), torch.float64, 1e-12),
    ],
)
@pytest.mark.parametrize(("Q", "S", "causal"), SHAPES)
def test_cuda_kernels_equal_the_definition(kernel, dtype, tolerance, Q, S, causal):
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        grad, q, k, v = (t.to("cuda", dtype) for t in _inputs(Q, S, K=16))
        wide = [t.double() for t in (grad, q, k, v)]
        out, lse = kernel.forward(q, k, v, causal)
        exact = Plain().forward(*wide[1:], causal)
        torch.testing.assert_close(out.double(), exact[0], rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), exact[1], rtol=0, atol=tolerance)
        for ours, theirs in zip(
            kernel.backward(grad, Attended(q, k, v, out, lse), causal),
            Plain().backward(wide[0], Attended(*wide[1:], *exact), causal),
            strict=True,
        ):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
