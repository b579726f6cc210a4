"""Rank correlations: of maps, of lists, and of populations that are too large to rank.

Tied values always get the mean of their ranks. The similarity of two maps (FF paper, section 4) is Spearman's rank
correlation of all their cells.

For large populations (EMNLP 2020, Table 2: 10^9 pairs), values are counted in narrow logarithmic bins, and only the
joint histogram of the two quantities is stored. `spearman_of_histogram` is exact for values rounded to their bins;
`rank_resolution` measures how much the rounding loses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import NormscopeError

EXACT = 8  # up to this many pairs, a permutation test tries all orders (8! = 40,320)
DRAWN = 10_000  # random orders for longer lists
OCTAVES = 150  # below 1; single precision cannot tell values below 2^-150 from zero


def average_ranks(values: Tensor) -> Tensor:
    """(..., N): ranks from 1 along the last dimension in float64; ties get their mean rank."""
    given = values.detach().cpu().numpy()  # NumPy's sort is several times faster than torch's
    found = np.empty(given.shape)
    rows = given.shape[-1]
    for row, into in zip(given.reshape(-1, rows), found.reshape(-1, rows), strict=True):
        order = np.argsort(row)
        into[order] = _sorted_ranks(row[order])
    return torch.from_numpy(found).to(values.device)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension; NaN if either side is constant."""
    a = a - a.mean(-1, keepdim=True)
    b = b - b.mean(-1, keepdim=True)
    found: Tensor = (a * b).sum(-1) / (torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1))
    return found


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation over the last dimension; NaN if either side is constant."""
    return pearson(average_ranks(a), average_ranks(b))


def spearman_of_lists(a: Any, b: Any) -> float:
    """Spearman's rank correlation of two lists or arrays; NaN if either is constant or has fewer than two values."""
    x, y = _equal_length_columns(a, b)
    return float(spearman(x, y)) if len(x) > 1 else nan


def kendall_of_lists(a: Any, b: Any) -> float:
    """Kendall's tau-b of two lists or arrays; NaN if either is constant.

    Concordant minus discordant pairs, divided by the geometric mean of the numbers of untied pairs on either side.
    """
    x, y = _equal_length_columns(a, b)
    first, second = ((values[:, None] - values).sign() for values in (x, y))
    pairs = first.square().sum() * second.square().sum()
    return float((first * second).sum() / pairs.sqrt()) if float(pairs) > 0 else nan


def spearman_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided permutation test of Spearman's correlation, for lists as short as a model's layers.

    The share of the orders of b whose |rho| with a is at least the observed one; NaN if either side is constant.
    When orders are sampled, the observed one is counted as one of them.
    """
    x, y = (average_ranks(torch.tensor(list(values), dtype=torch.float64)) for values in (a, b))
    size = len(x)
    if size <= EXACT:
        orders = torch.tensor(list(permutations(range(size))), dtype=torch.long)
    else:
        generator = torch.Generator().manual_seed(0)
        orders = torch.rand(DRAWN, size, generator=generator).argsort(-1)
    found = float(pearson(x, y))
    if math.isnan(found):
        return nan
    as_strong = int((pearson(x, y[orders]).abs() >= abs(found) - 1e-12).sum())
    return as_strong / len(orders) if size <= EXACT else (as_strong + 1) / (len(orders) + 1)


def log_bins(values: Any, per_octave: int) -> NDArray[np.int16]:
    """floor(per_octave log2 v) for values v >= 0. Zeros share the lowest bin, -OCTAVES per_octave."""
    given = np.asarray(values)
    with np.errstate(divide="ignore"):
        scaled = np.floor(np.log2(given) * per_octave)
    found: NDArray[np.int16] = np.maximum(scaled, -OCTAVES * per_octave).astype(np.int16)
    return found


def spearman_of_histogram(x: Any, y: Any, counts: Any) -> float:
    """Spearman's correlation of a joint histogram with `counts` pairs in the cells of bins x and y, which may repeat.

    rho = sum n_xy r_x r_y / sqrt(sum n_x r_x^2 sum n_y r_y^2), where r is the mid-rank of a bin minus the mean rank.
    NaN if either side is constant.
    """
    cells = np.asarray(counts, dtype=np.float64)
    return spearman_of_places(sorted_places(x), sorted_places(y), cells)


def sorted_places(values: Any) -> NDArray[np.intp]:
    """The index of each value among the distinct values, in increasing order: [5, 2, 5] -> [1, 0, 1]."""
    _, place = np.unique(np.asarray(values), return_inverse=True)
    found: NDArray[np.intp] = place
    return found


def spearman_of_places(x: NDArray[np.intp], y: NDArray[np.intp], weights: NDArray[np.float64]) -> float:
    """Spearman's correlation of two lists given by `sorted_places`, where each pair counts `weights` times.

    Sorting is done once, so that a bootstrap can call this with the weights of each resample. NaN if either side is
    constant.
    """
    (total_x, rank_x), (total_y, rank_y) = _weighted_mid_ranks(x, weights), _weighted_mid_ranks(y, weights)
    spread = (total_x * rank_x**2).sum() * (total_y * rank_y**2).sum()
    return float((weights * rank_x[x] * rank_y[y]).sum() / np.sqrt(spread)) if spread > 0 else nan


def rank_resolution(bins: Any, counts: Any) -> float:
    """1 - sum p_b^3: the share of the rank variance between bins; 1 if no two values share a bin."""
    sums, _ = _weighted_mid_ranks(sorted_places(bins), np.asarray(counts, dtype=np.float64))
    total = sums.sum()
    return float(1 - ((sums / total) ** 3).sum()) if total else nan


def _sorted_ranks(ordered: NDArray[Any]) -> NDArray[np.float64]:
    """1, 2, 3, ... for sorted values, averaged over equal ones."""
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(ordered)))
    found: NDArray[np.float64] = np.repeat(starts + (counts + 1) / 2, counts)
    return found


def _equal_length_columns(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both lists as float64 tensors."""
    x, y = (torch.as_tensor(np.asarray(values, dtype=np.float64)) for values in (a, b))
    if len(x) != len(y):
        raise NormscopeError(f"A correlation needs two lists of the same length, not of {len(x)} and {len(y)} values.")
    return x, y


def _weighted_mid_ranks(
    place: NDArray[np.intp], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The total weight of each place, and its mid-rank minus the mean rank."""
    totals: NDArray[np.float64] = np.bincount(place, weights=weights).astype(np.float64)
    return totals, np.cumsum(totals) - (totals + totals.sum()) / 2
