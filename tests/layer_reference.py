"""The transformer layer by its definition, one query at a time, in the inputs' own precision."""

import math

import torch
from torch import nn

from parallel import BlockSettings, LayerSize, Scope, TransformerLayer


def make_layer(
    kind="blockwise",
    *,
    width=12,
    heads=3,
    dropout=0.0,
    recompute=False,
    blocks=(None, None, None),
    dtype=torch.float64,
):
    """A layer whose weights are all random, so that none can be forgotten unseen."""
    size = LayerSize(width=width, heads=heads, feed_forward=4 * width, dropout=dropout)
    settings = BlockSettings(query=blocks[0], key=blocks[1], rows=blocks[2])
    layer = TransformerLayer(size, kind=kind, recompute=recompute, blocks=settings)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        spread = 1.5 / math.sqrt(width) if parameter.dim() == 2 else 0.3
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (spread * drawn).to(dtype)
    return layer


def make_input(S, B=2, width=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, S, width, generator=generator, dtype=torch.float64).to(dtype)


def reference(layer, x_BSD, scope=None):
    """What every kind must compute, without any helper of the package."""
    scope = scope or Scope()
    B, S, D = x_BSD.shape
    H, K = layer.size.heads, layer.size.head_width
    lengths = scope.lengths or (S,) * B
    norm = nn.functional.layer_norm
    normed = norm(x_BSD, (D,), layer.norm_attention.weight, layer.norm_attention.bias)
    qkv = normed @ layer.query_key_value.weight.T + layer.query_key_value.bias
    q, k, v = (part.unflatten(2, (H, K)) for part in qkv.chunk(3, dim=2))
    rows = []
    for t in range(scope.start, S, scope.stride):
        row = []
        for b in range(B):
            keys = min(t + 1, lengths[b]) if scope.causal else lengths[b]
            if t >= lengths[b]:
                row.append(q.new_zeros(D))
                continue
            score = torch.einsum("hk,shk->hs", q[b, t], k[b, :keys]) / math.sqrt(K)
            row.append(torch.einsum("hs,shk->hk", score.softmax(1), v[b, :keys]).flatten())
        rows.append(torch.stack(row))
    read = x_BSD[:, scope.start :: scope.stride]
    read = read + torch.stack(rows, 1) @ layer.output.weight.T + layer.output.bias
    normed = norm(read, (D,), layer.norm_feed_forward.weight, layer.norm_feed_forward.bias)
    hidden = (normed @ layer.up.weight.T + layer.up.bias).clamp(min=0)
    return read + hidden @ layer.down.weight.T + layer.down.bias


def gradients(layer, function, x_BSD):
    """Output, and gradients of the input and of all weights, for a fixed output gradient."""
    x_BSD = x_BSD.detach().clone().requires_grad_()
    y = function(x_BSD)
    wanted = [x_BSD, *(p for p in layer.parameters() if p.requires_grad)]
    return y, torch.autograd.grad(y, wanted, output_gradient(y))


def output_gradient(y):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)


def assert_close(ours, theirs, tolerance):
    """Compares (output, gradients) pairs, absolutely."""
    for a, b in zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
