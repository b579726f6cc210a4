"""Competition ranks, and rank correlations, against scipy."""

from math import isnan

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from normscope.measures.correlation import spearman_of_lists
from normscope.measures.frequency import frequency_ranks


def test_competition_ranks() -> None:
    found = frequency_ranks({"the": 10, "of": 7, "and": 7, "rare": 1, "none": 0})
    assert found.by_token == {"the": 1, "of": 2, "and": 2, "rare": 4}
    assert found.unseen == 5
    assert found.of(["rare", "the", "none", "new"]).tolist() == [4, 1, 5, 5]


def test_against_scipy() -> None:
    counts = np.random.default_rng(0).integers(1, 20, 200)
    found = frequency_ranks(dict(enumerate(counts.tolist())))
    np.testing.assert_array_equal(found.of(range(200)), rankdata(-counts, method="min"))
    assert found.unseen == rankdata(-counts, method="min").max() + 1


def test_nothing_counted() -> None:
    found = frequency_ranks(dict[int, int]())
    assert found.of([3]).tolist() == [1]


def test_spearman_with_ties() -> None:
    generator = np.random.default_rng(1)
    a, b = generator.integers(0, 5, 100), generator.normal(size=100).round(1)
    assert spearman_of_lists(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    assert isnan(spearman_of_lists([1, 1, 1], [1, 2, 3]))
    assert isnan(spearman_of_lists([1], [2]))
    assert isnan(spearman_of_lists([], []))
