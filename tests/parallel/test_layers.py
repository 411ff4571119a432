import math

import pytest
import torch
from torch import nn

from parallel import LAYERS, KVCache, LayerSize, TransformerLayer
from parallel.memory import plan

LENGTHS = (1, 2, 7, 64, 97)


def _layer(kind="vanilla", recompute=False, width=12, heads=3, dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    size = LayerSize(width=width, heads=heads, feed_forward=4 * width, dropout=dropout)
    return TransformerLayer(size, kind=kind, recompute=recompute).to(dtype)


def _input(S, B=2, width=12, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(B, S, width, dtype=dtype)


def _reference(layer, x_BSD):
    """The definition, one query at a time, without any of the layer's own helpers."""
    H, K = layer.size.heads, layer.size.head_width
    normed = nn.functional.layer_norm(
        x_BSD, x_BSD.shape[-1:], layer.norm_attention.weight, layer.norm_attention.bias
    )
    qkv = normed @ layer.query_key_value.weight.T + layer.query_key_value.bias
    q, k, v = (part.unflatten(2, (H, K)) for part in qkv.chunk(3, dim=2))
    rows = []
    for t in range(x_BSD.shape[1]):
        score = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / math.sqrt(K)
        rows.append(torch.einsum("bhs,bshk->bhk", score.softmax(2), v[:, : t + 1]).flatten(1))
    x_BSD = x_BSD + torch.stack(rows, 1) @ layer.output.weight.T + layer.output.bias
    normed = nn.functional.layer_norm(
        x_BSD, x_BSD.shape[-1:], layer.norm_feed_forward.weight, layer.norm_feed_forward.bias
    )
    hidden = (normed @ layer.up.weight.T + layer.up.bias).clamp(min=0)
    return x_BSD + hidden @ layer.down.weight.T + layer.down.bias


def _gradients(layer, function, x_BSD):
    x_BSD = x_BSD.clone().requires_grad_()
    y_BSD = function(x_BSD)
    weight = torch.linspace(-1, 1, y_BSD.numel(), dtype=y_BSD.dtype).view_as(y_BSD)
    grads = torch.autograd.grad((y_BSD * weight).sum(), [x_BSD, *layer.parameters()])
    return y_BSD, grads


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("S", LENGTHS)
def test_output_and_all_gradients_equal_the_definition(kind, recompute, S):
    layer = _layer(kind, recompute)
    x_BSD = _input(S)
    y, grads = _gradients(layer, layer, x_BSD)
    expected, expected_grads = _gradients(layer, lambda x: _reference(layer, x), x_BSD)
    assert torch.allclose(y, expected, rtol=0, atol=1e-10)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", LAYERS)
def test_single_precision_is_near_double(kind):
    single = _layer(kind, dtype=torch.float32)(_input(97, dtype=torch.float32))
    double = _layer(kind)(_input(97, dtype=torch.float32).double())
    assert torch.allclose(single.double(), double, rtol=0, atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4], [9], [2, 7]])
def test_decoding_in_pieces_equals_the_whole(kind, pieces):
    layer = _layer(kind)
    x_BSD = _input(9)
    cache = KVCache(
        batch=2, heads=3, capacity=9, head_width=4, device=x_BSD.device, dtype=x_BSD.dtype
    )
    decoded = torch.cat([layer.decode(piece, cache) for piece in x_BSD.split(pieces, 1)], dim=1)
    assert torch.allclose(decoded, layer(x_BSD), rtol=0, atol=1e-12)
    assert cache.length == 9
    with pytest.raises(ValueError, match="cache: got 10 tokens, expected at most its capacity 9"):
        layer.decode(x_BSD[:, :1], cache)


def test_cache_bytes():
    cache = KVCache(batch=2, heads=3, capacity=5, head_width=4, device=torch.device("cpu"))
    assert cache.nbytes == 2 * 2 * 3 * 5 * 4 * 4


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_is_the_same_under_recomputation(kind):
    grads = []
    for recompute in (False, True):
        layer = _layer(kind, recompute, dropout=0.3)
        torch.manual_seed(5)
        grads.append(_gradients(layer, layer, _input(16))[1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    layer.eval()
    assert not torch.equal(grads[0][0], _gradients(layer, layer, _input(16))[1][0])


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"layer.kind: got 'flash', expected one of"):
        _layer("flash")


def _saved_bytes(layer, x_BSD):
    """Bytes that autograd keeps between forward and backward, parameters aside."""
    seen: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x_BSD)
    del y
    return sum(seen.values())


@pytest.mark.parametrize("kind", LAYERS)
def test_memory_plan_is_near_what_autograd_keeps(kind):
    layer = _layer(kind, width=64, heads=1, dtype=torch.float32)
    S = 512
    kept = _saved_bytes(layer, _input(S, B=1, width=64, dtype=torch.float32).requires_grad_())
    planned = plan(
        parameters=0,
        layers=1,
        size=layer.size,
        kind=kind,
        recompute=False,
        batch=1,
        sequence=S,
        element_bytes=4,
    )
    assert planned.total == planned.activations
    assert 0.7 < planned.activations / kept < 1.4
