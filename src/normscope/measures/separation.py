"""How well a score separates two groups of the same items: the area under the ROC curve, with a bootstrap."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError
from normscope.measures.uncertainty import Estimate, resample_statistic


def area_under_curve(positive: Any, negative: Any, weights: Any = None) -> float:
    """``sum_ij w_i w_j ([p_i > n_j] + [p_i = n_j] / 2) / (sum_i w_i)^2``: how often a positive score is the higher one.

    Item i has a score in each group; `weights` are the counts of the items (default: each once).
    """
    p, n = (np.asarray(values, dtype=np.float64) for values in (positive, negative))
    if p.ndim != 1 or p.shape != n.shape or not len(p):
        raise NormscopeError(f"Both groups need one score for each item, but have the shapes {p.shape} and {n.shape}.")
    if not (np.isfinite(p).all() and np.isfinite(n).all()):
        raise NormscopeError("An area under the curve needs finite scores.")
    w = np.ones(len(p)) if weights is None else np.asarray(weights, dtype=np.float64)
    higher: NDArray[np.float64] = (p[:, None] > n) + 0.5 * (p[:, None] == n)
    return float(w @ higher @ w / w.sum() ** 2)


def estimate_area_under_curve(positive: Any, negative: Any, what: str = "items", resamples: int = 1000) -> Estimate:
    """`area_under_curve` with the interval of a bootstrap that draws an item's two scores together."""
    statistic = partial(area_under_curve, positive, negative)
    return resample_statistic(statistic, len(positive), resamples).estimate(what)
