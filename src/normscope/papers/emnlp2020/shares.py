"""Shares of special tokens and punctuation, measured by weights and by norms (EMNLP 2020, Fig. 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.uncertainty import Estimate, decide_at_least, resample_means, undecided
from normscope.papers.common import layer_numbers, layer_picture, published_curves, scan_paper_side
from normscope.papers.emnlp2020 import shared
from normscope.papers.emnlp2020.shared import CATEGORIES, THEIRS
from normscope.papers.resampling import SEQUENCES, estimates_along
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports.report import Claim, Picture, Section, Table

Curves = Mapping[str, Sequence[float]]  # category -> a value for each layer

TITLES = {"weight": "Weight-based: sum of alpha", "norm": "Norm-based: sum of ||alpha f(x)||"}
SPECIAL = {"special": ("first", "separator"), "punctuation": ("punctuation",)}  # key of numbers -> categories
TEXT = (
    "How much attention each category of tokens receives: the sum over its tokens, averaged over the outputs of a "
    "sequence and then over sequences. With weights this is the sum of alpha (averaged over heads), which totals 1 "
    "over all categories; with norms it is {}. The maps show both sums for each head."
)
LEVELS = {
    "heads": "the sum of ||alpha f(x)|| of each head, averaged over heads",
    "layer": "the sum of the layer's norms ||sum over heads of alpha f(x)||",
}


@dataclass(frozen=True)
class CategoryShares:
    """The sums of each sequence, (sequences, layers, categories), in the order of CATEGORIES."""

    layers: tuple[int, ...]  # from 1
    weight: NDArray[np.float64]  # sums to 1 over categories
    norm: NDArray[np.float64]
    keys: NDArray[np.float64]  # share of the tokens


def shares_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 3: weight-based and norm-based analysis of [CLS], [SEP], punctuation and the rest, by layer and by head."""
    run, readings = runs[shared.PLAIN], setting.readings
    names = shared.token_category_labels(readings)
    found = read_category_shares(setting, run, readings)
    layers = found.layers
    weight, norm = (_curves_of_means(one) for one in (found.weight, found.norm))
    part = _shares_of_total(norm)
    present = [c for n, c in enumerate(CATEGORIES) if found.keys[:, :, n].any()]
    columns = {"layer": "", "category": "", "sum of alpha": ".3f", "sum of ||alpha f||": ".3f"}
    rows = (
        (layer, names[c], weight[c][n], norm[c][n], 100 * part[c][n]) for n, layer in enumerate(layers) for c in present
    )
    title = "Fig. 3. Weights and norms by category"
    table = Table.of("fig3-shares", title, {**columns, "share of norms (%)": ".1f"}, rows, folded=True)
    numbers: dict[str, float] = {}
    pictures = []
    for what, curves in (("weight", weight), ("norm", norm)):
        shown = {c: curves[c] for c in present}
        pictures.append(_shares_picture(what, shown, layers, names))
        for c, values in shown.items():
            numbers |= layer_numbers(f"share.{what}.{c}", values, layers)
    for key, some in SPECIAL.items():
        at = _weight_peak(weight, some)
        if weight_there := sum(weight[c][at] for c in some):
            numbers[f"share_at_peak.{key}.weight"] = weight_there
            numbers[f"share_at_peak.{key}.norm"] = sum(part[c][at] for c in some)
    return Section(
        "shares",
        "Weights against norms: special tokens and punctuation",
        TEXT.format(LEVELS[readings.share_norm]),
        (*pictures, *_head_shares(setting, run, {c: names[c] for c in present}), table),
        _shares_claims(setting, run, found, names),
        numbers,
    )


def read_category_shares(setting: Setting, run: Run, readings: Any) -> CategoryShares:
    """The sums of each category in each sequence and layer."""
    norm = "norm" if readings.share_norm == "heads" else "layer_norm"
    frame = shared.add_token_category(scan_paper_side(run, "category_shares", setting.side), readings)
    keys = ("id", "layer", "category")
    sums = pl.col("weight", "keys").sum(), pl.col(norm).sum().alias("norm")
    found = frame.sort("id", "layer", "kind").group_by(keys).agg(*sums).sort(keys).collect()
    layers = sorted(found["layer"].unique().to_list())
    order = [sorted(CATEGORIES).index(category) for category in CATEGORIES]
    weight, norms, count = (
        found[name].cast(pl.Float64).to_numpy().reshape(-1, len(layers), len(CATEGORIES))[..., order]
        for name in ("weight", "norm", "keys")
    )
    return CategoryShares(tuple(layer + 1 for layer in layers), weight, norms, count / count.sum(-1, keepdims=True))


def _curves_of_means(table: NDArray[np.float64]) -> dict[str, list[float]]:
    """category -> the mean over sequences in each layer."""
    return dict(zip(CATEGORIES, table.mean(0).T.tolist(), strict=True))


def _shares_picture(what: str, curves: Curves, layers: Sequence[int], names: Mapping[str, str]) -> Picture:
    theirs = published_curves(THEIRS, {names[c]: f"share.{what}.{c}.L{{}}" for c in curves}, len(layers))
    series = {names[c]: curves[c] for c in curves}
    ylabel, note = TITLES[what].partition(": ")[2], f"Dashed: {shared.REFERENCE}." if theirs else ""
    return layer_picture(f"fig3-{what}", f"Fig. 3. {TITLES[what]}", series, layers, ylabel, note, reference=theirs)


