"""The bootstrap against scipy's, against direct resampling, and on data without any difference."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normscope import NormscopeError
from normscope.measures import bootstrap
from normscope.measures.bootstrap import (
    bootstrap_clustered_difference,
    bootstrap_mean_difference,
    bootstrap_resampled_means,
)


def test_against_scipy() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.gamma(2.0, 1.0, 80) + 0.2, generator.gamma(2.0, 1.0, 120)
    found = bootstrap_mean_difference(first, second, resamples=20_000)

    def difference(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return a.mean(axis) - b.mean(axis)

    theirs = stats.bootstrap((first, second), difference, n_resamples=20_000, method="percentile", random_state=1)
    spread = theirs.standard_error
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert found.low == pytest.approx(theirs.confidence_interval.low, abs=0.04 * spread)
    assert found.high == pytest.approx(theirs.confidence_interval.high, abs=0.04 * spread)
    share = (theirs.bootstrap_distribution <= 0).mean()
    assert found.p == pytest.approx(share, abs=5 * np.sqrt(2 * share * (1 - share) / 20_000) + 1e-4)


@pytest.mark.parametrize("kind", ["laplace", "lognormal", "ties"])
def test_strata_draw_as_direct_resampling_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean, variance and skewness are those of the exact distribution, and so is its shape."""
    generator = np.random.default_rng(1)
    size = 1500
    values = {
        "laplace": generator.laplace(size=size) * 1e-3,
        "lognormal": generator.lognormal(0, 1.5, size),
        "ties": generator.integers(0, 3, size) ** 2.0,
    }[kind]
    direct = bootstrap_resampled_means(values, 10_000, np.random.default_rng(2))
    monkeypatch.setattr(bootstrap, "DIRECT", 0)
    found = bootstrap_resampled_means(values, 20_000, np.random.default_rng(3))
    spread = values.std() / np.sqrt(size)
    assert abs(found.mean() - values.mean()) < 5 * spread / np.sqrt(2e4)
    assert found.std() / spread == pytest.approx(1, abs=0.025)
    assert stats.skew(found) == pytest.approx(stats.skew(values) / np.sqrt(size), abs=0.09)
    assert stats.ks_2samp(found, direct).pvalue > 1e-3


def test_direct_resampling_is_used_for_few_values() -> None:
    values = np.array([0.0, 1.0])
    found = bootstrap_resampled_means(values, 4000, np.random.default_rng(0))
    assert set(found) == {0.0, 0.5, 1.0}
    assert abs((found == 0.5).mean() - 0.5) < 0.04


