"""The sections of the study across layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from normscope.measures.uncertainty import Resampled, resample_means
from normscope.papers.common import layer_numbers, layer_picture
from normscope.papers.resampling import estimates_along, pick
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

RUN = "plain"
ITEMS = "entries"
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
    resampled = _resample_flow_means(runs, pl.lit(True), "own", "inputs")
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
    steps = resampled.map(lambda found: found[..., :-1, 0] - found[..., 1:, 0])
    more = resampled.map(lambda found: found[..., -1, 1] - found[..., 0, 1]).estimate(ITEMS)
    claims = (
        decided_claim(
            "The share of the token itself decreases from layer to layer",
            estimates_along(steps, ITEMS),
            " ".join(f"{value:.2f}" for value in own),
            layers=layers[1:],
            own=True,
        ),
        decided_claim(
            "The effective number of inputs is larger in the last layer than in the first",
            more,
            f"{inputs[-1]:.1f} against {inputs[0]:.1f}",
            evidence=describe_estimate(more, ".2f", name="difference"),
            own=True,
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
    resampled = _resample_flow_means(runs, pl.col("first").is_not_nan(), "first", "even")
    margin = resampled.map(lambda found: found[..., -1, 0] - found[..., -1, 1]).estimate(ITEMS)
    claim = decided_claim(
        "The first token has more than its even share in the states of the last layer",
        margin,
        f"{values[-1]:.3f}; an even share is {even:.3f}",
        evidence=describe_estimate(margin, ".3f", name="difference"),
        own=True,
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
    share = _resample_flow_means(runs, pl.lit(True), "other_side").map(lambda found: found[..., -1, 0])
    claim = decided_claim(
        statement,
        share.map(lambda found: found - 0.5).estimate(ITEMS),
        f"{values[-1]:.3f}",
        evidence=describe_estimate(share.estimate(ITEMS), ".3f"),
        own=True,
    )
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
    numbers: dict[str, float] = {}
    for name, values in series.items():
        numbers |= layer_numbers(f"spearman.{name}", values)
    parts = (table, layer_picture("agreement-chart", title, series, layers, SPEARMAN))
    claims = _agreement_claims(runs, {name: values[-1] for name, values in series.items()})
    return Section("agreement", "Comparison of other methods with the exact flow", METHODS, parts, claims, numbers)


def _agreement_claims(runs: Runs, last: Mapping[str, float]) -> tuple[Claim, ...]:
    """Claims about the last layer, with the correlations of each entry."""
    table = runs[RUN].scan("flow_agreement")
    rows = table.filter(pl.col("layer") == pl.col("layer").max()).sort("method", "id").collect()
    found = resample_means(np.stack([rows.filter(rows["method"] == name)["spearman"].to_numpy() for name in last], 1))
    places = {name: n for n, name in enumerate(last)}
    text = "At the last layer, rollout of the norms of whole layers is closer to the exact flow than rollout of weights"
    norms = last["rollout:layer"]
    if "rollout" in last:
        a, b = places["rollout:layer"], places["rollout"]
        margin = found.map(lambda means: means[..., a] - means[..., b]).estimate(ITEMS)
        evidence = describe_estimate(margin, ".2f", name="difference")
        ours = f"{norms:.2f} against {last['rollout']:.2f}"
        first = decided_claim(text, margin, ours, evidence=evidence, own=True)
    else:
        ours = f"{norms:.2f}; rollout of weights is not defined for encoder-decoders"
        first = Claim(text, None, ours, own=True)
    best = max(last, key=lambda name: last[name])
    of_best = describe_estimate(pick(found, places[best]).estimate(ITEMS), ".2f")
    second = decided_claim(
        "The best of these methods ranks inputs nearly as the exact flow does (correlation above 0.9)",
        estimates_along(found.map(lambda means: means - 0.9), ITEMS),
        f"{best}: {last[best]:.2f}",
        at_least=1,
        evidence=f"{best}: {of_best}; the verdict allows for the choice among {len(last)} methods",
        own=True,
    )
    return first, second


def _resample_flow_means(runs: Runs, where: Any, *keys: str) -> Resampled:
    """(layers, keys): the means of `_flow_means`, over all selected tokens, under resampling of entries."""
    groups = runs[RUN].scan("flow").filter(where).group_by("id", "layer")
    sums = [pl.col(key).cast(pl.Float64).sum() for key in keys]
    rows = groups.agg(*sums, pl.len().cast(pl.Float64).alias("count")).sort("id", "layer").collect()
    table = rows.select(*keys, "count").to_numpy().reshape(rows["id"].n_unique(), -1, len(keys) + 1)
    return resample_means(table).map(lambda totals: totals[..., :-1] / totals[..., -1:])


def _flow_means(runs: Runs, where: Any, *keys: str) -> tuple[list[int], dict[str, list[float]]]:
    """The layers, from 1, and for each key its means by layer over the selected rows."""
    groups = runs[RUN].scan("flow").filter(where).group_by("layer")
    found = groups.agg(*(pl.col(key).cast(pl.Float64).mean() for key in keys)).sort("layer").collect()
    return [layer + 1 for layer in found["layer"].to_list()], {key: found[key].to_list() for key in keys}
