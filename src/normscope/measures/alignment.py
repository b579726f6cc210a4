"""Word alignments from cross-attention (EMNLP 2020, section 5), and how good they are.

A decoder that is given [start, y_1, ..., y_m] reads y_t at its row t and writes y_t at its row t - 1. The alignment
of y_t is taken with output ("AWO") from the row that writes it, or with input ("AWI") from the row that reads it.
Source and target subwords become words; each target word is linked to the source word of the largest cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from normscope.errors import NormscopeError

SETTINGS = ("AWO", "AWI")

Links = frozenset[tuple[int, int]]  # (source word, target word), from 0


def word_maps(maps: Tensor, source: Sequence[int | None], target: Sequence[int | None], setting: str) -> Tensor:
    """(..., target words, source words and special tokens): a map of subwords as one of words.

    `maps` (..., rows, columns) has a row for each decoder input and a column for each source token; `source` and
    `target` give the word of each, None for special tokens. Cells are added up over the subwords of a source word and
    averaged over those of a target word. Special tokens of the source are columns of their own, after the words.
    """
    if setting not in SETTINGS:
        raise NormscopeError(f"An alignment is taken with {' or '.join(SETTINGS)}, not {setting!r}.")
    rows, columns = maps.shape[-2:]
    if len(target) != rows or len(source) != columns:
        raise NormscopeError(
            f"The map has {rows} rows and {columns} columns, but words are given for {len(target)} and {len(source)}."
        )
    if any(word is not None for word in target[:1]):
        raise NormscopeError("The decoder's first input is no word but a start token.")
    shift = 1 if setting == "AWO" else 0
    return _averages(target, shift, maps) @ (maps @ _sums(source, maps))


def _sums(source: Sequence[int | None], like: Tensor) -> Tensor:
    """(columns, words and special tokens): 1 where a token belongs to a word or is the special token."""
    words = _count(source)
    special = [n for n, word in enumerate(source) if word is None]
    matrix = torch.zeros(len(source), words + len(special), dtype=like.dtype)
    for n, word in enumerate(source):
        matrix[n, words + special.index(n) if word is None else word] = 1
    return matrix


def _averages(target: Sequence[int | None], shift: int, like: Tensor) -> Tensor:
    """(words, rows): the mean over the rows of a word, each `shift` before the one that reads it."""
    matrix = torch.zeros(_count(target), len(target), dtype=like.dtype)
    for n, word in enumerate(target):
        if word is not None:
            matrix[word, n - shift] = 1
    return matrix / matrix.sum(1, keepdim=True)


def _count(words: Sequence[int | None]) -> int:
    """How many words there are; each must have a token."""
    there = {word for word in words if word is not None}
    if there != set(range(len(there))):
        raise NormscopeError(f"There is a word without a token among the {max(there) + 1}.")
    return len(there)


def argmax_links(words: Tensor, sources: int) -> Tensor:
    """(..., target words): the source word of each target word, -1 where a special token has the largest cell."""
    best = words.argmax(-1)
    return torch.where(best < sources, best, -1)


@dataclass(frozen=True)
class Hits:
    """What the links A of a corpus have in common with the gold ones, sure S and possible P (which contain S)."""

    links: int  # |A|
    sure: int  # |S|
    in_sure: int  # |A and S|
    in_possible: int  # |A and P|

    @property
    def aer(self) -> float:
        """Alignment error rate ``1 - (|A and S| + |A and P|) / (|A| + |S|)``."""
        return 1 - (self.in_sure + self.in_possible) / (self.links + self.sure) if self.links + self.sure else nan

    @property
    def precision(self) -> float:
        """|A and P| / |A|."""
        return self.in_possible / self.links if self.links else nan

    @property
    def recall(self) -> float:
        """|A and S| / |S|."""
        return self.in_sure / self.sure if self.sure else nan


def hits(best: Tensor, sources: int, sure: Links, possible: Links) -> dict[str, Tensor]:
    """Counts of one sentence, each (...): `links` |A|, `in_sure`, `in_possible`, and `linked`, |A| of only those
    target words that have a gold link: the others cannot but be wrong, though the gold data may have left them out.

    `best` (..., target words) is the source word of each target word, -1 for none.
    """
    if not sure <= possible:
        raise NormscopeError("The possible links must contain the sure ones.")
    targets = best.shape[-1]
    for source, target in possible:
        if not (0 <= source < sources and 0 <= target < targets):
            raise NormscopeError(
                f"A link joins word {source + 1} to target word {target + 1} (counted from 1), but there are {sources} "
                f"words and {targets} target words."
            )
    # A column more than there are source words, for -1: no link.
    is_sure, is_possible = (torch.zeros(targets, sources + 1, dtype=torch.bool) for _ in range(2))
    for table, gold in ((is_sure, sure), (is_possible, possible)):
        for source, target in gold:
            table[target, source] = True
    place = torch.arange(targets)
    there = best >= 0
    return {
        "links": there.sum(-1),
        "linked": (there & is_possible.any(1)).sum(-1),
        "in_sure": is_sure[place, best].sum(-1),
        "in_possible": is_possible[place, best].sum(-1),
    }
