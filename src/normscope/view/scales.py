"""The numbers and colours of maps: values, own cells and colour scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from normscope.analysis import Analysis
from normscope.view.tokens import Labelled, side_spans

# The cividis colour map of Nuñez, Anderton and Renslow: perceptually uniform, also for colour-blind readers.
CIVIDIS = (
    *("#00224e", "#003170", "#2a3f6d", "#434e6c", "#575d6d", "#6a6c71", "#7d7c78"),
    *("#918b78", "#a59c74", "#bcae6c", "#d2c060", "#e9d34e", "#fee838"),
)
BEYOND = "#fff7c2"  # own tokens above the end of the scale
ORANGE, BLUE = (217, 119, 6), (37, 99, 235)  # positive and negative scores
Values = NDArray[np.float64]


def drop_empty_side(analysis: Analysis, scope: str) -> Analysis:
    """The scope alone, without the columns of a side that contributes nothing to it.

    Before the cross-attention, the encoder contributes nothing; to the cross-attention itself, the decoder's own tokens
    contribute nothing.
    """
    spans = side_spans(analysis.columns)
    measured = analysis.measured[analysis.resolve(scope)]
    kept = [j for _, a, b in spans for j in range(a, b) if bool((measured.map[..., a:b] != 0).any())]
    if len(spans) == 1 or not kept:
        kept = list(range(len(analysis.columns)))
    return replace(
        analysis,
        measured={analysis.resolve(scope): replace(measured, map=measured.map[..., kept])},
        columns=tuple(analysis.columns[j] for j in kept),
        word_ids=None,
    )


def scale_quantity_name(scope: str) -> str:
    """The quantity that a scope's map shows."""
    return "attention weight" if scope.endswith("-W") else "norm of the contribution"


def map_values(analysis: Analysis, scope: str, layer: int) -> Values:
    """One map (rows, columns); `layer` is the model's layer index, counted from 0."""
    values: Values = analysis[scope][analysis.layer_position(layer)].detach().cpu().double().numpy()
    return values


def own_token_cells(analysis: Labelled) -> NDArray[np.bool_]:
    """(rows, columns): True where input and output are the same token."""
    rows = [(label.side, label.position) for label in analysis.rows]
    columns = [(label.side, label.position) for label in analysis.columns]
    return np.array([[row == column for column in columns] for row in rows], dtype=bool)


class Scale(NamedTuple):
    """A colour scale from 0 to `end`; `top` is the largest value, which exceeds `end` only for own tokens."""

    end: float
    top: float

    @property
    def clipped(self) -> bool:
        return self.top > self.end

    def share(self, value: float) -> float:
        """A value's position on the scale, from 0 to 1."""
        return min(max(value / self.end, 0.0), 1.0) if math.isfinite(value) else 0.0


def colour_scale(maps: Iterable[Values], own: NDArray[np.bool_]) -> Scale:
    """One scale for several maps, ending at their largest value.

    If own tokens exceed all others more than twofold, it ends at the largest of the others: a bright diagonal would
    leave the rest dark.
    """
    top = others = 0.0
    for values in maps:
        finite = np.isfinite(values)
        top = max(top, float(values.max(initial=0.0, where=finite)))
        others = max(others, float(values.max(initial=0.0, where=finite & ~own)))
    end = others if 0 < 2 * others < top else top
    return Scale(end, top) if end > 0 else Scale(1.0, 1.0)


def worst_completeness(analysis: Analysis) -> tuple[float, str, int]:
    """The largest completeness error, its scope and its layer (counted from 0); NaN counts as the largest."""
    errors = [
        (error, scope, layer)
        for scope, per_layer in analysis.completeness.items()
        for error, layer in zip(per_layer.double().tolist(), analysis.layers, strict=True)
    ]
    return max(errors, key=lambda entry: (math.isnan(entry[0]), entry[0]))
