"""Text that all views share: the sides of a map, the names of models, and the equation of a flow."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.flow.result import Flow
from normscope.labels import Label, shorten_label, visible_label_text


class Labelled(Protocol):
    """A result whose maps have labelled rows and columns."""

    @property
    def rows(self) -> Sequence[Label]: ...

    @property
    def columns(self) -> Sequence[Label]: ...


class Span(NamedTuple):
    """Consecutive columns of one side."""

    side: str
    start: int
    stop: int


def side_spans(labels: Sequence[Label]) -> list[Span]:
    """The columns of each side: one span, or two for a decoder with cross-attention (its own, the encoder's)."""
    starts = [j for j in range(len(labels)) if j == 0 or labels[j].side != labels[j - 1].side]
    return [Span(labels[a].side, a, b) for a, b in zip(starts, [*starts[1:], len(labels)], strict=True)]


def sides_note(analysis: Labelled) -> str:
    """`" (decoder | encoder tokens)"`, `" (by source)"`, or `""` if all columns are on the side of the rows."""
    sides = [span.side for span in side_spans(analysis.columns)]
    if sides == ["source"]:
        return " (by source)"
    return f" ({' | '.join(sides)} tokens)" if sides != [analysis.rows[0].side] else ""


def tokens_line(labels: Sequence[Label]) -> str:
    """All tokens in one line, with the names of the sides if there are two."""
    spans = side_spans(labels)
    texts = [" ".join(shorten_label(visible_label_text(label.token), 18) for label in labels[a:b]) for _, a, b in spans]
    return texts[0] if len(spans) == 1 else " | ".join(f"{s.side}: {t}" for s, t in zip(spans, texts, strict=True))


def model_label(analysis: Analysis | EncoderDecoderAnalysis) -> str:
    """The model's name; for a local path, its last part."""
    name = str(analysis.info.get("model", "") or "unnamed model")
    return Path(name).name if os.path.isabs(name) else name


def target_label(flow: Flow) -> str:
    """The target with its position counted from 1, as in all views (the library counts from 0)."""
    assert flow.to is not None
    return re.sub(r"at position(s?) (\d+)(?: to (\d+))?", _position_from_one, flow.to.target)


def _position_from_one(found: re.Match[str]) -> str:
    last = "" if found[3] is None else f" to {int(found[3]) + 1}"
    return f"at token{found[1]} {int(found[2]) + 1}{last}"


def target_equation(flow: Flow) -> str:
    """`logit of 'happy' = 12.3 = 9.8 (tokens) + 2.5 (biases), completeness error 1e-7`"""
    to = flow.to
    assert to is not None
    if math.isnan(to.remainder):
        return f"{target_label(flow)} = {to.value:.4g}; the scores of {flow.method} do not add up to it"
    total = float(to.scores.double().sum())
    sign = "-" if to.remainder < 0 else "+"
    return (
        f"{target_label(flow)} = {to.value:.4g} = {total:.4g} (tokens) {sign} {abs(to.remainder):.4g} (biases), "
        f"completeness error {to.completeness:.0e}"
    )


def flow_scores_list(flow: Flow) -> list[float]:
    """The scores of the target by token, of the sum of all targets if there are several."""
    assert flow.to is not None
    return [float(value) for value in flow.to.scores.double().tolist()]


def completeness_note(flow: Flow) -> str:
    """`worst completeness error 2e-07`, or an empty string if the method does not decompose vectors."""
    return "" if flow.completeness is None else f"worst completeness error {float(flow.completeness.max()):.1e}"
