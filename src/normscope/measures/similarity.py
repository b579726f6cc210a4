"""Similarity of two maps (FF paper, section 4): Spearman's rank correlation of all their cells."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """(..., N): ranks from 1 along the last dimension, ties at their mean, in float64."""
    ordered, order = values.sort(-1)
    size = values.shape[-1]
    place = torch.arange(1, size + 1, dtype=torch.float64, device=values.device).expand(values.shape)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    group = fresh.cumsum(-1) - 1  # which run of equal values
    sums = torch.zeros_like(place).scatter_add_(-1, group, place)
    counts = torch.zeros_like(place).scatter_add_(-1, group, torch.ones_like(place))
    mean = (sums / counts.clamp_min(1)).gather(-1, group)
    return torch.empty_like(mean).scatter_(-1, order, mean)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension; NaN where one side does not vary."""
    a = a - a.mean(-1, keepdim=True)
    b = b - b.mean(-1, keepdim=True)
    found: Tensor = (a * b).sum(-1) / (torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1))
    return found


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation over the last dimension, ties at their mean rank."""
    return correlation(ranks(a), ranks(b))
