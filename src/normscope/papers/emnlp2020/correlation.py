"""Whether alpha and ||f(x)|| cancel out (EMNLP 2020, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.correlation import OCTAVES, rank_resolution, spearman_of_histogram
from normscope.papers.common import CLEAR, finite_numbers, layer_picture, layer_table, scan_paper_side
from normscope.papers.emnlp2020 import shared
from normscope.papers.emnlp2020.measures import KINDS, NORM_BINS, WEIGHT_BINS
from normscope.papers.emnlp2020.shared import CATEGORIES, REFERENCE, THEIRS
from normscope.papers.emnlp2020.shares import mean_category_shares
from normscope.papers.published import quote_published
from normscope.papers.study import Runs, Setting
from normscope.reports import map_charts
from normscope.reports.report import Cell, Claim, Picture, Section, Table, none_if_nan

BinnedPairs = tuple[NDArray[Any], ...]  # bins of alpha, bins of ||f||, counts

COARSE_WEIGHTS = 1  # bins per octave in the figure
COARSE_NORMS = 4
TEXT = (
    "Each pair of a query and a key, in each layer and head, has a weight alpha and the key's ||f(x)||. Spearman's "
    "correlation of the two is computed over all pairs whose key belongs to a category. There are too many pairs to "
    "rank individually, so they are counted in logarithmic bins, {} per octave for alpha and {} for ||f(x)||; pairs in "
    "the same bin are ties. Resolution is the share of the rank variance that lies between bins (1: no binning).\n\n"
    "The last table lists layers and categories that combine a large alpha with a small ||f(x)||: their tokens receive "
    "at least {:g} times the weight of uniform attention, and their mean ||f(x)|| is at most {:g} times the layer's."
)


def correlation_section(setting: Setting, runs: Runs) -> Section:
    """Table 2: Spearman's correlation of alpha and ||f(x)|| by category; by layer; and where they cancel."""
    readings, run = setting.readings, runs[shared.PLAIN]
    names = shared.token_category_labels(readings)
    counts = _pair_counts(setting, run)
    bins = {c: _category_bins(counts, c) for c in CATEGORIES}
    rho = {c: spearman_of_histogram(*found) for c, found in bins.items()}
    pairs = {c: int(number.sum()) for c, (_, _, number) in bins.items()}
    rows = []
    for c, (weights, norms, number) in bins.items():
        resolutions = (none_if_nan(rank_resolution(one, number)) for one in (weights, norms))
        theirs = (THEIRS.get(f"spearman.{c}"), int(THEIRS.get(f"pairs.{c}", 0)) or None)
        rows.append((names[c], none_if_nan(rho[c]), pairs[c], *resolutions, *theirs))
    layers = sorted(counts["layer"].unique().to_list())
    present = [c for c in CATEGORIES if pairs[c]]
    by_layer = {
        names[c]: [spearman_of_histogram(*_category_bins(counts, c, layer)) for layer in layers] for c in present
    }
    columns = {"category": "", "Spearman": ".2f", "pairs": ",", "resolution of alpha": ".5f"}
    columns |= {"resolution of ||f||": ".5f", f"Spearman, {REFERENCE}": ".2f", "pairs, published": ","}
    title, numbered = "Spearman's correlation of alpha and ||f(x)||", [layer + 1 for layer in layers]
    cells = {name: [none_if_nan(value) for value in values] for name, values in by_layer.items()}
    return Section(
        "correlation",
        "Weights against ||f(x)||",
        TEXT.format(WEIGHT_BINS, NORM_BINS, readings.large_weight, readings.small_norm),
        (
            Table.of("table2-spearman", f"Table 2. {title}", columns, rows),
            _joint_distribution({names[c]: _coarse_bins(*bins[c]) for c in present}),
            layer_picture("table2-layers", f"{title} in each layer", by_layer, numbered, "Spearman"),
            layer_table("table2-by-layer", f"{title} by layer", cells, numbered, ".2f", folded=len(layers) > 20),
            _cancelling_table(setting, run, names),
        ),
        _cancelling_claims(names, rho),
        finite_numbers({f"spearman.{c}": rho[c] for c in present} | {f"pairs.{c}": pairs[c] for c in present}),
    )


def _pair_counts(setting: Setting, run: Run) -> pl.DataFrame:
    """layer, category, weight_bin, norm_bin -> how many pairs of the corpus, sorted so that sums have one order."""
    keys = ("layer", "category", "weight_bin", "norm_bin")
    categories = shared.token_kind_categories(setting.readings)
    by_code = {code: categories[name] for code, name in enumerate(KINDS)}
    return (
        scan_paper_side(run, "weight_norm_counts", setting.side)
        .with_columns(pl.col("kind").replace_strict(by_code, return_dtype=pl.String).alias("category"))
        .group_by(keys)
        .agg(pl.col("count").sum())
        .sort(keys)
        .collect()
    )


