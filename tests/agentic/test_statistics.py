import itertools
import warnings

import numpy as np
import pytest
from scipy import stats

from agentic import statistics


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_interval_is_that_of_the_normal_distribution_for_many_values():
    values = np.random.default_rng(0).normal(5, 1, 40)
    told = statistics.estimate(values)
    half = 1.96 * values.std(ddof=1) / 40**0.5
    assert told.mean == values.mean()
    assert told.count == 40
    assert told.interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1)


def test_interval_is_that_of_all_resamples():
    values = np.array([1.0, 2.0, 7.0, 11.0, 12.0])
    resamples = list(itertools.product(values, repeat=5))
    means = np.mean(resamples, axis=1)  # all of them, equally likely
    low, high = statistics.estimate(values).interval
    assert low == pytest.approx(np.quantile(means, 0.025), abs=0.3)
    assert high == pytest.approx(np.quantile(means, 0.975), abs=0.3)


@pytest.mark.parametrize("value", [0.0, 0.1, -1000.0, 1e-300])
def test_equal_values_have_an_interval_of_no_width(value):
    told = statistics.estimate(np.full(7, value))
    assert told.interval == pytest.approx((value, value), rel=1e-12)
    told = statistics.over_seeds([np.full(3, value), np.full(2, value)])
    assert told.mean_interval == pytest.approx((value, value), rel=1e-12)
    assert told.iqm_interval == pytest.approx((value, value), rel=1e-12)


def test_few_values():
    assert statistics.estimate(np.array([3.0])) == statistics.Estimate(
        mean=3.0, interval=None, count=1
    )
    assert statistics.estimate(np.array([])) == statistics.Estimate(
        mean=None, interval=None, count=0
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
def test_interquartile_mean_drops_a_quarter_from_either_end(count):
    values = np.random.default_rng(count).normal(size=count) ** 3
    cut = count // 4
    expected = np.mean(sorted(values)[cut : count - cut])
    assert statistics.iqm(values) == pytest.approx(expected, abs=1e-12)


def _by_loops(scores, statistic):
    """The stratified bootstrap, one resample after the other."""
    rng = np.random.default_rng(1)
    found = [
        statistic(np.concatenate([rng.choice(s, len(s)) for s in scores])) for _ in range(4000)
    ]
    return np.quantile(found, [0.025, 0.975])


def test_over_seeds_resamples_within_each_task():
    # Tasks far apart: whoever mixes them gets intervals a hundred times as wide.
    scores = [np.array([0.0, 1.0, 2.0]), np.array([100.0, 101.0, 103.0, 104.0])]
    told = statistics.over_seeds(scores)
    runs = np.concatenate(scores)
    assert told.mean == pytest.approx(runs.mean(), abs=1e-12)
    assert told.iqm == pytest.approx(np.sort(runs)[1:-1].mean(), abs=1e-12)
    assert told.mean_interval == pytest.approx(_by_loops(scores, np.mean), abs=0.1)
    trimmed = _by_loops(scores, lambda values: np.sort(values)[1:-1].mean())
    assert told.iqm_interval == pytest.approx(trimmed, abs=0.2)
    assert told.mean_interval[1] - told.mean_interval[0] < 3


def test_one_task_over_seeds_is_the_plain_bootstrap():
    values = np.array([1.0, 4.0, 2.0, 8.0])
    assert statistics.over_seeds([values]).mean_interval == statistics.estimate(values).interval


def test_over_seeds_of_a_single_seed_has_no_interval():
    told = statistics.over_seeds([np.array([1.0, 2.0]), np.array([6.0])])
    assert (told.mean, told.mean_interval, told.iqm_interval) == (3.0, None, None)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_expected_max_is_the_mean_over_all_subsets(n):
    values = np.array([3.0, -1.0, 3.0, 8.0, 0.5, 2.0])
    subsets = [max(subset) for subset in itertools.combinations(values, n)]
    assert statistics.expected_max(values, n) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_expected_max_of_many_values_and_of_too_few():
    values = np.arange(40_000.0)
    # Of uniform integers 0 .. m-1 the largest of n is (m + 1) n / (n + 1) - 1 on average.
    assert statistics.expected_max(values, 64) == pytest.approx(40_001 * 64 / 65 - 1, rel=1e-9)
    assert statistics.expected_max(values[:3], 4) is None
    assert statistics.expected_max(np.full(3, 0.1), 2) == pytest.approx(0.1, abs=1e-15)


def test_slopes_are_those_of_a_regression_of_the_trials_that_were_run():
    returns = np.random.default_rng(0).normal(size=(5, 6))
    returns[1, 4:] = np.nan
    returns[2, 2:] = np.nan
    returns[3, 1:] = np.nan
    expected = [
        stats.linregress(np.arange(n), returns[c, :n]).slope
        for c, n in ((0, 6), (1, 4), (2, 2), (4, 6))
    ]
    np.testing.assert_allclose(statistics.slopes(returns), expected, atol=1e-12)
    assert len(statistics.slopes(returns[:, :1])) == 0


def _all_resamples(seeds):
    """The mean of every equally likely resample: seeds first, then contexts of each."""
    per_seed = [np.mean(list(itertools.product(s, repeat=len(s))), axis=1) for s in seeds]
    return np.array(
        [
            np.mean(means)
            for drawn in itertools.product(per_seed, repeat=len(seeds))
            for means in itertools.product(*drawn)
        ]
    )


def test_interval_over_seeds_and_contexts_is_that_of_all_resamples():
    seeds = [np.array([0.0, 1.0, 5.0]), np.array([7.0, 8.0, 12.0])]
    means = _all_resamples(seeds)  # (2 x 27)^2, equally likely: as many contexts in each seed
    told = statistics.over_seeds_and_contexts([seeds])
    assert told.mean == pytest.approx(5.5)
    assert told.count == 6
    low, high = told.interval
    assert low == pytest.approx(np.quantile(means, 0.025), abs=0.34)
    assert high == pytest.approx(np.quantile(means, 0.975), abs=0.34)
    # Neither of the two alone: contexts pooled are too sure, and so are means of seeds.
    pooled = statistics.estimate(np.concatenate(seeds)).interval
    assert high - low > 1.1 * (pooled[1] - pooled[0])
    of_means = statistics.over_seeds([np.array([2.0, 9.0])]).mean_interval
    assert low < of_means[0] - 0.5
    assert high > of_means[1] + 0.5


def test_every_seed_and_every_task_weighs_the_same_over_seeds_and_contexts():
    tasks = [[np.array([0.0]), np.full(9, 4.0)], [np.array([10.0]), np.array([10.0]), np.ones(3)]]
    told = statistics.over_seeds_and_contexts(tasks)
    assert told.mean == pytest.approx((2 + 7) / 2)
    low, high = told.interval
    # 0.5 has 1 chance in 108 and 1.5 another 2, 7.0 has 8.
    assert (low, high) == pytest.approx((1.5, 7.0))


def test_one_seed_has_no_interval_over_seeds_and_contexts():
    told = statistics.over_seeds_and_contexts([[np.arange(5.0)]])
    assert (told.mean, told.interval, told.count) == (2.0, None, 5)
    both = [[np.arange(5.0), np.arange(3.0)], [np.arange(5.0)]]
    assert statistics.over_seeds_and_contexts(both).interval is None
