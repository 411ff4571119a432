"""What the blockwise layer allocates and keeps."""

import pytest
import torch
from layer_reference import (
    make_input,
    make_layer,
)

from benchmarks.allocations import allocated
from parallel import Scope


@pytest.mark.parametrize("stride", [1, 4])
def test_peak_memory_is_that_of_the_formula(stride):
    S, D, blocks = 4096, 64, (512, 256, 128)
    layer = make_layer(width=D, heads=2, blocks=blocks, dtype=torch.float32)
    x_BSD = make_input(S, 1, D, torch.float32).requires_grad_()
    scope = Scope(stride=stride)
    dy_BRD = torch.ones(1, S // stride, D)
    layer(x_BSD, scope).backward(dy_BRD)  # gradients exist from now on
    unit = 4 * S * D
    forward = allocated(lambda: layer(x_BSD, scope))
    step = allocated(lambda: layer(x_BSD, scope).backward(dy_BRD))
    lse = 2 / D  # of the two heads, in fp32
    rows = 1 / stride
    # Kept: the attention output, and the layer's output itself.
    kept = (2 + lse) * rows
    assert forward.kept == pytest.approx(kept * unit, rel=0.01)
    query, key, part = (block / S for block in blocks)
    kernel = 2 * 256 * 512 * 4 / unit  # its tiles of scores
    # Keys and values beside them, and what exists of one block.
    assert forward.peak <= (kept + 2 + 3 * query + 8 * part + kernel / 2) * unit
    # Keys and values, their gradients, that of x, and what exists of one block: first of its
    # feed-forward, then of its attention.
    block = 3 * query + max(22 * part, 2 * query + 2 * key + kernel)
    assert step.peak <= (kept + 5 + block) * unit
    assert max(step.largest, forward.largest) <= unit
    assert unit < 4 * S * 4 * D < 4 * S * S  # so no allocation is S x 4D, none S x S


def _saved(layer, x_BSD):
    """Bytes that autograd keeps between forward and backward, parameters aside."""
    seen = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x_BSD)
    return sum(seen.values())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_keeps_input_attention_output_and_log_sum_exp(dropout):
    x_BSD = make_input(100).requires_grad_()
    one = x_BSD.nbytes
    lse = one * 3 // 12
    assert _saved(make_layer(dropout=dropout, blocks=(32, 32, 32)), x_BSD) == 2 * one + lse
    assert _saved(make_layer(dropout=dropout, recompute=True), x_BSD) == one


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_keeps_nothing(mode):
    layer, x_BSD = make_layer(blocks=(16, 16, 16)), make_input(64)
    expected = layer(x_BSD)
    with mode():
        assert torch.equal(layer(x_BSD), expected)
        assert allocated(lambda: layer(x_BSD)).kept == x_BSD.nbytes  # its output
