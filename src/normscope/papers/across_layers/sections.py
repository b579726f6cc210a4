"""The sections of the study across layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import polars as pl

from normscope.papers.common import layer_numbers
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

RUN = "plain"
EXACT = (
    "The model is frozen at each input: attention weights, norm statistics and the gates of integrated gradients stay "
    "as the forward pass made them, and the rest is linear. A state after a layer is then a sum of vectors, one for "
    "each input token, and a remainder that comes from biases. Shares are those of the vectors' norms."
)
FIRST = (
    "How much of the states of all other tokens comes from the first one, which often gets much attention. An even "
    "share is one over the number of inputs that a state can have; in a causal model, those up to its own."
)
SIDES = "Inputs of a decoder's state are the tokens written so far and, through cross-attention, those of the source."
METHODS = (
    "Methods that multiply maps of single layers lose the directions of vectors: what cancels in the model does not "
    "cancel there. How similarly their maps from the input rank cells, compared with the exact flow."
)
ENOUGH = 20  # decoder states at a position whose mean is drawn


def input_spread_section(setting: Setting, runs: Runs) -> Section:
    """The share of the own input and the number of inputs, from the input and in one layer."""
    layers, means = _flow_means(runs, pl.lit(True), "own", "inputs", "own_in_layer", "inputs_in_layer")
    own, inputs, *_ = means.values()
    columns = {"own share": ".3f", "inputs": ".2f", "own share in the layer": ".3f", "inputs in the layer": ".2f"}
    table = Table.of(
        "spread",
        "Inputs of a state by layer",
        {"layer": "", **columns},
        zip(layers, *means.values(), strict=True),
        "Means over the tokens of all entries. Inputs: the effective number, exp of the entropy of the shares.",
    )
    pictures = [
        Picture(
            name,
            title,
            charts.line_chart(
                {"from the input": means[key], "in the layer": means[f"{key}_in_layer"]}, x=layers, ylabel=ylabel
            ),
        )
        for name, key, title, ylabel in (
            ("own-share", "own", "Share of the own token", "share of the own token"),
            ("inputs", "inputs", "Effective number of inputs", "effective number of inputs"),
        )
    ]
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
    completeness = float(runs[RUN].scan("flow").select(pl.col("completeness").max()).collect().item())
    numbers = layer_numbers("own", own, layers) | layer_numbers("inputs", inputs, layers)
    numbers["completeness"] = completeness
    text = f"{EXACT}\n\nThe worst completeness error of all states is {completeness:.1e}."
    return Section("spread", "How inputs spread", text, (table, *pictures), claims, numbers)


def first_token_section(setting: Setting, runs: Runs) -> Section:
    """The share of the first token, which is an attention sink in many models."""
    layers, means = _flow_means(runs, pl.col("first").is_not_nan(), "first", "even")
    values, even = means["first"], means["even"][-1]
    claim = Claim(
        "The first token has more than its even share in the states of the last layer",
        values[-1] > even,
        f"{values[-1]:.3f}, an even share is {even:.3f}",
    )
    title = "Share of the first token in the states of others"
    chart = charts.line_chart({"first token": values}, x=layers, ylabel="share in other tokens' states")
    table = Table.of("first", title, {"layer": "", "share": ".3f"}, zip(layers, values, strict=True))
    numbers = layer_numbers("first", values, layers)
    return Section("first", "The first token", FIRST, (table, Picture("first-chart", title, chart)), (claim,), numbers)


def source_share_section(setting: Setting, runs: Runs) -> Section:
    """What comes from the source of an encoder-decoder."""
    layers, means = _flow_means(runs, pl.lit(True), "other_side")
    values = means["other_side"]
    last = runs[RUN].scan("flow").filter(pl.col("layer") == max(layers) - 1).group_by("position")
    by_position = last.agg(pl.col("other_side").mean(), pl.len().alias("count")).sort("position").collect()
    often = by_position.filter(pl.col("count") >= ENOUGH)
    title, columns = "Share of the source by layer", {"layer": "", "source": ".3f"}
    chart = charts.line_chart({"source": values}, x=layers, ylabel="share")
    parts: list[Table | Picture] = [
        Table.of("source", f"{title} of the decoder", columns, zip(layers, values, strict=True)),
        Picture("source-chart", title, chart),
    ]
    if len(often) > 1:
        chart = charts.line_chart(
            {"source": often["other_side"].to_list()},
            x=[n + 1 for n in often["position"].to_list()],
            xlabel="position of the decoder",
            ylabel="share of the source, last layer",
        )
        parts.append(Picture("source-position", "Share of the source by position, last layer", chart))
    statement = "The source gives more to the decoder's last states than the tokens written before"
    claim = Claim(statement, values[-1] > 0.5, f"{values[-1]:.3f}")
    numbers = layer_numbers("source", values, layers)
    return Section("sides", "Source and target", SIDES, tuple(parts), (claim,), numbers)


def flow_agreement_section(setting: Setting, runs: Runs) -> Section:
    """Other methods against the exact flow."""
    groups = runs[RUN].scan("flow_agreement").group_by("method", "layer")
    series: dict[str, list[float]] = {}
    for method, _, value in groups.agg(pl.col("spearman").mean()).sort("method", "layer").collect().iter_rows():
        series.setdefault(method, []).append(value)
    layers = range(1, len(next(iter(series.values()))) + 1)
    title = "Spearman's correlation with the exact flow"
    table = Table.of(
        "agreement",
        title,
        {"method": "", **{f"layer {n}": ".2f" for n in layers}},
        ((name, *values) for name, values in series.items()),
        "Mean over entries; cells that a causal model cannot reach are left out.",
    )
    chart = charts.line_chart(series, x=layers, ylabel="Spearman's correlation")
    best = max(series, key=lambda name: series[name][-1])
    norms, weights = series["rollout:layer"][-1], series["rollout"][-1] if "rollout" in series else None
    without = "there is no rollout of weights over two sides"
    claims = (
        Claim(
            "At the last layer, rollout of the norms of whole layers is closer to the exact flow than rollout of "
            "weights",
            None if weights is None else norms > weights,
            f"{norms:.2f}; {without}" if weights is None else f"{norms:.2f} against {weights:.2f}",
        ),
        Claim(
            "The best of these methods ranks inputs as the exact flow does (above 0.9)",
            series[best][-1] > 0.9,
            f"{best}: {series[best][-1]:.2f}",
        ),
    )
    numbers: dict[str, float] = {}
    for name, values in series.items():
        numbers |= layer_numbers(f"spearman.{name}", values)
    parts = (table, Picture("agreement-chart", title, chart))
    return Section("agreement", "Other methods against the exact flow", METHODS, parts, claims, numbers)


def _flow_means(runs: Runs, where: Any, *keys: str) -> tuple[list[int], dict[str, list[float]]]:
    """The layers, counted from 1, and the means by layer over all rows that count."""
    groups = runs[RUN].scan("flow").filter(where).group_by("layer")
    found = groups.agg(*(pl.col(key).cast(pl.Float64).mean() for key in keys)).sort("layer").collect()
    return [layer + 1 for layer in found["layer"].to_list()], {key: found[key].to_list() for key in keys}
