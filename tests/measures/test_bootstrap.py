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
from normscope.measures.bootstrap import bootstrap_mean_difference, bootstrap_resampled_means


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


def test_sides() -> None:
    first, second = np.arange(50) / 50 + 0.5, np.arange(50) / 50
    assert bootstrap_mean_difference(first, second).p < 1e-3
    assert bootstrap_mean_difference(second, first).p > 0.999
    assert bootstrap_mean_difference(second, first, sided="two").p < 1e-3
    reversed_ = bootstrap_mean_difference(second, first)
    assert (reversed_.above, reversed_.below < 1e-3) == (reversed_.p, True)
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
    for options in ({"resamples": 0}, {"sided": "three"}, {"alpha": 0.0}):
        with pytest.raises(NormscopeError):
            bootstrap_mean_difference([1.0], [1.0], **options)  # type: ignore[arg-type]
