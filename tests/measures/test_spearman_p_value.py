"""The permutation test of a rank correlation, against scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import permutation_test, spearmanr

from normscope.measures.correlation import spearman_p_value


@pytest.mark.parametrize("seed", range(4))
def test_few_pairs_exactly(seed: int) -> None:
    a, b = np.random.default_rng(seed).integers(0, 8, (2, 6)).astype(float)  # with ties
    expected = permutation_test(
        (a,),
        lambda x: abs(spearmanr(x, b).statistic),
        permutation_type="pairings",
        n_resamples=np.inf,
        alternative="greater",
    )
    assert spearman_p_value(a, b) == pytest.approx(expected.pvalue)


def test_known_answers() -> None:
    assert spearman_p_value([1, 2, 3], [1, 2, 3]) == pytest.approx(2 / 6)  # this order and its reverse
    assert spearman_p_value([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]) == pytest.approx(2 / 120)
    assert math.isnan(spearman_p_value([1, 2, 3], [4, 4, 4]))
    assert math.isnan(spearman_p_value([1.0], [2.0]))


def test_many_pairs_nearly() -> None:
    generator = np.random.default_rng(0)
    a = generator.standard_normal(12)
    b = a + 2 * generator.standard_normal(12)
    assert spearman_p_value(a, b) == pytest.approx(spearmanr(a, b).pvalue, abs=0.02)
    assert spearman_p_value(a, b) == spearman_p_value(a, b)


def test_p_values_are_uniform_on_null_data() -> None:
    """On null data about 5 % of p-values are at most 0.05; somewhat fewer with six pairs, as p is discrete."""
    generator = np.random.default_rng(1)
    found = [spearman_p_value(*generator.standard_normal((2, 6))) for _ in range(600)]
    assert 0.01 < np.mean(np.array(found) <= 0.05) < 0.065
