"""Similarity of two maps (FF paper, section 4): Spearman's rank correlation of all their cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """(..., N): ranks from 1 along the last dimension, ties at their mean, in float64."""
    given = values.detach().cpu().numpy()  # whose sort is several times faster than torch's
    found = np.empty(given.shape)
    rows = given.shape[-1]
    for row, into in zip(given.reshape(-1, rows), found.reshape(-1, rows), strict=True):
        order = np.argsort(row)
        into[order] = _places(row[order])
    return torch.from_numpy(found).to(values.device)


def _places(ordered: NDArray[Any]) -> NDArray[np.float64]:
    """1, 2, 3, ... of sorted values, the mean of these for equal ones."""
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(ordered)))
    found: NDArray[np.float64] = np.repeat(starts + (counts + 1) / 2, counts)
    return found


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension; NaN where one side does not vary."""
    a = a - a.mean(-1, keepdim=True)
    b = b - b.mean(-1, keepdim=True)
    found: Tensor = (a * b).sum(-1) / (torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1))
    return found


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation over the last dimension, ties at their mean rank."""
    return correlation(ranks(a), ranks(b))
