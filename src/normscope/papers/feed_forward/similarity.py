"""Similarity of the maps of a layer's scopes (FF paper, Table 1, Fig. 5, 9 and 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from normscope.corpus.store import Run
from normscope.measures.uncertainty import Estimate
from normscope.papers import common
from normscope.papers.common import layer_numbers, scan_paper_side
from normscope.papers.feed_forward.residual import describe_residual, residual_readings_table
from normscope.papers.feed_forward.sequences import (
    NORMALISED,
    ResampledSimilarities,
    interval_bands,
    resample_similarities,
    sequence_similarities,
)
from normscope.papers.feed_forward.shared import (
    EDITION,
    INTERVALS,
    NAME,
    REFERENCE,
    SPEARMAN,
    FeedForwardLayout,
    require_ff_layout,
)
from normscope.papers.feed_forward.similarity_claims import ByPair, similarity_claims
from normscope.papers.published import published_main_numbers
from normscope.papers.resampling import estimate_mean_along, estimates_along
from normscope.papers.study import Runs, Setting
from normscope.reports import facts, map_charts
from normscope.reports.report import Cell, Picture, Section, Table

RES1 = "ATTNRES-N"  # the scope with the published 0.41
WHOLE = "whole block"
TEXT = (
    "Spearman's correlation of {cells} of two maps, computed for each layer and sequence and averaged over sequences. "
    "{masking} Table 1 has three readings: maps without normalisation (raw), with each row divided by its sum, and "
    "with each column divided by its sum; figures and claims use {reading} maps.\n\n"
    "The change of contextualisation by a component is 1 - Spearman's correlation of the maps before and after it; "
    "that of the whole block, of the maps before {first} and after {last}. Where it is smaller than the change by the "
    "feed-forward, the components after the feed-forward undo part of it.\n\n"
    "{edition}"
)


def scope_similarities(run: Run, scopes: FeedForwardLayout) -> dict[str, ByPair]:
    """normalisation -> (scope, other), in the order of the layer -> layer -> Spearman's correlation of their maps, mean
    over sequences."""
    shares = scan_paper_side(run, "similarity_shares", scopes.side)
    return {
        "raw": _mean_similarities(scan_paper_side(run, "similarity", scopes.side)),
        **{name: _mean_similarities(shares.filter(pl.col("normalised") == name)) for name in NORMALISED[1:]},
    }


def similarity_section(setting: Setting, runs: Runs) -> Section:
    """Similarity to the previous scope (Table 1, Fig. 5), to the block's input (Fig. 9), of all pairs (Fig. 12)."""
    scopes, run, readings = require_ff_layout(setting), runs[common.masked_run(setting)], setting.readings
    means, single = scope_similarities(run, scopes), sequence_similarities(run, scopes)
    steps = [(scopes.before(scope), scope) for scope in scopes.chain[1:]]
    from_block = [(scopes.block, scope) for scope in scopes.after]
    pairs = (*steps, *from_block, (scopes.residual, scopes.layer))
    resampled = resample_similarities(single, pairs, readings.resamples, readings.seed)
    chosen = means[readings.normalise]
    text = TEXT.format(
        cells="the unmasked cells" if scopes.causal else "all cells",
        masking=common.describe_common_masking(setting),
        reading=readings.normalise,
        first=scopes.component(scopes.after[0]),
        last=scopes.component(scopes.after[-1]),
        edition=EDITION,
    )
    parts: list[Table | Picture] = [_similarity_table(scopes, means)]
    if RES1 in scopes.chain:
        res1 = {name: single[name, (scopes.before(RES1), RES1)] for name in NORMALISED}
        text += "\n\n" + describe_residual(facts.sequence_lengths(run), res1)
        parts.append(residual_readings_table(res1))
    by_layer = {pair: estimates_along(resampled.layers(readings.normalise, pair)) for pair in pairs}
    changes = _contextualisation_changes(scopes, resampled, readings.normalise)
    parts += [
        _similarity_picture(
            "fig5-similarity",
            "Fig. 5. Similarity of each scope after the attention block to the previous scope",
            {scopes.component(scope): by_layer[scopes.before(scope), scope] for scope in scopes.after},
        ),
        _change_picture(scopes, changes),
        _change_table(changes),
        _similarity_picture(
            "fig9-before",
            f"Fig. 9. Similarity of each scope to the scope before the feed-forward block ({scopes.block})",
            {scope: by_layer[scopes.block, scope] for scope in scopes.after},
        ),
        _similarity_heat_map(scopes, chosen),
        _similarity_layers_table(scopes, chosen, readings.normalise),
    ]
    return Section(
        "similarity",
        "Similarity of the maps within a layer",
        text,
        tuple(parts),
        similarity_claims(scopes, means, resampled, readings),
        _similarity_numbers(scopes, chosen, changes),
    )


def _mean_similarities(table: pl.LazyFrame) -> ByPair:
    value = pl.col("spearman")  # NaN if a map has a single cell or all cells are equal
    frame = table.group_by("scope", "other", "layer").agg(value.filter(value.is_not_nan()).mean())
    found: dict[tuple[str, str], dict[int, float]] = {}
    for scope, other, layer, mean in frame.sort("layer").collect().iter_rows():
        found.setdefault((scope, other), {})[layer + 1] = float("nan") if mean is None else mean
    return dict(found)


