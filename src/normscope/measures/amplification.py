"""FF-amp (FF paper, section 5): which pairs of tokens a component amplifies, from the maps before and after it.

The scale of maps differs between scopes, so each map is normalised first. The paper makes "each column sum to 1"
(footnote 6) but does not define its columns:

- axis="output": the contributions to one output sum to 1, ``m_ij / sum_j m_ij``;
- axis="input": the contributions of one input sum to 1, ``m_ij / sum_i m_ij``; these are the columns of our plots.
"""

from __future__ import annotations

from math import exp, lgamma
from typing import Literal

import torch
from torch import Tensor

from normscope.errors import NormscopeError

Axis = Literal["output", "input"]
AXES = ("output", "input")


def map_shares(maps: Tensor, axis: Axis = "output") -> Tensor:
    """(..., i, j) in float64: the map with each output's row or each input's column summing to 1, or 0."""
    if axis not in AXES:
        raise NormscopeError(f"axis must be 'output' or 'input', not {axis!r}.")
    values = maps.double()
    total = values.sum(-1 if axis == "output" else -2, keepdim=True)
    return values / total.clamp_min(torch.finfo(values.dtype).tiny)


def amplification(before: Tensor, after: Tensor, axis: Axis = "output") -> Tensor:
    """(..., i, j): ``map_shares(after) - map_shares(before)``, positive where output i gained from input j."""
    if before.shape != after.shape:
        raise NormscopeError(f"Both maps must have the same shape, not {tuple(before.shape)} and {tuple(after.shape)}.")
    return map_shares(after, axis) - map_shares(before, axis)


def draw_p_values(found: int, drawn: int, members: int, total: int) -> tuple[float, float]:
    """P(X >= found) and P(X <= found) for X members among `drawn` of `total` things without replacement, `members` of
    them in all: the exact permutation test of whether a category is more, or less, frequent among the pairs amplified
    most than among all pairs."""
    if not (0 <= found <= drawn <= total and found <= members <= total):
        raise NormscopeError(f"Cannot find {found} of {members} members among {drawn} of {total}.")
    low, high = max(0, drawn - (total - members)), min(drawn, members)
    whole = _log_choose(total, drawn)
    shares = [
        exp(_log_choose(members, k) + _log_choose(total - members, drawn - k) - whole) for k in range(low, high + 1)
    ]
    return min(1.0, sum(shares[found - low :])), min(1.0, sum(shares[: found - low + 1]))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
