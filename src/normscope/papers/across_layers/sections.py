"""The sections of the study across layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import polars as pl

from normscope.papers import charts
from normscope.papers.report import Claim, Picture, Section, Table

if TYPE_CHECKING:
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

RUN = "plain"
EXACT = (
    "The model is frozen at each input: attention weights, norm statistics and the gates of integrated gradients stay "
    "as the forward pass made them, and what is left is linear. A state after a layer is then a sum of vectors, one "
    "for each input token, and a remainder that comes from biases. Shares are those of the vectors' norms."
)


def spread(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """The own input and how many inputs there are, from the input and in one layer."""
    means = _means(runs, pl.lit(True), "own", "inputs", "own_in_layer", "inputs_in_layer")
    layers = [row["layer"] for row in means]
    own, inputs = ([row[key] for row in means] for key in ("own", "inputs"))
    table = Table(
        "spread",
        "Inputs of a state by layer",
        ("layer", "own share", "inputs", "own share in the layer", "inputs in the layer"),
        tuple((row["layer"], row["own"], row["inputs"], row["own_in_layer"], row["inputs_in_layer"]) for row in means),
        {"own share": ".3f", "own share in the layer": ".3f", "inputs": ".2f", "inputs in the layer": ".2f"},
        "Means over the tokens of all entries. Inputs: the effective number, exp of the entropy of the shares.",
    )
    pictures = (
        Picture(
            "own-share",
            "Share of the own token",
            charts.line_chart(
                {"from the input": own, "in the layer": [row["own_in_layer"] for row in means]},
                x=layers,
                ylabel="share of the own token",
            ),
        ),
        Picture(
            "inputs",
            "Effective number of inputs",
            charts.line_chart(
                {"from the input": inputs, "in the layer": [row["inputs_in_layer"] for row in means]},
                x=layers,
                ylabel="effective number of inputs",
            ),
        ),
    )
    claims = (
        Claim(
            "The own input's share in a state falls from layer to layer",
            all(b < a for a, b in pairwise(own)),
            " ".join(f"{value:.2f}" for value in own),
        ),
        Claim(
            "States of the last layer have more inputs than those of the first",
            inputs[-1] > inputs[0],
            f"{inputs[-1]:.1f} against {inputs[0]:.1f}",
        ),
    )
    numbers = {f"own.L{n}": value for n, value in zip(layers, own, strict=True)}
    numbers |= {f"inputs.L{n}": value for n, value in zip(layers, inputs, strict=True)}
    numbers["completeness"] = float(runs[RUN].scan("flow").select(pl.col("completeness").max()).collect().item())
    text = f"{EXACT}\n\nThe worst completeness error of all states is {numbers['completeness']:.1e}."
    return Section("spread", "How inputs spread", text, (table, *pictures), claims, numbers)


def first(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """The first token's share, which is a sink of attention in many models."""
    means = _means(runs, pl.col("first").is_not_nan(), "first", "even")
    layers, values = [row["layer"] for row in means], [row["first"] for row in means]
    even = means[-1]["even"]
    table = Table(
        "first",
        "Share of the first token in the states of others",
        ("layer", "share"),
        tuple(zip(layers, values, strict=True)),
        {"share": ".3f"},
    )
    claim = Claim(
        "The first token has more than its even share in the states of the last layer",
        values[-1] > even,
        f"{values[-1]:.3f} where an even share is {even:.3f}",
    )
    chart = charts.line_chart({"first token": values}, x=layers, ylabel="share in other tokens' states")
    numbers = {f"first.L{n}": value for n, value in zip(layers, values, strict=True)}
    text = (
        "How much of the states of all other tokens comes from the first one, which attention likes to rest on. An "
        "even share is one part in as many as a state can have inputs, in a causal model those up to its own."
    )
    return Section(
        "first", "The first token", text, (table, Picture("first-chart", table.title, chart)), (claim,), numbers
    )


