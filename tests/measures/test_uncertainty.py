"""Intervals and tests: known answers, agreement with scipy, and the rate of wrong decisions on null data."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import bootstrap, permutation_test, spearmanr, t

from normscope.errors import NormscopeError
from normscope.measures import uncertainty
from normscope.measures.uncertainty import Estimate, decide_at_least, resample_means

NULLS = 400  # data sets without an effect, for each kind of claim


def estimate_of(p_above: float) -> Estimate:
    return Estimate(0.0, math.nan, math.nan, p_above, 1 - p_above, "")


def mean_of(values: np.ndarray, seed: int = 0, resamples: int = 1000) -> Estimate:
    return resample_means(values[:, None], resamples, seed).map(lambda means: means[..., 0]).estimate()


# Known answers.


def test_interval_of_a_mean_is_that_of_student() -> None:
    values = np.random.default_rng(0).normal(1.0, 2.0, 40)
    found = mean_of(values, resamples=20_000)
    low, high = t.interval(0.95, 39, values.mean(), values.std(ddof=1) / math.sqrt(40))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)
    assert found.above == pytest.approx(t.sf(values.mean() / (values.std(ddof=1) / math.sqrt(40)), 39), abs=2e-3)
    assert found.method == "bootstrap over 40 items"


def test_interval_of_many_items_is_scipys_percentile_interval() -> None:
    values = np.random.default_rng(1).exponential(1.0, 2000)
    theirs = bootstrap((values,), np.mean, n_resamples=5000, method="percentile", rng=0).confidence_interval
    found = mean_of(values, resamples=5000)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=4e-3)


def test_statistics_are_paired_by_item() -> None:
    noise = np.random.default_rng(2).normal(0, 100, 30)
    table = np.stack([noise + 1.0, noise], 1)
    found = resample_means(table, 1000).map(lambda means: means[..., 0] - means[..., 1]).estimate()
    assert found.low == pytest.approx(1.0)
    assert found.high == pytest.approx(1.0)
    assert found.decide() is True


def test_missing_cells_are_left_out() -> None:
    table = np.array([[1.0, math.nan], [3.0, 5.0], [2.0, math.nan], [2.0, 7.0]])
    found = resample_means(table, 500)
    assert found.value.tolist() == [2.0, 6.0]
    never = resample_means(np.full((4, 1), math.nan), 50).map(lambda means: means[..., 0]).estimate()
    assert never.decide() is None
    assert "too few" in never.method


def test_one_item_decides_nothing() -> None:
    assert mean_of(np.array([3.0])).decide() is None
    assert mean_of(np.zeros(0)).decide() is None


def test_statistic_of_weights() -> None:
    values = np.random.default_rng(3).normal(size=50)
    found = uncertainty.resample_statistic(lambda weights: float(weights @ values / weights.sum()), 50, 2000).estimate()
    plain = mean_of(values, resamples=2000)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=0.05)


def test_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.random.default_rng(4).normal(0.5, 1.0, 16)
    without = [float(np.delete(values, n).mean()) for n in range(16)]
    found = uncertainty.jackknife(float(values.mean()), without)
    low, high = t.interval(0.95, 15, values.mean(), values.std(ddof=1) / 4)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-3)
    assert found.above == pytest.approx(t.sf(values.mean() / (values.std(ddof=1) / 4), 15), abs=1e-3)
    assert uncertainty.jackknife(1.0, [1.0, 1.0, 1.0]).decide() is True
    assert uncertainty.jackknife(1.0, [1.0, 1.0]).decide() is None


@pytest.mark.parametrize("seed", range(3))
def test_permutation_is_scipys(seed: int) -> None:
    a, b = np.random.default_rng(seed).integers(0, 8, (2, 6)).astype(float)  # with ties
    found = uncertainty.permute_spearman(a.tolist(), b.tolist())
    assert found.value == pytest.approx(spearmanr(a, b).statistic)
    for mine, side in ((found.above, "greater"), (found.below, "less")):
        theirs = permutation_test(
            (a,), lambda x: spearmanr(x, b).statistic, permutation_type="pairings", n_resamples=np.inf, alternative=side
        )
        assert mine == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize("seed", range(3))
def test_two_sided_permutation(seed: int) -> None:
    """Exact for few values without ties, whose correlations are distributed symmetrically; drawn orders for more."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 6))
    expected = permutation_test(
        (a,),
        lambda x: abs(spearmanr(x, b).statistic),
        permutation_type="pairings",
        n_resamples=np.inf,
        alternative="greater",
    )
    assert uncertainty.permute_spearman(a.tolist(), b.tolist()).two_sided == pytest.approx(expected.pvalue)
    a = rng.normal(size=12)
    b = a + 2 * rng.normal(size=12)
    found = uncertainty.permute_spearman(a.tolist(), b.tolist())
    assert found.two_sided == pytest.approx(spearmanr(a, b).pvalue, abs=0.02)
    assert found == uncertainty.permute_spearman(a.tolist(), b.tolist())


def test_two_sided_known_answers() -> None:
    assert uncertainty.permute_spearman([1, 2, 3], [1, 2, 3]).two_sided == pytest.approx(2 / 6)  # and its reverse
    assert uncertainty.permute_spearman([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]).two_sided == pytest.approx(2 / 120)
    assert math.isnan(uncertainty.permute_spearman([1, 2, 3], [4, 4, 4]).two_sided)
    assert math.isnan(uncertainty.permute_spearman([1.0], [2.0]).two_sided)