def _category_bins(counts: pl.DataFrame, category: str, layer: int | None = None) -> BinnedPairs:
    """The bins and counts of a category, in all layers or in one."""
    chosen = counts.filter((pl.col("category") == category) & (True if layer is None else pl.col("layer") == layer))
    return tuple(chosen[name].to_numpy() for name in ("weight_bin", "norm_bin", "count"))


def _joint_distribution(cells: Mapping[str, BinnedPairs]) -> Picture:
    """The joint distribution by category in coarse bins: alpha on the x axis, ||f|| on the y axis."""
    weights, norms = (np.concatenate([found[n] for found in cells.values()]) for n in (0, 1))
    left, bottom, top = _lowest_weight_bin(cells), int(norms.min()), int(norms.max())
    across, up = np.arange(left, int(weights.max()) + 1), np.arange(top, bottom - 1, -1)
    panels = {}
    for name, (x, y, n) in cells.items():
        found = np.zeros((len(up), len(across)))
        np.add.at(found, (top - y, np.maximum(x, left) - left), n)
        with np.errstate(divide="ignore"):
            panels[name] = np.where(found > 0, np.log10(found / max(found.sum(), 1)), nan)
    chart = map_charts.heat_map_charts(
        panels,
        rows=[f"{2 ** (bin / COARSE_NORMS):.2g}" for bin in up],
        columns=[f"{2.0 ** (bin / COARSE_WEIGHTS):.0e}" for bin in across],
        label="log10 of the share",
        xlabel="alpha",
        ylabel="||f(x)||",
    )
    return Picture(
        "table2-pairs",
        "Joint distribution of alpha and ||f(x)||",
        chart,
        "Each category is normalised separately. The leftmost column includes all smaller weights (1 % of the pairs).",
    )


def _coarse_bins(weights: NDArray[Any], norms: NDArray[Any], counts: NDArray[Any]) -> BinnedPairs:
    some = weights > -OCTAVES * WEIGHT_BINS  # not zero
    return weights[some] // (WEIGHT_BINS // COARSE_WEIGHTS), norms[some] // (NORM_BINS // COARSE_NORMS), counts[some]


def _lowest_weight_bin(cells: Mapping[str, BinnedPairs]) -> int:
    """The 1 % quantile of the coarse bins of alpha."""
    weights, counts = (np.concatenate([found[n] for found in cells.values()]) for n in (0, 2))
    order = np.argsort(weights)
    below = np.cumsum(counts[order]) / counts.sum()
    return int(weights[order][np.searchsorted(below, 0.01)])


def _cancelling_table(setting: Setting, run: Run, names: Mapping[str, str]) -> Table:
    """The layers and categories with a large alpha and a small ||f||, which cancel."""
    means = shared.corpus_norm_moments(setting, run, "layer", "category")
    whole = shared.corpus_norm_moments(setting, run, "layer")
    rows: list[tuple[Cell, ...]] = []
    shares = mean_category_shares(setting, run).filter(pl.col("keys") > 0)
    for layer, category, weight, keys in shares.select("layer", "category", "weight", "keys").iter_rows():
        times, mean = weight / keys, means[layer, category].mean
        norm = mean / whole[layer,].mean
        if times >= setting.readings.large_weight and norm <= setting.readings.small_norm:
            rows.append((layer + 1, names[category], times, weight, mean, norm))
    columns = ("alpha / uniform", "sum of alpha", "mean ||f||", "mean ||f|| / layer mean")
    return Table.of(
        "table2-cancelling",
        "Layers and categories with a large alpha and a small ||f(x)||",
        {"layer": "", "category": "", **dict.fromkeys(columns, ".2f")},
        rows,
        "" if rows else "No layer and category meets both conditions.",
    )


def _cancelling_claims(names: Mapping[str, str], rho: Mapping[str, float]) -> tuple[Claim, ...]:
    special, other = [c for c in CATEGORIES if c != "other" and not isnan(rho[c])], rho["other"]
    ours, absent = ", ".join(f"{names[c]} {rho[c]:.2f}" for c in special), "no such tokens in the corpus"
    unknown = isnan(other) or not special
    keys = ("spearman.first", "spearman.separator", "spearman.punctuation")
    return (
        Claim(
            "alpha and ||f(x)|| cancel out on special tokens and punctuation: their correlation is negative "
            f"(below {-CLEAR})",
            all(rho[c] < -CLEAR for c in special) if special else None,
            ours or absent,
            quote_published(THEIRS, "[CLS] {:.2f}, [SEP] {:.2f}, comma and period {:.2f}", *keys),
        ),
        Claim(
            "They hardly cancel out on other tokens, where the correlation is weakest",
            None if unknown else all(abs(other) < abs(rho[c]) for c in special),
            absent if unknown else f"{other:.2f}; {ours}",
            quote_published(THEIRS, "{:.2f}", "spearman.other"),
        ),
    )
