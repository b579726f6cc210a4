"""Labels: the tokens that name the rows and columns of a map."""

from __future__ import annotations

from typing import NamedTuple

from normscope.inputs.item import Item


class Label(NamedTuple):
    """A token that names a row or column of a map."""

    token: str
    side: str  # "encoder" or "decoder"; "prompt" for virtual tokens
    position: int  # on its side, counted from 0


def token_labels(item: Item, side: str) -> list[Label]:
    """The labels of all tokens of an item on one side."""
    return [Label(token, side, n) for n, token in enumerate(item.sides[side].names)]
