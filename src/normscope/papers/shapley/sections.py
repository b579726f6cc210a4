"""The sections of the Shapley study."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.measures.uncertainty import decide_at_least, resample_means
from normscope.papers.common import layer_picture
from normscope.papers.resampling import estimates_along, pick
from normscope.papers.shapley.measures import FEW, KEYS, PERMUTATIONS
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate, majority
from normscope.reports.report import Claim, Section, Table

RUN = "plain"
ITEMS = "entries"
IG = "integrated gradients"
ByScope = dict[str, list[dict[str, Any]]]  # scope -> its means by layer, each by key
COLUMNS = {
    "spearman": "Spearman",
    "repeat": "two draws",
    "difference": "difference",
    "norms": "norms",
    "same_top": "same largest",
}
AGREEMENT = (
    "The feed-forward's activation g(a) of the sum a = sum of z_j is distributed over the tokens j and the biases. "
    "Integrated gradients give every token the same coefficient, g(a) / a. The Shapley value of a token, computed for "
    "each hidden unit separately, is its mean marginal contribution over all orders in which the tokens can be added; "
    "it takes into account what the unit does when other tokens are absent.\n\n"
    "Shapley values are exact for inputs of at most {} tokens ({} entries) and estimated from {} random orders for "
    "longer ones ({} entries)."
)
AGREEMENT_NOTE = (
    "Spearman: correlation of the two maps. Two draws: correlation of two Shapley maps from different random orders, "
    "an upper limit set by sampling. Difference: mean |IG - Shapley| of the cells divided by the mean cell. Norms: sum "
    "of all cells with IG divided by the sum with Shapley values. Same largest: share of outputs whose largest "
    "contribution from another token comes from the same token."
)
CONCLUSION = (
    "With integrated gradients, the FF paper finds that feed-forward blocks change the maps and that the components "
    "after them undo part of the change. Repeating the analysis with Shapley values shows whether this is a property "
    "of the model or of the attribution method."
)


def shapley_agreement_section(setting: Setting, runs: Runs) -> Section:
    """How much the maps with integrated gradients and with Shapley values differ."""
    means = _shapley_means(runs)
    counts = runs[RUN].scan("shapley").group_by("exact").agg(pl.col("id").n_unique()).collect()
    entries = {bool(exact): int(number) for exact, number in counts.iter_rows()}
    title = "Integrated gradients against Shapley values"
    table = Table.of(
        "agreement",
        title,
        {"scope": "", "layer": "", **dict.fromkeys(COLUMNS.values(), ".3f")},
        _mean_rows(means, *COLUMNS),
        AGREEMENT_NOTE,
    )
    series = {scope: [row["spearman"] for row in some] for scope, some in means.items()}
    series |= {f"{scope}, two draws": [row["repeat"] for row in some] for scope, some in means.items()}
    whole = list(means.values())[-1]
    layers = range(1, len(whole) + 1)
    lowest = min(row["spearman"] for row in whole)
    same = sum(row["same_top"] for row in whole) / len(whole)
    scope = list(means)[-1]
    ranked, tops = (resample_means(_entry_values(runs, scope, key)) for key in ("spearman", "same_top"))
    top = tops.map(lambda found: found[..., 0].mean(-1))
    claims = (
        decided_claim(
            "Integrated gradients rank the cells of whole layers as Shapley values do (above 0.95 in every layer)",
            estimates_along(ranked.map(lambda found: found[..., 0] - 0.95), ITEMS),
            f"lowest correlation of a layer {lowest:.3f}",
            own=True,
        ),
        decided_claim(
            "For nine of ten outputs both have the same largest other input",
            top.map(lambda found: found - 0.9).estimate(ITEMS),
            f"{100 * same:.0f} %",
            evidence=describe_estimate(top.map(lambda found: 100 * found).estimate(ITEMS), ".0f", " %"),
            own=True,
        ),
    )
    numbers = {
        f"{key}.{scope}.L{row['layer'] + 1}": row[key] for scope, some in means.items() for row in some for key in KEYS
    }
    text = AGREEMENT.format(FEW, entries.get(True, 0), PERMUTATIONS, entries.get(False, 0))
    parts = (table, layer_picture("agreement-chart", title, series, layers, "Spearman's correlation"))
    return Section("agreement", "How much the maps differ", text, parts, claims, numbers)


def shapley_conclusion_section(setting: Setting, runs: Runs) -> Section:
    """Whether the FF paper's findings about feed-forward blocks depend on the gate."""
    means = _shapley_means(runs)
    title = "Correlation with the map before the feed-forward"
    table = Table.of(
        "before-after",
        title,
        {"scope": "", "layer": "", "by IG": ".3f", "by Shapley": ".3f"},
        _mean_rows(means, "before_ig", "before_shapley"),
        "The lower the correlation, the more the feed-forward changes the map.",
    )
    scope, some = next(iter(means.items()))
    ig, values = ([row[key] for row in some] for key in ("before_ig", "before_shapley"))
    series, layers = {"by IG": ig, "by Shapley": values}, range(1, len(values) + 1)
    claims = _conclusion_claims(runs, means)
    parts = (table, layer_picture("before-after-chart", title, series, layers, f"correlation, {scope}"))
    return Section("conclusion", "Does the paper's conclusion depend on the gate?", CONCLUSION, parts, claims)


