"""Spearman's correlation of a population that is too large to rank (EMNLP 2020, Table 2: 10^9 pairs).

Values are counted in fine logarithmic bins, so many to a doubling; the joint histogram of two quantities is all that is
kept. Its correlation, with every value of a bin at the bin's mid-rank, is exactly Spearman's (ties at their mean rank)
of the values so grouped. `resolution` says how fine the grouping was.
"""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

OCTAVES = 150  # below 1; what is smaller than 2^-150 single precision cannot tell from zero


def log_bins(values: Any, per_octave: int) -> NDArray[np.int16]:
    """floor(per_octave log2 v) of values v >= 0; zero has a bin of its own below all others, -OCTAVES per_octave."""
    given = np.asarray(values)
    with np.errstate(divide="ignore"):
        scaled = np.floor(np.log2(given) * per_octave)
    found: NDArray[np.int16] = np.maximum(scaled, -OCTAVES * per_octave).astype(np.int16)
    return found


def spearman(x: Any, y: Any, counts: Any) -> float:
    """Spearman's correlation of a joint histogram: `counts` pairs in the cell of bins x and y, which may repeat.

    rho = sum n_xy r_x r_y / sqrt(sum n_x r_x^2 sum n_y r_y^2), r the mid-rank of a bin less the mean rank. NaN where
    one side does not vary.
    """
    cells = np.asarray(counts, dtype=np.float64)
    rank_x, spread_x = _centred(x, cells)
    rank_y, spread_y = _centred(y, cells)
    if not spread_x > 0 or not spread_y > 0:
        return nan
    return float((cells * rank_x * rank_y).sum() / np.sqrt(spread_x * spread_y))


def resolution(bins: Any, counts: Any) -> float:
    """1 - sum p_b^3: the share of the rank variance that lies between bins, which is 1 for values without ties."""
    _, sums = _marginal(bins, np.asarray(counts, dtype=np.float64))
    total = sums.sum()
    return float(1 - ((sums / total) ** 3).sum()) if total else nan


def _centred(bins: Any, counts: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The centred mid-rank of each cell's bin, and the sum of their squares over the population."""
    place, sums = _marginal(bins, counts)
    ranks = np.cumsum(sums) - (sums + sums.sum()) / 2
    return ranks[place], float((sums * ranks**2).sum())


def _marginal(bins: Any, counts: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    _, place = np.unique(np.asarray(bins), return_inverse=True)
    sums: NDArray[np.float64] = np.bincount(place, weights=counts).astype(np.float64)
    return place, sums
