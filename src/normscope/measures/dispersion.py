"""Dispersion of a quantity (EMNLP 2020, Table 1): mean, standard deviation, coefficient of variation, extremes.

A population of any size is kept as moments of its parts, which combine exactly and without loss of digits:

    n = sum n_k,  m = sum n_k m_k / n,  D = sum_k (D_k + n_k (m_k - m)^2),  D the sum of squared deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Moments:
    """What is kept of a population; all but `count` are NaN where it is empty."""

    count: int
    mean: float
    deviations: float  # sum of squared deviations from the mean
    largest: float
    smallest: float

    def deviation(self, *, sample: bool = False) -> float:
        """SD over the population (divided by n), or its estimate from a sample (by n - 1)."""
        free = self.count - sample
        return sqrt(self.deviations / free) if free > 0 else nan

    def variation(self, *, sample: bool = False) -> float:
        """CV = SD / mean."""
        return self.deviation(sample=sample) / self.mean if self.mean else nan


EMPTY = Moments(0, nan, nan, nan, nan)


def moments(values: Any) -> Moments:
    """The moments of some values, in float64."""
    given = np.asarray(values, dtype=np.float64).ravel()
    if not given.size:
        return EMPTY
    mean = float(given.mean())
    squares = float(((given - mean) ** 2).sum())
    return Moments(given.size, mean, squares, float(given.max()), float(given.min()))


def combined(counts: Any, means: Any, deviations: Any, largest: Any, smallest: Any) -> Moments:
    """The moments of parts put together, one number of each for every part; empty parts may hold anything."""
    n = np.asarray(counts, dtype=np.int64).ravel()
    there = n > 0
    if not there.any():
        return EMPTY
    n, m, d, high, low = (
        np.asarray(column).ravel()[there] for column in (counts, means, deviations, largest, smallest)
    )
    n, m, d = n.astype(np.int64), m.astype(np.float64), d.astype(np.float64)
    total = int(n.sum())
    mean = float((n * m).sum() / total)
    squares = float((d + n * (m - mean) ** 2).sum())
    return Moments(total, mean, squares, float(high.max()), float(low.min()))
