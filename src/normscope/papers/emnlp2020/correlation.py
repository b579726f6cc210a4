"""Whether alpha and ||f(x)|| cancel each other (EMNLP 2020, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.measures.grouped import OCTAVES, resolution, spearman
from normscope.papers import charts, map_charts, published
from normscope.papers.emnlp2020.measures import KINDS, NORM_BINS, WEIGHT_BINS
from normscope.papers.emnlp2020.shared import (
    CATEGORIES,
    CLEAR,
    PAPER,
    PLAIN,
    REFERENCE,
    category_of,
    finite,
    labels,
    norm_moments,
    rows_of,
)
from normscope.papers.emnlp2020.shares import by_category
from normscope.papers.published import said
from normscope.papers.report import Cell, Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    import polars

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

DRAWN_WEIGHTS = 1  # bins an octave, as drawn
DRAWN_NORMS = 4
TEXT = (
    "Every pair of a query and a key, in every layer and head, has a weight alpha and the key's ||f(x)||. Spearman's "
    "correlation of the two is taken over all pairs whose key is of a category. There are too many pairs to rank, so "
    "they are counted in logarithmic bins, {} of alpha and {} of ||f(x)|| to a doubling; those of a bin count as "
    "ties. Resolution is the share of the rank variance that lies between bins: 1 would be no grouping at all.\n\n"
    "Where a large alpha meets a small ||f(x)||: the layers and categories whose tokens get at least {:g} times the "
    "weight that they would get if attention were spread evenly, while their mean ||f(x)|| is at most {:g} of the "
    "layer's."
)


def correlation(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Table 2: Spearman's correlation of alpha and ||f(x)|| by category; by layer; and where they cancel."""
    readings, run = setting.readings, runs[PLAIN]
    names, reference = labels(readings), published.reference(PAPER)
    counts = _counts(setting, run)
    rho, pairs, rows = {}, {}, []
    for category in CATEGORIES:
        cells = _cells(counts, category)
        rho[category], pairs[category] = spearman(*cells), int(cells[2].sum())
        fine = [resolution(bins, cells[2]) for bins in cells[:2]]
        theirs = (reference.get(f"spearman.{category}"), int(reference.get(f"pairs.{category}", 0)) or None)
        rows.append((names[category], known(rho[category]), pairs[category], *map(known, fine), *theirs))
    columns = ("category", "Spearman", "pairs", "resolution of alpha", "resolution of ||f||")
    added = (f"Spearman, {REFERENCE}", "pairs, published")
    layers = sorted(counts["layer"].unique().to_list())
    there = [category for category in CATEGORIES if pairs[category]]
    by_layer = {c: [spearman(*_cells(counts, c, layer)) for layer in layers] for c in there}
    return Section(
        "correlation",
        "Weights against ||f(x)||",
        TEXT.format(WEIGHT_BINS, NORM_BINS, readings.large_weight, readings.small_norm),
        (
            Table(
                "table2-spearman",
                "Table 2. Spearman's correlation of alpha and ||f(x)||",
                (*columns, *added),
                tuple(rows),
                dict(zip((*columns[1:], *added), (".2f", ",", ".5f", ".5f", ".2f", ","), strict=True)),
            ),
            _drawn({names[c]: _coarse(*_cells(counts, c)) for c in there}),
            Picture(
                "table2-layers",
                "Spearman's correlation of alpha and ||f(x)|| in each layer",
                charts.line_chart({names[c]: by_layer[c] for c in there}, x=[n + 1 for n in layers], ylabel="Spearman"),
            ),
            Table(
                "table2-by-layer",
                "Spearman's correlation of alpha and ||f(x)|| by layer",
                ("layer", *(names[c] for c in there)),
                tuple((layer + 1, *(known(by_layer[c][n]) for c in there)) for n, layer in enumerate(layers)),
                dict.fromkeys([names[c] for c in there], ".2f"),
                folded=len(layers) > 20,
            ),
            _cancelling(setting, run, names),
        ),
        _claims(names, rho, reference),
        finite({f"spearman.{c}": rho[c] for c in there} | {f"pairs.{c}": pairs[c] for c in there}),
    )


def _counts(setting: Setting, run: Run) -> polars.DataFrame:
    """layer, category, weight_bin, norm_bin -> how many pairs of the corpus."""
    import polars as pl

    of_kind = {code: category_of(setting.readings)[name] for code, name in enumerate(KINDS)}
    keys = ("layer", "category", "weight_bin", "norm_bin")
    return (
        rows_of(setting, run, "weight_norm_counts")
        .with_columns(pl.col("kind").replace_strict(of_kind, return_dtype=pl.String).alias("category"))
        .group_by(keys)
        .agg(pl.col("count").sum())
        .collect()
    )


