import math

import pytest
import torch
from layer_reference import make_input, make_layer

import parallel.cache
import parallel.decode
from parallel import KVCache
from parallel.decode import attend_cached

CPU = torch.device("cpu")


def make_cache(keys_and_values, capacity=None, dtype=None):
    key_BHSK, value_BHSK = keys_and_values
    B, H, S, K = key_BHSK.shape
    cache = KVCache(
        batch=B,
        heads=H,
        capacity=capacity or S,
        head_width=K,
        device=CPU,
        dtype=dtype or key_BHSK.dtype,
    )
    cache.append(key_BHSK, value_BHSK)
    return cache


def random(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, *shape, generator=generator, dtype=dtype).unbind()


def definition(q_BHRK, k_BHSK, v_BHSK):
    """Of the last R of S tokens, in double precision."""
    q_BHRK, k_BHSK, v_BHSK = (t.double() for t in (q_BHRK, k_BHSK, v_BHSK))
    R, S = q_BHRK.shape[2], k_BHSK.shape[2]
    hidden_RS = torch.ones(R, S, dtype=torch.bool).triu(S - R + 1)
    score_BHRS = q_BHRK @ k_BHSK.mT / math.sqrt(q_BHRK.shape[3])
    return score_BHRS.masked_fill(hidden_RS, -math.inf).softmax(3) @ v_BHSK


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize(("H", "K"), [(1, 128), (3, 7), (8, 16), (1, 1)])
@pytest.mark.parametrize("S", [1, 2, 511, 512, 513, 1024, 1025, 1500])
def test_attention_equals_the_definition(B, H, K, S):
    q, k, v = random(B, H, S, K)
    cache, single = make_cache((k, v)), make_cache((k.float(), v.float()), capacity=1600)
    for R in {1, min(2, S), min(4, S), min(9, S)}:
        expected = definition(q[:, :, -R:], k, v)
        torch.testing.assert_close(attend_cached(q[:, :, -R:], cache), expected, rtol=0, atol=1e-13)
        out = attend_cached(q[:, :, -R:].float(), single)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("R", [1, 3, 4, 64, 65])
def test_every_length_around_small_tiles(R, monkeypatch):
    monkeypatch.setattr(parallel.cache, "TILE", 4)
    for S in range(R, R + 14):
        q, k, v = random(2, 3, S, 5)
        out = attend_cached(q[:, :, -R:], make_cache((k, v), capacity=90))
        expected = definition(q[:, :, -R:], k, v)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("R", [1, 4, 80])
