"""The parts of a document's header that several of its entries are made of: tokens and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from normscope.analysis import Analysis
from normscope.labels import Label
from normscope.view.labels import visible

DIGITS = 4  # of the measures
SPECIAL = re.compile(r"\[(CLS|SEP|PAD|BOS|EOS)\]|</?(s|bos|eos|pad|cls|sep)>|<\|(?!0x)[^|]+\|>|<(start|end)_of_turn>")
PATCH = re.compile(r"\d+,\d+")

Words = dict[str, dict[int, int | None]]  # side -> position -> word, of the sides whose words are known


def words_of(sides: Mapping[str, Analysis]) -> Words:
    found: Words = {}
    for one in sides.values():
        if one.word_ids is not None:
            own = one.rows[0].side
            pairs = zip(one.columns, one.word_ids, strict=True)
            found[own] = {label.position: word for label, word in pairs if label.side == own}
    return found


def labels(given: Iterable[Label], words: Words, picture: bool) -> list[dict[str, Any]]:
    """Tokens with where they stand; `picture`: they are patches."""
    return [
        {
            "token": visible(label.token),
            "side": label.side,
            "position": label.position,
            "special": _special(label, words, picture),
            "word": words.get(label.side, {}).get(label.position),
        }
        for label in given
    ]


def _special(label: Label, words: Words, picture: bool) -> bool:
    """Whether a token stands for no text: of an encoder one without a word, else one that is written like it (what a
    model has generated has no words either)."""
    if picture:
        return PATCH.fullmatch(label.token) is None
    known = words.get(label.side)
    if known is not None and label.side == "encoder":
        return known.get(label.position) is None
    return SPECIAL.fullmatch(label.token) is not None


def numbers(tensor: Tensor, digits: int = DIGITS) -> Any:
    """Nested lists with so many digits; what is not finite becomes null."""
    values = tensor.detach().cpu().double().numpy()
    finite = np.isfinite(values)
    sizes = np.log10(np.abs(values), out=np.zeros_like(values), where=finite & (values != 0))
    factors = 10.0 ** np.clip(digits - 1 - np.floor(sizes), -300, 300)
    with np.errstate(all="ignore"):
        rounded = np.rint(values * factors) / factors
    return rounded.tolist() if bool(np.isfinite(rounded).all()) else _nulls(rounded.tolist())


def _nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulls(entry) for entry in value]
    return value if math.isfinite(value) else None
