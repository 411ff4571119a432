import torch
from torch.nn import functional

from agentic.explore.mlp import MlpEnsemble


def ensemble(count=3, sizes=(4, 8, 8, 2), normalise=True):
    networks = MlpEnsemble(count, sizes, normalise)
    networks.initialise(torch.Generator().manual_seed(0))
    return networks


def reference(networks, index, x):
    """The same network from torch.nn's functions, one at a time."""
    for depth, (weight, bias) in enumerate(networks.layers):
        x = functional.linear(x, weight[index].T, bias[index, 0])
        if depth == 0 and networks.normalise:
            x = functional.layer_norm(x, x.shape[-1:])
        if depth < len(networks.layers) - 1:
            x = functional.relu(x)
    return x


def test_every_network_of_an_ensemble_is_an_ordinary_perceptron():
    networks = ensemble()
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    for index in range(3):
        torch.testing.assert_close(networks(x)[index], reference(networks, index, x[index]))
    torch.testing.assert_close(networks(x[1:2], only=1)[0], networks(x)[1])


def test_parameters_are_rows_of_one_vector():
    networks = ensemble()
    assert networks.vector.shape == (3, (4 * 8 + 8) + (8 * 8 + 8) + (8 * 2 + 2))
    copy = MlpEnsemble(3, networks.sizes, normalise=True)
    copy.vector.copy_(networks.vector)
    x = torch.ones(3, 5, 4)
    assert torch.equal(copy(x), networks(x))


def test_gradient_predicts_the_change_of_the_loss():
    networks = ensemble()
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # a second call replaces the first one's result
        networks.backward(networks(x).square().mean())
    gradient = networks.vector.grad.clone()
    assert gradient.shape == networks.vector.shape
    step = 1e-2 * gradient / gradient.norm()
    losses = []
    for sign in (1, -2):
        networks.vector.add_(sign * step)
        losses.append(networks(x).square().mean().item())
    torch.testing.assert_close(
        torch.tensor((losses[0] - losses[1]) / 2e-2), gradient.norm(), rtol=1e-2, atol=0
    )


def test_a_single_network_passes_gradients_to_its_input_only():
    networks = ensemble()
    x = torch.ones(3, 5, 4, requires_grad=True)
    networks(x[:1], only=0).sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(tensor.grad is None for layer in networks.layers for tensor in layer)
