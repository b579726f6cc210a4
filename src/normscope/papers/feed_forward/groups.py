"""Pairs within a unit (word or entity) compared with other pairs at the same distances (FF paper, Fig. 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.corpus.store import Run
from normscope.measures.amplification import AXES
from normscope.measures.matching import match_distances
from normscope.papers.common import scan_paper_side
from normscope.papers.feed_forward.maps import Numbers, Texts, Values, off_diagonal_cells, stored_amp
from normscope.papers.feed_forward.measures import SPECIAL
from normscope.papers.feed_forward.shared import FeedForwardLayout

TokenUnits = Callable[[int], Sequence[Numbers]]  # entry -> for each unit (word, entity) the positions of its tokens


@dataclass(frozen=True)
class PairCells:
    """Cells of several maps, in order."""

    entries: Numbers
    cells: Numbers  # i n + j in the map of its entry
    distances: Numbers  # i - j, or |i - j|

    def __len__(self) -> int:
        return len(self.cells)

    def at(self, places: Numbers) -> PairCells:
        return PairCells(self.entries[places], self.cells[places], self.distances[places])

    def of(self, entry: int) -> Numbers:
        """The cells of one entry."""
        return self.cells[slice(*np.searchsorted(self.entries, [entry, entry + 1]))]


@dataclass(frozen=True)
class MatchedGroups:
    """Target pairs and an equal number of other pairs at the same distances."""

    targets: PairCells
    others: PairCells
    dropped: int  # targets without a match
    found: int  # all targets


@dataclass(frozen=True)
class GroupAmplification:
    """FF-amp of both groups with each normalisation: axis -> (layers, pairs)."""

    targets: dict[str, Values]
    others: dict[str, Values]


def split_word_units(given: Texts) -> TokenUnits:
    """The tokens of each word that is split into several."""

    def units(entry: int) -> list[Numbers]:
        words = given.words[entry]
        counts = np.bincount(words[words != SPECIAL]) if (words != SPECIAL).any() else np.zeros(0, int)
        return [np.flatnonzero(words == word) for word in np.flatnonzero(counts > 1)]

    return units


def entity_units(given: Texts, run: Run, scopes: FeedForwardLayout) -> TokenUnits:
    """The tokens of each named entity."""
    spans: dict[str, list[Numbers]] = {}
    frame = scan_paper_side(run, "entity_spans", scopes.side).select("id", "start", "end").collect()
    for id, start, end in frame.iter_rows():
        spans.setdefault(id, []).append(np.arange(start, end))
    return lambda entry: spans.get(given.ids[entry], [])


def matched_pair_groups(
    given: Texts, units: TokenUnits, causal: bool, readings: Any, distance: str | None = None
) -> MatchedGroups:
    """All pairs within a unit, and an equal number of other pairs sampled at the same distances; `distance` is that of
    the readings unless given."""
    distance = distance or readings.distance
    targets = _collect_cells(given, lambda entry: _cells_within_units(given, units(entry), entry, causal), distance)
    near = np.unique(targets.distances)

    def rest(entry: int) -> Numbers:
        cells = off_diagonal_cells(given, entry, causal, readings.specials)
        cells = cells[np.isin(_cell_distances(cells, len(given.types[entry]), distance), near)]
        return cells[~np.isin(cells, targets.of(entry))]

    others = _collect_cells(given, rest, distance)
    found = match_distances(targets.distances, others.distances, readings.seed)
    return MatchedGroups(targets.at(found.targets), others.at(found.others), found.dropped, len(targets))


def group_amplification(
    run: Run, scopes: FeedForwardLayout, given: Texts, *matched: MatchedGroups
) -> list[GroupAmplification]:
    """FF-amp of all pairs of both groups, for one or more matchings, reading the maps of one entry at a time."""
    sides = [cells for groups in matched for cells in (groups.targets, groups.others)]
    found: list[dict[str, list[Values]]] = [{axis: [] for axis in AXES} for _ in sides]
    for entry, id in enumerate(given.ids):
        parts = [cells.of(entry) for cells in sides]
        if not any(map(len, parts)):
            continue
        for axis in AXES:
            values = stored_amp(run, scopes, id, axis)  # type: ignore[arg-type]
            for into, cells in zip(found, parts, strict=True):
                into[axis].append(values[:, cells])
    joined = [{axis: np.concatenate(some, 1) for axis, some in one.items() if some} for one in found]
    return [GroupAmplification(*both) for both in zip(joined[::2], joined[1::2], strict=True)]


def other_ff_amp_axis(axis: str) -> str:
    """The other axis of normalisation."""
    return next(name for name in AXES if name != axis)


def pair_type_keys(given: Texts, cells: PairCells) -> Numbers:
    """The ordered pair of types of each cell, as one number."""
    found = [given.keys(entry, cells.of(entry)) for entry in range(len(given))]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _cells_within_units(given: Texts, units: Sequence[Numbers], entry: int, causal: bool) -> Numbers:
    """The cells of two different tokens of the same unit."""
    size = len(given.types[entry])
    found = []
    for unit in units:
        output, input = np.repeat(unit, len(unit)), np.tile(unit, len(unit))
        apart = input < output if causal else input != output
        found.append(output[apart] * size + input[apart])
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def _collect_cells(given: Texts, cells: Callable[[int], Numbers], distance: str) -> PairCells:
    pieces = [cells(entry) for entry in range(len(given))]
    sizes = [len(piece) for piece in pieces]
    distances = [_cell_distances(piece, len(types), distance) for piece, types in zip(pieces, given.types, strict=True)]
    empty = [np.zeros(0, np.int64)]
    return PairCells(
        np.repeat(np.arange(len(sizes)), sizes), np.concatenate(pieces or empty), np.concatenate(distances or empty)
    )


def _cell_distances(cells: Numbers, size: int, distance: str) -> Numbers:
    output, input = np.divmod(cells, size)
    return np.abs(output - input) if distance == "absolute" else output - input
