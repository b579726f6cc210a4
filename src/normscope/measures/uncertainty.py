"""Uncertainty of a number, and what it decides: bootstrap and jackknife over items, permutation over layers or heads.

A claim is put as a margin that should be positive: "A is larger than B" as A - B, "below 0.9" as 0.9 - x. An `Estimate`
is a margin with its interval and two one-sided p-values. It decides for or against the claim if the p-value of that
direction is at most alpha / 2, which is the same as an interval that excludes zero; otherwise the data do not decide.

Claims about several layers ("in most layers", "in every layer", "in some layer") are partial conjunctions (Benjamini
and Heller, Biometrics 2008): at least u of n margins are positive at the level (n - u + 1) p_(u), p_(u) the u-th
smallest p-value. The level holds whatever the dependence between layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import nan
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError
from normscope.measures.bootstrap import cluster_counts

Values = NDArray[np.float64]

ALPHA = 0.05
RESAMPLES = 10_000
AT_ONCE = 2**22  # counts held in memory
ALL_ORDERS = 8  # up to this many values, all orders are tried (8! = 40,320)
ALL_SIGNS = 14  # up to this many values, all signs are tried (2^14 = 16,384)
NORMAL = NormalDist()


@dataclass(frozen=True)
class Estimate:
    """A number with its interval, and how surely it is above or below zero."""

    value: float
    low: float  # ends of the 1 - alpha interval; NaN for permutation tests, which have none
    high: float
    above: float  # one-sided p-value against "not above zero"
    below: float  # one-sided p-value against "not below zero"
    method: str  # "bootstrap over 872 sequences"

    @property
    def two_sided(self) -> float:
        """The two-sided p-value: twice the smaller of the two, at most 1; NaN if the number is undefined."""
        return nan if math.isnan(self.value) else min(1.0, 2 * min(self.above, self.below))

    def decide(self, alpha: float = ALPHA) -> bool | None:
        """True if the number is above zero, False if it is below, None if the data do not decide."""
        return decide_at_least(1, [self], alpha)


@dataclass(frozen=True)
class Resampled:
    """Statistics of the data and of bootstrap resamples of its items."""

    value: Values  # (...)
    draws: Values  # (resamples, ...)
    items: int

    def map(self, function: Callable[[Values], Any]) -> Resampled:
        """The same for a function of the statistics along their last dimensions."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return Resampled(np.asarray(function(self.value)), np.asarray(function(self.draws)), self.items)

    def estimate(self, what: str = "items", alpha: float = ALPHA) -> Estimate:
        """The estimate of a single statistic, by the percentile interval widened for few items."""
        draws = self.draws[np.isfinite(self.draws)]
        value = float(self.value)
        if self.items < 2 or not math.isfinite(value) or 2 * len(draws) < len(self.draws):
            return undecided(value, f"too few {what} for a bootstrap")
        outer = _percentile_level(alpha / 2, self.items)
        low, high = np.quantile(draws, [outer, 1 - outer])
        above, below = (
            _nominal_level((1 + int(wrong.sum())) / (1 + len(draws)), self.items) for wrong in (draws <= 0, draws >= 0)
        )
        return Estimate(value, float(low), float(high), above, below, f"bootstrap over {self.items:,} {what}")


