"""The mixing ratio (EMNLP 2021, eq. 8): how much of a token's new vector comes from other tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def mixing_ratio(others: Tensor, own: Tensor) -> Tensor:
    """``r_i = ||sum_{j!=i} c_ij|| / (||sum_{j!=i} c_ij|| + ||c_ii||)`` from the two norms.

    The norm of the sum, not the sum of norms. 0 for a token without any contribution.
    """
    return others / (others + own).clamp_min(torch.finfo(others.dtype).tiny)
