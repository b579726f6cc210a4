"""Spearman's correlation of a joint histogram: exact for the grouped values, and close for the original ones."""

from itertools import islice
from math import isnan

import numpy as np
import pytest
from scipy.stats import spearmanr

from normscope import Analyzer, NormscopeError, default_model
from normscope.corpus import strict
from normscope.corpus.readers.formats import read
from normscope.measures import correlation
from normscope.measures.correlation import (
    OCTAVES,
    log_bins,
    ordinal_codes,
    rank_resolution,
    spearman_of_codes,
    spearman_of_histogram,
    spearman_of_repeated,
)
from normscope.papers.emnlp2020.measures import NORM_BINS, WEIGHT_BINS, token_kind
from tests.helpers.files import real_file


@pytest.mark.parametrize("seed", range(5))
def test_ties_against_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, 7, 40), generator.integers(-3, 3, 40)
    counts = generator.integers(1, 9, 40)  # cells come in any order, and some of them twice
    expected = spearmanr(np.repeat(x, counts), np.repeat(y, counts)).statistic
    assert spearman_of_histogram(x, y, counts) == pytest.approx(expected, abs=1e-12)


def test_by_hand() -> None:
    # Ranks of x: 1.5 1.5 3 4, of y: 1 2.5 2.5 4. Sum of products of deviations 3.75, of squares 4.5 and 4.5.
    assert spearman_of_histogram([0, 0, 1, 2], [5, 6, 6, 9], [1, 1, 1, 1]) == pytest.approx(3.75 / 4.5)
    assert spearman_of_histogram([0, 1], [1, 0], [10**9, 10**9]) == -1


def test_constant_values_have_no_correlation() -> None:
    assert isnan(spearman_of_histogram([1, 1], [1, 2], [3, 4]))
    assert isnan(spearman_of_histogram([], [], []))


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_observations(seed: int) -> None:
    """The codes are made once; observations of weight zero are absent, those of weight two are there twice."""
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=50).round(1), generator.normal(size=50)
    weights = generator.integers(0, 4, 50)
    expected = spearmanr(np.repeat(x, weights), np.repeat(y, weights)).statistic
    assert spearman_of_codes(ordinal_codes(x), ordinal_codes(y), weights) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("at_once", [7, 2**22])
def test_repeated_values_against_scipy(dtype: type, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "AT_ONCE", at_once)
    generator = np.random.default_rng(at_once)
    counts = generator.integers(0, 40, 300)
    y = generator.normal(size=300).round(1)  # with ties, as of several keys
    x = (generator.exponential(size=counts.sum()) ** 4).astype(dtype)
    x[::5] = x[1]  # a long run of ties
    x[:3] = 0, -0.0, 1e-45
    expected = spearmanr(x, np.repeat(y, counts)).statistic
    assert spearman_of_repeated(x, y, counts) == pytest.approx(expected, abs=1e-12)
    assert spearman_of_repeated(-x, y, counts) == pytest.approx(-expected, abs=1e-12)


def test_repeated_values_that_do_not_fit() -> None:
    assert isnan(spearman_of_repeated([], [], []))
    assert isnan(spearman_of_repeated(np.ones(3, dtype=np.float32), [1.0, 2.0], [1, 2]))
    with pytest.raises(NormscopeError, match="do not pair with 3"):
        spearman_of_repeated([1.0, 2.0, 3.0], [1.0, 2.0], [1, 1])


def test_bins() -> None:
    assert log_bins([1.0, 1.99, 2.0, 0.5, 0.49], 1).tolist() == [0, 0, 1, -1, -2]
    assert log_bins(np.array([2**0.5, 2**0.499]), 8).tolist() == [4, 3]
    tiny = np.float32(1e-45)  # the smallest there is
    assert log_bins(np.array([0, tiny], dtype=np.float32), 4).tolist() == [-OCTAVES * 4, -149 * 4]


def test_resolution() -> None:
    assert rank_resolution([0, 1, 2, 3], [1, 1, 1, 1]) == 1 - 4 / 64
    assert rank_resolution([0, 0], [5, 7]) == 0
    assert isnan(rank_resolution([], []))


def test_the_error_on_real_weights_and_norms_is_small() -> None:
    """alpha and ||f|| of the default model on Wikipedia: all pairs ranked, and counted in the paper's bins."""
    path = real_file("wikitext2.raw.test.txt")
    lens = Analyzer.from_pretrained(default_model.find())
    found: dict[str, list[np.ndarray]] = {}
    for entry in strict(islice(read(path, "pairs", tokenizer=lens.tokenizer), 2)):
        result = lens.analyze(entry.given, scopes=["attention"], heads=True)
        kinds = np.array([token_kind(token) for token in result.tokens])
        assert result.value_norms is not None
        both = np.stack(np.broadcast_arrays(result.heads["weights"], result.value_norms[:, :, None]))
        for name in np.unique(kinds):
            found.setdefault(name, []).append(both[..., kinds == name].reshape(2, -1))
    assert {"first", "separator", "punctuation", "other"} <= set(found)
    for name in ("first", "separator", "punctuation", "other"):
        weights, norms = np.concatenate(found[name], axis=1)
        bins = log_bins(weights, WEIGHT_BINS), log_bins(norms, NORM_BINS)
        exact = spearmanr(weights, norms).statistic
        assert abs(spearman_of_histogram(*bins, np.ones(len(weights))) - exact) < 1e-3
        assert spearman_of_repeated(weights, norms, np.ones(len(weights))) == pytest.approx(exact, abs=1e-12)
        assert min(rank_resolution(one, np.ones(len(weights))) for one in bins) > 0.99
