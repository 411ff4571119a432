import numpy as np
import pytest

from agentic import hindsight


def test_ascending_is_stable_and_worst_first():
    assert hindsight.ascending(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [1, 3, 0, 2]


def test_returns_to_go_by_hand():
    reward_NT = np.array([[1.0, 0.0, 1.0], [2.0, 1.0, 2.0]])
    got = hindsight.returns_to_go(reward_NT, target=5.0)
    assert got.tolist() == [[5.0, 4.0, 4.0], [5.0, 3.0, 2.0]]


def test_best_trajectory_ends_at_its_last_reward_and_a_worse_one_above_it():
    reward_NT = np.array([[0.25, 0.25], [0.5, 1.0]])
    got = hindsight.returns_to_go(reward_NT, target=1.5)
    assert got[1, -1] - reward_NT[1, -1] == 0.0
    assert got[0, -1] - reward_NT[0, -1] == pytest.approx(1.0)


def test_completion_marks_only_the_last_step_of_those_that_reach_the_target():
    got = hindsight.completion(np.array([1.0, 4.0, 4.0]), target=4.0, steps=3)
    assert got.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_loss_weights():
    returns_N = np.array([1.0, 3.0, 4.0])
    counted = {
        loss_on: hindsight.loss_weights(returns_N, 2, loss_on, least=3.0)
        for loss_on in ("last", "top", "all")
    }
    assert counted["last"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert counted["top"].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert counted["all"].tolist() == [[1, 1]] * 3
    assert counted["top"].dtype == np.float32
    assert hindsight.loss_weights(returns_N[:1], 2, "last", 3.0).tolist() == [[1, 1]]
    assert hindsight.loss_weights(returns_N, 2, "top", 9.0).tolist() == [[0, 0], [0, 0], [1, 1]]
    several = hindsight.loss_weights(returns_N + [[0], [2]], 1, "top", np.array([[4.0], [5.0]]))
    assert several[..., 0].tolist() == [[0, 0, 1], [0, 1, 1]]
