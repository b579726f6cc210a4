"""Pairs of subwords that the feed-forward amplifies (FF paper, section 5.1: FF-amp matrix, Tables 2 and 3).

amp(w_j, w_i) is the mean FF-amp over all occurrences of the ordered pair of types (input w_j, output w_i). With tens of
millions of cells, pairs are encoded as integers and summed in arrays, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from normscope.analysis import Analysis
from normscope.corpus.store import Run
from normscope.measures.amplification import amplification as ff_amp_of
from normscope.papers.feed_forward.categories import category_numbers, category_tables, describe_categories
from normscope.papers.feed_forward.maps import (
    AmplifiedPairs,
    Numbers,
    Texts,
    Values,
    off_diagonal_cells,
    read_run_texts,
    stored_amp,
)
from normscope.papers.feed_forward.shared import FeedForwardLayout, require_ff_layout
from normscope.papers.study import Runs, Setting
from normscope.reports import map_charts
from normscope.reports.report import Cell, Picture, Section, Table

TOP = 10  # pairs per list, as in the paper
LONG = 100  # pairs per longer list, for which overlap and categories are counted
TENTH = 10  # at most one in ten pairs counts as amplified most
WAITING = 2**22  # keys collected before they are summed
DRAWN = 30  # the matrix of a sequence of about this many tokens is drawn
PLAIN = "plain"  # the run without masking
TEXT = (
    "FF-amp is the map after the feed-forward ({scopes.ff}) minus the map before it ({scopes.input}), normalised so "
    "that {sums}. The amp of an ordered pair of subwords (input, output) is the mean of FF-amp over all their "
    "occurrences at two different positions. The second list is for the whole block: {scopes.layer} minus "
    "{scopes.residual}. The text is not masked.\n\n"
    "The lists contain pairs that occur in at least {readings.min_sequences} sequences and at least "
    "{readings.min_occurrences} times ({pairs:,} pairs in {texts:,} sequences), special tokens {specials}.\n\n"
    "{categories}"
)


def amplification_section(setting: Setting, runs: Runs) -> Section:
    """An FF-amp matrix, the pairs amplified most by the feed-forward and by the whole block, and their overlap."""
    scopes, readings, run = require_ff_layout(setting), setting.readings, runs[PLAIN]
    given = read_run_texts(run, scopes)
    pairs = amplified_pairs(run, scopes, given, readings)
    size = max(TOP, min(LONG, len(pairs.keys) // TENTH))
    lists = {"FF": pairs.ff, _block_components(scopes): pairs.block}
    text = TEXT.format(
        scopes=scopes,
        readings=readings,
        sums=describe_ff_amp_axis(readings.axis),
        pairs=len(pairs.keys),
        texts=len(given),
        specials="included" if readings.list_specials else "left out",
        categories=describe_categories(),
    )
    parts: tuple[Table | Picture, ...] = (
        _ff_amp_picture(setting, run, scopes, given),
        *(_top_pairs_table(name, lists[name], pairs, given, number) for number, name in enumerate(lists, 2)),
        *category_tables(lists, pairs, given, size),
        _overlap_table(lists, pairs),
        _listed_pairs_table(lists, pairs, given),
    )
    numbers = category_numbers(pairs.ff, pairs, given, size)
    return Section("amplification", "Amplified pairs of subwords", text, parts, (), numbers)


def amplified_pairs(run: Run, scopes: FeedForwardLayout, given: Texts, readings: Any) -> AmplifiedPairs:
    """Mean amp of each pair of types above both minimum counts of the readings."""
    cells = partial(off_diagonal_cells, given, causal=scopes.causal, specials=readings.list_specials)
    keys, sequences, occurrences = _tally_pairs(given, cells)
    chosen = (sequences >= readings.min_sequences) & (occurrences >= readings.min_occurrences)
    keys, sequences, occurrences = keys[chosen], sequences[chosen], occurrences[chosen]
    sums: list[Values] = []
    within = np.zeros(len(keys), np.int64)
    for entry, id in enumerate(given.ids):
        here = cells(entry)
        found = given.keys(entry, here)
        places = np.searchsorted(keys, found)
        known = places < len(keys)
        known[known] = keys[places[known]] == found[known]
        np.add.at(within, places[known], given.within_word(entry, here[known]))
        both = [stored_amp(run, scopes, id, readings.axis, block) for block in (False, True)]
        sums = sums or [np.zeros((len(values), len(keys))) for values in both]
        for total, values in zip(sums, both, strict=True):
            for layer, row in zip(total, values[:, here[known]], strict=True):
                np.add.at(layer, places[known], row)
    ff, block = (total / occurrences for total in sums) if sums else (np.zeros((0, 0)), np.zeros((0, 0)))
    return AmplifiedPairs(keys, occurrences, sequences, within, ff, block)


def describe_ff_amp_axis(axis: str) -> str:
    """The normalisation of the maps in words."""
    return f"the contributions {'to each output' if axis == 'output' else 'of each input'} sum to 1"


def _block_components(scopes: FeedForwardLayout) -> str:
    """LN1 FF RES2 LN2 for a post-LN layer, LN2 FF RES2 for a pre-LN layer."""
    start, end = scopes.chain.index(scopes.residual) + 1, scopes.chain.index(scopes.layer) + 1
    return " ".join(scopes.components[start:end])


def _top_pairs_table(name: str, values: Values, pairs: AmplifiedPairs, given: Texts, number: int) -> Table:
    rows = []
    for layer, row in enumerate(values, 1):
        found = [given.pair(int(pairs.keys[place])) for place in pairs.top(row, TOP)]
        rows.append((layer, " · ".join(f"({a}, {b})" for a, b in found)))
    stem, title = name.lower().replace(" ", "-"), f"Pairs (input, output) amplified most by {name}"
    return Table.of(f"table{number}-{stem}-pairs", f"Table {number}. {title}", {"layer": "", f"top {TOP}": ""}, rows)


def _overlap_table(lists: Mapping[str, Values], pairs: AmplifiedPairs) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for layer, (a, b) in enumerate(zip(*lists.values(), strict=True), 1):
        common = [len(set(pairs.top(a, size).tolist()) & set(pairs.top(b, size).tolist())) for size in (TOP, LONG)]
        rows.append((layer, *common, _amp_correlation(a, b)))
    return Table.of(
        "overlap-of-pairs",
        f"Pairs in both lists: {' and '.join(lists)}",
        {"layer": "", f"of the top {TOP}": "", f"of the top {LONG}": "", "correlation of amp": ".2f"},
        rows,
        "Pearson's correlation over all pairs above the minimum counts.",
    )


def _amp_correlation(a: Values, b: Values) -> float | None:
    if len(a) < 2 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _listed_pairs_table(lists: Mapping[str, Values], pairs: AmplifiedPairs, given: Texts) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, values in lists.items():
        for layer, row in enumerate(values, 1):
            for rank, place in enumerate(pairs.top(row, TOP), 1):
                counts = int(pairs.occurrences[place]), int(pairs.sequences[place])
                rows.append((name, layer, rank, *given.pair(int(pairs.keys[place])), float(row[place]), *counts))
    columns = dict.fromkeys(("amplified by", "layer", "rank", "input", "output"), "")
    return Table.of(
        "amplified-pairs",
        "The same lists with amp and the number of occurrences",
        {**columns, "amp": ".4f", "occurrences": "", "sequences": ""},
        rows,
        folded=True,
    )


def _ff_amp_picture(setting: Setting, run: Run, scopes: FeedForwardLayout, given: Texts) -> Picture:
    """The FF-amp matrix of the example, or of a sequence of about 30 tokens, in the layer with the largest gains."""
    axis = setting.readings.axis
    if setting.example is not None:
        found = setting.lens.analyze(setting.example, scopes=[scopes.input, scopes.ff])
        side = found if isinstance(found, Analysis) else found.side(scopes.side)
        tokens = list(side.tokens)
        values = ff_amp_of(side[scopes.input], side[scopes.ff], axis).numpy()
    else:
        entry = min(range(len(given)), key=lambda n: (abs(len(given.types[n]) - DRAWN), n))
        tokens = [given.vocabulary[number] for number in given.types[entry]]
        values = stored_amp(run, scopes, given.ids[entry], axis).reshape(-1, len(tokens), len(tokens))
    blank = np.eye(len(tokens), dtype=bool) | (np.triu(np.ones((len(tokens),) * 2, bool)) if scopes.causal else False)
    layer = int(np.where(blank, 0.0, values).clip(min=0).sum((1, 2)).argmax())
    look = {"label": "FF-amp", "xlabel": "input", "ylabel": "output", "diverging": True}
    whose = "the example" if setting.example is not None else f"{given.ids[entry]}, chosen for its length"
    return Picture(
        "ff-amp",
        f"FF-amp matrix of a sequence, layer {layer + 1}",
        map_charts.heat_map_chart(np.where(blank, np.nan, values[layer]), rows=tokens, columns=tokens, **look),
        f"All {len(tokens)} tokens of {whose}, in the layer with the largest total gain between different tokens. The "
        f"diagonal {'and later inputs are' if scopes.causal else 'is'} left blank.",
    )


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