def sides(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Of an encoder-decoder: what comes from the source."""
    means = _means(runs, pl.lit(True), "other_side")
    layers, values = [row["layer"] for row in means], [row["other_side"] for row in means]
    by_place = (
        runs[RUN].scan("flow").filter(pl.col("layer") == max(layers) - 1).group_by("position")
        .agg(pl.col("other_side").mean(), pl.len().alias("count")).sort("position").collect()
    )  # fmt: skip
    kept = by_place.filter(pl.col("count") >= 20)
    parts: list[Table | Picture] = [
        Table(
            "source",
            "Share of the source by layer of the decoder",
            ("layer", "source"),
            tuple(zip(layers, values, strict=True)),
            {"source": ".3f"},
        ),
        Picture(
            "source-chart",
            "Share of the source by layer",
            charts.line_chart({"source": values}, x=layers, ylabel="share"),
        ),
    ]
    if len(kept) > 1:
        chart = charts.line_chart(
            {"source": kept["other_side"].to_list()},
            x=[n + 1 for n in kept["position"].to_list()],
            xlabel="position of the decoder",
            ylabel="share of the source, last layer",
        )
        parts.append(Picture("source-position", "Share of the source by position, last layer", chart))
    claim = Claim(
        "The source gives more to the decoder's last states than what was written before",
        values[-1] > 0.5,
        f"{values[-1]:.3f}",
    )
    numbers = {f"source.L{n}": value for n, value in zip(layers, values, strict=True)}
    text = (
        "Inputs of a decoder's state are the tokens written so far and, through cross-attention, those of the source."
    )
    return Section("sides", "Source and target", text, tuple(parts), (claim,), numbers)


def agreement(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Other methods against the exact flow."""
    found = (
        runs[RUN].scan("flow_agreement").group_by("method", "layer")
        .agg(pl.col("spearman").mean()).sort("method", "layer").collect()
    )  # fmt: skip
    series: dict[str, list[float]] = {}
    for method, _, value in found.iter_rows():
        series.setdefault(method, []).append(value)
    depth = len(next(iter(series.values())))
    columns = ("method", *(f"layer {n}" for n in range(1, depth + 1)))
    table = Table(
        "agreement",
        "Spearman's correlation with the exact flow",
        columns,
        tuple((name, *values) for name, values in series.items()),
        dict.fromkeys(columns[1:], ".2f"),
        "Mean over entries; cells that a causal model cannot reach are left out.",
    )
    chart = charts.line_chart(series, x=range(1, depth + 1), ylabel="Spearman's correlation")
    best = max(series, key=lambda name: series[name][-1])
    claims = (
        Claim(
            "At the last layer, rolled out norms of whole layers are nearer to the exact flow than rolled out weights",
            series["rollout:layer"][-1] > series["rollout"][-1] if "rollout" in series else None,
            f"{series['rollout:layer'][-1]:.2f} against {series['rollout'][-1]:.2f}"
            if "rollout" in series
            else f"{series['rollout:layer'][-1]:.2f}; weights are not rolled out over two sides",
        ),
        Claim("The best of these methods ranks inputs as the exact flow does (above 0.9)", series[best][-1] > 0.9,
              f"{best}: {series[best][-1]:.2f}"),
    )  # fmt: skip
    numbers = {f"spearman.{name}.L{n}": v for name, values in series.items() for n, v in enumerate(values, 1)}
    text = (
        "Methods that multiply maps of single layers lose the directions of vectors: what cancels in the model does "
        "not cancel there. How far their maps from the input rank cells as the exact flow does."
    )
    return Section(
        "agreement", "Other methods against the exact flow", text,
        (table, Picture("agreement-chart", table.title, chart)), claims, numbers,
    )  # fmt: skip


def _means(runs: Mapping[str, Run], where: Any, *keys: str) -> Sequence[dict[str, Any]]:
    """Means by layer, counted from 1, over all rows that count."""
    found = (
        runs[RUN].scan("flow").filter(where).group_by("layer")
        .agg(*(pl.col(key).cast(pl.Float64).mean() for key in keys)).sort("layer").collect()
    )  # fmt: skip
    return [{**row, "layer": row["layer"] + 1} for row in found.iter_rows(named=True)]
