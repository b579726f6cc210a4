"""How alike the maps of a layer's scopes are (FF paper, Table 1, Fig. 5, 9 and 12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from normscope.papers import charts, map_charts, published
from normscope.papers.feed_forward.shared import (
    PAPER,
    REFERENCE,
    Layout,
    described_input,
    known_layout,
    listed,
    masked_run,
)
from normscope.papers.published import said
from normscope.papers.report import Cell, Claim, Picture, Section, Table

if TYPE_CHECKING:
    import polars

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

ByLayer = Mapping[int, float]  # layer, from 1 -> mean over sequences
Pair = tuple[str, str]
CHANGED = 0.9  # below, a component has changed the map
ALIKE = 0.95  # above, two maps are nearly the same


def similarities(run: Run, scopes: Layout) -> dict[Pair, ByLayer]:
    """(scope, other), in the layer's order -> layer -> Spearman's correlation of raw maps, mean over sequences."""
    import polars as pl

    return _means(run.scan("similarity").filter(pl.col("side") == scopes.side))


def normalised_similarities(run: Run, scopes: Layout) -> dict[str, dict[Pair, ByLayer]]:
    """The same of neighbouring scopes whose maps were divided by the sums of their rows, or of their columns."""
    import polars as pl

    table = run.scan("similarity_normalised").filter(pl.col("side") == scopes.side)
    return {name: _means(table.filter(pl.col("normalised") == name)) for name in ("row", "column")}


def _means(table: polars.LazyFrame) -> dict[Pair, ByLayer]:
    import polars as pl

    means = (
        pl.col("spearman").filter(pl.col("spearman").is_not_nan()).mean()
    )  # NaN: a map of one cell, or of equal ones
    frame = table.group_by("scope", "other", "layer").agg(means).sort("layer").collect()
    found: dict[Pair, dict[int, float]] = {}
    for scope, other, layer, value in frame.iter_rows():
        found.setdefault((scope, other), {})[layer + 1] = float("nan") if value is None else value
    return dict(found)


def similarity(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Each scope with the one before (Table 1, Fig. 5) and with the feed-forward's input (Fig. 9), all (Fig. 12)."""
    scopes = known_layout(setting)
    run = runs[masked_run(setting)]
    raw = similarities(run, scopes)
    readings = {"raw": raw, **normalised_similarities(run, scopes)}
    chosen = readings[setting.readings.normalise]
    steps = {scope: chosen[scopes.before(scope), scope] for scope in scopes.chain[1:]}
    before = {scope: raw[scopes.block, scope] for scope in scopes.after}
    layers = list(next(iter(raw.values())))
    return Section(
        "similarity",
        "Similarity of the maps of a layer's scopes",
        _text(setting, scopes),
        (
            _table1(scopes, readings),
            Picture(
                "fig5-similarity",
                "Fig. 5. Similarity of each scope after the attention block with the one before",
                charts.line_chart(
                    {scopes.component(scope): list(steps[scope].values()) for scope in scopes.after},
                    x=layers,
                    ylabel="Spearman's correlation",
                ),
            ),
            Picture(
                "fig9-before",
                "Fig. 9. Similarity of each scope with the one before the feed-forward block",
                charts.line_chart(
                    {scope: list(values.values()) for scope, values in before.items()},
                    x=layers,
                    ylabel="Spearman's correlation",
                ),
                f"With {scopes.block}.",
            ),
            Picture(
                "fig12-all-pairs",
                "Fig. 12. Similarity of all scopes, mean over layers and sequences",
                map_charts.heat_map(
                    _matrix(scopes, raw),
                    rows=scopes.chain,
                    columns=scopes.chain,
                    label="Spearman's correlation",
                    annotate=True,
                ),
            ),
            _layers_table(scopes, raw, steps, layers, setting.readings.normalise),
        ),
        _claims(scopes, steps, before, raw),
        _numbers(scopes, steps, before, raw),
    )


def _text(setting: Setting, scopes: Layout) -> str:
    cells = "the cells where a token can see another" if scopes.side == "decoder" else "all cells"
    text = (
        f"Spearman's correlation of {cells} of two maps, for each layer and sequence; means over sequences. "
        f"{described_input(setting)} Table 1 has three readings: the maps as they are (raw), each row divided by its "
        "sum, each column by its sum."
    )
    if "ATTNRES-N" not in scopes.chain:
        return text
    return (
        f"{text}\n\nThe published 0.41 for RES1 cannot come from the procedure that the paper describes, under any of "
        "these readings: maps before and after a residual connection differ only where a token contributes to itself, "
        "which keeps the correlation of raw maps above 0.95 for sequences of 122 tokens. It is shown and not used, and "
        "the 0.48 for ATTN may have the same unknown cause."
    )


def _table1(scopes: Layout, readings: Mapping[str, Mapping[Pair, ByLayer]]) -> Table:
    theirs = {scope: published.reference(PAPER).get(f"similarity.{scope}") for scope in scopes.chain}
    rows: list[tuple[Cell, ...]] = []
    for scope in scopes.chain[1:]:
        pair = scopes.before(scope), scope
        values = readings["raw"][pair].values()
        means = (_mean(found[pair]) for found in readings.values())
        rows.append((scopes.component(scope), scope, *means, min(values), max(values), theirs[scope]))
    columns = ("component", "scope", *readings, "lowest", "highest", "published")
    note = "Lowest and highest: of the layers' means, raw."
    if any(theirs.values()):
        note += f" Published: {REFERENCE}."
    else:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(
        "table1-similarity",
        "Table 1. Similarity of each scope with the one before, mean over layers and sequences",
        columns,
        tuple(rows),
        dict.fromkeys(columns[2:], ".2f"),
        note,
    )


