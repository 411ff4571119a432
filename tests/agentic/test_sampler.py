import dataclasses

import numpy as np
import pytest
import torch
from conftest import make_store

from agentic.config import ChainConfig
from agentic.sampler import Chain, ChainSampler, assemble

CONFIG = ChainConfig(
    trajectories=3,
    count="fixed",
    single_fraction=0.0,
    window_share=0.0,
    best_from=1.0,
    spread="full",
    loss_on="last",
)


def _sampler(store, batch_steps=12, seed=0, single_steps=0, **changes):
    return ChainSampler(
        store,
        np.arange(store.episodes),
        dataclasses.replace(CONFIG, **changes),
        batch_steps=batch_steps,
        seed=seed,
        single_steps=single_steps,
    )


def test_chains_ascend_without_repetition():
    store = make_store([5.0, 1.0, 4.0, 2.0, 3.0])
    sampler = _sampler(store)
    for i in range(50):
        (chain,) = sampler.draw(i).chains
        returns = store.returns[0, list(chain.episodes)]
        assert len(set(chain.episodes)) == 3
        assert list(returns) == sorted(returns)


def test_draws_are_a_pure_function_of_seed_and_index():
    store = make_store([float(r) for r in range(30)])
    forward = [_sampler(store, count="uniform").draw(i) for i in range(40)]
    fresh = _sampler(store, count="uniform")
    assert [fresh.draw(i) for i in reversed(range(40))] == forward[::-1]
    assert [_sampler(store, seed=1, count="uniform").draw(i) for i in range(40)] != forward


def test_best_comes_from_the_top_and_everything_is_drawn():
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, best_from=0.2)
    chains = [chain for i in range(300) for chain in sampler.draw(i).chains]
    assert {chain.episodes[-1] for chain in chains} == {8, 9}
    assert {e for chain in chains for e in chain.episodes[:-1]} == set(range(9))
    uniform = [chain for i in range(300) for chain in _sampler(store).draw(i).chains]
    assert {chain.episodes[0] for chain in uniform} == set(range(8))


def test_drawn_spread_gives_narrow_chains_as_well_as_wide_ones():
    store = make_store([float(r) for r in range(20)])
    drawn, full = (
        np.array([s.draw(i).chains[0].episodes for i in range(400)]) @ [-1, 0, 1]
        for s in (_sampler(store, best_from=0.05, spread=spread) for spread in ("drawn", "full"))
    )
    assert drawn.min() == 2
    assert drawn.max() == 19
    assert (drawn <= 5).mean() > 4 * (full <= 5).mean()


def test_number_of_trajectories_is_drawn_and_fills_the_batch():
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, count="uniform", batch_steps=24, single_steps=5)
    sizes = [[len(chain.episodes) for chain in sampler.draw(i).chains] for i in range(60)]
    assert all(s == [1] * 6 for s in sizes[:5])
    assert {tuple(s) for s in sizes[5:]} == {(1,) * 6, (2,) * 3, (3,) * 2}


def test_a_chain_that_does_not_fit_the_batch_still_comes_alone():
    (chain,) = _sampler(make_store([1.0, 2.0, 3.0]), batch_steps=1).draw(0).chains
    assert chain.episodes == (0, 1, 2)


def test_fewer_trajectories_than_a_chain_needs():
    with pytest.raises(ValueError, match=r"chain.trajectories: got 3.*at most the 2"):
        _sampler(make_store([1.0, 2.0]))


def test_tasks_are_drawn_and_ranked_by_their_own_returns():
    store = make_store([1.0, 2.0, 3.0], tasks=2)
    sampler = _sampler(store, batch_steps=1)
    chains = [sampler.draw(i).chains[0] for i in range(40)]
    assert {c.task: c.episodes for c in chains} == {0: (0, 1, 2), 1: (2, 1, 0)}


def test_assembled_chain_by_hand():
    store = make_store([2.0, 4.0], steps=2)  # rewards 1, 1 and 2, 2
    steps, weight_BL = assemble(store, [Chain(task=0, episodes=(0, 1))], "last")
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
    steps, weight_BL = assemble(store, chains, "all")
    assert steps.valid.tolist() == [[True, True, False, False], [True] * 4]
    assert weight_BL.tolist() == [[1.0, 1.0, 0.0, 0.0], [1.0] * 4]
    assert not steps.observation[0, 2:].any()
    assert torch.equal(steps.observation[0, :2], steps.observation[1, 2:])


def test_windows_are_pieces_of_single_trajectories():
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, best_from=0.1, window_share=0.5, single_steps=10)
    draws = [sampler.draw(i) for i in range(200)]
    assert all(draw.window is not None for draw in draws[:10])
    assert {draw.window for draw in draws} == {None, 1, 2, 4}
    assert 0.35 < np.mean([draw.window is not None for draw in draws[10:]]) < 0.65
    for i, draw in enumerate(draws):
        steps, weight_BL = sampler.batch(i)
        if draw.window is None:
            assert steps.timestep.shape == (1, 12)
            continue
        assert steps.timestep.shape == (12 // draw.window, draw.window)
        assert weight_BL.shape == steps.timestep.shape
        assert weight_BL.all()
        # Pieces in order: the whole trajectories again.
        assert steps.timestep.flatten().tolist() == [0, 1, 2, 3] * 3
        assert steps.observation[..., 0].flatten().tolist() == [36.0, 37.0, 38.0, 39.0] * 3
        assert steps.task.shape == (len(steps.timestep),)
