"""Whether alpha and ||f(x)|| cancel out (EMNLP 2020, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.correlation import OCTAVES, rank_resolution
from normscope.measures.uncertainty import Estimate, decide_at_least
from normscope.papers.common import CLEAR, finite_numbers, layer_picture, layer_table
from normscope.papers.emnlp2020 import pair_ranks, shared
from normscope.papers.emnlp2020.measures import GROUPS, NORM_BINS, WEIGHT_BINS
from normscope.papers.emnlp2020.pair_ranks import BinnedPairs, Jackknifed
from normscope.papers.emnlp2020.shared import CATEGORIES, REFERENCE, THEIRS
from normscope.papers.emnlp2020.shares import read_category_shares
from normscope.papers.published import quote_published
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim
from normscope.reports import map_charts
from normscope.reports.report import Cell, Claim, Picture, Section, Table, none_if_nan

COARSE_WEIGHTS = 1  # bins per octave in the figure
COARSE_NORMS = 4
TEXT = (
    "Each pair of a query and a key, in each layer and head, has a weight alpha and the key's ||f(x)||. Spearman's "
    "correlation of the two is computed over all pairs whose key belongs to a category. {} The intervals come from a "
    "jackknife, which leaves out each of {} groups of sequences in turn.\n\n"
    "The last table lists layers and categories that combine a large alpha with a small ||f(x)||: their tokens receive "
    "at least {:g} times the weight of uniform attention, and their mean ||f(x)|| is at most {:g} times the layer's."
)
RANKED = "The ranks are exact: all {:,} pairs are ranked individually."
BINNED = (
    f"The {{:,}} pairs {{}}: they are counted in logarithmic bins, {WEIGHT_BINS} per octave for alpha and {NORM_BINS} "
    "for ||f(x)||, and pairs in the same bin are ties. Resolution is the share of the rank variance that lies between "
    "bins (1: no binning)."
)
BINNED_WHY = {
    "exact": f"are more than {pair_ranks.EXACT_PAIRS:,}, too many to rank individually",
    "binned": "are not ranked individually, as requested",
}


def correlation_section(setting: Setting, runs: Runs) -> Section:
    """Table 2: Spearman's correlation of alpha and ||f(x)|| by category; by layer; and where they cancel."""
    readings, run = setting.readings, runs[shared.PLAIN]
    names = shared.token_category_labels(readings)
    counts = pair_ranks.pair_counts(setting, run, readings)
    bins = {c: pair_ranks.category_bins(counts, c) for c in CATEGORIES}
    pairs = {c: int(number.sum()) for c, (_, _, number) in bins.items()}
    present = [c for c in CATEGORIES if pairs[c]]
    layers = sorted(counts["layer"].unique().to_list())
    exact = pair_ranks.has_ranked_pairs(setting, run)
    if exact:
        rho, by_layer = pair_ranks.exact_correlations(setting, run, layers)
    else:
        rho, by_layer = pair_ranks.binned_correlations(counts, layers)
    found = pair_ranks.jackknifed_correlations(counts, rho)
    total = sum(pairs.values())
    how = RANKED.format(total) if exact else BINNED.format(total, BINNED_WHY[readings.ranks])
    title, numbered = "Spearman's correlation of alpha and ||f(x)||", [layer + 1 for layer in layers]
    shown = {names[c]: by_layer[c] for c in present}
    cells = {name: [none_if_nan(value) for value in values] for name, values in shown.items()}
    return Section(
        "correlation",
        "Weights against ||f(x)||",
        TEXT.format(how, GROUPS, readings.large_weight, readings.small_norm),
        (
            _correlation_table(f"Table 2. {title}", names, bins, found, exact),
            _joint_distribution({names[c]: _coarse_bins(*bins[c]) for c in present}),
            layer_picture("table2-layers", f"{title} in each layer", shown, numbered, "Spearman"),
            layer_table("table2-by-layer", f"{title} by layer", cells, numbered, ".2f", folded=len(layers) > 20),
            _cancelling_table(setting, run, names),
        ),
        _cancelling_claims(setting, run, names, found),
        finite_numbers({f"spearman.{c}": rho[c] for c in present} | {f"pairs.{c}": pairs[c] for c in present}),
    )


