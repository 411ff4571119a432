import dataclasses

import numpy as np
import pytest
import torch
from conftest import make_store

from agentic.config import ChainConfig
from agentic.sampler import ChainSampler, Windows, cut

CONFIG = ChainConfig(
    trajectories=3,
    count="fixed",
    window_share=0.0,
    window_steps=12,
    window_batch=12,
    best_from=1.0,
    spread="full",
    loss_on="last",
)


def _sampler(store, batch_steps=12, seed=0, context_steps=None, **changes):
    return ChainSampler(
        store,
        np.arange(store.episodes),
        dataclasses.replace(CONFIG, **changes),
        batch_steps=batch_steps,
        seed=seed,
        context_steps=context_steps,
    )


def test_chains_ascend_without_repetition():
    store = make_store([5.0, 1.0, 4.0, 2.0, 3.0])
    sampler = _sampler(store)
    for i in range(50):
        (chain,) = sampler.draw(i)
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
    chains = [chain for i in range(300) for chain in sampler.draw(i)]
    assert {chain.episodes[-1] for chain in chains} == {8, 9}
    assert {e for chain in chains for e in chain.episodes[:-1]} == set(range(9))
    uniform = [chain for i in range(3000) for chain in _sampler(store).draw(i)]
    assert {chain.episodes[0] for chain in uniform} == set(range(8))


def test_drawn_spread_gives_narrow_chains_as_well_as_wide_ones():
    store = make_store([float(r) for r in range(20)])
    drawn, full = (
        np.array([s.draw(i)[0].episodes for i in range(400)]) @ [-1, 0, 1]
        for s in (_sampler(store, best_from=0.05, spread=spread) for spread in ("drawn", "full"))
    )
    assert drawn.min() == 2
    assert drawn.max() == 19
    assert (drawn <= 5).mean() > 4 * (full <= 5).mean()


def test_number_of_trajectories_is_drawn_and_fills_the_batch():
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, count="uniform", batch_steps=24)
    sizes = {tuple(len(chain.episodes) for chain in sampler.draw(i)) for i in range(60)}
    assert sizes == {(1,) * 6, (2,) * 3, (3,) * 2}


@pytest.mark.parametrize("window_share", [0.0, 1.0])
@pytest.mark.parametrize("top", [1.0, 0.5])
def test_the_loss_counts_all_that_could_be_a_best(window_share, top):
    store = make_store([float(r) for r in range(20)], tasks=2)
    sampler = _sampler(
        store,
        loss_on="top",
        best_from=0.2,
        top=top,
        window_share=window_share,
        trajectories=4,
        batch_steps=16,
    )
    best = {tuple(c) for i in range(300) for c in _bests(sampler, i)}
    size = round(20 * top * 0.2)
    assert best == {(0, e) for e in range(20 - size, 20)} | {(1, e) for e in range(size)}
    counted = set()
    for i in range(300):
        drawn, (_, weight_BL) = sampler.draw(i), sampler.batch(i)
        chains = (
            zip(drawn.task, drawn.episodes, strict=True)
            if isinstance(drawn, Windows)
            else [(c.task, c.episodes) for c in drawn]
        )
        for (task, episodes), weight_L in zip(chains, weight_BL, strict=True):
            weight_NT = weight_L.unflatten(0, (4, -1))
            expected = [(int(task), int(e)) in best for e in episodes]
            assert weight_NT.tolist() == [[float(c)] * weight_NT.shape[1] for c in expected]
            counted.add(tuple(expected))
    assert {(False, False, False, True), (False, False, True, True)} <= counted


def _bests(sampler, index):
    drawn = sampler.draw(index)
    if isinstance(drawn, Windows):
        return list(zip(drawn.task.tolist(), drawn.episodes[:, -1].tolist(), strict=True))
    return [(chain.task, chain.episodes[-1]) for chain in drawn]


@pytest.mark.parametrize("window_share", [0.0, 1.0])
@pytest.mark.parametrize(
    ("count", "shares"), [("fixed", [0, 0, 0, 1]), ("uniform", [0.25, 0.25, 0.25, 0.25])]
)
def test_how_often_chains_have_how_many_trajectories(count, shares, window_share):
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, trajectories=4, count=count, window_share=window_share)
    drawn = [sampler.draw(i) for i in range(2000)]
    sizes = [d.episodes.shape[1] if window_share else len(d[0].episodes) for d in drawn]
    seen = np.bincount(sizes, minlength=5)[1:] / len(sizes)
    np.testing.assert_allclose(seen, shares, rtol=0, atol=0.04)  # 4 standard errors


