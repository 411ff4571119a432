"""Dropout under recomputation, in blocks or not."""

import pytest
import torch
from layer_reference import (
    assert_close,
    gradients,
    make_input,
    make_layer,
)

from benchmarks.allocations import allocated
from parallel.sublayers import Dropout

BLOCKS = [(1, 1, 1), (5, 3, 2), (16, 16, 16), (16, 5, 7), (64, 1000, 3), (1000, 7, 1000)]


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