def _head_shares(setting: Setting, run: Run, names: Mapping[str, str]) -> Iterator[Picture | Table]:
    """Maps of both sums for each layer, head and category, and the numbers as a table."""
    keys = ("layer", "head", "category")
    frame = shared.add_token_category(scan_paper_side(run, "head_shares", setting.side), setting.readings)
    sequences = frame.select(pl.col("id").n_unique()).collect().item()
    sums = (
        frame.filter(pl.col("category").is_in(list(names)))
        .sort("id", "layer", "head", "kind")
        .group_by(keys)
        .agg(pl.col("weight", "norm").sum() / sequences)
        .sort(keys)
        .collect()
    )
    for what, title in TITLES.items():
        panels: dict[str, dict[shared.Head, float]] = {name: {} for name in names.values()}
        for layer, head, category, value in sums.select(*keys, what).iter_rows():
            panels[names[category]][layer, head] = value
        note = "Mean over the outputs of a sequence, then over sequences. Each map has its own colour scale."
        yield shared.head_maps_picture(f"fig3-{what}-heads", f"{title} in each head", panels, note)
    columns = {"layer": "", "head": "", "category": "", "sum of alpha": ".3f", "sum of ||alpha f||": ".3f"}
    rows = ((layer + 1, head + 1, names[c], *both) for layer, head, c, *both in sums.iter_rows())
    yield Table.of("fig3-by-head", "Weights and norms by head and category", columns, rows, folded=True)


def _shares_of_total(curves: Curves) -> dict[str, list[float]]:
    """Each category's share of the sum over categories, by layer."""
    sums = [sum(values) for values in zip(*(curves[c] for c in CATEGORIES), strict=True)]
    return {c: [value / total for value, total in zip(curves[c], sums, strict=True)] for c in CATEGORIES}


def _shares_claims(setting: Setting, run: Run, found: CategoryShares, names: Mapping[str, str]) -> tuple[Claim, ...]:
    theirs, norms = (
        published_curves(THEIRS, {c: f"share.{what}.{c}.L{{}}" for c in CATEGORIES}, 12) for what in ("weight", "norm")
    )
    their_part = _shares_of_total(norms)
    weight, part = _curves_of_means(found.weight), _shares_of_total(_curves_of_means(found.norm))
    changed = shared.other_readings(setting.readings, share_norm=tuple(LEVELS), punctuation=("comma-period", "all"))
    others = {name: read_category_shares(setting, run, readings) for name, readings in changed.items()}
    marks = names["punctuation"]
    claims = []
    for some, what in (
        (SPECIAL["special"], "[CLS] and [SEP] together"),
        (SPECIAL["punctuation"], marks[0].upper() + marks[1:]),
    ):
        margin, share = _peak_margin(found, some)
        there = any(weight[c][0] for c in some)
        claims.append(
            decided_claim(
                f"{what} receive much weight but contribute little: in the layer where their weight peaks, their share "
                "of the norms is less than half their share of the weight",
                margin,
                _describe_peak(found.layers, weight, part, some) if there else "no such tokens in the corpus",
                _describe_peak(range(1, 13), theirs, their_part, some),
                evidence=describe_estimate(share, name="share of the norms / share of the weight"),
                under={name: _peak_margin(other, some)[0].decide() for name, other in others.items()},
            )
        )
    margins, least = _majority_margins(found), min(part["other"])
    ordinary = decided_claim(
        "Measured by norms, ordinary tokens contribute most in every layer",
        margins,
        f"at least {100 * least:.0f} % (layer {found.layers[part['other'].index(least)]})",
        f"at least {100 * min(their_part['other']):.0f} %",
        layers=found.layers,
        under={name: decide_at_least(len(margins), _majority_margins(other)) for name, other in others.items()},
    )
    return (*claims, ordinary)


def _weight_peak(weight: Curves, some: Sequence[str]) -> int:
    """The index of the layer where the categories together receive most weight."""
    sums = [sum(values) for values in zip(*(weight[c] for c in some), strict=True)]
    return max(range(len(sums)), key=sums.__getitem__)


def _describe_peak(layers: Sequence[int], weight: Curves, part: Curves, some: Sequence[str]) -> str:
    """The layer where the categories together receive most weight, and their shares there."""
    at = _weight_peak(weight, some)
    by_weight, by_norm = (sum(curves[c][at] for c in some) for curves in (weight, part))
    return f"layer {layers[at]}: {100 * by_weight:.0f} % of the weight, {100 * by_norm:.0f} % of the norms"


def _peak_margin(found: CategoryShares, some: Sequence[str]) -> tuple[Estimate, Estimate]:
    """At the layer of the data's peak: half the share of the weight minus the share of the norms, and the quotient of
    the shares."""
    at = _weight_peak(_curves_of_means(found.weight), some)
    chosen = [CATEGORIES.index(c) for c in some]
    both = np.stack([found.weight[:, at], found.norm[:, at]], 1)  # (sequences, 2, categories)
    if not both[:, 0, chosen].any():
        absent = undecided(np.nan, "no such tokens in the corpus")
        return absent, absent
    shares = resample_means(both).map(lambda sums: sums[..., chosen].sum(-1) / sums.sum(-1))
    margin = shares.map(lambda share: share[..., 0] / 2 - share[..., 1])
    return margin.estimate(SEQUENCES), shares.map(lambda share: share[..., 1] / share[..., 0]).estimate(SEQUENCES)


def _majority_margins(found: CategoryShares) -> list[Estimate]:
    """The share of ordinary tokens in the norms of each layer, minus one half."""
    other = CATEGORIES.index("other")
    margins = resample_means(found.norm).map(lambda sums: sums[..., other] / sums.sum(-1) - 0.5)
    return estimates_along(margins)