def _contextualisation_changes(
    scopes: FeedForwardLayout, resampled: ResampledSimilarities, reading: str
) -> dict[str, list[Estimate]]:
    """component -> 1 - Spearman's correlation: the mean over layers, then each layer."""
    pairs = {scopes.component(scope): (scopes.before(scope), scope) for scope in scopes.chain[1:]}
    pairs[WHOLE] = (scopes.block, scopes.layer)
    found = {}
    for name, pair in pairs.items():
        change = resampled.layers(reading, pair).map(lambda values: 1 - values)
        found[name] = [estimate_mean_along(change), *estimates_along(change)]
    return found


def _change_table(changes: Mapping[str, Sequence[Estimate]]) -> Table:
    depth = len(next(iter(changes.values()))) - 1
    rows = [
        (name, mean.value, mean.low, mean.high, *(one.value for one in layers))
        for name, (mean, *layers) in changes.items()
    ]
    columns = ("mean", "low", "high", *(f"layer {layer}" for layer in range(1, depth + 1)))
    return Table.of(
        "contextualisation-change",
        f"Change of contextualisation by each component: 1 - {SPEARMAN}",
        {"component": "", **dict.fromkeys(columns, ".3f")},
        rows,
        f"Low and high: 95 % interval of the mean over layers ({next(iter(changes.values()))[0].method}).",
    )


def _change_picture(scopes: FeedForwardLayout, changes: Mapping[str, Sequence[Estimate]]) -> Picture:
    names = (*(scopes.component(scope) for scope in scopes.after), WHOLE)
    title = "Change of contextualisation by each component of the feed-forward block, and by the whole block"
    return _similarity_picture(
        "contextualisation-change-layers", title, {name: changes[name][1:] for name in names}, f"1 - {SPEARMAN}"
    )


def _similarity_table(scopes: FeedForwardLayout, readings: Mapping[str, ByPair]) -> Table:
    published = published_main_numbers(NAME)
    theirs = {scope: published.get(f"similarity.{scope}") for scope in scopes.chain}
    known = any(theirs.values())
    rows: list[tuple[Cell, ...]] = []
    for scope in scopes.chain[1:]:
        pair = scopes.before(scope), scope
        values = readings["raw"][pair].values()
        means = (_mean_over_layers(some[pair]) for some in readings.values())
        beside = [theirs[scope]] if known else []
        rows.append((scopes.component(scope), scope, *means, min(values), max(values), *beside))
    columns = (*readings, "lowest", "highest", *(["published"] if known else []))
    note = "Lowest and highest: over the layer means of raw maps."
    return Table.of(
        "table1-similarity",
        "Table 1. Similarity of each scope to the previous one, mean over layers and sequences",
        {"component": "", "scope": "", **dict.fromkeys(columns, ".2f")},
        rows,
        f"{note} Published: {REFERENCE}." if known else note,
    )


def _similarity_picture(
    name: str, title: str, lines: Mapping[str, Sequence[Estimate]], ylabel: str = SPEARMAN
) -> Picture:
    series = {label: [one.value for one in values] for label, values in lines.items()}
    layers = range(1, len(next(iter(series.values()))) + 1)
    return common.layer_picture(name, title, series, layers, ylabel, INTERVALS, bands=interval_bands(lines))


def _similarity_heat_map(scopes: FeedForwardLayout, given: ByPair) -> Picture:
    found = np.eye(len(scopes.chain))
    for a, b in scopes.pairs:
        n, m = scopes.chain.index(a), scopes.chain.index(b)
        found[n, m] = found[m, n] = _mean_over_layers(given[a, b])
    look: dict[str, Any] = {"rows": scopes.chain, "columns": scopes.chain, "label": SPEARMAN, "annotate": True}
    title = "Fig. 12. Similarity of all pairs of scopes, mean over layers and sequences"
    return Picture("fig12-all-pairs", title, map_charts.heat_map_chart(found, **look))


def _similarity_layers_table(scopes: FeedForwardLayout, given: ByPair, reading: str) -> Table:
    rows = [(a, b, "yes" if scopes.before(b) == a else "", *given[a, b].values()) for a, b in scopes.pairs]
    layers = {f"layer {layer}": ".3f" for layer in next(iter(given.values()))}
    return Table.of(
        "similarity-layers",
        f"Similarity of all pairs of scopes by layer ({reading} maps)",
        {"scope": "", "other": "", "neighbours": "", **layers},
        rows,
        folded=True,
    )


def _similarity_numbers(
    scopes: FeedForwardLayout, given: ByPair, changes: Mapping[str, Sequence[Estimate]]
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for scope in scopes.chain[1:]:
        key, values = f"similarity.{scope}", given[scopes.before(scope), scope]
        numbers |= {key: _mean_over_layers(values)} | layer_numbers(key, values.values(), values)
        numbers |= {f"{key}.min": min(values.values()), f"{key}.max": max(values.values())}
    for scope in scopes.after:
        numbers |= layer_numbers(f"before.{scope}", given[scopes.block, scope].values())
    numbers |= {f"pair.{a}.{b}": _mean_over_layers(given[a, b]) for a, b in scopes.pairs}
    for name, (mean, *layers) in changes.items():
        key = f"change.{name.replace(' ', '-')}"
        ends = {"": mean.value, ".low": mean.low, ".high": mean.high}
        numbers |= common.finite_numbers({f"{key}{end}": value for end, value in ends.items()})
        numbers |= layer_numbers(key, [one.value for one in layers])
    return numbers


def _mean_over_layers(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))