def _conclusion_claims(runs: Runs, means: ByScope) -> tuple[Claim, ...]:
    """The FF paper's two findings with Shapley values; the verdicts with integrated gradients are given as well."""
    (first, some), (last, ends) = (list(means.items())[n] for n in (0, -1))
    after, end = ([row["before_shapley"] for row in rows] for rows in (some, ends))
    keys = ("before_shapley", "before_ig")
    found = resample_means(np.stack([_entry_values(runs, scope, *keys) for scope in (first, last)], -1))
    changed = [estimates_along(pick(found, n, -2).map(lambda v: 0.95 - v[..., 0]), ITEMS) for n in range(2)]
    nearer = [estimates_along(pick(found, n, -2).map(lambda v: v[..., 1] - v[..., 0]), ITEMS) for n in range(2)]
    most = majority(len(some))
    text = (
        "With Shapley values, too, the components after the feed-forward undo part of the change: in most layers "
        "the map of the whole layer is closer to the map before the feed-forward"
    )
    return (
        decided_claim(
            "With Shapley values, too, the feed-forward changes the map in every layer (correlation below 0.95)",
            changed[0],
            " ".join(f"{value:.2f}" for value in after),
            under={IG: decide_at_least(len(some), changed[1])},
            own=True,
        ),
        decided_claim(
            text,
            nearer[0],
            " ".join(f"{value:.2f}" for value in end),
            at_least=most,
            under={IG: decide_at_least(most, nearer[1])},
            own=True,
        )
        if len(means) > 1
        else Claim(text, None, "nothing follows the feed-forward here", own=True),
    )


def _entry_values(runs: Runs, scope: str, *keys: str) -> NDArray[np.float64]:
    """(entries, layers, keys): the values of every entry."""
    rows = runs[RUN].scan("shapley").filter(pl.col("scope") == scope).sort("id", "layer").collect()
    found: NDArray[np.float64] = rows.select(keys).to_numpy().reshape(rows["id"].n_unique(), -1, len(keys))
    return found


def _mean_rows(means: ByScope, *keys: str) -> list[tuple[Any, ...]]:
    return [(scope, row["layer"] + 1, *(row[key] for key in keys)) for scope, some in means.items() for row in some]


def _shapley_means(runs: Runs) -> ByScope:
    table = runs[RUN].scan("shapley")
    frame = table.group_by("scope", "layer").agg(*(pl.col(key).mean() for key in KEYS)).collect()
    scopes = table.select("scope").unique(maintain_order=True).collect()["scope"].to_list()
    return {scope: list(frame.filter(pl.col("scope") == scope).sort("layer").iter_rows(named=True)) for scope in scopes}
