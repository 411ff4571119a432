"""Steps of chains as they are gathered: whole trajectories and windows of them."""

import numpy as np
import pytest
import torch
from conftest import make_store

from agentic.sampler import Chain, Windows, assemble, cut

LEAST = np.zeros(1)  # of loss_on=top


def test_assembled_chain_by_hand():
    store = make_store([2.0, 4.0], steps=2)  # rewards 1, 1 and 2, 2
    steps, weight_BL = assemble(store, [Chain(task=0, episodes=(0, 1))], "last", LEAST)
    assert steps.return_to_go.tolist() == [[4.0, 3.0, 4.0, 2.0]]
    assert steps.reward.tolist() == [[1.0, 1.0, 2.0, 2.0]]
    assert steps.completion.tolist() == [[0.0, 0.0, 0.0, 1.0]]
    assert steps.timestep.tolist() == [[0, 1, 0, 1]]
    assert steps.trajectory.tolist() == [[0, 0, 1, 1]]
    assert steps.observation[0, :, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert weight_BL.tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert steps.valid.all()


def test_shorter_chains_are_padded_on_the_right():
    store = make_store([2.0, 4.0], steps=2)
    chains = [Chain(task=0, episodes=(1,)), Chain(task=0, episodes=(0, 1))]
    steps, weight_BL = assemble(store, chains, "all", LEAST)
    assert steps.valid.tolist() == [[True, True, False, False], [True] * 4]
    assert weight_BL.tolist() == [[1.0, 1.0, 0.0, 0.0], [1.0] * 4]
    assert not steps.observation[0, 2:].any()
    assert torch.equal(steps.observation[0, :2], steps.observation[1, 2:])


@pytest.mark.parametrize("loss_on", ["last", "top", "all"])
def test_whole_windows_are_the_chain_itself(loss_on):
    store = make_store([2.0, 5.0, 9.0], steps=4, tasks=2)
    episodes = np.array([[0, 2], [1, 2], [2, 0]])
    task = np.array([0, 0, 1])
    windows = Windows(length=4, task=task, episodes=episodes, start=np.zeros((3, 2), int))
    chains = [
        Chain(task=int(k), episodes=tuple(map(int, e))) for k, e in zip(task, episodes, strict=True)
    ]
    least_K = np.array([2.5, -4.0])  # the second task's returns are -2, -5 and -9
    steps, weight_BL = cut(store, windows, loss_on, least_K)
    expected, expected_weight_BL = assemble(store, chains, loss_on, least_K)
    for name, value in vars(expected).items():
        assert torch.allclose(getattr(steps, name), value), name
        assert getattr(steps, name).dtype == value.dtype, name
    assert torch.equal(weight_BL, expected_weight_BL)


def test_a_window_is_that_part_of_the_chain():
    store = make_store([2.0, 4.0], steps=4)
    windows = Windows(
        length=2, task=np.array([0]), episodes=np.array([[0, 1]]), start=np.array([[1, 2]])
    )
    steps, weight_BL = cut(store, windows, "last", LEAST)
    assert steps.timestep.tolist() == [[1, 2, 2, 3]]
    assert steps.trajectory.tolist() == [[0, 0, 1, 1]]
    assert steps.return_to_go.tolist() == [[3.5, 3.0, 2.0, 1.0]]
    assert steps.completion.tolist() == [[0.0, 0.0, 0.0, 1.0]]
    assert steps.observation[0, :, 0].tolist() == [1.0, 2.0, 6.0, 7.0]
    assert weight_BL.tolist() == [[0.0, 0.0, 1.0, 1.0]]
