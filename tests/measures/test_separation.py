"""The area under the ROC curve against pairs counted one by one, and its interval."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from normscope import NormscopeError
from normscope.measures.separation import area_under_curve, estimate_area_under_curve


def by_hand(positive: list[float], negative: list[float]) -> float:
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative]
    return sum(wins) / len(wins)


def test_pairs_one_by_one() -> None:
    generator = np.random.default_rng(0)
    positive, negative = (generator.integers(0, 6, 20).tolist() for _ in range(2))  # with ties
    assert area_under_curve(positive, negative) == pytest.approx(by_hand(positive, negative))
    counts = generator.integers(0, 3, 20)
    repeated = [[v for v, n in zip(values, counts, strict=True) for _ in range(n)] for values in (positive, negative)]
    assert area_under_curve(positive, negative, counts) == pytest.approx(by_hand(*repeated))


def test_extremes() -> None:
    assert area_under_curve([2, 3], [0, 1]) == 1
    assert area_under_curve([0, 1], [2, 3]) == 0
    assert area_under_curve([1, 1], [1, 1]) == 0.5
    assert estimate_area_under_curve([2, 3, 4], [0, 1, 1]).value == 1


def test_the_interval_has_the_true_area() -> None:
    generator = np.random.default_rng(1)
    negative = generator.normal(size=200)
    positive = generator.normal(1, size=200)
    found = estimate_area_under_curve(positive, negative, "pairs")
    assert found.low < 0.7602 < found.high  # Phi(1 / sqrt 2)
    assert 0.06 < found.high - found.low < 0.13
    assert found.method == "bootstrap over 200 pairs"


@pytest.mark.parametrize("given", [([1.0], [1.0, 2.0]), ([], []), ([nan], [1.0])])
def test_refused(given: tuple[list[float], list[float]]) -> None:
    with pytest.raises(NormscopeError, match=r"one score for each item|finite"):
        area_under_curve(*given)
