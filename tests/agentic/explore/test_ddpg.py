import copy

import pytest
import torch
from torch.nn import functional

from agentic.explore.ddpg import Actor, Critic, Ddpg, DdpgSettings, linear

O, A, B = 4, 2, 16
SETTINGS = DdpgSettings(
    hidden=8, learning_rate=1e-3, bootstrap=0.99**3, tau=0.01, noise=0.2, noise_clip=0.3
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_networks_have_the_papers_layers_and_parameters():
    H = 1024
    trunk = H + 2 * H  # bias and layer normalisation
    actor = Actor(24, 6, H, generator())
    assert parameters(actor) == (24 * H + trunk) + (H * H + H) + (H * 6 + 6)
    critic = Critic(24, 6, H, generator())
    assert parameters(critic) == (30 * H + trunk) + 2 * ((H * H + H) + (H + 1))
    names = [type(m).__name__ for m in actor.modules() if not list(m.children())]
    assert names == ["Linear", "LayerNorm", "Tanh", "Linear", "ReLU", "Linear", "Tanh"]
    names = [type(m).__name__ for m in critic.modules() if not list(m.children())]
    assert names == ["Linear", "LayerNorm", "Tanh"] + 2 * ["Linear", "ReLU", "Linear"]


def test_layers_begin_orthogonal_without_bias_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    layer = linear(5, 12, generator())
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(layer.weight.T @ layer.weight, torch.eye(5))
    assert (layer.bias == 0).all()
    assert not torch.equal(layer.weight, linear(5, 12, generator(1)).weight)


def test_an_update_is_the_papers():
    agent = Ddpg(O, A, SETTINGS, generator())
    for slow in agent.target.parameters():  # a target that is not the critic
        slow.data.add_(0.1 * torch.randn(slow.shape, generator=generator(1)))
    actor, critic, target = copy.deepcopy((agent.actor, agent.critic, agent.target))
    x, later = (torch.randn(B, O, generator=generator(seed)) for seed in (2, 3))
    action = torch.rand(B, A, generator=generator(4)) * 2 - 1
    reward = torch.rand(B, 1, generator=generator(5))
    agent.generator.manual_seed(6)
    draws = generator(6)
    agent.update(x, action, reward, later)

    def noise():
        return (0.2 * torch.randn(B, A, generator=draws)).clamp(-0.3, 0.3)

    edge = 1 - 1e-6
    with torch.no_grad():
        next_action = (actor(later) + noise()).clamp(-edge, edge)
        goal = reward + 0.99**3 * torch.stack(target(later, next_action)).amin(0)
    optimiser = torch.optim.Adam(critic.parameters(), 1e-3)
    sum(functional.mse_loss(q, goal) for q in critic(x, action)).backward()
    optimiser.step()
    optimiser = torch.optim.Adam(actor.parameters(), 1e-3)
    (-torch.stack(critic(x, actor(x) + noise())).amin(0).mean()).backward()
    optimiser.step()
    pairs = [(agent.critic, critic), (agent.actor, actor)]
    for slow, learned in zip(target.parameters(), critic.parameters(), strict=True):
        slow.data += 0.01 * (learned.data - slow.data)
    for got, expected in [*pairs, (agent.target, target)]:
        for one, other in zip(got.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.data, other.data, rtol=1e-5, atol=1e-6)


def still(agent, mean):
    """The agent with an actor of constant mean."""
    *_, last, _ = agent.actor.layers
    last.weight.data.zero_()
    last.bias.data.fill_(torch.tensor(mean).atanh())
    return agent


def test_behaviour_is_a_truncated_normal_that_is_not_clipped():
    action = still(Ddpg(O, A, SETTINGS, generator()), 0.0).act(torch.zeros(20_000, O))
    assert action.mean().item() == pytest.approx(0, abs=0.005)
    assert action.std().item() == pytest.approx(0.2, abs=0.005)
    # Of a normal 13.4 % lie beyond 1.5 deviations.
    assert (action.abs() > 0.3).float().mean().item() == pytest.approx(0.134, abs=0.01)
    edge = still(Ddpg(O, A, SETTINGS, generator()), 0.9).act(torch.zeros(20_000, O))
    assert edge.max() < 1
    assert (edge > 0.9999).float().mean().item() == pytest.approx(0.309, abs=0.01)


def test_noise_in_updates_is_clipped_and_passes_the_gradient():
    agent = Ddpg(O, A, SETTINGS, generator())
    mean = torch.full((20_000, 1), 0.9, requires_grad=True)
    action = agent._noisy(mean, clip=0.3)
    action.sum().backward()
    assert action.min().item() == pytest.approx(0.6, abs=1e-6)
    assert (action < 0.6001).float().mean().item() == pytest.approx(0.067, abs=0.01)
    assert action.max() < 1
    assert (mean.grad == 1).all()
