import dataclasses

import pytest
import torch
from conftest import make_model

from agentic.tokens import Steps


def _identity(model):
    """Takes norm, biases and place out of an embedding: what remains names its sources."""
    embedding = model.embedding
    embedding.norm = torch.nn.Identity()
    torch.nn.init.zeros_(embedding.timestep.weight)
    for column, name in enumerate(
        ("return_to_go", "observation", "action", "reward", "completion")
    ):
        layer = getattr(embedding, name)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.ones_(layer.weight[column : column + 1])
        if layer.bias is not None:
            torch.nn.init.zeros_(layer.bias)
    return embedding


def _three_steps():
    """Two trajectories of 2 and 1 steps; every value names its type (tens) and step."""
    return Steps(
        return_to_go=torch.tensor([[10.0, 11.0, 12.0]]),
        observation=torch.tensor([[[20.0], [21.0], [22.0]]]),
        action=torch.tensor([[[30.0], [31.0], [32.0]]]),
        reward=torch.tensor([[40.0, 41.0, 42.0]]),
        completion=torch.tensor([[0.0, 1.0, 0.0]]),
        timestep=torch.tensor([[0, 1, 0]]),
        trajectory=torch.tensor([[0, 0, 1]]),
        task=torch.tensor([0]),
        valid=torch.ones(1, 3, dtype=torch.bool),
    )


@torch.no_grad()
def test_interleaved_is_return_state_action_reward_by_time():
    model = make_model(layout="interleaved", observation_size=1, action_size=1)
    tokens = _identity(model)(_three_steps())[0, :, :5].tolist()
    assert tokens == [
        [10, 0, 0, 0, 0], [0, 20, 0, 0, 0], [0, 0, 30, 0, 0], [0, 0, 0, 40, 0],
        [11, 0, 0, 0, 0], [0, 21, 0, 0, 0], [0, 0, 31, 0, 0], [0, 0, 0, 41, 1],
        [12, 0, 0, 0, 0], [0, 22, 0, 0, 0], [0, 0, 32, 0, 0], [0, 0, 0, 42, 0],
    ]  # fmt: skip


@torch.no_grad()
def test_step_layout_shows_the_step_before_and_carries_the_flag_to_the_next_trajectory():
    model = make_model(layout="step", observation_size=1, action_size=1)
    tokens = _identity(model)(_three_steps())[0, :, :5].tolist()
    assert tokens == [[10, 20, 0, 0, 0], [11, 21, 30, 40, 0], [12, 22, 0, 0, 1]]


@torch.no_grad()
def test_a_window_knows_no_step_before_its_first():
    model = make_model(layout="step", observation_size=1, action_size=1)
    steps = dataclasses.replace(
        _three_steps(),  # now two windows from the middle of two trajectories
        timestep=torch.tensor([[3, 4, 2]]),
        completion=torch.zeros(1, 3),
    )
    embedding = _identity(model)
    tokens = embedding(steps)[0, :, :5].tolist()
    assert tokens == [[10, 20, 0, 0, 0], [11, 21, 30, 40, 0], [12, 22, 0, 0, 0]]


@torch.no_grad()
@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_hidden_past_leaves_no_trace(layout, random_steps):
    model = make_model(layout=layout, past_action="none", past_reward="none")
    steps = random_steps(1, 2, 5)
    other = dataclasses.replace(
        steps, action=torch.rand_like(steps.action), reward=torch.rand_like(steps.reward)
    )
    assert torch.equal(model.embedding(steps), model.embedding(other))


@torch.no_grad()
@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_dropout_of_the_past_is_for_training_only(layout, random_steps):
    model = make_model(layout=layout, past_action="dropout", dropout=0.5)
    steps = random_steps(1, 3, 5)
    kept = model.embedding(steps)
    assert torch.equal(kept, model.embedding(steps))
    model.train()
    torch.manual_seed(0)
    first, second = model.embedding(steps), model.embedding(steps)
    assert not torch.equal(first, second)
    unchanged = (first == kept).all(dim=2).float().mean()
    assert 0.3 < unchanged < 1.0


@torch.no_grad()
def test_timesteps_restart_in_every_trajectory_and_trajectories_are_told_apart(random_steps):
    steps = random_steps(1, 2, 5)
    assert steps.timestep.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    twice = Steps(
        **{
            name: value if name in ("timestep", "trajectory", "task", "valid") else value * 0
            for name, value in vars(steps).items()
        }
    )
    plain = make_model()
    token_BSD = plain.embedding(twice)
    assert torch.equal(token_BSD[:, :5], token_BSD[:, 5:])
    told = make_model(trajectory_embedding=True)
    token_BSD = told.embedding(twice)
    assert not torch.equal(token_BSD[:, :5], token_BSD[:, 5:])
