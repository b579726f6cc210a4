"""Results of a text with pictures on the grids of their tokens: one output's contributions, or scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.explain.result import Explanation
from normscope.labels import Label
from normscope.view.figure.style import PLAIN, Look
from normscope.view.scales import Values


@dataclass(frozen=True, eq=False)
class PictureValues:
    """The values of one picture's tokens on its finest grid."""

    name: str
    values: Values  # (down, across)
    total: float  # of all its tokens, those of further grids and ends of lines included


def picture_names(info: Mapping[str, Any]) -> list[str]:
    """The names of the pictures in the input of a result."""
    return [str(one["name"]) for one in info.get("pictures", ())]


def values_on_pictures(info: Mapping[str, Any], columns: Sequence[Label], values: Values) -> list[PictureValues]:
    """Values (columns,) on the finest grid of each picture that has one."""
    side = next((label.side for label in columns), "")
    places = {label.position: n for n, label in enumerate(columns) if label.side == side}
    found = []
    for one in info.get("pictures", ()):
        total = float(values[[places[n] for n in one["positions"]]].sum())
        for _, rows in one["grids"][:1]:
            grid = np.array([[values[places[n]] for n in line] for line in rows])
            found.append(PictureValues(one["name"], grid, total))
    return found


def row_on_pictures(
    analysis: Analysis, scope: str, layer: int, row: int, look: Look = PLAIN
) -> tuple[list[PictureValues], float]:
    """The contributions to one output on the pictures, and those of all tokens together."""
    if analysis.by_source:
        raise NormscopeError("The columns of this analysis are sources, not patches. Analyse it without sources=.")
    values = look.values(analysis, scope, layer)[row]
    found = values_on_pictures(analysis.info, analysis.columns, values)
    if not found:
        raise NormscopeError("The tokens of this analysis have no known place in a picture.")
    return found, float(values.sum())


def scores_on_pictures(told: Explanation) -> list[PictureValues]:
    """The scores of the patches for the whole answer."""
    total: Values = told.scores.detach().cpu().double().sum(0).numpy()
    return values_on_pictures(told.info, told.columns, total)


def find_written_row(analysis: Analysis, token: str | int | None) -> int:
    """The row of an output given by its token or index; default: the last. Of a token that occurs several times, the
    index is needed."""
    tokens = list(analysis.tokens)
    if token is None:
        return len(tokens) - 1
    if isinstance(token, int) and not isinstance(token, bool) and -len(tokens) <= token < len(tokens):
        return token % len(tokens)
    if isinstance(token, str) and tokens.count(token) == 1:
        return tokens.index(token)
    times = f" occurs {tokens.count(token)} times" if token in tokens else " is not there"
    raise NormscopeError(
        f"The output {token!r}{times}. Give a token such as {tokens[-1]!r}, or an index from 0 to {len(tokens) - 1}."
    )


def pictures_to_draw(given: Any, count: int) -> list[Any]:
    """One picture, or None, for each of `count` grids."""
    images = list(given) if isinstance(given, list | tuple) else [given] * (1 if count == 1 or given is None else 0)
    images = images * count if given is None else images
    if len(images) != count:
        raise NormscopeError(f"The input has {count} pictures: pass as many as image=[...], in order.")
    return images
