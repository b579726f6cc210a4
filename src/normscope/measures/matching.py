"""Pairs of tokens matched by distance (FF paper, section 5.2).

Nearby tokens interact more than distant ones, so pairs of one kind are compared with equally many other pairs at
exactly the same distances.
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
    """Sorted indices into the lists of targets and others, with equal numbers of both at every distance."""

    targets: Places
    others: Places
    dropped: int  # targets left out at random, at distances with too few others

    def __len__(self) -> int:
        return len(self.targets)


def match_distances(targets: Any, others: Any, seed: int = 0) -> Matched:
    """A random sample of the others, without replacement, with the same histogram of distances as the targets.

    `targets` and `others` are integer distances, |i - j| or i - j. At a distance with fewer others than targets, only
    as many targets are kept.
    """
    wanted, pool = (_matching_whole_distances(distances) for distances in (targets, others))
    if not len(wanted) or not len(pool):
        return Matched(np.zeros(0, np.int64), np.zeros(0, np.int64), len(wanted))
    low = min(int(wanted.min()), int(pool.min()))
    size = max(int(wanted.max()), int(pool.max())) - low + 1
    there = np.bincount(wanted - low, minlength=size)
    room = np.minimum(there, np.bincount(pool - low, minlength=size))
    generator = np.random.default_rng(seed)
    kept = _draw_matching_by_bin(wanted - low, room, generator)
    return Matched(kept, _draw_matching_by_bin(pool - low, room, generator), len(wanted) - len(kept))


def _draw_matching_by_bin(bins: Places, room: Places, generator: np.random.Generator) -> Places:
    """Sorted indices of room[b] members of every bin b, drawn without replacement."""
    candidates = np.flatnonzero(room[bins] > 0)
    order = generator.permutation(candidates)
    order = order[np.argsort(bins[order], kind="stable")]  # bin by bin, each in random order
    counts = np.bincount(bins[order], minlength=len(room))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Places = np.sort(order[rank < room[bins[order]]])
    return found


def _matching_whole_distances(distances: Any) -> Places:
    values = np.asarray(distances)
    if values.ndim != 1 or not (np.issubdtype(values.dtype, np.integer) or not values.size):
        raise NormscopeError("Distances must be a list of integers.")
    return values.astype(np.int64)
