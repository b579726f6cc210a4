"""FF-amp (FF paper, section 5): which pairs of tokens a component amplifies, from the maps before and after it.

Scales of maps differ from one scope to the next, so each map is normalised first. The paper has "each column sum to 1"
(footnote 6) without saying which side its columns are:

- axis="output": the contributions to one output sum to 1, ``m_ij / sum_j m_ij``;
- axis="input": the contributions of one input sum to 1, ``m_ij / sum_i m_ij``: a column, as maps are drawn here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from normscope.errors import NormscopeError

Axis = Literal["output", "input"]
AXES = ("output", "input")


def shares(maps: Tensor, axis: Axis = "output") -> Tensor:
    """(..., i, j) in float64: the map with every output's row, or every input's column, summing to 1; zeros stay."""
    if axis not in AXES:
        raise NormscopeError(f"A map is normalised by output or input, not by {axis!r}.")
    values = maps.double()
    total = values.sum(-1 if axis == "output" else -2, keepdim=True)
    return values / total.clamp_min(torch.finfo(values.dtype).tiny)


def amplification(before: Tensor, after: Tensor, axis: Axis = "output") -> Tensor:
    """(..., i, j): ``shares(after) - shares(before)``, above zero where input j gained in output i."""
    if before.shape != after.shape:
        raise NormscopeError(f"The maps differ in shape: {tuple(before.shape)} before, {tuple(after.shape)} after.")
    return shares(after, axis) - shares(before, axis)
