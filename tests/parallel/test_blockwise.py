import itertools
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layer_reference import (
    assert_close,
    gradients,
    make_input,
    make_layer,
    output_gradient,
    reference,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.allocations import allocated
from parallel import BlockSettings, LayerSize, Scope
from parallel.sublayers import Dropout

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


# Memory


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


# Dropout


def test_dropout_masks_do_not_depend_on_blocks():
    like = torch.empty(2, 1, 5)

    def draw(rows, seed=7):
        return Dropout(0.3, seed, 1300).masks(rows, like).kept_2BRD

    whole = draw(range(1300))
    assert whole.shape == (2, 2, 1300, 5)
    for size in (1, 100, 256, 700):
        parts = [draw(range(a, min(a + size, 1300))) for a in range(0, 1300, size)]
        assert torch.equal(torch.cat(parts, dim=2), whole)
    assert whole.float().mean() == pytest.approx(0.7, abs=0.02)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[:, :, :256], whole[:, :, 256:512])
    assert not torch.equal(draw(range(1300), seed=8), whole)
    assert not torch.equal(draw(range(1300), seed=7 + 2**32), whole)
    ones = torch.ones(2, 1300, 5)
    dropped = Dropout(0.3, 7, 1300).masks(range(1300), like).drop(0, ones)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])


def test_dropout_draws_no_more_than_the_rows_that_there_are():
    dropout, like = Dropout(0.3, 7, 3), torch.empty(1000, 3, 8)
    assert allocated(lambda: dropout.masks(range(3), like)).peak < 4 * 2 * like.numel()


INEXACT = ("query_key_value", "norm_feed_forward.weight")  # behind a softmax or a norm


def _integer_layer(kind, blocks):
    """Computes with small integers wherever dropout acts, so that no order of sums matters."""
    layer = make_layer(kind, dropout=0.5, blocks=blocks)
    generator = torch.Generator().manual_seed(3)
    for name, p in layer.named_parameters():
        p.data = torch.randint(-3, 4, p.shape, generator=generator).to(p.dtype)
        if name.startswith(INEXACT):
            p.data.zero_()
    return layer


@pytest.mark.parametrize("blocks", [(5, 3, 2), (600, 100, 600), (1300, 1300, 1300), (1, 1000, 1)])
def test_dropout_gives_the_very_gradients_of_the_dense_layers(blocks):
    found = []
    for kind in ("vanilla", "memory_efficient", "blockwise"):
        layer = _integer_layer(kind, blocks)
        torch.manual_seed(5)
        x_BSD = make_input(1200 if min(blocks) > 1 else 100).round().requires_grad_()
        y = layer(x_BSD)
        y.backward(torch.ones_like(y))
        exact = [p for name, p in layer.named_parameters() if not name.startswith(INEXACT)]
        found.append([y, x_BSD.grad, *(p.grad for p in exact)])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))
    assert all(grad.any() for grad in found[2][-4:])  # those of the feed-forward are not empty


@pytest.mark.parametrize("blocks", BLOCKS)
def test_dropout_gradients_equal_the_dense_layers_to_rounding(blocks):
    found = []
    for kind in ("vanilla", "blockwise"):
        layer = make_layer(kind, dropout=0.3, blocks=blocks)
        torch.manual_seed(5)
        found.append(gradients(layer, layer, make_input(65)))
    assert_close(found[1], found[0], 1e-11)


def test_every_pass_drops_something_else():
    layer, x_BSD = make_layer(dropout=0.3), make_input(5)
    torch.manual_seed(5)
    first, second = layer(x_BSD), layer(x_BSD)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(layer(x_BSD), first)
    assert torch.equal(layer(x_BSD), second)


def test_a_seed_is_drawn_only_where_something_is_dropped():
    plain, dropping = make_layer(), make_layer(dropout=0.3)
    before = torch.get_rng_state()
    plain(make_input(5))
    dropping.eval()(make_input(5))
    assert torch.equal(torch.get_rng_state(), before)
    dropping.train()(make_input(5))
    assert not torch.equal(torch.get_rng_state(), before)


# In PyTorch's machinery


