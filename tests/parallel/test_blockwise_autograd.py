"""The blockwise layer inside PyTorch's machinery."""

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
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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


def _loss_of(model, rank):
    """On a sequence of the rank's own length, which is cut into another number of blocks."""
    return model(make_input((64, 97)[rank])[rank : rank + 1]).square().mean()


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
    _loss_of(wrapped, rank).backward()
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
    ((_loss_of(model, 0) + _loss_of(model, 1)) / 2).backward()
    found = torch.load(tmp_path / "grads", weights_only=True)
    for ours, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=0, atol=1e-12)
