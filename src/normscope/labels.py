"""Labels: the tokens that name the rows and columns of a map, and readable text for them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len


class Label(NamedTuple):
    """A token that names a row or column of a map, or a source, which names a column."""

    token: str
    side: str  # "encoder" or "decoder"; "prompt": virtual tokens; "source": a source; "other": of a contrasted text
    position: int  # on its side, counted from 0


def source_labels(labels: Iterable[Label]) -> list[bool]:
    """For each label, whether it is a token of an encoder-decoder's source."""
    return [label.side == "encoder" for label in labels]


def visible_label_text(token: str) -> str:
    """The token with everything visible: control characters escaped, outer spaces as ␣, an empty token as ∅."""
    if not token:
        return "∅"
    inner = token.strip(" ")
    left = len(token) - len(token.lstrip(" "))
    right = len(token) - left - len(inner)
    return "␣" * left + "".join(map(_spell_out_label_character, inner)) + "␣" * right


def _spell_out_label_character(char: str) -> str:
    hidden = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return char.encode("unicode_escape").decode() if hidden else char


def shorten_label(text: str, width: int) -> str:
    """`text`, shortened in the middle to at most `width` terminal cells."""
    if cell_len(text) <= width:
        return text
    tail = _fitting_label_glyphs(label_glyphs(text)[::-1], (width - 1) // 2)[::-1]
    head = _fitting_label_glyphs(label_glyphs(text), width - 1 - sum(map(cell_len, tail)))
    return "".join([*head, "…", *tail])


def label_glyphs(text: str) -> list[str]:
    """Characters, each with the zero-width marks that follow it."""
    glyphs: list[str] = []
    for char in text:
        if glyphs and not cell_len(char):
            glyphs[-1] += char
        else:
            glyphs.append(char)
    return glyphs


def _fitting_label_glyphs(glyphs: Sequence[str], width: int) -> list[str]:
    taken: list[str] = []
    for glyph in glyphs:
        width -= cell_len(glyph)
        if width < 0:
            break
        taken.append(glyph)
    return taken


def number_ranges_label(numbers: Iterable[int]) -> str:
    """`1-3, 5`"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def count_label(number: int, thing: str) -> str:
    """A number of things: "1 layer", "6 layers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
