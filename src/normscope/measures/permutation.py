"""How often chance alone makes a correlation as strong: a permutation test, for as few pairs as a model has layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import torch

from normscope.measures.similarity import correlation, ranks

EXACT = 8  # pairs up to which all orders are tried: 40,320
DRAWN = 10_000  # random orders, beyond


def spearman_p(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of the orders of b whose |Spearman| with a is at least that of b as it is (two-sided); NaN where one
    side does not vary. Of random orders the given one is counted as one more."""
    x, y = (ranks(torch.tensor(list(values), dtype=torch.float64)) for values in (a, b))
    size = len(x)
    if size <= EXACT:
        orders = torch.tensor(list(permutations(range(size))), dtype=torch.long)
    else:
        generator = torch.Generator().manual_seed(0)
        orders = torch.rand(DRAWN, size, generator=generator).argsort(-1)
    found = float(correlation(x, y))
    if math.isnan(found):
        return math.nan
    as_strong = int((correlation(x, y[orders]).abs() >= abs(found) - 1e-12).sum())
    return as_strong / len(orders) if size <= EXACT else (as_strong + 1) / (len(orders) + 1)
