"""Behaviour cloning against its definition, one step at a time."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import make_model

K = 3


def _model(tasks=1, **changes):
    names = ("cartpole_swingup", "cartpole_balance")[:tasks]
    model = make_model(method="bc", context_steps=K, trajectories=1, tasks=names, **changes)
    model.set_units(
        observation_mean=np.array([0.3, -0.2, 0.1]),
        observation_std=np.array([2.0, 0.5, 1.0]),
        return_scale=np.ones(tasks),
    )
    return model


def _slow(model, steps, b, t):
    """The action of one step, from its last K normalised observations, zeros before the first."""
    seen = [torch.zeros(3)] * max(0, K - 1 - t)
    for s in range(max(0, t - K + 1), t + 1):
        seen.append((steps.observation[b, s] - model.observation_mean) / model.observation_std)
    x = torch.cat(seen)
    if len(model.spec.tasks) > 1:
        x = torch.cat([x, torch.eye(len(model.spec.tasks))[steps.task[b]]])
    for module in model.layers:
        x = module(x)
    return torch.tanh(model.head(x))


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("first", [0, 2, 4])
def test_actions_are_those_of_the_last_observations_padded_with_zeros(tasks, first, random_steps):
    model, steps = _model(tasks), random_steps(3, 1, 5, tasks=tasks)
    expected = torch.stack(
        [torch.stack([_slow(model, steps, b, t) for t in range(first, 5)]) for b in range(3)]
    )
    torch.testing.assert_close(model(steps, first), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("length", [K, 5])
def test_the_loss_counts_steps_whose_observations_are_known(tasks, length, random_steps):
    model, steps = _model(tasks), random_steps(4, 1, length, tasks=tasks)
    begin_B = torch.tensor([0, 7, 1, 0])  # of the windows, in their episodes
    steps = dataclasses.replace(steps, timestep=steps.timestep + begin_B[:, None])
    weight_BL = torch.rand(4, length, generator=torch.Generator().manual_seed(1))
    total = weight = 0.0
    for b in range(4):
        for t in range(length):
            if begin_B[b] == 0 or t >= K - 1:
                error = (_slow(model, steps, b, t) - steps.action[b, t]).square().mean()
                total += weight_BL[b, t] * error
                weight += weight_BL[b, t]
    torch.testing.assert_close(model.loss(steps, weight_BL), total / weight, rtol=0, atol=1e-6)


def test_nothing_but_observations_and_the_task_is_seen(random_steps):
    model, steps = _model(tasks=2), random_steps(2, 1, 5, tasks=2)
    others = dataclasses.replace(
        steps,
        return_to_go=steps.return_to_go + 9,
        action=-steps.action,
        reward=steps.reward + 9,
        completion=1 - steps.completion,
    )
    assert torch.equal(model(steps), model(others))
    swapped = dataclasses.replace(steps, task=steps.task.flip(0))
    assert not torch.allclose(model(steps), model(swapped), atol=1e-4)


def test_hidden_layers_are_as_many_and_as_wide_as_the_settings_say():
    model = _model(layers=4, width=8, heads=1)
    sizes = [layer.weight.shape for layer in model.layers if isinstance(layer, torch.nn.Linear)]
    assert [tuple(size) for size in sizes] == [(8, 3 * K), (8, 8), (8, 8), (8, 8)]
    assert model.parameter_count() == 8 * 3 * K + 8 + 3 * (64 + 8) + 2 * 8 + 2
