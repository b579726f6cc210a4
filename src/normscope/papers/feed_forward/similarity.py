"""Similarity of the maps of a layer's scopes (FF paper, Table 1, Fig. 5, 9 and 12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from normscope.corpus.store import Run
from normscope.papers import common
from normscope.papers.common import claim_with_published, layer_numbers, paper_layers_text, scan_paper_side
from normscope.papers.feed_forward.shared import NAME, REFERENCE, SPEARMAN, FeedForwardLayout, require_ff_layout
from normscope.papers.published import published_main_numbers, quote_published
from normscope.papers.study import Runs, Setting
from normscope.reports import map_charts
from normscope.reports.report import Cell, Claim, Picture, Section, Table

ByLayer = Mapping[int, float]  # layer, from 1 -> mean over sequences
ByScope = Mapping[str, ByLayer]
ByPair = Mapping[tuple[str, str], ByLayer]
CHANGED = 0.9  # similarity below which a component counts as changing the map
ALIKE = 0.95  # similarity above which two maps count as nearly the same
TEXT = (
    "Spearman's correlation of {cells} of two maps, computed for each layer and sequence and averaged over sequences. "
    "{masking} Table 1 has three readings: maps without normalisation (raw), with each row divided by its sum, and "
    "with each column divided by its sum."
)
RESIDUAL = (
    "\n\nThe published 0.41 for RES1 cannot result from the procedure described in the paper under any of these "
    "readings: maps before and after a residual connection differ only on the diagonal, which keeps the correlation of "
    "raw maps above 0.95 for sequences of 122 tokens. The value is shown but not used; the 0.48 for ATTN may have the "
    "same unknown cause."
)


def scope_similarities(run: Run, scopes: FeedForwardLayout) -> dict[tuple[str, str], ByLayer]:
    """(scope, other), in the order of the layer -> layer -> Spearman's correlation of raw maps, mean over sequences."""
    return _mean_similarities(scan_paper_side(run, "similarity", scopes.side))


def normalised_similarities(run: Run, scopes: FeedForwardLayout) -> dict[str, dict[tuple[str, str], ByLayer]]:
    """The same for neighbouring scopes, with maps divided by the sums of their rows or of their columns."""
    table = scan_paper_side(run, "similarity_normalised", scopes.side)
    return {name: _mean_similarities(table.filter(pl.col("normalised") == name)) for name in ("row", "column")}


def similarity_section(setting: Setting, runs: Runs) -> Section:
    """Similarity to the previous scope (Table 1, Fig. 5), to the block's input (Fig. 9), of all pairs (Fig. 12)."""
    scopes, run, reading = require_ff_layout(setting), runs[common.masked_run(setting)], setting.readings.normalise
    raw = scope_similarities(run, scopes)
    readings = {"raw": raw, **normalised_similarities(run, scopes)}
    steps = {scope: readings[reading][scopes.before(scope), scope] for scope in scopes.chain[1:]}
    cells = "the unmasked cells" if scopes.causal else "all cells"
    text = TEXT.format(cells=cells, masking=common.describe_common_masking(setting))
    fig5 = {scopes.component(scope): steps[scope] for scope in scopes.after}
    fig9 = {scope: raw[scopes.block, scope] for scope in scopes.after}
    to_previous = "Fig. 5. Similarity of each scope after the attention block to the previous scope"
    to_block = f"Fig. 9. Similarity of each scope to the scope before the feed-forward block ({scopes.block})"
    return Section(
        "similarity",
        "Similarity of the maps within a layer",
        text + (RESIDUAL if "ATTNRES-N" in scopes.chain else ""),
        (
            _similarity_table(scopes, readings),
            _similarity_picture("fig5-similarity", to_previous, fig5),
            _similarity_picture("fig9-before", to_block, fig9),
            _similarity_heat_map(scopes, raw),
            _similarity_layers_table(scopes, raw, steps, reading),
        ),
        _similarity_claims(scopes, steps, raw),
        _similarity_numbers(scopes, steps, raw),
    )


def _mean_similarities(table: pl.LazyFrame) -> dict[tuple[str, str], ByLayer]:
    value = pl.col("spearman")  # NaN if a map has a single cell or all cells are equal
    frame = table.group_by("scope", "other", "layer").agg(value.filter(value.is_not_nan()).mean())
    found: dict[tuple[str, str], dict[int, float]] = {}
    for scope, other, layer, mean in frame.sort("layer").collect().iter_rows():
        found.setdefault((scope, other), {})[layer + 1] = float("nan") if mean is None else mean
    return dict(found)


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


def _similarity_picture(name: str, title: str, lines: ByScope) -> Picture:
    layers = list(next(iter(lines.values())))
    series = {label: list(values.values()) for label, values in lines.items()}
    return common.layer_picture(name, title, series, layers, SPEARMAN)


