"""Spearman's correlation of alpha and ||f(x)|| over all pairs of a query and a key, exact or binned, and its jackknife.

All pairs are stored and ranked if there are at most `EXACT_PAIRS`, which is known before the run from the lengths of
the sequences. The histogram in narrow bins is always stored: the jackknife leaves out its groups of sequences, and in
larger corpora the ranks are those of the bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.corpus.plan import Plan
from normscope.corpus.shards import encode_shard, split_into_shards
from normscope.corpus.store import Run
from normscope.inputs.item import Item
from normscope.measures.correlation import (
    ordinal_codes,
    spearman_of_codes,
    spearman_of_histogram,
    spearman_of_repeated,
)
from normscope.measures.uncertainty import Estimate, jackknife
from normscope.papers.common import scan_paper_side
from normscope.papers.emnlp2020 import shared
from normscope.papers.emnlp2020.measures import GROUPS, KINDS
from normscope.papers.emnlp2020.shared import CATEGORIES
from normscope.papers.runs import RunPlan
from normscope.papers.study import Setting

BinnedPairs = tuple[NDArray[Any], ...]  # bins of alpha, bins of ||f||, counts
Correlations = tuple[dict[str, float], dict[str, list[float]]]  # by category: over all layers, and in each layer

EXACT_PAIRS = 2**27  # most pairs that are ranked individually: 0.5 GB on disk, 2 GB of memory
PAIRS = "weight_norm_pairs"  # the table of all pairs
BINS = ("weight_bin", "norm_bin")
# Equal inputs have equal values: a word at one position in the first layer, [CLS] in every text, and in a causal model
# the common beginning of texts. Batches of different shapes compute them with different rounding, which must not order
# them.
DIGITS = 6


@dataclass(frozen=True)
class Jackknifed:
    """A correlation over the corpus, and without each group of sequences."""

    value: float
    without: NDArray[np.float64]  # (groups,)

    def estimate(self, offset: float = 0.0, sign: int = 1) -> Estimate:
        """The estimate of sign * value - offset."""
        without = (sign * self.without - offset).tolist()
        return jackknife(sign * self.value - offset, without, "groups of sequences")


def correlation_runs(setting: Setting) -> tuple[RunPlan, ...]:
    """The run that Table 2 reads; all pairs are stored if there are at most `EXACT_PAIRS`."""
    measures = ("weight_norm_counts", "category_shares", "norm_moments")
    exact = setting.readings.ranks == "exact" and has_few_pairs(setting)
    return (RunPlan(shared.PLAIN, (*measures, PAIRS) if exact else measures),)


def has_few_pairs(setting: Setting, most: int = EXACT_PAIRS) -> bool:
    """Whether the corpus has at most `most` pairs of a query and a key, over all layers and heads."""
    if not setting.data:
        return False
    side, pairs = setting.side, 0
    each = setting.depth * setting.lens.loaded.head_counts[0]
    for number, entries in split_into_shards(setting.read(), 16):
        for item in encode_shard(setting.lens, Plan(), number, entries).items:
            if isinstance(item, Item):
                length = int(item.sides[side].real.sum())
                pairs += each * (length * (length + 1) // 2 if side == "decoder" else length**2)
        if pairs > most:
            return False
    return True


def has_ranked_pairs(setting: Setting, run: Run) -> bool:
    """Whether the run stores all pairs, and they are to be used."""
    return setting.readings.ranks == "exact" and PAIRS in run.tables


def pair_counts(setting: Setting, run: Run, readings: Any) -> pl.DataFrame:
    """layer, category, weight_bin, norm_bin, group -> how many pairs, sorted so that sums have one order."""
    keys = ("layer", "category", *BINS, "group")
    return (
        _with_category(scan_paper_side(run, "weight_norm_counts", setting.side), readings)
        .group_by(keys)
        .agg(pl.col("count").sum())
        .sort(keys)
        .collect()
    )


def category_bins(counts: pl.DataFrame, category: str, layer: int | None = None) -> BinnedPairs:
    """The bins and counts of a category, in all layers or in one."""
    chosen = counts.filter((pl.col("category") == category) & (True if layer is None else pl.col("layer") == layer))
    sums = chosen.group_by(BINS).agg(pl.col("count").sum()).sort(BINS)
    return tuple(sums[name].to_numpy() for name in (*BINS, "count"))


def binned_correlations(counts: pl.DataFrame, layers: Sequence[int]) -> Correlations:
    """Spearman's correlation of the bins."""
    over_all = {c: spearman_of_histogram(*category_bins(counts, c)) for c in CATEGORIES}
    return over_all, {c: [spearman_of_histogram(*category_bins(counts, c, n)) for n in layers] for c in CATEGORIES}


def exact_correlations(setting: Setting, run: Run, layers: Sequence[int]) -> Correlations:
    """Spearman's correlation of the values themselves, rounded to `DIGITS` significant digits. One category is held in
    memory at a time."""
    frame = _with_category(scan_paper_side(run, PAIRS, setting.side), setting.readings)
    over_all, by_layer = {}, {}
    for category in CATEGORIES:
        found = frame.filter(pl.col("category") == category).select("layer", "weights", "norms", "queries").collect()
        over_all[category] = _spearman_of_lists_of_pairs(found)
        by_layer[category] = [_spearman_of_lists_of_pairs(found.filter(pl.col("layer") == n)) for n in layers]
    return over_all, by_layer


def jackknifed_correlations(counts: pl.DataFrame, values: Mapping[str, float]) -> dict[str, Jackknifed]:
    """category -> the correlation `values` [category], and the binned one without each group of sequences.

    A group without tokens of a category does not change its correlation; groups without any sequence are left out.
    """
    groups = sorted(counts["group"].unique().to_list())
    found = {}
    for category in CATEGORIES:
        chosen = counts.filter(pl.col("category") == category)
        weight, norm, group, number = (chosen[name].to_numpy() for name in (*BINS, "group", "count"))
        _, first, cells = np.unique(weight.astype(np.int64) * 2**16 + norm, return_index=True, return_inverse=True)
        x, y = ordinal_codes(weight[first]), ordinal_codes(norm[first])
        size = len(first) * GROUPS
        table = np.bincount(cells * GROUPS + group, weights=number, minlength=size).reshape(-1, GROUPS)
        without = [spearman_of_codes(x, y, table.sum(1) - table[:, one]) for one in groups]
        found[category] = Jackknifed(values[category], np.array(without))
    return found


def _with_category(frame: pl.LazyFrame, readings: Any) -> pl.LazyFrame:
    """The frame with a column `category` from the column `kind`, a place in KINDS."""
    categories = shared.token_kind_categories(readings)
    by_code = {code: categories[name] for code, name in enumerate(KINDS)}
    return frame.with_columns(pl.col("kind").replace_strict(by_code, return_dtype=pl.String).alias("category"))


def _spearman_of_lists_of_pairs(found: pl.DataFrame) -> float:
    if not len(found):
        return float("nan")
    weights, norms = (found[name].explode().round_sig_figs(DIGITS).to_numpy() for name in ("weights", "norms"))
    return spearman_of_repeated(weights, norms, found["queries"].explode().to_numpy())
