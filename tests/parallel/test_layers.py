import pytest
import torch
import torch._dynamo.testing
from layer_reference import assert_close, gradients, make_input, make_layer, reference

from parallel import LAYERS, KVCache, Scope

LENGTHS = (1, 2, 7, 64, 97)
SCOPES = {
    "causal": Scope(),
    "every key": Scope(causal=False),
    "padded": Scope(lengths=(5, 0)),
    "padded, every key": Scope(causal=False, lengths=(0, 7)),
    "every third row": Scope(start=2, stride=3),
    "padded, every third row": Scope(start=1, stride=3, lengths=(7, 2)),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("S", LENGTHS)
def test_output_and_all_gradients_equal_the_definition(kind, recompute, S):
    layer = make_layer(kind, recompute=recompute)
    expected = gradients(layer, lambda x: reference(layer, x), make_input(S))
    assert_close(gradients(layer, layer, make_input(S)), expected, 1e-10)


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_padding_causality_and_rows_equal_the_definition(kind, scope):
    layer = make_layer(kind)
    expected = gradients(layer, lambda x: reference(layer, x, scope), make_input(7))
    assert_close(gradients(layer, lambda x: layer(x, scope), make_input(7)), expected, 1e-10)


@pytest.mark.parametrize("kind", LAYERS)
def test_single_precision_is_near_double(kind):
    single = make_layer(kind, dtype=torch.float32)(make_input(97).float())
    double = make_layer(kind)(make_input(97).float().double())
    assert torch.allclose(single.double(), double, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4], [9], [2, 7]])
def test_decoding_in_pieces_equals_the_whole(kind, pieces):
    layer = make_layer(kind)
    x_BSD = make_input(9)
    cache = KVCache(
        batch=2, heads=3, capacity=9, head_width=4, device=x_BSD.device, dtype=x_BSD.dtype
    )
    decoded = torch.cat([layer.decode(piece, cache) for piece in x_BSD.split(pieces, 1)], dim=1)
    assert torch.allclose(decoded, layer(x_BSD), rtol=0, atol=1e-12)
    assert cache.length == 9
    with pytest.raises(ValueError, match="cache: got 10 tokens, expected at most its capacity 9"):
        layer.decode(x_BSD[:, :1], cache)


@torch.no_grad()
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16])
def test_decoding_under_autocast(cached):
    layer = make_layer(dtype=torch.float32)
    x_BSD = make_input(9).float()
    cache = KVCache(batch=2, heads=3, capacity=9, head_width=4, device=x_BSD.device, dtype=cached)
    with torch.autocast("cpu", torch.bfloat16):
        decoded = torch.cat([layer.decode(x, cache) for x in x_BSD.split([5, 4], 1)], dim=1)
        torch.testing.assert_close(decoded, layer(x_BSD), rtol=0.05, atol=0.05)


def test_shared_and_parametrised_weights_are_the_ones_used():
    for kind in LAYERS:
        layer = make_layer(kind)
        before = layer(make_input(5))
        torch.nn.utils.parametrizations.weight_norm(layer.up)
        assert torch.allclose(layer(make_input(5)), before, rtol=0, atol=1e-10)
        layer.up.parametrizations.weight.original0.data.mul_(2)
        assert not torch.allclose(layer(make_input(5)), before)
        layer = make_layer(kind)
        layer.norm_feed_forward = layer.norm_attention
        layer(make_input(5)).sum().backward()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_layers_equal_eager_ones_and_are_not_compiled_for_every_step(kind, dropout):
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = make_layer(kind, dropout=dropout)
    compiled = torch.compile(layer, backend=counted)
    frames = []
    for S in (9, 9, 16, 17, 18, 19, 20):
        torch.manual_seed(S)
        expected = gradients(layer, layer, make_input(S))
        torch.manual_seed(S)
        assert_close(gradients(layer, compiled, make_input(S)), expected, 1e-12)
        frames.append(counted.frame_count)
    assert frames[-1] == frames[3]  # neither a new seed nor a new length makes another graph


def test_cache_bytes():
    cache = KVCache(batch=2, heads=3, capacity=5, head_width=4, device=torch.device("cpu"))
    assert cache.nbytes == 2 * 2 * 3 * 5 * 4 * 4


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_is_the_same_under_recomputation(kind):
    grads = []
    for recompute in (False, True):
        layer = make_layer(kind, recompute=recompute, dropout=0.3)
        torch.manual_seed(5)
        grads.append(gradients(layer, layer, make_input(16))[1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    layer.eval()
    assert not torch.equal(grads[0][0], gradients(layer, layer, make_input(16))[1][0])


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"layer.kind: got 'flash', expected one of"):
        make_layer("flash")


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        (Scope(start=5), "start 5, stride 1, expected a stride of 1 or more and a start in"),
        (Scope(stride=0), "stride 0"),
        (Scope(lengths=(5,)), "expected 2 lengths"),
        (Scope(lengths=(5, 6)), "in \\[0, 5\\]"),
    ],
)
def test_a_scope_that_does_not_fit(scope, message):
    with pytest.raises(ValueError, match=message):
        make_layer()(make_input(5), scope)
