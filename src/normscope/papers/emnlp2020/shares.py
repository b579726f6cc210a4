"""Shares of special tokens and punctuation, measured by weights and by norms (EMNLP 2020, Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from normscope.corpus.store import Run
from normscope.papers.common import layer_numbers, layer_picture, published_curves, scan_paper_side
from normscope.papers.emnlp2020 import shared
from normscope.papers.emnlp2020.shared import CATEGORIES, THEIRS
from normscope.papers.study import Runs, Setting
from normscope.reports.report import Claim, Picture, Section, Table

Curves = Mapping[str, Sequence[float]]  # category -> a value for each layer

TITLES = {"weight": "Weight-based: sum of alpha", "norm": "Norm-based: sum of ||alpha f(x)||"}
TEXT = (
    "How much attention each category of tokens receives: the sum over its tokens, averaged over the outputs of a "
    "sequence and then over sequences. With weights this is the sum of alpha (averaged over heads), which totals 1 "
    "over all categories; with norms it is {}."
)
LEVELS = {
    "heads": "the sum of ||alpha f(x)|| of each head, averaged over heads",
    "layer": "the sum of the layer's norms ||sum over heads of alpha f(x)||",
}


def shares_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 3: weight-based and norm-based analysis of [CLS], [SEP], punctuation and the rest, by layer."""
    names = shared.token_category_labels(setting.readings)
    frame = mean_category_shares(setting, runs[shared.PLAIN])
    layers = [layer + 1 for layer in sorted(frame["layer"].unique().to_list())]
    by_category = {c: frame.filter(pl.col("category") == c).sort("layer") for c in CATEGORIES}
    weight, norm, keys = (
        {c: some[column].cast(pl.Float64).to_list() for c, some in by_category.items()}
        for column in ("weight", "norm", "keys")
    )
    part = _shares_of_total(norm)
    present = [c for c in CATEGORIES if any(keys[c])]
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
    return Section(
        "shares",
        "Weights against norms: special tokens and punctuation",
        TEXT.format(LEVELS[setting.readings.share_norm]),
        (*pictures, table),
        _shares_claims(names, layers, weight, part),
        numbers,
    )


def mean_category_shares(setting: Setting, run: Run) -> pl.DataFrame:
    """layer (from 0), category -> `weight`, `norm` and `keys` (share of the tokens), each the mean over sequences."""
    norm = "norm" if setting.readings.share_norm == "heads" else "layer_norm"
    frame = shared.add_token_category(scan_paper_side(run, "category_shares", setting.side), setting.readings)
    sums = pl.col("weight", "keys").sum(), pl.col(norm).sum().alias("norm")
    part = pl.col("keys") / pl.col("keys").sum().over("id", "layer")
    return (
        frame.group_by("id", "layer", "category")
        .agg(*sums)
        .with_columns(part)
        .group_by("layer", "category")
        .agg(pl.col("weight", "norm", "keys").mean())
        .sort("layer", "category")
        .collect()
    )


def _shares_picture(what: str, curves: Curves, layers: Sequence[int], names: Mapping[str, str]) -> Picture:
    theirs = published_curves(THEIRS, {names[c]: f"share.{what}.{c}.L{{}}" for c in curves}, len(layers))
    series = {names[c]: curves[c] for c in curves}
    ylabel, note = TITLES[what].partition(": ")[2], f"Dashed: {shared.REFERENCE}." if theirs else ""
    return layer_picture(f"fig3-{what}", f"Fig. 3. {TITLES[what]}", series, layers, ylabel, note, reference=theirs)


def _shares_of_total(curves: Curves) -> dict[str, list[float]]:
    """Each category's share of the sum over categories, by layer."""
    sums = [sum(values) for values in zip(*(curves[c] for c in CATEGORIES), strict=True)]
    return {c: [value / total for value, total in zip(curves[c], sums, strict=True)] for c in CATEGORIES}


def _shares_claims(names: Mapping[str, str], layers: Sequence[int], weight: Curves, part: Curves) -> tuple[Claim, ...]:
    theirs, norms = (
        published_curves(THEIRS, {c: f"share.{what}.{c}.L{{}}" for c in CATEGORIES}, 12) for what in ("weight", "norm")
    )
    their_part = _shares_of_total(norms)
    marks = names["punctuation"]
    claims = []
    for some, what in (
        (("first", "separator"), "[CLS] and [SEP] together"),
        (("punctuation",), marks[0].upper() + marks[1:]),
    ):
        ours, by_weight, by_norm = _shares_at_weight_peak(layers, weight, part, some)
        claims.append(
            Claim(
                f"{what} receive much weight but contribute little: in the layer where their weight peaks, their share "
                "of the norms is less than half their share of the weight",
                by_norm < by_weight / 2 if by_weight > 0 else None,
                ours if by_weight > 0 else "no such tokens in the corpus",
                _shares_at_weight_peak(range(1, 13), theirs, their_part, some)[0],
            )
        )
    least = min(part["other"])
    ordinary = Claim(
        "Measured by norms, ordinary tokens contribute most in every layer",
        least > 0.5,
        f"at least {100 * least:.0f} % (layer {layers[part['other'].index(least)]})",
        f"at least {100 * min(their_part['other']):.0f} %",
    )
    return (*claims, ordinary)


def _shares_at_weight_peak(
    layers: Sequence[int], weight: Curves, part: Curves, some: Sequence[str]
) -> tuple[str, float, float]:
    """The layer where the categories together receive most weight, described; their weight and norm shares there."""
    sums = [sum(values) for values in zip(*(weight[c] for c in some), strict=True)]
    at = max(range(len(sums)), key=sums.__getitem__)
    norm = sum(part[c][at] for c in some)
    text = f"layer {layers[at]}: {100 * sums[at]:.0f} % of the weight, {100 * norm:.0f} % of the norms"
    return text, sums[at], norm
