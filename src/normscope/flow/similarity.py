"""The similarity of two texts as a target: the cosine of their embeddings, explained on the side of one text.

With the pooled vector ``e = sum_i w_i x_i`` of this text and ``u`` of the other, ``cos = <e, u> / (||e|| ||u||)``. The
length of e is held, so that the cosine is the direction ``u / (||e|| ||u||)`` in every pooled state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.flow.maps import FrozenModel
from normscope.flow.output_head import freeze_to_end
from normscope.flow.targets import Target
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel


@dataclass(frozen=True)
class Similarity:
    """The cosine between the embeddings of two texts, as the target of a flow through one of them.

    Exchange the two texts to explain the same number on the other side.

    Args:
        text: The other text.
        pooling: How the states after the last layer (and the norm after it) become the embedding: "mean" over all
            tokens that are not masked, special tokens included, as in sentence-transformers' mean pooling; the "first"
            token; or the "last".
    """

    text: Any
    pooling: Literal["mean", "first", "last"] = "mean"


def similarity_target(loaded: LoadedModel, model: FrozenModel, item: Item, given: Similarity, position: Any) -> Target:
    """The direction of the cosine in the states of this text."""
    if position is not None:
        raise NormscopeError("A similarity is of pooled states: leave position= out.")
    if given.pooling not in ("mean", "first", "last"):
        raise NormscopeError(f"Unknown pooling {given.pooling!r}. Known: mean, first, last.")
    if loaded.two_sided:
        raise NormscopeError(f"{loaded.family.name} has two sides, and no embedding of a text.")
    (other,) = encode(loaded, given.text)
    theirs = _pooled_vector(freeze_to_end(loaded, other), given.pooling)
    ours = _pooled_vector(model, given.pooling)
    for vector in (ours, theirs):
        if not float(vector.norm()) > 0:
            raise NormscopeError("An embedding is zero, so it has no cosine with another.")
    direction = theirs / (theirs.norm() * ours.norm())
    rows, weights = _pooled_rows(model.stacks[-1].real, given.pooling)
    one = torch.ones_like(rows)
    return Target(
        (f"cosine of the {given.pooling}-pooled embeddings",),
        rows,
        one - 1,
        one,
        vectors=weights.to(direction)[:, None] * direction,
        place="end",
    )


def _pooled_vector(model: FrozenModel, pooling: str) -> Tensor:
    """(d,)"""
    last = model.stacks[-1]
    state = last.end_states
    rows, weights = _pooled_rows(last.real, pooling)
    return weights.to(state) @ state[rows]


def _pooled_rows(real: Tensor, pooling: str) -> tuple[Tensor, Tensor]:
    """The tokens that are pooled, and the weight of each."""
    rows = real.nonzero().flatten()
    if pooling != "mean":
        rows = rows[:1] if pooling == "first" else rows[-1:]
    return rows, torch.full((len(rows),), 1 / len(rows), dtype=torch.float64, device=rows.device)
