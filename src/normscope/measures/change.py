"""How much hidden states and predictions change between a model and an altered copy."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """(...): ``||h' - h|| / ||h||`` over the last dimension; 0 for unchanged vectors, including zero vectors."""
    apart = torch.linalg.vector_norm(after.double() - before.double(), dim=-1)
    length = torch.linalg.vector_norm(before.double(), dim=-1)
    return torch.where(apart == 0, torch.zeros_like(apart), apart / length)


def cosine_distance(before: Tensor, after: Tensor) -> Tensor:
    """(...): ``1 - h . h' / (||h|| ||h'||)`` over the last dimension, from 0 to 2.

    0 between two zero vectors, 1 if only one of them is zero. Computed as half the squared distance of the unit
    vectors, which is accurate for nearly parallel vectors.
    """
    units = [_to_unit_length(vectors.double()) for vectors in (before, after)]
    apart = (units[0] - units[1]).square().sum(-1) / 2
    alone = (units[0].abs().sum(-1) == 0) != (units[1].abs().sum(-1) == 0)
    return torch.where(alone, torch.ones_like(apart), apart)


def cross_entropy(logits: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
    """(positions,): ``-log softmax(logits_p)[target_p]``, in nats, at the given positions.

    `logits` is (n, vocabulary); `targets` has the correct token at each position.
    """
    scores = torch.log_softmax(logits[positions].double(), dim=-1)
    return -scores.gather(-1, targets[:, None]).squeeze(-1)


def _to_unit_length(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