def _similarity_heat_map(scopes: FeedForwardLayout, raw: ByPair) -> Picture:
    found = np.eye(len(scopes.chain))
    for a, b in scopes.pairs:
        n, m = scopes.chain.index(a), scopes.chain.index(b)
        found[n, m] = found[m, n] = _mean_over_layers(raw[a, b])
    look: dict[str, Any] = {"rows": scopes.chain, "columns": scopes.chain, "label": SPEARMAN, "annotate": True}
    title = "Fig. 12. Similarity of all pairs of scopes, mean over layers and sequences"
    return Picture("fig12-all-pairs", title, map_charts.heat_map_chart(found, **look))


def _similarity_layers_table(scopes: FeedForwardLayout, raw: ByPair, steps: ByScope, reading: str) -> Table:
    kind = "to the previous scope" + ("" if reading == "raw" else f" ({reading})")
    rows = [(kind, scopes.before(scope), scope, *values.values()) for scope, values in steps.items()]
    rows += [("all pairs", a, b, *raw[a, b].values()) for a, b in scopes.pairs]
    columns = {"figure": "", "scope": "", "other": "", **{f"layer {layer}": ".3f" for layer in steps[scopes.ff]}}
    return Table.of("similarity-layers", "Similarity by layer", columns, rows, folded=True)


def _similarity_claims(scopes: FeedForwardLayout, steps: ByScope, raw: ByPair) -> tuple[Claim, ...]:
    published, ff = published_main_numbers(NAME), steps[scopes.ff]
    lowest = min(ff, key=lambda layer: ff[layer])
    after_ff, after_residual = (raw[scopes.block, scope] for scope in (scopes.ff, scopes.ff_residual))
    back = [layer for layer in ff if after_residual[layer] > after_ff[layer]]
    whole = _mean_over_layers(raw[scopes.residual, scopes.layer])
    keys = [f"similarity.ATTNRESLNFF-N{end}" for end in ("", ".min", ".max")]
    claims = [
        Claim(
            f"The feed-forward changes the map: the similarity is below {CHANGED} in at least one layer",
            ff[lowest] < CHANGED,
            f"{_mean_over_layers(ff):.2f}, from {ff[lowest]:.2f} (layer {lowest}) to {max(ff.values()):.2f}",
            quote_published(published, "{:.2f}, from {:.2f} to {:.2f}", *keys),
        ),
        Claim(
            "RES2 counteracts the feed-forward: in every layer the map after it is closer to the map before the block",
            len(back) == len(ff),
            f"in {len(back)} of {len(ff)}: {paper_layers_text(back)}",
            "in every layer",
        ),
    ]
    if scopes.layer != scopes.ff_residual:
        norm, residual = (_mean_over_layers(steps[scope]) for scope in (scopes.layer, scopes.ff_residual))
        after_norm = raw[scopes.block, scopes.layer]
        nearer = [layer for layer in ff if after_norm[layer] > after_residual[layer]]
        claims += [
            claim_with_published(
                "LN2 changes the map more than RES2 does",
                norm < residual,
                "similarity {:.2f} against {:.2f}",
                (norm, residual),
                published,
                *("similarity.ATTNRESLNFFRESLN-N", "similarity.ATTNRESLNFFRES-N"),
            ),
            Claim(
                "LN2 counteracts the feed-forward in the layer where the feed-forward changes the map most",
                lowest in nearer,
                f"layer {lowest}: the similarity to the map before the block goes from {after_residual[lowest]:.2f} to "
                f"{after_norm[lowest]:.2f}; it increases in {paper_layers_text(nearer)}",
                "it increases in layers 10-11, where the feed-forward changes the map most",
            ),
        ]
    statement = f"The map of the whole layer is nearly that of attention and residual (similarity above {ALIKE})"
    key = "pair.ATTNRES-N.ATTNRESLNFFRESLN-N"
    return (*claims, claim_with_published(statement, whole > ALIKE, "{:.2f}", (whole,), published, key))


def _similarity_numbers(scopes: FeedForwardLayout, steps: ByScope, raw: ByPair) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for scope, values in steps.items():
        key = f"similarity.{scope}"
        numbers |= {key: _mean_over_layers(values)} | layer_numbers(key, values.values(), values)
        numbers |= {f"{key}.min": min(values.values()), f"{key}.max": max(values.values())}
    for scope in scopes.after:
        numbers |= layer_numbers(f"before.{scope}", raw[scopes.block, scope].values())
    return numbers | {f"pair.{a}.{b}": _mean_over_layers(raw[a, b]) for a, b in scopes.pairs}


def _mean_over_layers(values: ByLayer) -> float:
    return float(np.mean(list(values.values())))
