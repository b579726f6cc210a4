"""Word alignments from cross-attention (EMNLP 2020, section 5) and their error rates.

A decoder with the input [start, y_1, ..., y_m] reads y_t in row t and predicts it in row t - 1. Alignment with output
("AWO") takes y_t's links from the row that predicts it, alignment with input ("AWI") from the row that reads it.
Subwords are merged into words; each target word is linked to the source word with the largest cell. Beyond the paper,
links can be chosen by a threshold on the shares of a target word's row, and made symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from normscope.errors import NormscopeError

SETTINGS = ("AWO", "AWI")
SYMMETRIES = ("intersection", "union")

Links = frozenset[tuple[int, int]]  # (source word, target word), from 0


def alignment_maps_of_words(
    maps: Tensor, source: Sequence[int | None], target: Sequence[int | None], setting: str
) -> Tensor:
    """(..., target words, source words and special tokens): a map of subwords merged into a map of words.

    `maps` (..., rows, columns) has a row for each decoder input and a column for each source token; `source` and
    `target` give the word index of each, None for special tokens. Cells are summed over the subwords of a source word
    and averaged over those of a target word. Special tokens of the source keep a column each, after the words.
    """
    if setting not in SETTINGS:
        raise NormscopeError(f"The alignment setting must be {' or '.join(SETTINGS)}, not {setting!r}.")
    rows, columns = maps.shape[-2:]
    if len(target) != rows or len(source) != columns:
        raise NormscopeError(
            f"The map has {rows} rows and {columns} columns, but words are given for {len(target)} and {len(source)}."
        )
    if any(word is not None for word in target[:1]):
        raise NormscopeError("The decoder's first input must be a start token, not part of a word.")
    shift = 1 if setting == "AWO" else 0
    return _alignment_target_word_means(target, shift, maps) @ (maps @ _alignment_source_word_sums(source, maps))


def _alignment_source_word_sums(source: Sequence[int | None], like: Tensor) -> Tensor:
    """(columns, words and special tokens): 1 where a token belongs to the word or is that special token."""
    words = _count_alignment_words(source)
    special = [n for n, word in enumerate(source) if word is None]
    matrix = torch.zeros(len(source), words + len(special), dtype=like.dtype)
    for n, word in enumerate(source):
        matrix[n, words + special.index(n) if word is None else word] = 1
    return matrix


def _alignment_target_word_means(target: Sequence[int | None], shift: int, like: Tensor) -> Tensor:
    """(words, rows): averages over the rows of a word, moved up by `shift`."""
    matrix = torch.zeros(_count_alignment_words(target), len(target), dtype=like.dtype)
    for n, word in enumerate(target):
        if word is not None:
            matrix[word, n - shift] = 1
    return matrix / matrix.sum(1, keepdim=True)


def _count_alignment_words(words: Sequence[int | None]) -> int:
    """The number of words, after a check that each has a token."""
    there = {word for word in words if word is not None}
    if there != set(range(len(there))):
        raise NormscopeError(f"Every one of the {max(there) + 1} words must have a token.")
    return len(there)


def argmax_alignment_links(words: Tensor, sources: int) -> Tensor:
    """(..., target words): the source word of each target word, -1 if a special token has the largest cell."""
    best = words.argmax(-1)
    return torch.where(best < sources, best, -1)


def word_links(words: Tensor, sources: int, threshold: float | None = None, symmetrise: str | None = None) -> Links:
    """The links of a map (target words, source words and special tokens).

    By default each target word has the link of `argmax_alignment_links`. With a threshold, it is linked to every source
    word with at least this share of its row, special tokens included in the row's sum. `symmetrise` also links each
    source word to the target word in which it has the largest share, and takes the "intersection" or the "union" of
    both directions; with a threshold, only links with at least that share remain.
    """
    check_link_options(threshold, symmetrise)
    shares = words / words.sum(-1, keepdim=True).clamp_min(torch.finfo(words.dtype).tiny)
    enough = shares[:, :sources] >= (0 if threshold is None else threshold)
    forward, backward = torch.zeros_like(enough), torch.zeros_like(enough)
    best = argmax_alignment_links(words, sources)
    forward[best >= 0, best[best >= 0]] = True
    if len(words) and sources:
        backward[shares[:, :sources].argmax(0), torch.arange(sources)] = True
    if symmetrise is None:
        chosen = enough if threshold is not None else forward
    else:
        chosen = enough & (forward & backward if symmetrise == "intersection" else forward | backward)
    return frozenset((source, target) for target, source in chosen.nonzero().tolist())


def check_link_options(threshold: float | None, symmetrise: str | None) -> None:
    """Refuse options of `word_links` that have no meaning."""
    if symmetrise is not None and symmetrise not in SYMMETRIES:
        raise NormscopeError(f"symmetrise must be {' or '.join(SYMMETRIES)}, not {symmetrise!r}.")
    if threshold is not None and not 0 < threshold <= 1:
        raise NormscopeError(f"The threshold is a share of a row, above 0 and at most 1, not {threshold!r}.")


def format_pharaoh(links: Links) -> str:
    """Links in Pharaoh format, `0-0 1-2`: source word, target word, counted from 0, in order."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


@dataclass(frozen=True)
class Hits:
    """Overlap of the links A of a corpus with its gold links: sure S and possible P, which contain S."""

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


def count_link_hits(links: Links, sure: Links, possible: Links) -> tuple[Hits, Hits]:
    """The hits of the links of one sentence, and those of its links to target words that have a gold link.

    The second count leaves out target words that the annotators did not link, all of whose links are wrong.
    """
    known = {target for _, target in possible}
    linked = sum(target in known for _, target in links)
    in_sure, in_possible = len(links & sure), len(links & possible)
    return Hits(len(links), len(sure), in_sure, in_possible), Hits(linked, len(sure), in_sure, in_possible)


def count_gold_alignment_hits(best: Tensor, sources: int, sure: Links, possible: Links) -> dict[str, Tensor]:
    """Counts for one sentence, each (...): `links` |A|, `in_sure`, `in_possible` and `linked`.

    `linked` is |A| restricted to target words with a gold link. All links of other target words count as wrong, even if
    the annotators only left them out. `best` (..., target words) is the source word of each target word, -1 for none.
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
    # The extra column is for -1, no link.
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
