"""Frequency ranks of tokens (EMNLP 2020, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Token = TypeVar("Token", int, str)


@dataclass(frozen=True)
class FrequencyRanks(Generic[Token]):
    """The rank of every counted token, 1 for the most frequent; equally frequent tokens share the best rank."""

    by_token: Mapping[Token, int]
    unseen: int  # the rank of all other tokens: one below the last

    def of(self, tokens: Iterable[Token]) -> NDArray[np.int64]:
        """The rank of each token."""
        return np.array([self.by_token.get(token, self.unseen) for token in tokens], dtype=np.int64)


def frequency_ranks(counts: Mapping[Token, int]) -> FrequencyRanks[Token]:
    """Competition ranks: 1 + the number of more frequent tokens. A token with count zero is unseen."""
    seen = sorted(((count, token) for token, count in counts.items() if count > 0), key=lambda pair: -pair[0])
    found: dict[Token, int] = {}
    rank, before = 0, None
    for place, (count, token) in enumerate(seen, 1):
        if count != before:
            rank, before = place, count
        found[token] = rank
    return FrequencyRanks(found, rank + 1)