def test_frozen_weights_get_no_gradient_and_change_no_other():
    layer = make_layer(blocks=(16, 16, 16))
    _, (_, *grads) = gradients(layer, layer, make_input(33))
    expected = dict(zip(layer.state_dict(), grads, strict=True))
    for p in (layer.up.weight, layer.query_key_value.weight, layer.norm_attention.bias):
        p.requires_grad_(False)
    x_BSD = make_input(33)  # not even the input wants a gradient
    y = layer(x_BSD)
    y.backward(output_gradient(y))
    for name, p in layer.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=1e-12)
        else:
            assert p.grad is None


def test_all_weights_frozen():
    layer = make_layer().requires_grad_(False)
    x_BSD = make_input(9).requires_grad_()
    layer(x_BSD).sum().backward()
    assert x_BSD.grad.isfinite().all()
    assert not layer(make_input(9)).requires_grad


def test_double_use_in_one_graph():
    blockwise, dense = make_layer(blocks=(16, 16, 16)), make_layer("vanilla")
    found = [gradients(m, lambda x, m=m: m(m(x) * 0.5), make_input(33)) for m in (blockwise, dense)]
    assert_close(*found, 1e-10)


def test_a_weight_changed_before_the_backward_pass_is_an_error():
    layer = make_layer()
    y = layer(make_input(9)).sum()
    with torch.no_grad():
        layer.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_second_derivatives_are_refused():
    layer, x_BSD = make_layer(), make_input(9).requires_grad_()
    y = layer(x_BSD).square().sum()
    (grad,) = torch.autograd.grad(y, x_BSD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_input_with_strides():
    layer = make_layer(blocks=(16, 16, 16))
    x_BSD = make_input(33)
    expected = gradients(layer, layer, x_BSD)
    strided = x_BSD.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(gradients(layer, layer, strided), expected, 1e-12)
    y = layer(x_BSD)
    y.sum().backward()  # its gradient has strides of 0


def test_compiled_model_equals_eager():
    """The layer is a graph of its own; what stands around it is compiled."""
    model = nn.Sequential(nn.Linear(12, 12), make_layer(blocks=(16, 16, 16)), nn.Linear(12, 3))
    model = model.double()
    compiled = torch.compile(model, backend="aot_eager")
    found = [gradients(model, m, make_input(33)) for m in (model, compiled)]
    assert_close(*found, 1e-12)


def _train_alone(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    model = nn.Sequential(make_layer(blocks=(16, 16, 16)), make_layer(blocks=(8, 16, 16)))
    wrapped = DistributedDataParallel(model)
    wrapped(make_input(33)[rank : rank + 1]).square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], f"{folder}/part")
        os.replace(f"{folder}/part", f"{folder}/grads")
    # Whoever started it ends it: leaving the group was seen to hang on a busy machine, in gloo's
    # own threads, after all was done.
    time.sleep(300)


def test_distributed_data_parallel_gives_the_gradients_of_one_process(tmp_path, monkeypatch):
    if os.path.exists("/sys/class/net/lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    started = mp.spawn(_train_alone, (str(tmp_path),), nprocs=2, join=False)
    try:
        while not (tmp_path / "grads").exists():
            started.join(timeout=0.2)  # raises what a process raised
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    model = nn.Sequential(make_layer(blocks=(16, 16, 16)), make_layer(blocks=(8, 16, 16)))
    model(make_input(33)).square().mean().backward()
    found = torch.load(tmp_path / "grads", weights_only=True)
    for ours, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=0, atol=1e-12)


# Block sizes


def test_block_sizes_are_chosen_or_fixed():
    size = LayerSize(width=128, heads=1, feed_forward=512)
    shape = {"batch": 1, "sequence": 16384, "element_bytes": 4}
    chosen = BlockSettings().sizes(size, **shape)
    assert min(chosen.query, chosen.key) >= 768  # below it PyTorch's kernel takes smaller tiles
    assert BlockSettings(key=3).sizes(size, **shape) == type(chosen)(
        query=chosen.query, key=3, rows=chosen.rows
    )
    wide = LayerSize(width=1024, heads=8, feed_forward=4096)
    assert BlockSettings().sizes(wide, **shape).rows < chosen.rows
    short = BlockSettings().sizes(size, batch=1, sequence=5, element_bytes=4)
    assert (short.query, short.key, short.rows) == (5, 5, 5)
    with pytest.raises(ValueError, match="block_rows: got 0, expected a positive integer"):
        BlockSettings(rows=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
