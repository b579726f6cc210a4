"""Rollout (Abnar & Zuidema 2020): maps of single layers multiplied along the depth of a model."""

from __future__ import annotations

import torch
from torch import Tensor


def rollout(maps: Tensor, encoder: Tensor | None = None) -> Tensor:
    """(layers, n, columns): ``R_1 = M_1, R_l = M_l R_(l-1)``.

    Where a decoder's maps have the encoder's columns after their own, those lead through the `encoder`'s own map
    (m, m): ``R_l = M_l[own] R_(l-1) + [0, M_l[cross] encoder]``, beginning with ``R_0 = [1, 0]``.
    """
    rows, columns = maps.shape[1:]
    reached = torch.eye(rows, columns, dtype=maps.dtype, device=maps.device)
    found = []
    for one in maps:
        reached = one[:, :rows] @ reached
        if encoder is not None:
            reached[:, rows:] += one[:, rows:] @ encoder
        found.append(reached)
    return torch.stack(found)


def half_residual(weights: Tensor) -> Tensor:
    """``0.5 A + 0.5 I``, A the mean of the heads."""
    return 0.5 * weights + 0.5 * torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
