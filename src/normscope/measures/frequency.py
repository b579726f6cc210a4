"""Frequency ranks of tokens, and Spearman's correlation with them (EMNLP 2020, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.measures.similarity import spearman as _spearman

Token = TypeVar("Token", int, str)


@dataclass(frozen=True)
class Ranks(Generic[Token]):
    """The rank of every token that was counted, 1 for the most frequent; tokens of one count share the best rank."""

    by_token: Mapping[Token, int]
    unseen: int  # the rank of all others: one below the last

    def of(self, tokens: Iterable[Token]) -> NDArray[np.int64]:
        """The rank of each token."""
        return np.array([self.by_token.get(token, self.unseen) for token in tokens], dtype=np.int64)


def ranks(counts: Mapping[Token, int]) -> Ranks[Token]:
    """Competition ranks: 1 + how many tokens are more frequent. A token counted zero times is unseen."""
    seen = sorted(((count, token) for token, count in counts.items() if count > 0), key=lambda pair: -pair[0])
    found: dict[Token, int] = {}
    rank, before = 0, None
    for place, (count, token) in enumerate(seen, 1):
        if count != before:
            rank, before = place, count
        found[token] = rank
    return Ranks(found, rank + 1)


def spearman(a: Any, b: Any) -> float:
    """Spearman's correlation of two lists, ties at their mean rank; NaN where one does not vary."""
    x, y = (torch.as_tensor(np.asarray(values, dtype=np.float64)) for values in (a, b))
    return float(_spearman(x, y)) if len(x) > 1 else float("nan")
