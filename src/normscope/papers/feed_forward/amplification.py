"""Which pairs of subwords the feed-forward amplifies (FF paper, section 5.1: FF-amp matrix, Tables 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from normscope.analysis import Analysis
from normscope.measures.amplification import amplification as ff_amp_of
from normscope.papers import map_charts
from normscope.papers.feed_forward.maps import Texts, Values, ff_amp, texts
from normscope.papers.feed_forward.shared import Layout, known_layout
from normscope.papers.feed_forward.top import Pairs, amplified_pairs, overlap
from normscope.papers.report import Cell, Picture, Section, Table

if TYPE_CHECKING:
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

TOP = 10  # pairs of a list, as in the paper
LONG = 100  # pairs of the longer lists whose overlap is counted too
DRAWN = 30  # tokens of a drawn matrix
PLAIN = "plain"  # the run that masks nothing


def amplification(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """An FF-amp matrix, the pairs amplified most by the feed-forward and by its whole block, and what these share."""
    scopes, readings, run = known_layout(setting), setting.readings, runs[PLAIN]
    given = texts(run, scopes)
    pairs = amplified_pairs(
        run,
        scopes,
        given,
        axis=readings.axis,
        causal=scopes.side == "decoder",
        specials=readings.list_specials,
        min_sequences=readings.min_sequences,
        min_occurrences=readings.min_occurrences,
    )
    lists = {"FF": pairs.ff, _block_name(scopes): pairs.block}
    return Section(
        "amplification",
        "Pairs of subwords that are amplified",
        f"FF-amp is the map after the feed-forward ({scopes.ff}) less the one before it ({scopes.input}), after each "
        f"was normalised so that {sums_to_one(readings.axis)}; amp of an ordered pair of subwords (input, output) is "
        "its mean over all their occurrences at two different positions. The second list is of the whole block: "
        f"{scopes.layer} less {scopes.residual}. Nothing is masked.\n\n"
        f"Listed are pairs that occur in at least {readings.min_sequences} sequences and at least "
        f"{readings.min_occurrences} times ({len(pairs.keys):,} pairs in {len(given):,} sequences), special tokens "
        f"{'included' if readings.list_specials else 'left out'}.",
        (
            _matrix(setting, run, scopes, given),
            *(_short(name, values, pairs, given, number) for number, (name, values) in enumerate(lists.items(), 2)),
            _overlaps(lists, pairs),
            _all(lists, pairs, given),
        ),
    )


def _block_name(scopes: Layout) -> str:
    """LN1 FF RES2 LN2 of a post-LN layer, LN2 FF RES2 of a pre-LN one."""
    start, end = scopes.chain.index(scopes.residual) + 1, scopes.chain.index(scopes.layer) + 1
    return " ".join(scopes.components[start:end])


def sums_to_one(axis: str) -> str:
    """How maps are normalised, in words."""
    return f"the contributions {'to every output' if axis == 'output' else 'of every input'} sum to 1"


def _short(name: str, values: Values, pairs: Pairs, given: Texts, number: int) -> Table:
    rows = []
    for layer, row in enumerate(values, 1):
        found = [given.pair(int(pairs.keys[place])) for place in pairs.top(row, TOP)]
        rows.append((layer, " · ".join(f"({a}, {b})" for a, b in found)))
    return Table(
        f"table{number}-{name.lower().replace(' ', '-')}-pairs",
        f"Table {number}. Pairs (input, output) amplified most by {name}",
        ("layer", f"top {TOP}"),
        tuple(rows),
    )


def _overlaps(lists: Mapping[str, Values], pairs: Pairs) -> Table:
    first, second = lists.values()
    rows: list[tuple[Cell, ...]] = []
    for layer, (a, b) in enumerate(zip(first, second, strict=True), 1):
        common = [overlap(pairs.top(a, size), pairs.top(b, size)) for size in (TOP, LONG)]
        rows.append((layer, common[0], common[1], _correlation(a, b)))
    return Table(
        "overlap-of-pairs",
        f"Pairs that both lists have: {' and '.join(lists)}",
        ("layer", f"of the top {TOP}", f"of the top {LONG}", "correlation of amp"),
        tuple(rows),
        {"correlation of amp": ".2f"},
        "The correlation is Pearson's, over all pairs that occur often enough.",
    )


def _correlation(a: Values, b: Values) -> float | None:
    if len(a) < 2 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _all(lists: Mapping[str, Values], pairs: Pairs, given: Texts) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, values in lists.items():
        for layer, row in enumerate(values, 1):
            for rank, place in enumerate(pairs.top(row, TOP), 1):
                counts = int(pairs.occurrences[place]), int(pairs.sequences[place])
                rows.append((name, layer, rank, *given.pair(int(pairs.keys[place])), float(row[place]), *counts))
    return Table(
        "amplified-pairs",
        "The same lists with amp and how often each pair occurs",
        ("amplified by", "layer", "rank", "input", "output", "amp", "occurrences", "sequences"),
        tuple(rows),
        {"amp": ".4f"},
        folded=True,
    )


def _matrix(setting: Setting, run: Run, scopes: Layout, given: Texts) -> Picture:
    """The FF-amp matrix of the example, or of a sequence of some 30 tokens, at the layer where others gain most."""
    axis = setting.readings.axis
    if setting.example is not None:
        found = setting.lens.analyze(setting.example, scopes=[scopes.input, scopes.ff])
        side = found if isinstance(found, Analysis) else found.side(scopes.side)
        tokens = list(side.tokens)
        values = ff_amp_of(side[scopes.input], side[scopes.ff], axis).numpy()
    else:
        entry = min(range(len(given)), key=lambda n: (abs(len(given.types[n]) - DRAWN), n))
        tokens = [given.vocabulary[number] for number in given.types[entry]]
        values = ff_amp(run, scopes, given.ids[entry], axis).reshape(-1, len(tokens), len(tokens))
    shown = min(DRAWN, len(tokens))
    diagonal = np.eye(len(tokens), dtype=bool)
    layer = int(np.where(diagonal, 0.0, values).clip(min=0).sum((1, 2)).argmax())
    drawn = np.where(diagonal, np.nan, values[layer])[:shown, :shown]
    return Picture(
        "ff-amp",
        f"FF-amp matrix of a sequence, layer {layer + 1}",
        map_charts.heat_map(
            drawn, rows=tokens[:shown], columns=tokens[:shown], label="FF-amp", xlabel="input", ylabel="output",
            diverging=True,
        ),
        "The layer in which the gains of other tokens are largest. A token's contribution to itself is left blank."
        + (f" The first {shown} of {len(tokens)} tokens." if shown < len(tokens) else ""),
    )  # fmt: skip