@pytest.mark.parametrize(("sided", "size"), [("one", 40), ("two", 40), ("one", 3000)])
def test_false_positives_are_near_5_percent(sided: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if size > 1000:
        monkeypatch.setattr(bootstrap, "DIRECT", 0)  # by strata
    generator = np.random.default_rng(5)
    tries, resamples = (300, 300) if size < 1000 else (120, 100)
    hits = 0
    for seed in range(tries):
        first, second = generator.exponential(size=size), generator.exponential(size=size)
        hits += bootstrap_mean_difference(first, second, resamples=resamples, sided=sided, seed=seed).p < 0.05  # type: ignore[arg-type]
    assert 0.05 - 3 * np.sqrt(0.0475 / tries) < hits / tries < 0.05 + 3 * np.sqrt(0.0475 / tries)


def test_false_positives_of_clusters() -> None:
    """Instances of a cluster share an offset: drawn one by one they seem to differ far too often."""
    generator = np.random.default_rng(6)
    tries, clusters, each = 300, 60, 20
    by_instance = by_cluster = 0
    for seed in range(tries):
        offset = generator.standard_normal((clusters, 1, 2))
        values = offset + 0.3 * generator.standard_normal((clusters, each, 2))
        by_instance += bootstrap_mean_difference(values[..., 0], values[..., 1], resamples=200, seed=seed).p < 0.05
        counts = np.full((clusters, 2), each)
        (found,) = bootstrap_clustered_difference(values.sum(1)[None], counts, resamples=400, seed=seed)
        by_cluster += found.p < 0.05
    assert by_instance / tries > 0.2
    assert 0.012 < by_cluster / tries < 0.088


def test_clusters_by_hand() -> None:
    """Against a loop that draws clusters, for two layers; the second has no difference at all."""
    generator = np.random.default_rng(7)
    counts = generator.integers(0, 5, (30, 2))
    counts[0] = 3
    sums = np.stack([counts * generator.normal([1.0, 0.8], 0.3, (30, 2)), counts * 2.0])
    found = bootstrap_clustered_difference(sums, counts, resamples=5000)
    drawn = []
    for _ in range(4000):
        some = generator.integers(0, 30, 30)
        drawn.append(np.subtract(*(sums[0][some].sum(0) / counts[some].sum(0))))
    given = np.subtract(*(sums[0].sum(0) / counts.sum(0)))
    assert found[0].difference == pytest.approx(given)
    assert found[0].low == pytest.approx(np.quantile(drawn, 0.025), abs=0.15 * np.std(drawn))
    assert found[0].high == pytest.approx(np.quantile(drawn, 0.975), abs=0.15 * np.std(drawn))
    assert found[0].p == pytest.approx(np.mean(np.array(drawn) <= 0), abs=0.02)
    assert (found[1].difference, found[1].low, found[1].high) == pytest.approx((0, 0, 0), abs=1e-12)


def test_sides() -> None:
    first, second = np.arange(50) / 50 + 0.5, np.arange(50) / 50
    assert bootstrap_mean_difference(first, second).p < 1e-3
    assert bootstrap_mean_difference(second, first).p > 0.999
    assert bootstrap_mean_difference(second, first, sided="two").p < 1e-3
    assert bootstrap_mean_difference([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert bootstrap_mean_difference([1.0, 1.0], [1.0, 1.0], sided="two").p == 1.0


def test_seed_decides() -> None:
    first, second = np.random.default_rng(0).standard_normal((2, 60))
    assert bootstrap_mean_difference(first, second, seed=1) == bootstrap_mean_difference(first, second, seed=1)
    assert bootstrap_mean_difference(first, second, seed=1) != bootstrap_mean_difference(first, second, seed=2)


class Counted:
    """A random generator that counts its draws."""

    def __init__(self) -> None:
        self.inner, self.drawn = np.random.default_rng(1), 0

    def __getattr__(self, name: str) -> Callable[..., np.ndarray]:
        def draw(*given: Any, **options: Any) -> np.ndarray:
            found: np.ndarray = getattr(self.inner, name)(*given, **options)
            self.drawn += found.size
            return found

        return draw


def test_a_large_layer_is_not_drawn_value_by_value() -> None:
    """Ten thousand resamples of 300,000 values would be three thousand million draws."""
    generator: Any = Counted()
    values = np.random.default_rng(0).standard_normal(300_000)
    assert len(bootstrap_resampled_means(values, 10_000, generator)) == 10_000
    assert 0 < generator.drawn < 5_000_000


def test_empty_groups_and_bad_options() -> None:
    assert isnan(bootstrap_mean_difference([], [1.0]).p)
    assert isnan(bootstrap_clustered_difference(np.zeros((1, 2, 2)), np.array([[1, 0], [1, 0]]))[0].p)
    for options in ({"resamples": 0}, {"sided": "three"}, {"alpha": 0.0}):
        with pytest.raises(NormscopeError):
            bootstrap_mean_difference([1.0], [1.0], **options)  # type: ignore[arg-type]
    with pytest.raises(NormscopeError, match=r"\(layers, clusters, 2\) and"):
        bootstrap_clustered_difference(np.zeros((1, 2, 2)), np.zeros((3, 2)))
