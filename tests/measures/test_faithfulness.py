"""Faithfulness statistics, by examples with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from normscope import NormscopeError
from normscope.measures.correlation import kendall_of_lists, spearman_of_lists
from normscope.measures.faithfulness import (
    aopc,
    faithfulness_all_but_top_tokens,
    faithfulness_area_under_curve,
    faithfulness_choice_accuracy,
    faithfulness_count_in_share,
    faithfulness_interval,
    faithfulness_mean_by_entry,
    faithfulness_probability_drop,
    faithfulness_token_ranking,
    faithfulness_top_tokens,
)


def test_counts_are_rounded_up() -> None:
    assert [faithfulness_count_in_share(share, 10) for share in (0, 0.01, 0.1, 0.11, 0.5, 0.9, 1)] == [
        0,
        1,
        1,
        2,
        5,
        9,
        10,
    ]
    assert [faithfulness_count_in_share(share, 3) for share in (0.1, 0.34, 2 / 3)] == [1, 2, 2]
    assert faithfulness_count_in_share(0.3, 10) == 3  # although 0.3 * 10 is a little more than 3 in binary
    for share in (-0.1, 1.1):
        with pytest.raises(NormscopeError, match="between 0 and 1"):
            faithfulness_count_in_share(share, 4)


def test_token_ranking_and_removal() -> None:
    order = faithfulness_token_ranking([0.1, -3.0, 2.0, 0.1, 0.5])
    assert order == (2, 4, 0, 3, 1)  # signed, and of equals the earlier first
    assert faithfulness_top_tokens(order, 0.4) == {2, 4}
    assert faithfulness_all_but_top_tokens(order, 0.4) == {0, 3, 1}
    assert faithfulness_top_tokens(order, 0) == faithfulness_all_but_top_tokens(order, 1) == frozenset()
    assert faithfulness_top_tokens(order, 1) == faithfulness_all_but_top_tokens(order, 0) == {0, 1, 2, 3, 4}
    with pytest.raises(NormscopeError, match="finite"):
        faithfulness_token_ranking([1.0, math.nan])


def test_drops_and_their_mean() -> None:
    drops = faithfulness_probability_drop([0.9, 0.6], [[0.8, 0.5, 0.1], [0.7, 0.6, 0.0]])
    np.testing.assert_allclose(drops, [[0.1, 0.4, 0.8], [-0.1, 0.0, 0.6]])
    np.testing.assert_allclose(aopc(drops), [1.3 / 3, 0.5 / 3])
    np.testing.assert_allclose(aopc(drops, with_empty=True), [1.3 / 4, 0.5 / 4])
    with pytest.raises(NormscopeError, match="at least one share"):
        aopc(np.zeros((2, 0)))


def test_areas() -> None:
    shares = (0, 0.25, 1)
    assert faithfulness_area_under_curve([1.0, 1.0, 1.0], shares) == pytest.approx(1)
    assert faithfulness_area_under_curve([1.0, 0.0, 0.0], shares) == pytest.approx(
        0.125
    )  # a triangle over the first quarter
    np.testing.assert_allclose(faithfulness_area_under_curve([[0, 1, 0], [1, 1, 0]], shares), [0.5, 0.25 + 0.375])
    assert faithfulness_area_under_curve([2.0, 4.0], (0.1, 0.3)) == pytest.approx(3)  # over its own range
    for bad in ((0, 0.25), (0, 0.5, 0.5), (0, 1, 0.5)):
        with pytest.raises(NormscopeError, match="increasing shares"):
            faithfulness_area_under_curve([1.0, 1.0, 1.0], bad)


def test_accuracy() -> None:
    found = faithfulness_choice_accuracy([[1, 1, 0], [2, 0, 2]], [1, 2])
    np.testing.assert_array_equal(found, [[1, 1, 0], [1, 0, 1]])
    np.testing.assert_allclose(found.mean(0), [1, 0.5, 0.5])


def test_rank_correlations_by_hand() -> None:
    assert spearman_of_lists([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert kendall_of_lists([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert kendall_of_lists([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)  # two pairs agree, one does not
    assert math.isnan(kendall_of_lists([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman_of_lists([1, 1, 1], [1, 2, 3]))
    with pytest.raises(NormscopeError, match="same length"):
        kendall_of_lists([1, 2], [1, 2, 3])


def test_rank_correlations_against_scipy() -> None:
    generator = np.random.default_rng(0)
    for size in (2, 5, 40):
        a, b = generator.integers(0, 6, (2, size)).astype(float)
        if a.std() and b.std():
            assert kendall_of_lists(a, b) == pytest.approx(stats.kendalltau(a, b).statistic, abs=1e-12)
            assert spearman_of_lists(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_intervals() -> None:
    same = faithfulness_interval([0.5] * 20)
    assert (same.mean, same.low, same.high) == (0.5, 0.5, 0.5)
    assert same.p == pytest.approx(0.0018, abs=1e-4)  # 2 / 10,001 by the percentiles, widened for 20 entries
    alone = faithfulness_interval([0.5])
    assert (alone.mean, math.isnan(alone.low), math.isnan(alone.p)) == (0.5, True, True)
    values = np.random.default_rng(1).normal(0.3, 1, 400)
    found = faithfulness_interval(values, seed=3)
    half = 1.96 * values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)
    assert found == faithfulness_interval(values, seed=3)
    assert faithfulness_interval([0.2, math.nan, 0.4]).mean == pytest.approx(0.3)
    assert math.isnan(faithfulness_interval([]).mean)
    assert math.isnan(faithfulness_interval([math.nan]).low)
    with pytest.raises(NormscopeError, match="alpha"):
        faithfulness_interval([1.0], alpha=0)


def test_intervals_cover_what_they_say() -> None:
    """For 200 samples with a known mean, about 95 % of the intervals contain it."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = faithfulness_interval(generator.exponential(1, 60), resamples=500)
        hits += found.low <= 1 <= found.high
    assert 0.88 < hits / 200 < 0.98


def test_values_of_one_entry_are_one() -> None:
    found = faithfulness_mean_by_entry([1, 3, 10, math.nan, 5], ["b", "b", "a", "c", "a"])
    np.testing.assert_array_equal(found, [2, 7.5, math.nan])
    with pytest.raises(NormscopeError, match="2 values, got 1"):
        faithfulness_mean_by_entry([1, 2], ["a"])


def test_a_paired_difference_sees_what_an_unpaired_one_does_not() -> None:
    generator = np.random.default_rng(0)
    level = generator.normal(0, 5, 200)
    first, second = level + 0.1, level + generator.normal(0, 0.2, 200)
    assert faithfulness_interval(first - second).p < 0.01
    assert faithfulness_interval(first).low < faithfulness_interval(second).mean < faithfulness_interval(first).high
