"""How much vectors change, and how well logits predict: for comparing a model with an altered copy of itself."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """(...): ``||h' - h|| / ||h||`` over the last dimension; 0 where nothing changes, also where h is zero."""
    apart = torch.linalg.vector_norm(after.double() - before.double(), dim=-1)
    length = torch.linalg.vector_norm(before.double(), dim=-1)
    return torch.where(apart == 0, torch.zeros_like(apart), apart / length)


def cosine_distance(before: Tensor, after: Tensor) -> Tensor:
    """(...): ``1 - h . h' / (||h|| ||h'||)`` over the last dimension, from 0 to 2.

    0 between two zero vectors, 1 between a zero vector and another.
    Half the squared distance of the unit vectors, which keeps its accuracy where they nearly agree.
    """
    units = [_unit(vectors.double()) for vectors in (before, after)]
    apart = (units[0] - units[1]).square().sum(-1) / 2
    alone = (units[0].abs().sum(-1) == 0) != (units[1].abs().sum(-1) == 0)
    return torch.where(alone, torch.ones_like(apart), apart)


def cross_entropy(logits: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
    """(positions,): ``-log softmax(logits_p)[target_p]``, in nats, at the given positions.

    `logits` is (n, vocabulary); `targets` has the right token for each of the positions.
    """
    scores = torch.log_softmax(logits[positions].double(), dim=-1)
    return -scores.gather(-1, targets[:, None]).squeeze(-1)


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
