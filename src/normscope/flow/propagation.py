"""States carried through a frozen model, forwards by source and backwards from a direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from normscope.flow.frozen import FrozenBlock, FrozenLayer, Map


def forward_layer(layer: FrozenLayer, X: Tensor, encoder: Tensor | None = None, remainder: bool = True) -> Tensor:
    """(n, sources, d) after a layer. With `remainder` the last source takes every constant."""
    for block in layer.blocks:
        X = forward_block(block, X, encoder, remainder)
    return X


def forward_block(block: FrozenBlock, X: Tensor, encoder: Tensor | None, remainder: bool) -> Tensor:
    total = X if block.residual else None
    for chain in block.branches:
        state = X
        for one in chain:
            state = through(one, state, encoder, remainder)
        total = state if total is None else total + state
    assert total is not None
    return total if block.after is None else through(block.after, total, encoder, remainder)


def through(one: Map, X: Tensor, encoder: Tensor | None, remainder: bool) -> Tensor:
    """One component; its constant goes to the last source."""
    made = one.forward(X, encoder)
    if remainder and one.constant is not None:
        made[:, -1] += one.constant
    return made


@dataclass
class Backwards:
    """A direction on its way to the input, with what the constants behind it have added to the target."""

    direction: Tensor  # (n, d)
    encoder: Tensor | None = None  # (n_encoder, d): the direction in the encoder's last states, as far as it is known
    constants: float = 0.0


def adjoint_layer(layer: FrozenLayer, at: Backwards) -> None:
    """Take a direction from behind a layer to before it."""
    for block in reversed(layer.blocks):
        adjoint_block(block, at)


def adjoint_block(block: FrozenBlock, at: Backwards) -> None:
    if block.after is not None:
        back((block.after,), at)
    behind, total = at.direction, at.direction if block.residual else None
    for chain in block.branches:
        at.direction = behind
        back(chain, at)
        total = at.direction if total is None else total + at.direction
    assert total is not None
    at.direction = total


def back(chain: Sequence[Map], at: Backwards) -> None:
    """Take a direction from behind maps that follow each other to before them."""
    for one in reversed(chain):
        if one.constant is not None:
            constant = one.constant.expand_as(at.direction)
            at.constants += float((at.direction.double() * constant.double()).sum())
        at.direction, other = one.adjoint(at.direction)
        if other is not None:
            at.encoder = other if at.encoder is None else at.encoder + other
