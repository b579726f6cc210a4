"""Scores of tokens added up: by word, sentence, line or source."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError, did_you_mean
from normscope.flow.spans import spell_tokens
from normscope.inputs.marked_text import GRAINS
from normscope.labels import Label
from normscope.tracing.recorded import row_blocks

Places = tuple[int, ...]
FRAMES = {"word": 5, "sentence": 25}  # of a sound, 20 ms each


@dataclass(frozen=True)
class SpelledText:
    """The text of one side of the input, and the characters of each of its tokens. The frames of a sound are spelled by
    their times."""

    text: str
    spans: tuple[tuple[int, int], ...]
    answer: int | None = None  # the character at which the answer begins; no word or sentence extends across it
    sound: bool = False

    def pieces(self, grain: str) -> list[tuple[int, int]]:
        """The words, sentences or lines, as characters. Those of a sound are 0.1 s, 0.5 s, and all of it."""
        if self.sound:
            ends = row_blocks(len(self.spans), FRAMES.get(grain, len(self.spans)))
            return [(self.spans[some.start][0], self.spans[some.stop - 1][1]) for some in ends]
        cut = len(self.text) if self.answer is None else self.answer
        parts = ((0, self.text[:cut]), (cut, self.text[cut:]))
        found = GRAINS[grain].finditer
        return [(at + one.start(), at + one.end()) for at, part in parts for one in found(part)]

    def name(self, piece: tuple[int, int]) -> str:
        """The text of a piece; of a sound, the times of its first and last frame."""
        text = self.text[slice(*piece)]
        return " to ".join(dict.fromkeys((text.split()[0], text.split()[-1]))) if self.sound else text


@dataclass(frozen=True)
class TokenGroup:
    """Tokens whose scores are added up."""

    name: str
    places: Places  # into the columns, or the answer's tokens


@dataclass(frozen=True, eq=False)
class GroupedScores:
    """The scores of parts of the answer by parts of the input."""

    rows: tuple[TokenGroup, ...]
    columns: tuple[TokenGroup, ...]
    scores: Tensor  # (rows, columns), float64
    remainders: Tensor  # (rows,), float64


@dataclass(frozen=True, eq=False)
class SourceShares:
    """How much the source of an encoder-decoder adds to each part of what it writes."""

    rows: tuple[TokenGroup, ...]
    shares: Tensor  # (rows,), float64: sum of |scores| of the source's tokens over that of all tokens
    source: Tensor  # (rows,), float64: what the source's tokens add, signed
    prefix: Tensor  # (rows,), float64: what the target text so far adds, its start token included
    remainders: Tensor  # (rows,), float64: from no token


def spell_side(tokenizer: Any, ids: Sequence[int] | None, names: Sequence[str], sound: bool = False) -> SpelledText:
    """The text of the tokens of a side; their names with spaces if there is no tokenizer, or no ids."""
    if tokenizer is not None and ids is not None and hasattr(tokenizer, "decode"):
        text, spans = spell_tokens(tokenizer, list(ids))
        return SpelledText(text, tuple(spans))
    text, places = "", []
    for name in names:
        places.append((len(text), len(text) + len(name)))
        text += f"{name} "
    return SpelledText(text.rstrip(), tuple(places), sound=sound)


def part_text(one: SpelledText, places: Sequence[int]) -> SpelledText:
    """The text with a new line at each of some tokens that have no text of their own, so that no word or sentence
    extends across them."""
    text, spans, moved, last = "", [], 0, 0
    for n, (begin, end) in enumerate(one.spans):
        if n in places:
            text += one.text[last:begin] + "\n"
            moved, last = moved + 1, begin
        spans.append((begin + moved, end + moved))
    return SpelledText(text + one.text[last:], tuple(spans), one.answer)


def group_tokens(labels: Sequence[Label], texts: Mapping[str, SpelledText], grain: str) -> tuple[TokenGroup, ...]:
    """Labels as groups: every token by itself, or the words, sentences or lines of their text, in order. A token
    belongs to the group of its first character that is not a space, one of spaces to that of the next token, and one
    without characters, such as a special token, is alone."""
    if grain == "token":
        return tuple(TokenGroup(label.token, (n,)) for n, label in enumerate(labels))
    if grain not in GRAINS:
        raise NormscopeError(
            f"Unknown grain {grain!r}.{did_you_mean(grain, GRAINS)} Known: token, {', '.join(GRAINS)}, source."
        )
    pieces = {side: one.pieces(grain) for side, one in texts.items()}
    numbers = _piece_numbers(labels, texts, pieces)
    found: dict[tuple[str, int], TokenGroup] = {}
    for n, (label, number) in enumerate(zip(labels, numbers, strict=True)):
        key = (label.side, -1 - n if number is None else number)
        name = label.token if number is None else texts[label.side].name(pieces[label.side][number])
        before = found.get(key)
        found[key] = TokenGroup(name, (*(before.places if before else ()), n))
    return tuple(found.values())


def _piece_numbers(
    labels: Sequence[Label], texts: Mapping[str, SpelledText], pieces: Mapping[str, Sequence[tuple[int, int]]]
) -> list[int | None]:
    """The piece of each token on its side; None for a token that is alone."""
    found: list[int | None] = []
    for label in labels:
        begin, end = texts[label.side].spans[label.position]
        inside = texts[label.side].text[begin:end]
        at = begin + len(inside) - len(inside.lstrip()) if inside.strip() else begin
        number = bisect_right(pieces[label.side], at, key=lambda piece: piece[0]) - 1
        held = end > begin and number >= 0 and at < pieces[label.side][number][1]
        found.append(number if held else None)
    for step in (-1, 1):  # tokens of spaces between pieces join the token after them, the last ones that before
        for n in range(len(labels))[::step]:
            m = n - step
            if found[n] is None and 0 <= m < len(labels) and _is_joined_space(labels[n], labels[m], texts):
                found[n] = found[m]
    return found


def _is_joined_space(label: Label, neighbour: Label, texts: Mapping[str, SpelledText]) -> bool:
    """Whether a token consists of spaces, and the other is on the same side and on the same side of the answer's
    beginning."""
    if label.side != neighbour.side:
        return False
    one = texts[label.side]
    (begin, end), (other, _) = one.spans[label.position], one.spans[neighbour.position]
    cut = len(one.text) if one.answer is None else one.answer
    return end > begin and not one.text[begin:end].strip() and (begin < cut) == (other < cut)


def sum_groups(scores: Tensor, rows: Sequence[TokenGroup], columns: Sequence[TokenGroup]) -> Tensor:
    """(rows, columns), float64: the sums of scores (tokens, columns) over groups of both."""
    table = scores.double()
    by_row = torch.stack([table[list(one.places)].sum(0) for one in rows])
    return torch.stack([by_row[:, list(one.places)].sum(-1) for one in columns], dim=1)
