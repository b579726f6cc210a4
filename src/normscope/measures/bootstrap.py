"""Bootstrap of a difference of means (FF paper, Fig. 7), resampling single instances.

The test is unpaired: each group is resampled separately, with replacement and at its own size. p is the share of
resampled differences on the wrong side of zero, (1 + #{d* <= 0}) / (1 + resamples), consistent with the percentile
interval. `uncertainty.resample_means` resamples whole sequences of dependent instances.

Small samples are resampled value by value. For large ones, the sorted values are divided into strata, with each extreme
value in a stratum alone. The number of draws from each stratum is multinomial and sampled exactly. Only the variation
within strata, a few thousandths of the variance even for heavy tails, is approximated, by a normal distribution with
the exact variance; skewness and tails are those of direct resampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError

Sided = Literal["one", "two"]
SIDES = ("one", "two")
DIRECT = 50_000_000  # up to this many draws, values are drawn one by one
AT_ONCE = 2**20  # draws held in memory
STRATA = 256
ALONE = 64  # the lowest and the highest 64 values are strata of size one

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """The first group's mean minus the second's, with its 1 - alpha interval and p-values."""

    difference: float
    low: float
    high: float
    p: float
    above: float = nan  # one-sided p-value against "not above zero"
    below: float = nan  # one-sided p-value against "not below zero"


def bootstrap_mean_difference(
    first: Any,
    second: Any,
    *,
    resamples: int = 10_000,
    sided: Sided = "one",
    alpha: float = 0.05,
    seed: int | Sequence[int] = 0,
) -> Difference:
    """Unpaired bootstrap of ``mean(first) - mean(second)``. One-sided tests for a positive difference.

    NaN if a group is empty.
    """
    _check_bootstrap(resamples, sided, alpha)
    groups = [np.asarray(group, dtype=np.float64).ravel() for group in (first, second)]
    if not all(len(group) for group in groups):
        return Difference(nan, nan, nan, nan)
    generator = np.random.default_rng(seed)
    drawn = [bootstrap_resampled_means(group, resamples, generator) for group in groups]
    return _summarise_bootstrap_differences(
        float(groups[0].mean() - groups[1].mean()), drawn[0] - drawn[1], sided, alpha
    )


def bootstrap_resampled_means(values: Values, resamples: int, generator: np.random.Generator) -> Values:
    """(resamples,): means of resamples of the values, drawn with replacement and of the same size."""
    size = len(values)
    if size * resamples <= DIRECT or size <= 2 * ALONE + STRATA:
        pieces = _bootstrap_chunk_sizes(resamples, max(1, AT_ONCE // size))
        return np.concatenate([values[generator.integers(0, size, (n, size))].mean(1) for n in pieces])
    centre = values.mean()
    strata = _split_into_bootstrap_strata(np.sort(values) - centre)
    sizes = np.array([len(stratum) for stratum in strata])
    means = np.array([stratum.mean() for stratum in strata])
    variances = np.array([stratum.var() for stratum in strata])
    draws = generator.multinomial(size, sizes / size, size=resamples).astype(np.float64)
    inside = np.sqrt(draws @ variances) * generator.standard_normal(resamples)
    found: Values = centre + (draws @ means + inside) / size
    return found


def _split_into_bootstrap_strata(ordered: Values) -> list[Values]:
    """Sorted values in groups of neighbours; values at both ends are groups of one."""
    low, middle, high = np.split(ordered, [ALONE, len(ordered) - ALONE])
    return [*np.split(low, ALONE), *np.array_split(middle, STRATA), *np.split(high, ALONE)]


def cluster_counts(clusters: int, size: int, generator: np.random.Generator) -> Values:
    """(size, clusters): how often each cluster occurs in each of `size` resamples."""
    drawn = generator.integers(0, clusters, (size, clusters)) + clusters * np.arange(size)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * clusters).reshape(size, clusters).astype(np.float64)


def _summarise_bootstrap_differences(given: float, drawn: Values, sided: Sided, alpha: float) -> Difference:
    above, below = ((1 + int(wrong.sum())) / (1 + len(drawn)) for wrong in (drawn <= 0, drawn >= 0))
    low, high = np.quantile(drawn, [alpha / 2, 1 - alpha / 2])
    p = above if sided == "one" else min(1.0, 2 * min(above, below))
    return Difference(given, float(low), float(high), p, above, below)


def _bootstrap_chunk_sizes(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def _check_bootstrap(resamples: int, sided: str, alpha: float) -> None:
    if resamples < 1:
        raise NormscopeError(f"A bootstrap needs at least one resample, not {resamples}.")
    if sided not in SIDES:
        raise NormscopeError(f"sided must be 'one' or 'two', not {sided!r}.")
    if not 0 < alpha < 1:
        raise NormscopeError(f"alpha must be between 0 and 1, not {alpha}.")
