"""FF-amp from the maps stored with a run, entry by entry (FF paper, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.amplification import Axis, amplification
from normscope.papers.common import scan_paper_side
from normscope.papers.feed_forward.measures import SPECIAL
from normscope.papers.feed_forward.shared import FeedForwardLayout

Values = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Texts:
    """The entries of a run, without their maps: token types and words as numbers."""

    ids: tuple[str, ...]
    types: tuple[Numbers, ...]  # for each entry, the number of each token's type
    words: tuple[Numbers, ...]  # the number of its word, SPECIAL for special tokens
    vocabulary: tuple[str, ...]  # the token of each type

    def __len__(self) -> int:
        return len(self.ids)

    def keys(self, entry: int, cells: Numbers) -> Numbers:
        """The ordered pair of types (input j, output i) of each cell i n + j, as one number."""
        types = self.types[entry]
        output, input = np.divmod(cells, len(types))
        return types[input] * len(self.vocabulary) + types[output]

    def within_word(self, entry: int, cells: Numbers) -> NDArray[np.bool_]:
        """Whether the two tokens of each cell belong to one word."""
        words = self.words[entry]
        output, input = np.divmod(cells, len(words))
        same: NDArray[np.bool_] = (words[input] == words[output]) & (words[input] != SPECIAL)
        return same

    def pair(self, key: int) -> tuple[str, str]:
        """The tokens (input, output) of a key."""
        input, output = divmod(int(key), len(self.vocabulary))
        return self.vocabulary[input], self.vocabulary[output]


@dataclass(frozen=True)
class AmplifiedPairs:
    """All ordered pairs of types above the minimum counts, with their mean amplification."""

    keys: Numbers  # sorted
    occurrences: Numbers
    sequences: Numbers  # number of sequences with the pair
    within: Numbers  # number of occurrences within one word
    ff: Values  # (layers, pairs): amp by the feed-forward
    block: Values  # (layers, pairs): amp from the attention's residual to the end of the layer

    def top(self, values: Values, count: int) -> Numbers:
        """Indices of the `count` largest values, in descending order."""
        count = min(count, len(values))
        if not count:
            return np.zeros(0, np.int64)
        some = np.argpartition(-values, count - 1)[:count]
        order: Numbers = some[np.lexsort((some, -values[some]))]
        return order


def read_run_texts(run: Run, scopes: FeedForwardLayout) -> Texts:
    """All entries of a run, in corpus order."""
    words_of = dict(scan_paper_side(run, "token_words", scopes.side).select("id", "words").collect().iter_rows())
    numbers: dict[str, int] = {}
    ids, types, words = [], [], []
    for id, tokens in scan_paper_side(run, "items", scopes.side).select("id", "tokens").collect().iter_rows():
        ids.append(id)
        types.append(np.array([numbers.setdefault(token, len(numbers)) for token in tokens], dtype=np.int64))
        words.append(np.array(words_of[id], dtype=np.int64))
    return Texts(tuple(ids), tuple(types), tuple(words), tuple(numbers))


def off_diagonal_cells(given: Texts, entry: int, causal: bool, specials: bool) -> Numbers:
    """The cells i n + j with j != i (j < i in a causal model), without special tokens unless `specials`."""
    size = len(given.types[entry])
    output, input = np.divmod(np.arange(size * size), size)
    chosen = input < output if causal else input != output
    if not specials:
        usual = given.words[entry] != SPECIAL
        chosen &= usual[input] & usual[output]
    return np.flatnonzero(chosen)


def stored_amp(run: Run, scopes: FeedForwardLayout, id: str, axis: Axis, block: bool = False) -> Values:
    """(layers, n n): amplification by the feed-forward alone or, with `block`, from the attention's residual to the end
    of the layer (LN FF RES LN)."""
    around = (scopes.residual, scopes.layer) if block else (scopes.input, scopes.ff)
    before, after = (run.map(id, scope, scopes.side) for scope in around)
    values: Values = amplification(before, after, axis).flatten(1).numpy()
    return values