def _cells(
    counts: polars.DataFrame, category: str, layer: int | None = None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The bins and counts of a category, of all layers or of one."""
    import polars as pl

    chosen = counts.filter((pl.col("category") == category) & (True if layer is None else pl.col("layer") == layer))
    return chosen["weight_bin"].to_numpy(), chosen["norm_bin"].to_numpy(), chosen["count"].to_numpy()


def _drawn(cells: Mapping[str, Sequence[NDArray[Any]]]) -> Picture:
    """How the pairs lie, by category: alpha across, ||f|| upwards, in coarse bins."""
    weights, norms = (np.concatenate([found[n] for found in cells.values()]) for n in (0, 1))
    left, bottom, top = _floor(cells), int(norms.min()), int(norms.max())
    across, up = np.arange(left, int(weights.max()) + 1), np.arange(top, bottom - 1, -1)
    panels = {}
    for name, (x, y, n) in cells.items():
        found = np.zeros((len(up), len(across)))
        np.add.at(found, (top - y, np.maximum(x, left) - left), n)
        total = found.sum()
        with np.errstate(divide="ignore"):
            panels[name] = np.where(found > 0, np.log10(found / max(total, 1)), nan)
    chart = map_charts.heat_maps(
        panels,
        rows=[f"{2 ** (bin / DRAWN_NORMS):.2g}" for bin in up],
        columns=[f"{2.0 ** (bin / DRAWN_WEIGHTS):.0e}" for bin in across],
        label="log10 of the share",
        xlabel="alpha",
        ylabel="||f(x)||",
    )
    return Picture(
        "table2-pairs",
        "Where the pairs of alpha and ||f(x)|| lie",
        chart,
        "Each category by itself. The leftmost column also has all smaller weights, a hundredth of the pairs.",
    )


def _coarse(weights: NDArray[Any], norms: NDArray[Any], counts: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    zero = weights <= -OCTAVES * WEIGHT_BINS
    return weights[~zero] // (WEIGHT_BINS // DRAWN_WEIGHTS), norms[~zero] // (NORM_BINS // DRAWN_NORMS), counts[~zero]


def _floor(cells: Mapping[str, Sequence[NDArray[Any]]]) -> int:
    """The coarse bin of alpha below which lies less than a hundredth of all pairs."""
    weights, counts = (np.concatenate([found[n] for found in cells.values()]) for n in (0, 2))
    order = np.argsort(weights)
    below = np.cumsum(counts[order]) / counts.sum()
    return int(weights[order][np.searchsorted(below, 0.01)])


def _cancelling(setting: Setting, run: Run, names: Mapping[str, str]) -> Table:
    """The layers and categories of a large alpha and a small ||f||."""
    readings = setting.readings
    means = norm_moments(setting, run, "layer", "category")
    whole = norm_moments(setting, run, "layer")
    rows: list[tuple[Cell, ...]] = []
    for layer, category, weight, _, keys in (
        by_category(setting, run).select("layer", "category", "weight", "norm", "keys").iter_rows()
    ):
        if not keys:
            continue
        times, norm = weight / keys, means[layer, category].mean / whole[layer,].mean
        if times >= readings.large_weight and norm <= readings.small_norm:
            rows.append((layer + 1, names[category], times, weight, means[layer, category].mean, norm))
    columns = ("layer", "category", "alpha, times even", "sum of alpha", "mean ||f||", "mean ||f||, of the layer's")
    return Table(
        "table2-cancelling",
        "Layers where a large alpha meets a small ||f(x)||",
        columns,
        tuple(rows),
        dict.fromkeys(columns[2:], ".2f"),
        "" if rows else "There is none.",
    )


def _claims(names: Mapping[str, str], rho: Mapping[str, float], reference: Mapping[str, float]) -> tuple[Claim, ...]:
    special = [c for c in ("first", "separator", "punctuation") if not isnan(rho[c])]
    ours = ", ".join(f"{names[c]} {rho[c]:.2f}" for c in special)
    theirs = said(
        reference,
        "[CLS] {:.2f}, [SEP] {:.2f}, comma and period {:.2f}",
        "spearman.first",
        "spearman.separator",
        "spearman.punctuation",
    )
    least = isnan(rho["other"])
    return (
        Claim(
            "alpha and ||f(x)|| cancel each other on special tokens and punctuation: their correlation is negative, "
            f"below {-CLEAR}",
            all(rho[c] < -CLEAR for c in special) if special else None,
            ours or "there are no such tokens",
            theirs,
        ),
        Claim(
            "They hardly do on other tokens: the correlation is weakest there",
            None if least or not special else all(abs(rho["other"]) < abs(rho[c]) for c in special),
            f"{rho['other']:.2f}; {ours}" if special and not least else "there are no such tokens",
            said(reference, "{:.2f}", "spearman.other"),
        ),
    )
