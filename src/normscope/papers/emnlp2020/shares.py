"""What falls to special tokens and punctuation, by weights and by norms (EMNLP 2020, Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from normscope.papers import charts, published
from normscope.papers.emnlp2020.shared import (
    CATEGORIES,
    PAPER,
    PLAIN,
    REFERENCE,
    labels,
    published_curves,
    rows_of,
    with_category,
)
from normscope.papers.report import Claim, Picture, Section, Table

if TYPE_CHECKING:
    import polars

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

Curves = Mapping[str, Sequence[float]]  # category -> a value for each layer

TEXT = (
    "How much of the attention falls to each category of tokens: the sum over its tokens, averaged over all outputs of "
    "a sequence, then over sequences. By weights the sum of alpha (averaged over heads), which is 1 for all tokens "
    "together; by norms {}."
)
LEVELS = {
    "heads": "the sum of ||alpha f(x)|| of each head, averaged over heads",
    "layer": "the sum of the norms ||sum over heads of alpha f(x)|| of the layer",
}


def shares(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Fig. 3: weight-based and norm-based analysis of [CLS], [SEP], punctuation and the rest, by layer."""
    names = labels(setting.readings)
    frame = by_category(setting, runs[PLAIN])
    layers = [layer + 1 for layer in sorted(frame["layer"].unique().to_list())]
    weight, norm = ({c: _curve(frame, c, column) for c in CATEGORIES} for column in ("weight", "norm"))
    part = _parts(norm)
    there = [c for c in CATEGORIES if any(_curve(frame, c, "keys"))]
    reference = published.reference(PAPER)
    columns = ("layer", "category", "sum of alpha", "sum of ||alpha f||", "of the layer's norms (%)")
    table = Table(
        "fig3-shares",
        "Fig. 3. Weights and norms by category",
        columns,
        tuple(
            (layer, names[c], weight[c][n], norm[c][n], 100 * part[c][n])
            for n, layer in enumerate(layers)
            for c in there
        ),
        dict(zip(columns[2:], (".3f", ".3f", ".1f"), strict=True)),
        folded=True,
    )
    pictures = (
        _drawn("weight", "Weight-based: sum of alpha", {c: weight[c] for c in there}, layers, names),
        _drawn("norm", "Norm-based: sum of ||alpha f(x)||", {c: norm[c] for c in there}, layers, names),
    )
    return Section(
        "shares",
        "Weights against norms: special tokens and punctuation",
        TEXT.format(LEVELS[setting.readings.share_norm]),
        (*pictures, table),
        _claims(names, layers, weight, part, _published_parts(reference)),
        {
            f"share.{what}.{category}.L{layer}": value
            for what, curves in (("weight", weight), ("norm", norm))
            for category in there
            for layer, value in zip(layers, curves[category], strict=True)
        },
    )


def by_category(setting: Setting, run: Run) -> polars.DataFrame:
    """layer (from 0), category -> `weight`, `norm` and `keys` (share of the tokens), each the mean over sequences."""
    import polars as pl

    norm = "norm" if setting.readings.share_norm == "heads" else "layer_norm"
    frame = with_category(rows_of(setting, run, "category_shares"), setting.readings)
    by_sequence = frame.group_by("id", "layer", "category").agg(
        pl.col("weight").sum(), pl.col(norm).sum().alias("norm"), pl.col("keys").sum()
    )
    part = pl.col("keys") / pl.col("keys").sum().over("id", "layer")
    return (
        by_sequence.with_columns(part)
        .group_by("layer", "category")
        .agg(pl.col("weight", "norm", "keys").mean())
        .sort("layer", "category")
        .collect()
    )


def _drawn(what: str, title: str, curves: Curves, layers: Sequence[int], names: Mapping[str, str]) -> Picture:
    keys = {names[c]: f"share.{what}.{c}" for c in curves}
    theirs = published_curves(published.reference(PAPER), keys, len(layers))
    series = {names[c]: curves[c] for c in curves}
    chart = charts.line_chart(series, x=layers, ylabel=title.partition(": ")[2], reference=theirs)
    return Picture(f"fig3-{what}", f"Fig. 3. {title}", chart, f"Dashed: {REFERENCE}." if theirs else "")


def _curve(frame: polars.DataFrame, category: str, column: str) -> list[float]:
    import polars as pl

    return [float(value) for value in frame.filter(pl.col("category") == category).sort("layer")[column]]


def _parts(curves: Curves) -> dict[str, list[float]]:
    """Each category's part of the sum over categories, by layer."""
    sums = [sum(values) for values in zip(*(curves[c] for c in CATEGORIES), strict=True)]
    return {c: [value / total for value, total in zip(curves[c], sums, strict=True)] for c in CATEGORIES}


def _published_parts(reference: Mapping[str, float]) -> tuple[Curves, Curves]:
    weight, norm = (
        published_curves(reference, {c: f"share.{what}.{c}" for c in CATEGORIES}, 12) for what in ("weight", "norm")
    )
    return (weight, _parts(norm)) if len(norm) == len(CATEGORIES) == len(weight) else ({}, {})


def _claims(
    names: Mapping[str, str], layers: Sequence[int], weight: Curves, part: Curves, theirs: tuple[Curves, Curves]
) -> tuple[Claim, ...]:
    claims = []
    for some, what in (
        (("first", "separator"), "[CLS] and [SEP] together"),
        (("punctuation",), names["punctuation"][0].upper() + names["punctuation"][1:]),
    ):
        at, by_weight, by_norm = _peak(weight, part, some)
        claims.append(
            Claim(
                f"{what} draw much weight, but contribute little: where they have most weight, their part of the "
                "norms is less than half of it",
                by_norm < by_weight / 2 if by_weight > 0 else None,
                _weighed(layers, at, by_weight, by_norm) if by_weight > 0 else "there is no such token",
                _weighed(range(1, 13), *_peak(*theirs, some)) if theirs[0] else "",
            )
        )
    least = min(part["other"])
    claims.append(
        Claim(
            "By norms, ordinary tokens contribute most in every layer",
            least > 0.5,
            f"at least {100 * least:.0f} % (layer {layers[part['other'].index(least)]})",
            f"at least {100 * min(theirs[1]['other']):.0f} %" if theirs[0] else "",
        )
    )
    return tuple(claims)


def _peak(weight: Curves, part: Curves, some: Sequence[str]) -> tuple[int, float, float]:
    """The place of the layer where some categories have most weight, their weight and their part of the norms there."""
    sums = [sum(values) for values in zip(*(weight[c] for c in some), strict=True)]
    at = max(range(len(sums)), key=sums.__getitem__)
    return at, sums[at], sum(part[c][at] for c in some)


def _weighed(layers: Sequence[int], at: int, weight: float, norm: float) -> str:
    return f"layer {layers[at]}: {100 * weight:.0f} % of the weight, {100 * norm:.0f} % of the norms"