@pytest.mark.parametrize("converted", [1, 2**15, 2**22])  # bytes: one tile, three, all at a time
def test_a_bf16_cache_rounds_keys_and_values_and_nothing_else(R, converted, monkeypatch):
    monkeypatch.setattr(parallel.decode, "CONVERTED", converted)
    monkeypatch.setattr(parallel.cache, "TILE", 64)
    q, k, v = random(2, 3, 500, 7, dtype=torch.float32)
    cache = make_cache((k, v), dtype=torch.bfloat16)
    out = attend_cached(q[:, :, -R:], cache)
    expected = definition(q[:, :, -R:], k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    assert cache.nbytes == make_cache((k, v)).nbytes / 2


def test_large_scores_do_not_overflow():
    q, k, v = random(1, 1, 600, 8, dtype=torch.float32)
    out = attend_cached(1e4 * q[:, :, -1:], make_cache((k, v)))
    expected = definition(1e4 * q[:, :, -1:], k, v)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("R", [1, 80])
def test_autocast_rounds_nothing(R):
    q, k, v = random(2, 3, 100, 8, dtype=torch.float32)
    cache = make_cache((k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend_cached(q[:, :, -R:], cache)
    assert torch.equal(out, attend_cached(q[:, :, -R:], cache))


@pytest.mark.parametrize("R", [1, 4, 80])
def test_contexts_do_not_see_each_other(R):
    q, k, v = random(3, 2, 700, 8, dtype=torch.float32)
    clean = attend_cached(q[:, :, -R:], make_cache((k, v)))
    for b in range(3):
        alone = attend_cached(q[b : b + 1, :, -R:], make_cache((k[b : b + 1], v[b : b + 1])))
        torch.testing.assert_close(alone[0], clean[b], rtol=0, atol=1e-6)
    k[1], v[1] = math.nan, math.nan
    dirty = attend_cached(q[:, :, -R:], make_cache((k, v)))
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    assert dirty[1].isnan().all()


def test_runs_are_equal_bit_for_bit_and_threads_change_rounding_at_most():
    q, k, v = random(1, 1, 3000, 128, dtype=torch.float32)
    cache = make_cache((k, v))
    threads = torch.get_num_threads()
    outs = []
    try:
        for count in (1, 1, 2, 2):
            torch.set_num_threads(count)
            outs.append(attend_cached(q[:, :, -4:], cache))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_and_append_restore_a_cache_bit_for_bit(dtype):
    q, k, v = random(2, 3, 1100, 5, dtype=torch.float32)
    cache = make_cache((k, v), capacity=2000, dtype=dtype)
    assert torch.equal(cache.read(0, 1100)[0], k.to(dtype))
    assert torch.equal(cache.read(0, 1100)[1], v.to(dtype))
    for first, end in ((0, 0), (3, 3), (1100, 1100), (0, 1), (400, 1099), (512, 1024)):
        key, value = cache.read(first, end)
        assert torch.equal(key, k[:, :, first:end].to(dtype))
        assert torch.equal(value, v[:, :, first:end].to(dtype))
    key, value = cache.read(0, 1100)
    restored = make_cache((key[:, :, :700], value[:, :, :700]), capacity=1500)
    restored.append(key[:, :, 700:], value[:, :, 700:])
    assert restored.length == 1100
    key.fill_(7)  # a copy
    torch.testing.assert_close(
        attend_cached(q[:, :, -4:], restored), attend_cached(q[:, :, -4:], cache), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 11, 12, 13])
def test_a_cache_forgets_its_oldest_tokens(tokens, monkeypatch):
    monkeypatch.setattr(parallel.cache, "TILE", 4)
    q, k, v = random(2, 3, 20, 5)
    k[:, :, : max(tokens - 1, 0)] = math.nan
    v[:, :, : max(tokens - 1, 0)] = math.nan
    cache = make_cache((k[:, :, :13], v[:, :, :13]), capacity=18)
    cache.drop(tokens)
    assert cache.length == 13 - tokens
    assert torch.equal(cache.read(0, cache.length)[0], k[:, :, tokens:13])
    assert torch.equal(cache.read(0, cache.length)[1], v[:, :, tokens:13])
    end = min(tokens + 18, 20)  # it holds as many as before
    cache.append(k[:, :, 13:end], v[:, :, 13:end])
    out = attend_cached(q[:, :, end - 2 : end], cache)
    expected = definition(q[:, :, end - 2 : end], k[:, :, tokens:end], v[:, :, tokens:end])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


def test_tokens_that_are_not_there():
    _, k, v = random(1, 1, 5, 2)
    cache = make_cache((k, v))
    for first, end in ((0, 6), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match=f"cache: got tokens {first} to {end}, expected a ran"):
            cache.read(first, end)
    for tokens in (-1, 6):
        with pytest.raises(ValueError, match=f"cache: got {tokens} tokens to drop, expected 0 to"):
            cache.drop(tokens)
    with pytest.raises(ValueError, match="cache: got 10 tokens, expected at most its capacity 5"):
        cache.append(k, v)
    assert torch.equal(cache.read(0, 5)[1], v)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_gives_the_last_tokens_outputs_alone(mode):
    layer, x_BSD = make_layer(), make_input(9)
    with mode():
        whole = layer(x_BSD)
        cache = KVCache(batch=2, heads=3, capacity=9, head_width=4, device=CPU, dtype=torch.float64)
        for piece, last in ((slice(0, 5), 2), (slice(5, 9), 1)):
            out = layer.decode(x_BSD[:, piece], cache, last=last)
            expected = whole[:, piece][:, -last:]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="a cache on a GPU has a layout and kernels of its own, which no CPU can run",
)
@pytest.mark.parametrize("R", [1, 4, 80])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_a_cache_on_cuda_equals_the_definition(R, dtype, tolerance):
    q, k, v = (t.to("cuda", dtype) for t in random(2, 3, 700, 32))
    cache = KVCache(batch=2, heads=3, capacity=900, head_width=32, device=q.device, dtype=dtype)
    cache.append(k[:, :, :300], v[:, :, :300])
    cache.append(k[:, :, 300:], v[:, :, 300:])
    cache.drop(100)
    assert torch.equal(cache.read(0, 600)[1], v[:, :, 100:])
    out = attend_cached(q[:, :, -R:], cache).cpu().double()
    expected = definition(q[:, :, -R:].cpu(), k[:, :, 100:].cpu(), v[:, :, 100:].cpu())
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