def test_permutation_needs_enough_layers() -> None:
    assert uncertainty.permute_spearman([1, 2, 3], [1, 2, 3]).decide() is None  # one of six orders
    assert uncertainty.permute_spearman([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]).decide() is True
    assert uncertainty.permute_spearman(range(12), range(12, 0, -1)).decide() is False
    assert uncertainty.permute_spearman([1, 2, 3, 4], [7, 7, 7, 7]).method == "no variation over layers"


def test_sign_flips_of_six_values() -> None:
    found = uncertainty.flip_signs([1, 2, 3, 1, 2, 1])
    assert found.above == 1 / 64
    assert found.decide() is True
    assert uncertainty.flip_signs([-1, -2, -3, -1, -2, -1]).decide() is False
    assert uncertainty.flip_signs([1, 1, 1]).decide() is None  # one of eight


def test_partial_conjunction() -> None:
    p = [0.001, 0.004, 0.01, 0.2, 0.6, 0.9]
    assert uncertainty.partial_conjunction(p, 1) == pytest.approx(6 * 0.001)
    assert uncertainty.partial_conjunction(p, 3) == pytest.approx(4 * 0.01)
    assert uncertainty.partial_conjunction(p, 6) == 0.9
    margins = [estimate_of(one) for one in p]
    assert decide_at_least(1, margins) is True
    assert decide_at_least(3, margins) is None
    reversed_ = [estimate_of(1 - one) for one in p]
    assert decide_at_least(6, reversed_) is False  # some are negative, so not all are positive
    assert decide_at_least(1, [estimate_of(1e-4)] * 3) is True
    with pytest.raises(NormscopeError, match="Between 1 and 6"):
        decide_at_least(7, margins)


def test_a_margin_that_is_not_known_decides_nothing() -> None:
    assert decide_at_least(1, [uncertainty.undecided(5.0, "no data")]) is None


# On null data at most 5 % of the claims are decided, and nearly 5 % of those whose test is not conservative.


def null_mean(rng: np.random.Generator) -> bool | None:
    return mean_of(rng.normal(size=24), int(rng.integers(1 << 30)), 400).decide()


def null_paired_difference(rng: np.random.Generator) -> bool | None:
    table = rng.normal(size=(30, 1)) + rng.normal(size=(30, 2))
    found = resample_means(table, 400, int(rng.integers(1 << 30)))
    return found.map(lambda means: means[..., 0] - means[..., 1]).estimate().decide()


def null_ratio(rng: np.random.Generator) -> bool | None:
    """A share of sums: the margin is the ratio minus the true one."""
    table = rng.gamma(4.0, 0.25, size=(60, 2))
    found = resample_means(table, 400, int(rng.integers(1 << 30)))
    return found.map(lambda means: means[..., 0] / means[..., 1] - 1).estimate().decide()


def null_rank_correlation(rng: np.random.Generator) -> bool | None:
    """Spearman's correlation over the tokens of 40 texts."""
    from normscope.measures.correlation import spearman_of_histogram

    x, y = rng.integers(0, 50, (2, 40, 8))

    def rho(weights: np.ndarray) -> float:
        return spearman_of_histogram(x.ravel(), y.ravel(), np.repeat(weights, 8))

    return uncertainty.resample_statistic(rho, 40, 200, int(rng.integers(1 << 30))).estimate().decide()


def null_jackknife(rng: np.random.Generator) -> bool | None:
    values = rng.normal(size=16)
    return uncertainty.jackknife(values.mean(), [np.delete(values, n).mean() for n in range(16)]).decide()


def null_layers(rng: np.random.Generator) -> bool | None:
    return uncertainty.permute_spearman(rng.normal(size=7).tolist(), range(7)).decide()


def null_heads(rng: np.random.Generator) -> bool | None:
    return uncertainty.permute_spearman(rng.normal(size=48).tolist(), rng.normal(size=48).tolist(), "heads").decide()


def null_signs(rng: np.random.Generator) -> bool | None:
    return uncertainty.flip_signs(rng.normal(size=10).tolist()).decide()


def null_every_layer(rng: np.random.Generator) -> bool | None:
    """The least favourable null: in five of six layers the effect is sure, in one there is none."""
    return decide_at_least(6, [*[estimate_of(1e-6)] * 5, estimate_of(float(rng.uniform()))])


def null_most_layers(rng: np.random.Generator) -> bool | None:
    return decide_at_least(4, [*[estimate_of(1e-6)] * 3, *(estimate_of(float(p)) for p in rng.uniform(size=3))])


def null_some_layer(rng: np.random.Generator) -> bool | None:
    return decide_at_least(1, [estimate_of(float(p)) for p in rng.uniform(size=6)])


@pytest.mark.parametrize(
    ("draw", "rate"),
    [
        (null_mean, 0.05),
        (null_paired_difference, 0.05),
        (null_ratio, 0.05),
        (null_rank_correlation, 0.05),
        (null_jackknife, 0.05),
        (null_layers, 0.05),
        (null_heads, 0.05),
        (null_signs, 0.05),
        (null_every_layer, 0.05),  # 2.5 % to either side
        (null_most_layers, 0.025),  # against the claim speaks only a majority of reversed layers
        (null_some_layer, 0.025),
    ],
)
def test_chance_decides_rarely(draw: Callable[[np.random.Generator], bool | None], rate: float) -> None:
    rng = np.random.default_rng(5)
    decided = np.mean([draw(rng) is not None for _ in range(NULLS)])
    spread = 3 * math.sqrt(rate * (1 - rate) / NULLS)
    assert rate / 2 - spread < decided < rate + spread