def resample_means(table: Any, resamples: int = RESAMPLES, seed: int | Sequence[int] = 0) -> Resampled:
    """Column means of a table (items, ...) under resampling of its rows. NaN cells are left out of their column's mean.

    All columns are resampled together, so that functions of several columns are paired by item.
    """
    given = np.asarray(table, dtype=np.float64)
    if given.ndim < 2:
        raise NormscopeError(f"A table of items and statistics has at least two dimensions, not {given.ndim}.")
    items, shape = len(given), given.shape[1:]
    flat = given.reshape(items, math.prod(shape))
    known = np.isfinite(flat)
    complete = bool(known.all())
    columns = flat if complete else np.concatenate([np.where(known, flat, 0.0), known], 1)

    def means(totals: Values) -> Values:
        if complete:
            return totals / items
        sums, counts = np.split(totals, 2, axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Values = sums / counts
        return found

    generator = np.random.default_rng(seed)
    step = max(1, AT_ONCE // max(items, 1))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    drawn = [means(cluster_counts(items, size, generator) @ columns) for size in sizes] if items else []
    draws = np.concatenate(drawn) if drawn else np.full((1, flat.shape[1]), nan)
    value = means(columns.sum(0)) if items else np.full(flat.shape[1], nan)
    return Resampled(value.reshape(shape), draws.reshape(-1, *shape), items)


def resample_statistic(
    statistic: Callable[[Values], float], items: int, resamples: int = 1000, seed: int | Sequence[int] = 0
) -> Resampled:
    """A statistic of item weights, called with ones for the data and with the counts of each resample."""
    generator = np.random.default_rng(seed)
    draws = [statistic(cluster_counts(items, 1, generator)[0]) for _ in range(resamples if items > 1 else 1)]
    return Resampled(np.asarray(statistic(np.ones(items))), np.asarray(draws), items)


def jackknife(value: float, without: Sequence[float], what: str = "groups", alpha: float = ALPHA) -> Estimate:
    """Delete-a-group jackknife: SE^2 = (G - 1) / G sum_g (theta_(g) - mean)^2, with Student's t of G - 1 degrees."""
    left = np.asarray(without, dtype=np.float64)
    groups = len(left)
    if groups < 3 or not np.isfinite(left).all() or not math.isfinite(value):
        return undecided(value, f"too few {what} for a jackknife")
    error = math.sqrt((groups - 1) / groups * float(((left - left.mean()) ** 2).sum()))
    reach = _student_quantile(NORMAL.inv_cdf(1 - alpha / 2), groups - 1) * error
    if error == 0:
        above, below = (0.0 if value > 0 else 1.0), (0.0 if value < 0 else 1.0)
    else:
        score = _normal_score(value / error, groups - 1)
        above, below = NORMAL.cdf(-score), NORMAL.cdf(score)
    return Estimate(value, value - reach, value + reach, above, below, f"jackknife over {groups} {what}")


def mean_interval(mean: float, spread: float | None, items: int, alpha: float = ALPHA) -> tuple[float, float]:
    """mean -/+ t s / sqrt(n), with Student's t of n - 1 degrees and the sample's SD s; NaN for fewer than two items."""
    if items < 2 or spread is None:
        return nan, nan
    reach = _student_quantile(NORMAL.inv_cdf(1 - alpha / 2), items - 1) * spread / math.sqrt(items)
    return mean - reach, mean + reach


def permute_spearman(a: Sequence[float], b: Sequence[float], what: str = "layers", seed: int = 0) -> Estimate:
    """Spearman's correlation of two short lists with one-sided permutation p-values: the share of the orders of b whose
    correlation is at least as large (as small); the observed order is one of them."""
    x, y = (_centred_ranks(np.asarray(values, dtype=np.float64)) for values in (a, b))
    scale = math.sqrt(float((x**2).sum() * (y**2).sum()))
    if len(x) < 3 or scale == 0:
        return undecided(nan, f"too few {what}" if len(x) < 3 else f"no variation over {what}")
    if len(x) <= ALL_ORDERS:
        orders = np.array(list(permutations(range(len(x)))))
    else:
        drawn = np.random.default_rng(seed).permuted(np.tile(np.arange(len(x)), (RESAMPLES, 1)), axis=1)
        orders = np.concatenate([np.arange(len(x))[None], drawn])
    found = (y[orders] @ x) / scale
    value = float(x @ y) / scale
    above, below = float((found >= value - 1e-12).mean()), float((found <= value + 1e-12).mean())
    return Estimate(value, nan, nan, above, below, f"permutation over {len(x)} {what}")


def flip_signs(values: Sequence[float], what: str = "layers", seed: int = 0) -> Estimate:
    """The mean of some values with one-sided sign-flip p-values: exact if they are symmetric about zero."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) < 2:
        return undecided(float(given.mean()) if len(given) else nan, f"too few {what}")
    if len(given) <= ALL_SIGNS:
        signs = np.array(list(product((1.0, -1.0), repeat=len(given))))
    else:
        drawn = np.random.default_rng(seed).choice((1.0, -1.0), (RESAMPLES, len(given)))
        signs = np.concatenate([np.ones((1, len(given))), drawn])
    found, value = signs @ given / len(given), float(given.mean())
    slack = 1e-12 * float(np.abs(given).max())
    above, below = float((found >= value - slack).mean()), float((found <= value + slack).mean())
    return Estimate(value, nan, nan, above, below, f"sign flips over {len(given)} {what}")


def undecided(value: float, why: str) -> Estimate:
    """An estimate that decides nothing, with the reason as its method."""
    return Estimate(value, nan, nan, 1.0, 1.0, why)


def decide_at_least(count: int, margins: Sequence[Estimate], alpha: float = ALPHA) -> bool | None:
    """Whether at least `count` of the margins are positive; None if the data do not decide.

    True if the partial conjunction of `count` positive margins is significant; False if that of n - count + 1 negative
    margins is, which leaves fewer than `count` that can be positive.
    """
    if not 1 <= count <= len(margins):
        raise NormscopeError(f"Between 1 and {len(margins)} margins can be asked for, not {count}.")
    if partial_conjunction([margin.above for margin in margins], count) <= alpha / 2:
        return True
    if partial_conjunction([margin.below for margin in margins], len(margins) - count + 1) <= alpha / 2:
        return False
    return None


def partial_conjunction(p_values: Sequence[float], count: int) -> float:
    """p-value of "at least `count` of the n alternatives are true": (n - count + 1) p_(count), at most 1."""
    ordered = sorted(1.0 if math.isnan(p) else p for p in p_values)
    return min(1.0, (len(ordered) - count + 1) * ordered[count - 1])


def _percentile_level(p: float, items: int) -> float:
    """The percentile of the bootstrap distribution at which a one-sided interval has the level p.

    The bootstrap's spread is that of the population formula and its tails are normal. Multiplying by sqrt(n / (n - 1))
    and by Student's quantile over the normal one makes up for both (Hesterberg, American Statistician 2015).
    """
    wider = math.sqrt(items / (items - 1)) * _student_quantile(NORMAL.inv_cdf(1 - p), items - 1)
    return NORMAL.cdf(-wider)


def _nominal_level(percentile: float, items: int) -> float:
    """The inverse of `_percentile_level`, for percentiles in (0, 1]."""
    if percentile >= 1:
        return 1.0
    return NORMAL.cdf(-_normal_score(-NORMAL.inv_cdf(percentile) / math.sqrt(items / (items - 1)), items - 1))


def _normal_score(t: float, degrees: int) -> float:
    """The normal score with the same tail as Student's t (Wallace 1959; off by less than 0.02 for 3 degrees)."""
    score = (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))
    return math.copysign(score, t)


def _student_quantile(score: float, degrees: int) -> float:
    """The inverse of `_normal_score`."""
    scaled = score * (8 * degrees + 3) / (8 * degrees + 1)
    return math.copysign(math.sqrt(degrees * math.expm1(min(scaled * scaled / degrees, 700.0))), score)


def _centred_ranks(values: Values) -> Values:
    """Mean ranks of ties, minus the mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts + 1) / 2
    found: Values = ranks[place] - ranks[place].mean()
    return found
