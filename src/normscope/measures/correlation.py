"""Rank correlations: of maps, of lists, and of populations that are too large to rank.

Tied values always get the mean of their ranks. The similarity of two maps (FF paper, section 4) is Spearman's rank
correlation of all their cells.

Populations of pairs in which one value belongs to many pairs (EMNLP 2020, Table 2: ||f|| of a key, alpha of each query
and key) are ranked exactly by `spearman_of_repeated`, in 16 bytes per pair. In larger ones (10^9 pairs), values are
counted in narrow logarithmic bins, and only the joint histogram of the two quantities is stored.
`spearman_of_histogram` is exact for values rounded to their bins; `rank_resolution` measures how much the rounding
loses.
"""

from __future__ import annotations

import math
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import NormscopeError

AT_ONCE = 2**22  # pairs ranked at a time
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
    return spearman_of_codes(ordinal_codes(x), ordinal_codes(y), counts)


def ordinal_codes(values: Any) -> NDArray[np.intp]:
    """The place of each value among the distinct values in increasing order, from 0."""
    found: NDArray[np.intp] = np.unique(np.asarray(values), return_inverse=True)[1]
    return found


def spearman_of_codes(x: NDArray[np.intp], y: NDArray[np.intp], counts: Any) -> float:
    """`spearman_of_histogram` of `ordinal_codes`, without sorting: for many sets of counts of the same cells.

    Counts may be fractions or zero, as weights of resampled observations are.
    """
    cells = np.asarray(counts, dtype=np.float64)
    rank_x, spread_x = _centred_mid_ranks(x, cells)
    rank_y, spread_y = _centred_mid_ranks(y, cells)
    if not spread_x > 0 or not spread_y > 0:
        return nan
    return float((cells * rank_x[x] * rank_y[y]).sum() / np.sqrt(spread_x * spread_y))


def spearman_of_repeated(x: Any, y: Any, counts: Any) -> float:
    """Spearman's correlation of pairs of which y_k is in `counts` [k] consecutive ones; x has a value for each pair.

    Exact. Only the codes of x and the indices of y are sorted, packed into one array of integers; ranks are computed
    for a few million pairs at a time. NaN if either side is constant.
    """
    given, repeats = np.asarray(x), np.asarray(counts, dtype=np.int64)
    if len(given) != repeats.sum() or len(y) != len(repeats):
        raise NormscopeError(
            f"{len(y)} values repeated {len(repeats)} times, {repeats.sum()} in all, do not pair with {len(given)}."
        )
    rank_y, spread_y = _centred_mid_ranks(ordinal_codes(y), repeats.astype(np.float64))
    ranks = rank_y[ordinal_codes(y)]
    pairs = _sortable_codes(given).astype(np.uint64)
    pairs <<= np.uint64(32)
    pairs |= np.repeat(np.arange(len(repeats), dtype=np.uint32), repeats)
    pairs.sort()
    products, spread_x, start = 0.0, 0.0, 0
    while start < len(pairs):
        # Up to the last pair with the same x, so that ties are not divided.
        last = pairs[min(start + AT_ONCE, len(pairs)) - 1] >> np.uint64(32)
        end = int(np.searchsorted(pairs, (last + np.uint64(1)) << np.uint64(32)))
        some = pairs[start:end]
        codes = some >> np.uint64(32)
        first = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        ties = np.diff(np.append(first, len(some)))
        rank = start + first + (ties - len(pairs)) / 2  # centred mid-rank
        products += float((rank * np.add.reduceat(ranks[(some & np.uint64(2**32 - 1)).astype(np.intp)], first)).sum())
        spread_x += float((ties * rank**2).sum())
        start = end
    return products / math.sqrt(spread_x * spread_y) if spread_x > 0 and spread_y > 0 else nan


def rank_resolution(bins: Any, counts: Any) -> float:
    """1 - sum p_b^3: the share of the rank variance between bins; 1 if no two values share a bin."""
    sums = np.bincount(ordinal_codes(bins), weights=np.asarray(counts, dtype=np.float64))
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


def _centred_mid_ranks(codes: NDArray[np.intp], counts: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The centred mid-rank of each code, and the sum of its squares over the population."""
    sums = np.bincount(codes, weights=counts)
    ranks = np.cumsum(sums) - (sums + sums.sum()) / 2
    return ranks, float((sums * ranks**2).sum())


def _sortable_codes(values: NDArray[Any]) -> NDArray[Any]:
    """Unsigned integers in the order of the values: the bits of non-negative float32, otherwise `ordinal_codes`."""
    if values.dtype == np.float32 and (not len(values) or values.min() >= 0):
        found: NDArray[Any] = (values + np.float32(0)).view(np.uint32)  # the sum turns -0.0 into 0.0
        return found
    return ordinal_codes(values)
