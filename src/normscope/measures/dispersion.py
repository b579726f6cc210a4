"""Dispersion of a quantity (EMNLP 2020, Table 1): mean, standard deviation, coefficient of variation, extremes.

Moments of the parts of a population combine exactly, without cancellation:

    n = sum n_k,  m = sum n_k m_k / n,  D = sum_k (D_k + n_k (m_k - m)^2),  with D the sum of squared deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Summary of a population; all fields but `count` are NaN if it is empty."""

    count: int
    mean: float
    deviations: float  # sum of squared deviations from the mean
    largest: float
    smallest: float

    def deviation(self, *, sample: bool = False) -> float:
        """Standard deviation of the population (dividing by n) or its sample estimate (by n - 1)."""
        free = self.count - sample
        return sqrt(self.deviations / free) if free > 0 else nan

    def variation(self, *, sample: bool = False) -> float:
        """CV = SD / mean."""
        return self.deviation(sample=sample) / self.mean if self.mean else nan


EMPTY = Moments(0, nan, nan, nan, nan)


def moments(values: Any) -> Moments:
    """The moments of an array, in float64."""
    given = np.asarray(values, dtype=np.float64).ravel()
    if not given.size:
        return EMPTY
    mean = float(given.mean())
    squares = float(((given - mean) ** 2).sum())
    return Moments(given.size, mean, squares, float(given.max()), float(given.min()))


def combine_moments(counts: Any, means: Any, deviations: Any, largest: Any, smallest: Any) -> Moments:
    """The moments of a population from those of its parts, one value per part; empty parts are ignored."""
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
