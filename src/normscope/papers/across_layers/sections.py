"""The sections of the study across layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import polars as pl

from normscope.papers.common import layer_numbers, layer_picture
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

RUN = "plain"
EXACT = (
    "For each input the model is frozen: attention weights, normalization statistics and the gates from integrated "
    "gradients keep the values of the forward pass, which makes everything else linear. Each state is then a sum of "
    "one vector per input token and a remainder from the biases. The share of an input is the norm of its vector "
    "divided by the sum of the norms of all inputs."
)
FIRST = (
    "How much the first token, which often receives much attention, contributes to the states of all other tokens. An "
    "even share is one over the number of inputs that can reach a state; in a causal model, those up to its own "
    "position."
)
SIDES = "A decoder state depends on the target tokens so far and, through cross-attention, on the source tokens."
METHODS = (
    "Methods that multiply the maps of single layers discard the directions of vectors, so contributions that cancel "
    "in the model do not cancel in these methods. The table shows how similarly they rank the cells of the map from "
    "the input, compared with the exact flow."
)
ENOUGH = 20  # decoder states a position needs to be drawn
SPEARMAN = "Spearman's correlation"


def input_spread_section(setting: Setting, runs: Runs) -> Section:
    """A token's own share and the effective number of inputs, from the input and within one layer."""
    layers, means = _flow_means(runs, pl.lit(True), "own", "inputs", "own_in_layer", "inputs_in_layer")
    own, inputs, *_ = means.values()
    columns = {"own share": ".3f", "inputs": ".2f", "own share in the layer": ".3f", "inputs in the layer": ".2f"}
    table = Table.of(
        "spread",
        "Inputs of a state by layer",
        {"layer": "", **columns},
        zip(layers, *means.values(), strict=True),
        "Means over all tokens of all entries. Inputs: the effective number, exp of the entropy of the shares.",
    )
    pictures = [
        layer_picture(
            name, title, {"from the input": means[key], "in the layer": means[f"{key}_in_layer"]}, layers, title.lower()
        )
        for name, key, title in (
            ("own-share", "own", "Share of the token itself"),
            ("inputs", "inputs", "Effective number of inputs"),
        )
    ]
    claims = (
        Claim(
            "The share of the token itself decreases from layer to layer",
            all(b < a for a, b in pairwise(own)),
            " ".join(f"{value:.2f}" for value in own),
        ),
        Claim(
            "The effective number of inputs is larger in the last layer than in the first",
            inputs[-1] > inputs[0],
            f"{inputs[-1]:.1f} against {inputs[0]:.1f}",
        ),
    )
    completeness = float(runs[RUN].scan("flow").select(pl.col("completeness").max()).collect().item())
    numbers = layer_numbers("own", own, layers) | layer_numbers("inputs", inputs, layers)
    numbers["completeness"] = completeness
    text = f"{EXACT}\n\nThe worst completeness error of any state is {completeness:.1e}."
    return Section("spread", "How inputs spread", text, (table, *pictures), claims, numbers)


def first_token_section(setting: Setting, runs: Runs) -> Section:
    """The share of the first token, an attention sink in many models."""
    layers, means = _flow_means(runs, pl.col("first").is_not_nan(), "first", "even")
    values, even = means["first"], means["even"][-1]
    claim = Claim(
        "The first token has more than its even share in the states of the last layer",
        values[-1] > even,
        f"{values[-1]:.3f}; an even share is {even:.3f}",
    )
    title = "Share of the first token in the states of other tokens"
    picture = layer_picture("first-chart", title, {"first token": values}, layers, "share in other tokens' states")
    table = Table.of("first", title, {"layer": "", "share": ".3f"}, zip(layers, values, strict=True))
    numbers = layer_numbers("first", values, layers)
    return Section("first", "The first token", FIRST, (table, picture), (claim,), numbers)


def source_share_section(setting: Setting, runs: Runs) -> Section:
    """The share of the source in the decoder states of an encoder-decoder."""
    layers, means = _flow_means(runs, pl.lit(True), "other_side")
    values = means["other_side"]
    last = runs[RUN].scan("flow").filter(pl.col("layer") == max(layers) - 1).group_by("position")
    by_position = last.agg(pl.col("other_side").mean(), pl.len().alias("count")).sort("position").collect()
    often = by_position.filter(pl.col("count") >= ENOUGH)
    title, columns = "Share of the source by layer", {"layer": "", "source": ".3f"}
    parts: list[Table | Picture] = [
        Table.of("source", f"{title} of the decoder", columns, zip(layers, values, strict=True)),
        layer_picture("source-chart", title, {"source": values}, layers, "share"),
    ]
    if len(often) > 1:
        chart = charts.line_chart(
            {"source": often["other_side"].to_list()},
            x=[n + 1 for n in often["position"].to_list()],
            xlabel="decoder position",
            ylabel="share of the source, last layer",
        )
        parts.append(Picture("source-position", "Share of the source by position, last layer", chart))
    statement = "In the last layer, the source contributes more to decoder states than the target tokens"
    claim = Claim(statement, values[-1] > 0.5, f"{values[-1]:.3f}")
    numbers = layer_numbers("source", values, layers)
    return Section("sides", "Source and target", SIDES, tuple(parts), (claim,), numbers)


def flow_agreement_section(setting: Setting, runs: Runs) -> Section:
    """How closely other methods agree with the exact flow."""
    groups = runs[RUN].scan("flow_agreement").group_by("method", "layer")
    series: dict[str, list[float]] = {}
    for method, _, value in groups.agg(pl.col("spearman").mean()).sort("method", "layer").collect().iter_rows():
        series.setdefault(method, []).append(value)
    layers = range(1, len(next(iter(series.values()))) + 1)
    title = f"{SPEARMAN} with the exact flow"
    table = Table.of(
        "agreement",
        title,
        {"method": "", **{f"layer {n}": ".2f" for n in layers}},
        ((name, *values) for name, values in series.items()),
        "Mean over entries, without cells that causal masking excludes.",
    )
    best = max(series, key=lambda name: series[name][-1])
    norms, weights = series["rollout:layer"][-1], series["rollout"][-1] if "rollout" in series else None
    without = "rollout of weights is not defined for encoder-decoders"
    claims = (
        Claim(
            "At the last layer, rollout of the norms of whole layers is closer to the exact flow than rollout of "
            "weights",
            None if weights is None else norms > weights,
            f"{norms:.2f}; {without}" if weights is None else f"{norms:.2f} against {weights:.2f}",
        ),
        Claim(
            "The best of these methods ranks inputs nearly as the exact flow does (correlation above 0.9)",
            series[best][-1] > 0.9,
            f"{best}: {series[best][-1]:.2f}",
        ),
    )
    numbers: dict[str, float] = {}
    for name, values in series.items():
        numbers |= layer_numbers(f"spearman.{name}", values)
    parts = (table, layer_picture("agreement-chart", title, series, layers, SPEARMAN))
    return Section("agreement", "Comparison of other methods with the exact flow", METHODS, parts, claims, numbers)


def _flow_means(runs: Runs, where: Any, *keys: str) -> tuple[list[int], dict[str, list[float]]]:
    """The layers, from 1, and for each key its means by layer over the selected rows."""
    groups = runs[RUN].scan("flow").filter(where).group_by("layer")
    found = groups.agg(*(pl.col(key).cast(pl.Float64).mean() for key in keys)).sort("layer").collect()
    return [layer + 1 for layer in found["layer"].to_list()], {key: found[key].to_list() for key in keys}
