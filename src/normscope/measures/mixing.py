"""The mixing ratio (EMNLP 2021, eq. 8): how much of a token's new vector comes from the other tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def mixing_ratio(others: Tensor, own: Tensor) -> Tensor:
    """``r_i = ||sum_{j!=i} c_ij|| / (||sum_{j!=i} c_ij|| + ||c_ii||)``: the norm of the sum, not the sum of norms.

    `others` and `own` are (..., d). A token without any contribution (both norms zero) mixes nothing: 0.
    """
    mixed = torch.linalg.vector_norm(others, dim=-1)
    kept = torch.linalg.vector_norm(own, dim=-1)
    return mixed / (mixed + kept).clamp_min(torch.finfo(mixed.dtype).tiny)


def weight_mixing_ratio(own_weight: Tensor, residual: bool) -> Tensor:
    """ATTN-W: ``1 - A_ii``; ATTNRES-W: ``(1 - A_ii) / 2``, A the mean of the attention weights over heads."""
    return (1 - own_weight) / 2 if residual else 1 - own_weight