def _layers_table(
    scopes: Layout, raw: Mapping[Pair, ByLayer], steps: Mapping[str, ByLayer], layers: list[int], reading: str
) -> Table:
    kind = "with the one before" + ("" if reading == "raw" else f" ({reading})")
    rows: list[tuple[Cell, ...]] = [
        (kind, scopes.before(scope), scope, *values.values()) for scope, values in steps.items()
    ]
    rows += [
        ("all pairs", a, b, *raw[a, b].values()) for n, a in enumerate(scopes.chain) for b in scopes.chain[n + 1 :]
    ]
    names = [f"layer {layer}" for layer in layers]
    return Table(
        "similarity-layers",
        "Similarity layer by layer",
        ("figure", "scope", "other", *names),
        tuple(rows),
        dict.fromkeys(names, ".3f"),
        folded=True,
    )


def _matrix(scopes: Layout, raw: Mapping[Pair, ByLayer]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    size = len(scopes.chain)
    found = np.eye(size)
    for n, a in enumerate(scopes.chain):
        for m, b in enumerate(scopes.chain[n + 1 :], n + 1):
            found[n, m] = found[m, n] = _mean(raw[a, b])
    return found


def _claims(
    scopes: Layout, steps: Mapping[str, ByLayer], before: Mapping[str, ByLayer], raw: Mapping[Pair, ByLayer]
) -> tuple[Claim, ...]:
    theirs = published.reference(PAPER)
    ff, residual = steps[scopes.ff], steps[scopes.ff_residual]
    lowest = min(ff, key=lambda layer: ff[layer])
    back = [layer for layer in ff if before[scopes.ff_residual][layer] > before[scopes.ff][layer]]
    whole = _mean(raw[scopes.residual, scopes.layer])
    claims = [
        Claim(
            f"The feed-forward changes the map: in some layer the similarity falls below {CHANGED}",
            ff[lowest] < CHANGED,
            f"{_mean(ff):.2f}, from {ff[lowest]:.2f} (layer {lowest}) to {max(ff.values()):.2f}",
            said(theirs, "{:.2f}, from {:.2f} to {:.2f}", *_keys("ATTNRESLNFF-N")),
        ),
        Claim(
            "RES2 counteracts the feed-forward: in every layer the map after it is more like the one before the block",
            len(back) == len(ff),
            f"in {len(back)} of {len(ff)}: {listed(back)}",
            "in every layer",
        ),
    ]
    if scopes.layer != scopes.ff_residual:
        norm = steps[scopes.layer]
        nearer = [layer for layer in ff if before[scopes.layer][layer] > before[scopes.ff_residual][layer]]
        claims += [
            Claim(
                "LN2 changes the map more than RES2 does",
                _mean(norm) < _mean(residual),
                f"similarity {_mean(norm):.2f} against {_mean(residual):.2f}",
                said(
                    theirs, "similarity {:.2f} against {:.2f}",
                    "similarity.ATTNRESLNFFRESLN-N", "similarity.ATTNRESLNFFRES-N",
                ),
            ),
            Claim(
                "LN2 counteracts the feed-forward where it changes the map most",
                lowest in nearer,
                f"there (layer {lowest}) the similarity with the map before the block goes from "
                f"{before[scopes.ff_residual][lowest]:.2f} to {before[scopes.layer][lowest]:.2f}; it rises in "
                f"{listed(nearer)}",
                "it rises in layers 10-11, where the feed-forward changes the map most",
            ),
        ]  # fmt: skip
    claims.append(
        Claim(
            f"The map of the whole layer is nearly that of attention and residual (above {ALIKE})",
            whole > ALIKE,
            f"{whole:.2f}",
            said(theirs, "{:.2f}", "pair.ATTNRES-N.ATTNRESLNFFRESLN-N"),
        )
    )
    return tuple(claims)


def _keys(scope: str) -> tuple[str, str, str]:
    return f"similarity.{scope}", f"similarity.{scope}.min", f"similarity.{scope}.max"


def _numbers(
    scopes: Layout, steps: Mapping[str, ByLayer], before: Mapping[str, ByLayer], raw: Mapping[Pair, ByLayer]
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for scope, values in steps.items():
        numbers[f"similarity.{scope}"] = _mean(values)
        numbers |= {f"similarity.{scope}.L{layer}": value for layer, value in values.items()}
        numbers |= {f"similarity.{scope}.min": min(values.values()), f"similarity.{scope}.max": max(values.values())}
    for scope, values in before.items():
        numbers |= {f"before.{scope}.L{layer}": value for layer, value in values.items()}
    return numbers | {
        f"pair.{a}.{b}": _mean(raw[a, b]) for n, a in enumerate(scopes.chain) for b in scopes.chain[n + 1 :]
    }


def _mean(values: ByLayer) -> float:
    return float(np.mean(list(values.values())))
