"""Pairs of tokens matched by distance (FF paper, section 5.2).

Neighbours have more to do with each other than tokens far apart, so pairs of one kind are compared with as many others
of exactly the same distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Matched:
    """Indices into the two lists that were given, in order: at every distance as many of each."""

    targets: Places
    others: Places
    dropped: int  # targets left out, drawn at random: at their distance there are not enough others

    def __len__(self) -> int:
        return len(self.targets)


def matched(targets: Any, others: Any, seed: int = 0) -> Matched:
    """Others drawn at random, without replacement, with exactly the targets' histogram of distances.

    `targets` and `others` are whole numbers, |i - j| or i - j. Of a distance with fewer others than targets, as many
    targets are kept as there are others.
    """
    wanted, pool = (_whole(distances) for distances in (targets, others))
    if not len(wanted) or not len(pool):
        return Matched(np.zeros(0, np.int64), np.zeros(0, np.int64), len(wanted))
    low = min(int(wanted.min()), int(pool.min()))
    size = max(int(wanted.max()), int(pool.max())) - low + 1
    there = np.bincount(wanted - low, minlength=size)
    room = np.minimum(there, np.bincount(pool - low, minlength=size))
    generator = np.random.default_rng(seed)
    kept = _drawn(wanted - low, room, generator)
    return Matched(kept, _drawn(pool - low, room, generator), len(wanted) - len(kept))


def _drawn(bins: Places, room: Places, generator: np.random.Generator) -> Places:
    """For every bin b, room[b] of the places that are in it, drawn without replacement; sorted."""
    candidates = np.flatnonzero(room[bins] > 0)
    order = generator.permutation(candidates)
    order = order[np.argsort(bins[order], kind="stable")]  # bin by bin, each in random order
    counts = np.bincount(bins[order], minlength=len(room))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Places = np.sort(order[rank < room[bins[order]]])
    return found


def _whole(distances: Any) -> Places:
    values = np.asarray(distances)
    if values.ndim != 1 or not (np.issubdtype(values.dtype, np.integer) or not values.size):
        raise NormscopeError("Distances are a list of whole numbers.")
    return values.astype(np.int64)
