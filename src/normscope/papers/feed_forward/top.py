"""The most amplified pairs of subwords (FF paper, Tables 2 and 3).

amp(w_j, w_i) is the mean FF-amp over all occurrences of the ordered pair of types (input w_j, output w_i). With tens of
millions of cells, pairs are encoded as integers and summed in arrays, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from normscope.corpus.store import Run
from normscope.papers.feed_forward.maps import Numbers, Texts, Values, off_diagonal_cells, stored_amp
from normscope.papers.feed_forward.shared import FeedForwardLayout

WAITING = 2**22  # keys collected before they are summed


@dataclass(frozen=True)
class AmplifiedPairs:
    """All ordered pairs of types above the minimum counts, with their mean amplification."""

    keys: Numbers  # sorted
    occurrences: Numbers
    sequences: Numbers  # number of sequences with the pair
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


def amplified_pairs(run: Run, scopes: FeedForwardLayout, given: Texts, readings: Any) -> AmplifiedPairs:
    """Mean amp of each pair of types above both minimum counts of the readings."""
    cells = partial(off_diagonal_cells, given, causal=scopes.causal, specials=readings.list_specials)
    keys, sequences, occurrences = _tally_pairs(given, cells)
    chosen = (sequences >= readings.min_sequences) & (occurrences >= readings.min_occurrences)
    keys, sequences, occurrences = keys[chosen], sequences[chosen], occurrences[chosen]
    sums: list[Values] = []
    for entry, id in enumerate(given.ids):
        here = cells(entry)
        found = given.keys(entry, here)
        places = np.searchsorted(keys, found)
        known = places < len(keys)
        known[known] = keys[places[known]] == found[known]
        both = [stored_amp(run, scopes, id, readings.axis, block) for block in (False, True)]
        sums = sums or [np.zeros((len(values), len(keys))) for values in both]
        for total, values in zip(sums, both, strict=True):
            for layer, row in zip(total, values[:, here[known]], strict=True):
                np.add.at(layer, places[known], row)
    ff, block = (total / occurrences for total in sums) if sums else (np.zeros((0, 0)), np.zeros((0, 0)))
    return AmplifiedPairs(keys, occurrences, sequences, ff, block)


def _tally_pairs(given: Texts, cells: Callable[[int], Numbers]) -> tuple[Numbers, Numbers, Numbers]:
    """All pairs that occur, sorted; the number of sequences with each; its number of occurrences."""
    none, waiting = np.zeros(0, np.int64), 0
    whole: list[tuple[Numbers, Numbers, Numbers]] = [(none, none, none)]
    for entry in range(len(given)):
        keys, counts = np.unique(given.keys(entry, cells(entry)), return_counts=True)
        whole.append((keys, np.ones_like(keys), counts))
        waiting += len(keys)
        if waiting > WAITING:
            whole, waiting = [_add_tallies(whole)], 0
    return _add_tallies(whole)


def _add_tallies(pieces: Sequence[tuple[Numbers, Numbers, Numbers]]) -> tuple[Numbers, Numbers, Numbers]:
    """Sorted unique keys with the sums of their counts."""
    keys, sequences, counts = (np.concatenate(column) for column in zip(*pieces, strict=True))
    if not len(keys):
        return keys, sequences, counts
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    return keys[starts], np.add.reduceat(sequences[order], starts), np.add.reduceat(counts[order], starts)
