"""What all views share: readable tokens, names and colour scales."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.labels import Label

# The cividis scale of Nuñez, Anderton and Renslow, at even steps: perceptually even, also with colour-blindness.
CIVIDIS = (
    *("#00224e", "#003170", "#2a3f6d", "#434e6c", "#575d6d", "#6a6c71", "#7d7c78"),
    *("#918b78", "#a59c74", "#bcae6c", "#d2c060", "#e9d34e", "#fee838"),
)
BEYOND = "#fff7c2"  # own tokens that exceed the scale

Values = NDArray[np.float64]


def visible(token: str) -> str:
    """The token with nothing hidden: control and format characters spelled out, outer spaces as ␣, nothing as ∅."""
    if not token:
        return "∅"
    inner = token.strip(" ")
    left = len(token) - len(token.lstrip(" "))
    right = len(token) - left - len(inner)
    return "␣" * left + "".join(map(_visible, inner)) + "␣" * right


def _visible(char: str) -> str:
    hidden = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return char.encode("unicode_escape").decode() if hidden else char


def shorten(text: str, width: int) -> str:
    """`text` cut in the middle to `width` cells."""
    if cell_len(text) <= width:
        return text
    tail = _prefix(glyphs_of(text)[::-1], (width - 1) // 2)[::-1]
    head = _prefix(glyphs_of(text), width - 1 - sum(map(cell_len, tail)))
    return "".join([*head, "…", *tail])


def glyphs_of(text: str) -> list[str]:
    """Characters with the zero-width marks that follow them."""
    glyphs: list[str] = []
    for char in text:
        if glyphs and not cell_len(char):
            glyphs[-1] += char
        else:
            glyphs.append(char)
    return glyphs


def _prefix(glyphs: Sequence[str], width: int) -> list[str]:
    taken: list[str] = []
    for glyph in glyphs:
        width -= cell_len(glyph)
        if width < 0:
            break
        taken.append(glyph)
    return taken


def ranges(numbers: Iterable[int]) -> str:
    """`1-3, 5`"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class Labelled(Protocol):
    """What has tokens on both sides of its maps."""

    @property
    def rows(self) -> Sequence[Label]: ...

    @property
    def columns(self) -> Sequence[Label]: ...


class Span(NamedTuple):
    """Neighbouring columns of one side."""

    side: str
    start: int
    stop: int


def spans_of(labels: Sequence[Label]) -> list[Span]:
    """The columns of each side: one span, or for a decoder that reads an encoder its own and the encoder's."""
    starts = [j for j in range(len(labels)) if j == 0 or labels[j].side != labels[j - 1].side]
    return [Span(labels[a].side, a, b) for a, b in zip(starts, [*starts[1:], len(labels)], strict=True)]


def sides_note(analysis: Labelled) -> str:
    """`" (decoder | encoder tokens)"` where not all columns are on the side of the rows."""
    sides = [span.side for span in spans_of(analysis.columns)]
    return f" ({' | '.join(sides)} tokens)" if sides != [analysis.rows[0].side] else ""


def tokens_of(labels: Sequence[Label]) -> str:
    """All tokens in a line, named by side where there are two."""
    spans = spans_of(labels)
    texts = [" ".join(shorten(visible(label.token), 18) for label in labels[a:b]) for _, a, b in spans]
    return texts[0] if len(spans) == 1 else " | ".join(f"{s.side}: {t}" for s, t in zip(spans, texts, strict=True))


def contributing(analysis: Analysis, scope: str) -> Analysis:
    """The scope alone, without the columns of a side that gives nothing to it: before its cross-attention a decoder has
    nothing of the encoder, and the cross-attention itself nothing of the decoder's own tokens."""
    spans = spans_of(analysis.columns)
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


def model_label(analysis: Analysis | EncoderDecoderAnalysis) -> str:
    """The model's name; of a local path only the last part."""
    name = str(analysis.info.get("model", "") or "unnamed model")
    return Path(name).name if os.path.isabs(name) else name


def quantity(scope: str) -> str:
    """What the numbers of a scope's map are."""
    return "attention weight" if scope.endswith("-W") else "norm of the contribution"


def values_of(analysis: Analysis, scope: str, layer: int) -> Values:
    """One map (rows, columns); `layer` is the model's layer index, counted from 0."""
    values: Values = analysis[scope][analysis.layer_position(layer)].detach().cpu().double().numpy()
    return values


def own_cells(analysis: Labelled) -> NDArray[np.bool_]:
    """(rows, columns): where input and output are the same token."""
    rows = [(label.side, label.position) for label in analysis.rows]
    columns = [(label.side, label.position) for label in analysis.columns]
    return np.array([[row == column for column in columns] for row in rows], dtype=bool)


class Scale(NamedTuple):
    """A colour scale from 0 to `end`; `top` is the largest value, which own tokens may have beyond the end."""

    end: float
    top: float

    @property
    def clipped(self) -> bool:
        return self.top > self.end

    def share(self, value: float) -> float:
        """Where a value lies on the scale, from 0 to 1."""
        return min(max(value / self.end, 0.0), 1.0) if math.isfinite(value) else 0.0


def scale_of(maps: Iterable[Values], own: NDArray[np.bool_]) -> Scale:
    """The scale that maps share. It ends at their largest value, unless own tokens exceed all others more than twice:
    then at the largest of the others, because one bright diagonal would leave the rest dark.
    """
    top = others = 0.0
    for values in maps:
        finite = np.isfinite(values)
        top = max(top, float(values.max(initial=0.0, where=finite)))
        others = max(others, float(values.max(initial=0.0, where=finite & ~own)))
    end = others if 0 < 2 * others < top else top
    return Scale(end, top) if end > 0 else Scale(1.0, 1.0)


def worst_completeness(analysis: Analysis) -> tuple[float, str, int]:
    """The largest completeness error, its scope and its layer (counted from 0); not-a-number counts as largest."""
    errors = [
        (error, scope, layer)
        for scope, per_layer in analysis.completeness.items()
        for error, layer in zip(per_layer.double().tolist(), analysis.layers, strict=True)
    ]
    return max(errors, key=lambda entry: (math.isnan(entry[0]), entry[0]))
