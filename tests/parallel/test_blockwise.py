"""The blockwise layer is exact: against the definition, in every precision."""

import itertools

import pytest
import torch
from layer_reference import (
    assert_close,
    gradients,
    make_input,
    make_layer,
    reference,
)

from parallel import Scope

BLOCKS = [(1, 1, 1), (5, 3, 2), (16, 16, 16), (16, 5, 7), (64, 1000, 3), (1000, 7, 1000)]
LENGTHS = (1, 2, 17, 31, 64, 65)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("heads", [1, 3])
def test_equals_the_definition_for_all_blocks_and_lengths(S, blocks, heads):
    layer = make_layer(heads=heads, blocks=blocks)
    expected = gradients(layer, lambda x: reference(layer, x), make_input(S))
    assert_close(gradients(layer, layer, make_input(S)), expected, 1e-10)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("causal", "start", "stride"), list(itertools.product([0, 1], [0, 2], [1, 4]))
)
@pytest.mark.parametrize("lengths", [None, (17, 8, 0)])
def test_equals_the_definition_for_all_scopes(blocks, causal, start, stride, lengths):
    layer, x_BSD = make_layer(blocks=blocks), make_input(17, B=3)
    scope = Scope(causal=bool(causal), start=start, stride=stride, lengths=lengths)
    expected = gradients(layer, lambda x: reference(layer, x, scope), x_BSD)
    assert_close(gradients(layer, lambda x: layer(x, scope), x_BSD), expected, 1e-10)


def test_nothing_but_padding():
    layer = make_layer(blocks=(4, 4, 4))
    y, grads = gradients(layer, lambda x: layer(x, Scope(lengths=(0, 0))), make_input(9))
    assert all(t.isfinite().all() for t in (y, *grads))
    assert (grads[3] == 0).all()  # no query, key or value took part
    assert (grads[2] == 0).all()


def test_an_empty_batch():
    with pytest.raises(ValueError, match="x: got a batch of 0 sequences"):
        make_layer()(make_input(5)[:0])
    assert make_layer("vanilla")(make_input(5)[:0]).shape == (0, 5, 12)


def test_gradcheck():
    layer = make_layer(width=4, heads=2, blocks=(3, 2, 2))

    def function(x, *weights):
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    # The input first: the weights that the function is given are not the layer's own.
    weights = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(function, (make_input(7, 1, 4).requires_grad_(), *weights))


def _errors(layer, x_BSD, exact, autocast):
    def compute(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer(x)

    y, grads = gradients(layer, compute, x_BSD)
    pairs = zip([y, *grads], [exact[0], *exact[1]], strict=True)
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("heads", [1, 4])
def test_error_is_that_of_pytorchs_attention_and_does_not_grow_with_blocks(precision, heads):
    S, width = 1100, 32
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = {"width": width, "heads": heads, "dtype": dtype}
    x_BSD = make_input(S, 1, width, dtype)
    double = make_layer("vanilla", **size).double()  # the very weights, rounded to dtype
    exact = gradients(double, double, x_BSD.double())
    autocast = precision == "autocast"
    peer = _errors(make_layer("memory_efficient", **size), x_BSD, exact, autocast)
    one, *more = (
        _errors(make_layer(blocks=blocks, **size), x_BSD, exact, autocast)
        for blocks in [(2000, 2000, 2000), (300, 200, 100), (20, 20, 20)]
    )
    for ours in (one, *more):
        assert (ours <= 2 * peer).all(), ours / peer
    for ours in more:
        assert (ours <= 1.5 * one + torch.finfo(torch.float32).eps).all(), ours / one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_entered_again_in_the_backward_pass(dtype):
    x_BSD = make_input(33, 1, 32, torch.float32)
    found = []
    for kind in ("vanilla", "blockwise"):
        layer = make_layer(kind, width=32, heads=2, blocks=(16, 16, 16), dtype=torch.float32)

        def compute(x, layer=layer):
            with torch.autocast("cpu", dtype):
                return layer(x)

        found.append(gradients(layer, compute, x_BSD))
    step = torch.finfo(dtype).eps
    for ours, dense in zip(*([y, *grads] for y, grads in found), strict=True):
        assert ours.dtype == dense.dtype == torch.float32
        assert (ours - dense).norm() <= 8 * step * dense.norm()
    # Products were rounded to 16 bits: in fp32 no gradient would be this far off.
    exact = make_layer("vanilla", width=32, heads=2, dtype=torch.float32)
    _, grads = gradients(exact, exact, x_BSD)
    assert (found[1][1][1] - grads[1]).norm() > 0.05 * step * grads[1].norm()


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="these are CUDA's own attention kernels: no CPU has them to be tested on",
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize("stride", [1, 4])
def test_layer_on_cuda_equals_the_cpu(dtype, tolerance, stride):
    scope = Scope(stride=stride, lengths=(70, 33))
    size = {"width": 32, "heads": 2, "blocks": (32, 16, 8)}
    layer = make_layer("vanilla", dtype=torch.float64, **size)
    expected = gradients(layer, lambda x: layer(x, scope), make_input(70, 2, 32))
    layer = make_layer(dtype=dtype, **size).cuda()
    y, grads = gradients(layer, lambda x: layer(x, scope), make_input(70, 2, 32).to("cuda", dtype))
    assert_close((y.cpu().double(), [g.cpu().double() for g in grads]), expected, tolerance)
