"""The pairs of subwords that are amplified most (FF paper, Tables 2 and 3).

amp(w_j, w_i) is the mean FF-amp over all occurrences of the ordered pair of types (input w_j, output w_i). Pairs are
kept as whole numbers and summed in arrays, entry by entry, since there are tens of millions of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.measures.amplification import Axis
from normscope.papers.feed_forward.maps import Numbers, Texts, Values, block_amp, cells_of, each, ff_amp
from normscope.papers.feed_forward.shared import Layout

if TYPE_CHECKING:
    from normscope.corpus.store import Run

WAITING = 2**22  # keys that are held before they are added up


@dataclass(frozen=True)
class Pairs:
    """Every ordered pair of types that occurs often enough, with the mean of what amplifies it."""

    keys: Numbers  # sorted
    occurrences: Numbers
    sequences: Numbers  # in which it occurs
    ff: Values  # (layers, pairs): amp by the feed-forward
    block: Values  # (layers, pairs): amp by all from the attention's residual to the layer's end

    def top(self, values: Values, count: int) -> Numbers:
        """The places of the `count` largest, the largest first."""
        count = min(count, len(values))
        if not count:
            return np.zeros(0, np.int64)
        some = np.argpartition(-values, count - 1)[:count]
        order: Numbers = some[np.lexsort((some, -values[some]))]
        return order


def amplified_pairs(
    run: Run,
    scopes: Layout,
    given: Texts,
    *,
    axis: Axis,
    causal: bool,
    specials: bool,
    min_sequences: int,
    min_occurrences: int,
) -> Pairs:
    """amp of every pair of types that occurs in so many sequences, and so often."""
    keys, sequences, occurrences = _tally(given, causal, specials)
    chosen = (sequences >= min_sequences) & (occurrences >= min_occurrences)
    keys, sequences, occurrences = keys[chosen], sequences[chosen], occurrences[chosen]
    sums: list[Values] = []
    for entry, id in each(given):
        cells = cells_of(given, entry, causal=causal, specials=specials)
        found = given.keys(entry, cells)
        places = np.searchsorted(keys, found)
        known = places < len(keys)
        known[known] = keys[places[known]] == found[known]
        both = [amp(run, scopes, id, axis) for amp in (ff_amp, block_amp)]
        sums = sums or [np.zeros((len(values), len(keys))) for values in both]
        for total, values in zip(sums, both, strict=True):
            for layer, row in zip(total, values[:, cells[known]], strict=True):
                np.add.at(layer, places[known], row)
    ff, block = (total / occurrences for total in sums) if sums else (np.zeros((0, 0)), np.zeros((0, 0)))
    return Pairs(keys, occurrences, sequences, ff, block)


def overlap(first: Sequence[int] | Numbers, second: Sequence[int] | Numbers) -> int:
    """How many are in both lists."""
    return len(set(map(int, first)) & set(map(int, second)))


def _tally(given: Texts, causal: bool, specials: bool) -> tuple[Numbers, Numbers, Numbers]:
    """Every pair that occurs, in order; in how many sequences; how often."""
    whole: list[tuple[Numbers, Numbers, Numbers]] = []
    waiting = 0
    for entry, _ in each(given):
        keys, counts = np.unique(
            given.keys(entry, cells_of(given, entry, causal=causal, specials=specials)), return_counts=True
        )
        whole.append((keys, np.ones_like(keys), counts))
        waiting += len(keys)
        if waiting > WAITING:
            whole, waiting = [_added(whole)], 0
    return _added(whole)


def _added(pieces: Sequence[tuple[Numbers, Numbers, Numbers]]) -> tuple[Numbers, Numbers, Numbers]:
    """Sorted keys, each once, with the sums of what belongs to it."""
    if not pieces:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys, sequences, counts = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, np.int64)
    if not len(starts):
        return keys, sequences, counts
    return keys[starts], np.add.reduceat(sequences[order], starts), np.add.reduceat(counts[order], starts)
