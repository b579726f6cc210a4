"""Units that two tokenizations of one text have in common, so that maps between their tokens can be compared.

A unit is a smallest stretch of the text that is made of whole tokens in both: tokens that share a character are in one
unit. White space at either end of a token does not count, because some tokenizers count it and others do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normscope.errors import NormscopeError

Span = tuple[int, int]
Spans = Sequence[Span | None]  # the characters of each token; None for special tokens


@dataclass(frozen=True)
class CommonUnits:
    """The units of a text, and the unit of each token of both tokenizations (None: in no unit)."""

    texts: tuple[str, ...]
    first: tuple[int | None, ...]
    other: tuple[int | None, ...]

    @property
    def unmatched(self) -> int:
        """The number of tokens, of both, that are in no unit."""
        return self.first.count(None) + self.other.count(None)


def find_common_units(text: str, first: Spans, other: Spans, names: Sequence[str]) -> CommonUnits:
    """The common units of two tokenizations.

    Special tokens before the text are units with their counterparts, as are those after it; `names` are the tokens of
    the first. Other special tokens, and characters that only one tokenizer reads, are in no unit.
    """
    both = [[_stripped(text, span) for span in spans] for spans in (first, other)]
    merged = _merge_overlapping(
        sorted(span for spans in both for span in spans if span is not None and span[0] < span[1])
    )
    owners = [
        [_place_of_span(merged, span, given) for span, given in zip(spans, raw, strict=True)]
        for spans, raw in zip(both, (first, other), strict=True)
    ]
    kept = sorted({n for n in owners[0] if n is not None} & {n for n in owners[1] if n is not None})
    if not kept:
        raise NormscopeError("The two models have no text in common: their tokenizers read different characters.")
    before, after = (min(len(_specials_at_end(spans, end)) for spans in (first, other)) for end in (1, -1))
    number = {n: before + k for k, n in enumerate(kept)}
    units: list[tuple[int | None, ...]] = []
    for spans, owner in zip((first, other), owners, strict=True):
        found: list[int | None] = [None if n is None else number.get(n) for n in owner]
        for k, place in enumerate(_specials_at_end(spans, 1)[:before]):
            found[place] = k
        for k, place in enumerate(reversed(_specials_at_end(spans, -1)[:after])):
            found[place] = before + len(kept) + k
        units.append(tuple(found))
    place_of = {unit: n for n, unit in reversed(list(enumerate(units[0]))) if unit is not None}
    inner = {number[n]: text[slice(*merged[n])] for n in kept}
    texts = tuple(inner.get(unit, names[place_of[unit]]) for unit in range(before + len(kept) + after))
    return CommonUnits(texts, units[0], units[1])


def equal_units(names: Sequence[str]) -> CommonUnits:
    """The units of two equal tokenizations: their tokens."""
    places = tuple(range(len(names)))
    return CommonUnits(tuple(names), places, places)


def _stripped(text: str, span: Span | None) -> Span | None:
    """A span without white space at its ends."""
    if span is None:
        return None
    inside = text[span[0] : span[1]]
    start = span[0] + len(inside) - len(inside.lstrip())
    return start, max(start, span[0] + len(inside.rstrip()))


def _merge_overlapping(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _place_of_span(merged: Sequence[Span], span: Span | None, raw: Span | None) -> int | None:
    """The merged span that a token is in. White space alone is in one only if it lies inside."""
    if span is None or raw is None:
        return None
    at, end = span if span[0] < span[1] else raw
    low, high = 0, len(merged)
    while low < high:  # the last one that begins at or before the token
        middle = (low + high) // 2
        low, high = (middle + 1, high) if merged[middle][0] <= at else (low, middle)
    inside = low > 0 and end <= merged[low - 1][1] and at < merged[low - 1][1]
    return low - 1 if inside else None


def _specials_at_end(spans: Spans, step: int) -> list[int]:
    """The places of the special tokens at the beginning (1) or the end (-1), from the outside."""
    places = range(len(spans))[::step]
    found = []
    for place in places:
        if spans[place] is not None:
            break
        found.append(place)
    return found if len(found) < len(spans) else []