def test_a_chain_that_does_not_fit_the_batch_still_comes_alone():
    (chain,) = _sampler(make_store([1.0, 2.0, 3.0]), batch_steps=1).draw(0)
    assert chain.episodes == (0, 1, 2)


def test_fewer_trajectories_than_a_chain_needs():
    with pytest.raises(ValueError, match=r"chain.trajectories: got 3.*at most the 2"):
        _sampler(make_store([1.0, 2.0]))


def test_tasks_are_drawn_and_ranked_by_their_own_returns():
    store = make_store([1.0, 2.0, 3.0], tasks=2)
    sampler = _sampler(store, batch_steps=1)
    chains = [sampler.draw(i)[0] for i in range(40)]
    assert {c.task: c.episodes for c in chains} == {0: (0, 1, 2), 1: (2, 1, 0)}


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 0.35, 0.65), (1.0, 1, 1)])
def test_the_share_of_windows_is_the_one_asked_for(share, low, high):
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, window_share=share)
    draws = [isinstance(sampler.draw(i), Windows) for i in range(200)]
    assert low <= np.mean(draws) <= high


def test_windows_are_formed_like_chains_of_any_length():
    store = make_store([float(r) for r in range(10)], steps=6)
    sampler = _sampler(store, count="uniform", best_from=0.2, window_share=1.0, spread="drawn")
    seen = set()
    for i in range(300):
        windows = sampler.draw(i)
        B, N = windows.episodes.shape
        seen.add((N, windows.length))
        assert B == max(1, 12 // (N * windows.length))
        assert set(windows.episodes[:, -1]) <= {8, 9}
        assert (np.diff(windows.episodes, axis=1) >= 0).all()
        assert windows.start.min() >= 0
        assert windows.start.max() + windows.length <= 6
    assert seen >= {(1, 1), (1, 6), (2, 3), (3, 2), (3, 1)}


def test_fixed_count_and_longest_window_hold_in_windows():
    store = make_store([float(r) for r in range(10)], steps=12)
    sampler = _sampler(store, window_share=1.0, window_steps=6)
    drawn = [sampler.draw(i) for i in range(100)]
    assert {windows.episodes.shape[1] for windows in drawn} == {3}
    assert max(windows.length * 3 for windows in drawn) == 6


def test_drawn_spread_holds_with_any_best():
    store = make_store([float(r) for r in range(20)])
    full, drawn = (_sampler(store, best_from=1.0, spread=spread) for spread in ("full", "drawn"))
    assert [full.draw(i) for i in range(20)] != [drawn.draw(i) for i in range(20)]


def test_return_weighted_draws_follow_the_returns():
    store = make_store([0.0, 1.0, 2.0, 3.0, 4.0])
    weight = np.array([0.04, 1, 2, 3, 4])
    sampler = _sampler(store, weighting="return", trajectories=1)
    drawn = [sampler.draw(i)[0].episodes[0] for i in range(4000)]
    share = np.bincount(drawn, minlength=5) / 4000
    assert share == pytest.approx(weight / weight.sum(), abs=0.03)
    windows = [
        _sampler(store, weighting="return", trajectories=1, window_share=1.0).draw(i)
        for i in range(400)
    ]
    drawn = np.concatenate([w.episodes[:, -1] for w in windows])
    assert np.bincount(drawn, minlength=5) / len(drawn) == pytest.approx(
        weight / weight.sum(), abs=0.04
    )


def test_return_weighted_chains_keep_the_order_and_the_best():
    store = make_store([float(r) for r in range(20)], tasks=2)
    sampler = _sampler(store, weighting="return", best_from=0.2, spread="drawn")
    chains = [sampler.draw(i)[0] for i in range(300)]
    for chain in chains:
        returns = store.returns[chain.task, list(chain.episodes)]
        assert len(set(chain.episodes)) == 3
        assert list(returns) == sorted(returns)
        assert returns[-1] in np.sort(store.returns[chain.task])[-4:]
    assert {chain.task for chain in chains} == {0, 1}
    plain = [_sampler(store, best_from=0.2).draw(i)[0] for i in range(300)]
    worst, usual = (
        np.mean([store.returns[c.task, c.episodes[0]] - store.returns[c.task].min() for c in cs])
        for cs in (chains, plain)
    )
    assert worst > usual + 2


def test_equal_returns_have_equal_weights():
    sampler = _sampler(make_store([2.0] * 4), weighting="return", trajectories=1)
    assert {sampler.draw(i)[0].episodes[0] for i in range(100)} == {0, 1, 2, 3}


@pytest.mark.parametrize("best_from", [1.0, 0.5])
def test_with_replacement_a_trajectory_may_come_twice(best_from):
    store = make_store([1.0, 2.0])
    sampler = _sampler(store, replacement=True, best_from=best_from)
    chains = {sampler.draw(i)[0].episodes for i in range(100)}
    assert all(list(chain) == sorted(chain) for chain in chains)
    assert {(0, 1, 1), (1, 1, 1), (0, 0, 1)} <= chains
    assert (best_from == 1.0) == ((0, 0, 0) in chains)
    windows = _sampler(store, replacement=True, best_from=best_from, window_share=1.0).draw(0)
    assert windows.episodes.shape[1] == 3


@pytest.mark.parametrize("weighting", ["uniform", "return"])
@pytest.mark.parametrize("spread", ["full", "drawn"])
@pytest.mark.parametrize("best_from", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("returns", [[3.0], [2.0, 2.0], [0.0, 0.0, 5.0], [-1.0, -2.0, -3.0, 0.0]])
def test_few_or_equal_episodes_make_chains_of_any_length(returns, best_from, spread, weighting):
    store = make_store(returns)
    for replacement in (False, True):
        sampler = _sampler(
            store,
            trajectories=4 if replacement else len(returns),
            count="uniform",
            replacement=replacement,
            best_from=best_from,
            spread=spread,
            weighting=weighting,
            window_share=0.5,
        )
        for i in range(60):
            drawn = sampler.draw(i)
            for chain in [drawn.episodes] if isinstance(drawn, Windows) else drawn:
                ids = chain if isinstance(chain, np.ndarray) else np.array([chain.episodes])
                assert (np.diff(store.returns[0, ids], axis=1) >= 0).all()


def test_only_the_given_episodes_are_drawn():
    store = make_store([float(r) for r in range(12)], tasks=2)
    episodes = np.array([1, 4, 5, 7, 10])
    for weighting in ("uniform", "return"):
        config = dataclasses.replace(CONFIG, weighting=weighting, window_share=0.5)
        sampler = ChainSampler(store, episodes, config, batch_steps=12, seed=0)
        drawn = [sampler.draw(i) for i in range(100)]
        chains = {e for d in drawn if not isinstance(d, Windows) for c in d for e in c.episodes}
        windows = {int(e) for d in drawn if isinstance(d, Windows) for e in d.episodes.flat}
        assert chains == windows == set(episodes.tolist())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_every_task_has_its_own_weights(share):
    returns = [0.0] * 9 + [100.0]
    store = make_store(returns, tasks=2)  # the second task's are 0, nine times, and -100
    sampler = _sampler(store, weighting="return", trajectories=1, window_share=share)
    counts = np.zeros((2, 10))
    for i in range(600):
        drawn = sampler.draw(i)
        if share:
            np.add.at(counts, (drawn.task, drawn.episodes[:, 0]), 1)
        else:
            counts[drawn[0].task, drawn[0].episodes[0]] += 1
    assert counts[0, 9] > 0.8 * counts[0].sum()  # 100 against nine times 1
    assert counts[1, 9] < 0.05 * counts[1].sum()  # 1 against nine times 100


def test_seeds_are_streams_of_their_own():
    store = make_store([float(r) for r in range(30)])
    one, other = (_sampler(store, seed=seed) for seed in (0, 1))
    assert [one.draw(i + 1) for i in range(20)] != [other.draw(i) for i in range(20)]


def test_a_share_of_the_best_is_not_cut_short_by_rounding():
    store = make_store([float(r) for r in range(10)])
    sampler = _sampler(store, best_from=0.7, trajectories=1)
    assert {sampler.draw(i)[0].episodes[0] for i in range(200)} == set(range(3, 10))


def test_windows_of_the_papers_setting_are_any_trajectories():
    store = make_store([float(r) for r in range(10)])
    best = np.concatenate(
        [_sampler(store, window_share=1.0).draw(i).episodes[:, -1] for i in range(1500)]
    )
    expected = (np.arange(1, 11) ** 3 - np.arange(10) ** 3) / 1000  # the largest of three
    assert np.bincount(best, minlength=10) / len(best) == pytest.approx(expected, abs=0.03)


def test_windows_reach_the_last_step_and_only_the_best_completes():
    store = make_store([9.9, 10.0], steps=3)
    sampler = _sampler(store, trajectories=2, window_share=1.0, window_steps=6)
    drawn = [sampler.draw(i) for i in range(200)]
    assert max(int(w.start.max()) + w.length for w in drawn) == 3
    whole = Windows(
        length=3, task=np.array([0]), episodes=np.array([[0, 1]]), start=np.zeros((1, 2), int)
    )
    assert cut(store, whole, "last", np.zeros(1))[0].completion.tolist() == [[0.0] * 5 + [1.0]]


def test_a_context_of_k_steps_is_a_window_of_one_trajectory_from_anywhere():
    store = make_store([float(r) for r in range(10)], steps=6)
    sampler = _sampler(store, trajectories=1, context_steps=4)
    starts = []
    for i in range(300):
        drawn = sampler.draw(i)
        assert isinstance(drawn, Windows)
        assert (drawn.length, drawn.episodes.shape) == (4, (3, 1))  # 12 steps in a micro-batch
        steps, weight_BL = sampler.batch(i)
        assert torch.equal(steps.timestep, torch.tensor(drawn.start) + torch.arange(4))
        assert weight_BL.shape == (3, 4)
        assert (weight_BL == 1).all()
        # All the return that the episode still earns: nothing is relabelled.
        per_step = torch.from_numpy(store.returns[0, drawn.episodes] / 6)
        own = per_step * (6 - steps.timestep)
        assert steps.return_to_go.numpy() == pytest.approx(own.numpy(), abs=1e-5)
        starts += drawn.start.ravel().tolist()
    shares = np.bincount(starts) / len(starts)
    assert shares == pytest.approx(np.full(3, 1 / 3), abs=0.06)


@pytest.mark.parametrize("weighting", ["uniform", "return"])
@pytest.mark.parametrize("context_steps", [None, 2])
def test_only_the_top_is_ever_drawn_of_every_task(weighting, context_steps):
    store = make_store([float(r) for r in range(30)], tasks=2)
    sampler = _sampler(
        store,
        trajectories=1 if context_steps else 3,
        top=0.1,
        weighting=weighting,
        window_share=0.5,
        context_steps=context_steps,
    )
    drawn = {0: set(), 1: set()}
    for i in range(200):
        batch = sampler.draw(i)
        if isinstance(batch, Windows):
            pairs = zip(batch.task.tolist(), batch.episodes.tolist(), strict=True)
        else:
            pairs = ((chain.task, chain.episodes) for chain in batch)
        for task, episodes in pairs:
            drawn[task].update(episodes)
    assert drawn == {0: {27, 28, 29}, 1: {0, 1, 2}}


@pytest.mark.parametrize(
    ("top", "episodes", "left"), [(0.1, 225, 22), (0.1, 5, 1), (0.0, 5, 1), (0.7, 10, 7), (1, 9, 9)]
)
def test_the_top_is_whole_episodes_up_to_its_share(top, episodes, left):
    assert dataclasses.replace(CONFIG, top=top).best_of(episodes) == left
    store = make_store([float(r) for r in range(episodes)])
    sampler = _sampler(store, top=top, trajectories=1)
    assert sampler.ranked_KE.tolist() == [list(range(episodes - left, episodes))]


def test_a_top_smaller_than_a_chain_is_refused():
    with pytest.raises(ValueError, match=r"chain.trajectories: got 3.*at most the 2"):
        _sampler(make_store([float(r) for r in range(20)]), top=0.1)


def test_chains_of_windows_are_longer_than_an_episode_where_asked():
    store = make_store([float(r) for r in range(10)], steps=4)
    sampler = _sampler(store, trajectories=3, window_share=1.0, window_steps=12, window_batch=5)
    drawn = [sampler.draw(i) for i in range(300)]
    sizes = {(windows.length * 3, len(windows.task)) for windows in drawn}
    assert sizes == {(3, 1), (6, 1), (9, 1), (12, 1)}  # 5 environment steps hold one of the least