def _correlation_table(
    title: str,
    names: Mapping[str, str],
    bins: Mapping[str, BinnedPairs],
    found: Mapping[str, Jackknifed],
    exact: bool,
) -> Table:
    """Table 2 with the interval of each correlation; the resolution of the bins if the ranks are binned."""
    columns = {"category": "", "Spearman": ".3f", "from": ".3f", "to": ".3f", "pairs": ","}
    columns |= {} if exact else {"resolution of alpha": ".5f", "resolution of ||f||": ".5f"}
    columns |= {f"Spearman, {REFERENCE}": ".2f", "pairs, published": ","}
    rows = []
    for c, (weights, norms, number) in bins.items():
        one = found[c].estimate()
        resolutions = () if exact else (none_if_nan(rank_resolution(some, number)) for some in (weights, norms))
        theirs = (THEIRS.get(f"spearman.{c}"), int(THEIRS.get(f"pairs.{c}", 0)) or None)
        values = (none_if_nan(value) for value in (one.value, one.low, one.high))
        rows.append((names[c], *values, int(number.sum()), *resolutions, *theirs))
    return Table.of("table2-spearman", title, columns, rows, "From, to: 95 % interval.")


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
    shares = read_category_shares(setting, run, setting.readings)
    weights, keys = shares.weight.mean(0), shares.keys.mean(0)
    for (n, layer), (m, category) in product(enumerate(shares.layers), enumerate(CATEGORIES)):
        if not keys[n, m]:
            continue
        weight, mean = weights[n, m], means[layer - 1, category].mean
        times, norm = weight / keys[n, m], mean / whole[layer - 1,].mean
        if times >= setting.readings.large_weight and norm <= setting.readings.small_norm:
            rows.append((layer, names[category], times, weight, mean, norm))
    columns = ("alpha / uniform", "sum of alpha", "mean ||f||", "mean ||f|| / layer mean")
    return Table.of(
        "table2-cancelling",
        "Layers and categories with a large alpha and a small ||f(x)||",
        {"layer": "", "category": "", **dict.fromkeys(columns, ".2f")},
        rows,
        "" if rows else "No layer and category meets both conditions.",
    )


def _cancelling_claims(
    setting: Setting, run: Run, names: Mapping[str, str], found: Mapping[str, Jackknifed]
) -> tuple[Claim, ...]:
    special = [c for c in CATEGORIES if c != "other" and not isnan(found[c].value)]
    ours, absent = "; ".join(f"{names[c]} {found[c].value:.2f}" for c in special), "no such tokens in the corpus"
    unknown = isnan(found["other"].value) or not special
    negative, weakest = _cancelling_margins(found)
    changed = {}
    for reading, readings in shared.other_readings(setting.readings, punctuation=("comma-period", "all")).items():
        counts = pair_ranks.pair_counts(setting, run, readings)
        rho, _ = pair_ranks.binned_correlations(counts, ())
        changed[reading] = _cancelling_margins(pair_ranks.jackknifed_correlations(counts, rho))
    keys = ("spearman.first", "spearman.separator", "spearman.punctuation")
    return (
        decided_claim(
            "alpha and ||f(x)|| cancel out on special tokens and punctuation: their correlation is negative "
            f"(below {-CLEAR})",
            negative,
            ours or absent,
            quote_published(THEIRS, "[CLS] {:.2f}, [SEP] {:.2f}, comma and period {:.2f}", *keys),
            evidence=_describe_by_category(names, {c: found[c].estimate() for c in special}),
            under={reading: _decide_all(margins) for reading, (margins, _) in changed.items()},
        ),
        decided_claim(
            "They hardly cancel out on other tokens, where the correlation is weakest",
            [] if unknown else weakest,
            absent if unknown else f"other {found['other'].value:.2f}; {ours}",
            quote_published(THEIRS, "{:.2f}", "spearman.other"),
            evidence=_describe_by_category(
                names, dict(zip(special, weakest, strict=False)), "|correlation| minus that of other tokens"
            ),
            under={reading: _decide_all(margins) for reading, (_, margins) in changed.items()},
        ),
    )


def _cancelling_margins(found: Mapping[str, Jackknifed]) -> tuple[list[Estimate], list[Estimate]]:
    """For each category of special tokens that occurs: -CLEAR - rho, and |rho| - |rho of other tokens|."""
    special = [one for c, one in found.items() if c != "other" and not isnan(one.value)]
    other, apart = found["other"], []
    if not isnan(other.value):
        both = ((one, abs(one.without) - abs(other.without)) for one in special)
        apart = [Jackknifed(abs(one.value) - abs(other.value), without).estimate() for one, without in both]
    return [one.estimate(CLEAR, -1) for one in special], apart


def _decide_all(margins: list[Estimate]) -> bool | None:
    return decide_at_least(len(margins), margins) if margins else None


def _describe_by_category(names: Mapping[str, str], found: Mapping[str, Estimate], what: str = "") -> str:
    """ "95 % intervals: [CLS] or first -0.3 to -0.2, comma, period -0.5 to -0.4 (jackknife over 16 groups)" """
    known = {c: one for c, one in found.items() if not isnan(one.low)}
    if not known:
        return "; ".join(dict.fromkeys(one.method for one in found.values()))
    ends = "; ".join(f"{names[c]} {one.low:.3f} to {one.high:.3f}" for c, one in known.items())
    return f"95 % intervals{f' of {what}' if what else ''}: {ends} ({next(iter(known.values())).method})"
