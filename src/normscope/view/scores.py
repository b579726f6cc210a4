"""The part of a document's header that tells of a target: its value by input token, and by token of every layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.view.described import labels, numbers, words_of
from normscope.view.labels import visible
from normscope.view.patches import grid_of

if TYPE_CHECKING:
    from normscope.flow.result import Flow

DIGITS = 7  # the scores and the remainder are added up by readers
PLACE = re.compile(r" at position (\d+)$")  # how the words of a target end where it is read at a token


def scores_of(flow: Flow, sides: Mapping[str, Analysis]) -> dict[str, Any]:
    """Of a flow to a target, which must be of the same tokens as these analyses."""
    if flow.to is None:
        raise NormscopeError("A page shows the flow to a target: ask for one, such as flow(text, target='top').")
    for side, one in sides.items():
        own = [label for label in one.columns if label.side == side]
        if own != [label for label in flow.columns if label.side == side]:
            raise NormscopeError(f"The flow and the analysis are of different inputs: their {side} tokens differ.")
    to, place = flow.to, PLACE.search(flow.to.target)
    value, remainder, completeness = numbers(
        torch.tensor([to.value, to.remainder, to.completeness], dtype=torch.float64), DIGITS
    )
    picture = any(grid_of(one) is not None for one in sides.values())
    return {
        "method": flow.method,
        "target": visible(PLACE.sub("", to.target)),
        "position": None if place is None else int(place[1]),  # of the token that it is read at, counted from 0
        "value": value,
        "remainder": remainder,
        "completeness": completeness,
        "columns": labels(flow.columns, words_of(sides), picture),
        "scores": numbers(to.scores, DIGITS),
        "layers": {side: numbers(by_token) for side, by_token in to.layers.items()},
        "remainders": {side: numbers(constants) for side, constants in to.remainders.items()},
    }
