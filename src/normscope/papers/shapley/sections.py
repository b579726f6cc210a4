"""The sections of the Shapley study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from normscope.papers import charts
from normscope.papers.report import Claim, Picture, Section, Table
from normscope.papers.shapley.measures import FEW, KEYS, PERMUTATIONS

if TYPE_CHECKING:
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

RUN = "plain"
Means = dict[str, list[dict[str, Any]]]  # scope -> its means by layer


def agreement(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """How much the maps differ."""
    means = _means(runs)
    counts = runs[RUN].scan("shapley").group_by("exact").agg(pl.col("id").n_unique()).collect()
    entries = {bool(exact): int(number) for exact, number in counts.iter_rows()}
    names = {
        "spearman": "Spearman",
        "repeat": "of two draws",
        "difference": "difference",
        "norms": "norms",
        "same_top": "same largest",
    }
    rows = [(scope, row["layer"] + 1, *(row[key] for key in names)) for scope, some in means.items() for row in some]
    formats = dict.fromkeys(names.values(), ".3f")
    table = Table(
        "agreement", "Integrated gradients against Shapley values",
        ("scope", "layer", *names.values()), tuple(rows), formats,
        "Spearman: correlation of both maps. Of two draws: of two Shapley maps from other orders, the most that "
        "sampling allows. Difference: mean |IG - Shapley| of cells over the mean cell. Norms: sum of all cells by IG "
        "over that by Shapley. Same largest: share of outputs whose largest input beside themselves is the same.",
    )  # fmt: skip
    depth = len(next(iter(means.values())))
    series = {scope: [row["spearman"] for row in some] for scope, some in means.items()}
    series |= {f"{scope}, two draws": [row["repeat"] for row in some] for scope, some in means.items()}
    chart = charts.line_chart(series, x=range(1, depth + 1), ylabel="Spearman's correlation")
    whole = list(means.values())[-1]
    lowest = min(row["spearman"] for row in whole)
    same = sum(row["same_top"] for row in whole) / depth
    claims = (
        Claim(
            "Maps of whole layers by integrated gradients rank cells as Shapley values do (above 0.95 in every layer)",
            lowest > 0.95,
            f"lowest of the layers {lowest:.3f}",
        ),
        Claim("Both name the same largest input for nine of ten outputs", same > 0.9, f"{100 * same:.0f} %"),
    )
    numbers = {
        f"{key}.{scope}.L{row['layer'] + 1}": row[key] for scope, some in means.items() for row in some for key in KEYS
    }
    text = (
        "The feed-forward's activation g(a) of a sum a = sum of z_j is split over the tokens j and the biases. "
        "Integrated gradients give every token the same coefficient, g(a) / a. The Shapley value of a token is its "
        "mean gain over all orders in which the players may join, for every hidden unit by itself: it asks what the "
        "unit does when others are absent.\n\n"
        f"All coalitions are taken for inputs of at most {FEW} tokens ({entries.get(True, 0)} entries), "
        f"{PERMUTATIONS} random orders for longer ones ({entries.get(False, 0)} entries)."
    )
    return Section(
        "agreement",
        "How much the maps differ",
        text,
        (table, Picture("agreement-chart", table.title, chart)),
        claims,
        numbers,
    )


def conclusion(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Whether what the FF paper says of feed-forward blocks depends on the gate."""
    means = _means(runs)
    rows = [
        (scope, row["layer"] + 1, row["before_ig"], row["before_shapley"])
        for scope, some in means.items()
        for row in some
    ]
    columns = ("scope", "layer", "by IG", "by Shapley")
    table = Table(
        "before-after", "Correlation with the map before the feed-forward", columns, tuple(rows),
        dict.fromkeys(columns[2:], ".3f"), "The lower, the more the feed-forward changed.",
    )  # fmt: skip
    depth = len(next(iter(means.values())))
    scope, some = next(iter(means.items()))
    ig, values = ([row[key] for row in some] for key in ("before_ig", "before_shapley"))
    chart = charts.line_chart(
        {"by IG": ig, "by Shapley": values}, x=range(1, depth + 1), ylabel=f"correlation, {scope}"
    )
    end = list(means.values())[-1]
    claims = (
        Claim(
            "The feed-forward changes the map in every layer by Shapley values too (correlation below 0.95)",
            all(value < 0.95 for value in values),
            " ".join(f"{value:.2f}" for value in values),
        ),
        Claim(
            "What follows the feed-forward undoes a part of it by Shapley values too: the whole layer is nearer to the "
            "map before, in most layers",
            sum(row["before_shapley"] > value for row, value in zip(end, values, strict=True)) > depth / 2
            if len(means) > 1
            else None,
            " ".join(f"{row['before_shapley']:.2f}" for row in end),
        ),
    )
    text = (
        "The FF paper finds, with integrated gradients, that feed-forward blocks change the maps and that what follows "
        "them undoes a part of it. Whether that is a property of the model or of the gate: the same with Shapley "
        "values."
    )
    return Section(
        "conclusion", "Does the paper's conclusion depend on the gate?", text,
        (table, Picture("before-after-chart", table.title, chart)), claims,
    )  # fmt: skip


def _means(runs: Mapping[str, Run]) -> Means:
    frame = runs[RUN].scan("shapley").group_by("scope", "layer").agg(*(pl.col(key).mean() for key in KEYS)).collect()
    scopes = runs[RUN].scan("shapley").select("scope").unique(maintain_order=True).collect()["scope"].to_list()
    return {scope: list(frame.filter(pl.col("scope") == scope).sort("layer").iter_rows(named=True)) for scope in scopes}
