"""The sections of the Shapley study."""

from __future__ import annotations

from typing import Any

import polars as pl

from normscope.papers.shapley.measures import FEW, KEYS, PERMUTATIONS
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

RUN = "plain"
ByScope = dict[str, list[dict[str, Any]]]  # scope -> its means by layer, each by key
COLUMNS = {
    "spearman": "Spearman",
    "repeat": "of two draws",
    "difference": "difference",
    "norms": "norms",
    "same_top": "same largest",
}
AGREEMENT = (
    "The feed-forward's activation g(a) of a sum a = sum of z_j is split over the tokens j and the biases. Integrated "
    "gradients give every token the same coefficient, g(a) / a. The Shapley value of a token is its mean gain over "
    "all orders in which the players may join, for every hidden unit by itself: it asks what the unit does when "
    "others are absent.\n\n"
    "All coalitions are taken for inputs of at most {} tokens ({} entries), {} random orders for longer ones ({} "
    "entries)."
)
AGREEMENT_NOTE = (
    "Spearman: correlation of both maps. Of two draws: of two Shapley maps from different orders, the most that "
    "sampling allows. Difference: mean |IG - Shapley| of cells over the mean cell. Norms: sum of all cells by IG over "
    "that by Shapley. Same largest: share of outputs whose largest input beside themselves is the same."
)
CONCLUSION = (
    "The FF paper finds, with integrated gradients, that feed-forward blocks change the maps and that what follows "
    "them undoes a part of it. To see whether that is a property of the model or of the gate, the same with Shapley "
    "values."
)


def gate_agreement_section(setting: Setting, runs: Runs) -> Section:
    """How much the maps differ."""
    means = _shapley_means(runs)
    counts = runs[RUN].scan("shapley").group_by("exact").agg(pl.col("id").n_unique()).collect()
    entries = {bool(exact): int(number) for exact, number in counts.iter_rows()}
    title = "Integrated gradients against Shapley values"
    table = Table.of(
        "agreement",
        title,
        {"scope": "", "layer": "", **dict.fromkeys(COLUMNS.values(), ".3f")},
        _scope_layer_rows(means, *COLUMNS),
        AGREEMENT_NOTE,
    )
    series = {scope: [row["spearman"] for row in some] for scope, some in means.items()}
    series |= {f"{scope}, two draws": [row["repeat"] for row in some] for scope, some in means.items()}
    whole = list(means.values())[-1]
    chart = charts.line_chart(series, x=range(1, len(whole) + 1), ylabel="Spearman's correlation")
    lowest = min(row["spearman"] for row in whole)
    same = sum(row["same_top"] for row in whole) / len(whole)
    claims = (
        Claim(
            "Maps of whole layers by integrated gradients rank cells as Shapley values do (above 0.95 in every layer)",
            lowest > 0.95,
            f"lowest of the layers {lowest:.3f}",
        ),
        Claim("Both have the same largest input for nine of ten outputs", same > 0.9, f"{100 * same:.0f} %"),
    )
    numbers = {
        f"{key}.{scope}.L{row['layer'] + 1}": row[key] for scope, some in means.items() for row in some for key in KEYS
    }
    text = AGREEMENT.format(FEW, entries.get(True, 0), PERMUTATIONS, entries.get(False, 0))
    parts = (table, Picture("agreement-chart", title, chart))
    return Section("agreement", "How much the maps differ", text, parts, claims, numbers)


def gate_conclusion_section(setting: Setting, runs: Runs) -> Section:
    """Whether the FF paper's findings about feed-forward blocks depend on the gate."""
    means = _shapley_means(runs)
    title = "Correlation with the map before the feed-forward"
    table = Table.of(
        "before-after",
        title,
        {"scope": "", "layer": "", "by IG": ".3f", "by Shapley": ".3f"},
        _scope_layer_rows(means, "before_ig", "before_shapley"),
        "The lower, the more the feed-forward changed.",
    )
    scope, some = next(iter(means.items()))
    ig, values = ([row[key] for row in some] for key in ("before_ig", "before_shapley"))
    series = {"by IG": ig, "by Shapley": values}
    chart = charts.line_chart(series, x=range(1, len(values) + 1), ylabel=f"correlation, {scope}")
    end = [row["before_shapley"] for row in list(means.values())[-1]]
    nearer = sum(a > b for a, b in zip(end, values, strict=True))
    claims = (
        Claim(
            "The feed-forward changes the map in every layer by Shapley values too (correlation below 0.95)",
            all(value < 0.95 for value in values),
            " ".join(f"{value:.2f}" for value in values),
        ),
        Claim(
            "What follows the feed-forward undoes a part of it by Shapley values too: the whole layer is closer to the "
            "map before, in most layers",
            nearer > len(values) / 2 if len(means) > 1 else None,
            " ".join(f"{value:.2f}" for value in end),
        ),
    )
    parts = (table, Picture("before-after-chart", title, chart))
    return Section("conclusion", "Does the paper's conclusion depend on the gate?", CONCLUSION, parts, claims)


def _scope_layer_rows(means: ByScope, *keys: str) -> list[tuple[Any, ...]]:
    return [(scope, row["layer"] + 1, *(row[key] for key in keys)) for scope, some in means.items() for row in some]


def _shapley_means(runs: Runs) -> ByScope:
    table = runs[RUN].scan("shapley")
    frame = table.group_by("scope", "layer").agg(*(pl.col(key).mean() for key in KEYS)).collect()
    scopes = table.select("scope").unique(maintain_order=True).collect()["scope"].to_list()
    return {scope: list(frame.filter(pl.col("scope") == scope).sort("layer").iter_rows(named=True)) for scope in scopes}
