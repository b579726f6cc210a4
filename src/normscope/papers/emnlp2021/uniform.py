"""Uniform attention in the place of the learned one, against the mixing ratio of the layer (EMNLP 2021, section 6).

Others had found that a model works nearly as well with attention that is not learned. The paper's explanation: what is
mixed is a small part of each vector. So a layer should matter the less, the less it mixes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normscope.measures.permutation import spearman_p
from normscope.papers import charts
from normscope.papers.emnlp2021.measures import ALL
from normscope.papers.emnlp2021.ratios import (
    by_layer,
    grouped,
    linear_correlation,
    overall,
    rank_correlation,
    ratios,
    scope,
)
from normscope.papers.emnlp2021.shared import described_input, masked_run, over_layers
from normscope.papers.report import Cell, Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

RUN = "uniform"
CHANGES = {"relative": "change (%)", "cosine": "cosine"}
TEXT = """The attention weights of one layer, or of all, are made equal for all tokens that it may see, and the model \
is run on: how far its final hidden states h move, as ||h' - h|| / ||h|| and as cosine distance, means over tokens."""


def uniform(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """The change by each layer, and by all at once, beside the mixing ratio of the layer."""
    lens, average = setting.lens, setting.readings.layer_average
    weights, block = scope(lens, "weights"), scope(lens, "attention-block")
    means = by_layer(ratios(lens, runs[masked_run(setting)]), average)
    mixing = {name: overall(means[name]) for name in (weights, block)}
    found = changes(lens, runs[RUN], average)
    scored = "loss" in found[ALL]
    depth = lens.depths[0]
    kinds = {**CHANGES, **({"loss": "loss", "added": "loss added"} if scored else {})}
    measured = [kind for kind in kinds if kind != "loss"]
    columns = (f"{weights} (%)", f"{block} (%)", *kinds.values())
    rows: list[tuple[Cell, ...]] = [
        (n + 1, mixing[weights][n], mixing[block][n], *(found[n][kind] for kind in kinds)) for n in range(depth)
    ]
    rows.append(("all", None, None, *(found[ALL][kind] for kind in kinds)))
    correlations = {
        (name, kind): (
            rank_correlation(mixing[name], changed),
            known(spearman_p(mixing[name], changed)),
            linear_correlation(mixing[name], changed),
        )
        for name in mixing
        for kind in measured
        for changed in [[found[n][kind] for n in range(depth)]]
    }
    chosen = setting.readings.change
    return Section(
        "uniform",
        "Uniform attention in the place of the learned one",
        "\n\n".join((TEXT, _loss_text(setting, found[ALL]), described_input(setting))),
        (
            Table(
                "uniform-change",
                "Change of the output with uniform attention, by layer and in all layers at once",
                ("layer", *columns),
                tuple(rows),
                {column: ".1f" if "%" in column else ".3f" for column in columns},
                f"{weights} and {block}: the mixing ratio of the layer. {_explained(scored)}",
            ),
            Table(
                "uniform-correlation",
                f"Correlation over the {depth} layers of a layer's mixing ratio with the change it makes",
                ("mixing by", "with", "Spearman", "p", "Pearson"),
                tuple((name, kinds[kind], *some) for (name, kind), some in correlations.items()),
                {"Spearman": ".2f", "p": ".2f", "Pearson": ".2f"},
                "p: of Spearman's, two-sided, by permutation. A change in a low layer goes through all those above it.",
            ),
            Picture(
                "uniform-scatter",
                "Change of the output by uniform attention in a layer against its mixing ratio",
                charts.scatter(
                    mixing[block],
                    [found[n][chosen] for n in range(depth)],
                    xlabel=f"mixing ratio by {block} (%)",
                    ylabel="relative change (%)" if chosen == "relative" else "cosine distance",
                    labels=[f"layer {n + 1}" for n in range(depth)],
                ),
            ),
            Picture(
                "uniform-layers",
                "Mixing ratio, and relative change of the final hidden states, layer by layer (%)",
                charts.line_chart(
                    {
                        f"mixing by {weights}": mixing[weights],
                        f"mixing by {block}": mixing[block],
                        "relative change": [found[n]["relative"] for n in range(depth)],
                    },
                    x=range(1, depth + 1),
                    ylabel="%",
                ),
            ),
        ),
        _claims(setting, mixing, found),
        _numbers(found, correlations, chosen),
    )


def changes(lens: Analyzer, run: Run, average: str) -> dict[int, dict[str, float]]:
    """layer (from 0, or ALL) -> relative change in percent and cosine distance; where there is a head, its loss, what
    is added to it and the plain one. Each sequence counts once (macro), or by its tokens (micro); losses are means
    over all scored tokens."""
    import polars as pl

    weight = pl.lit(1.0) if average == "macro" else pl.col("tokens").cast(pl.Float64)
    score = pl.col("scored").cast(pl.Float64)
    means = [((pl.col(kind) * weight).sum() / (weight + 0 * pl.col(kind)).sum()).alias(kind) for kind in CHANGES]
    losses = [((pl.col(kind).fill_nan(0.0) * score).sum() / score.sum()).alias(kind) for kind in ("loss", "plain_loss")]
    rows = run.scan("uniform_attention").filter(pl.col("side") == lens.stacks[0].side)
    found: dict[int, dict[str, float]] = {}
    for row in grouped(rows, ["layer"], *means, *losses, score.sum()).iter_rows(named=True):
        values = {"relative": 100 * row["relative"], "cosine": row["cosine"]}
        if row["scored"]:
            values |= {"loss": row["loss"], "added": row["loss"] - row["plain_loss"], "plain": row["plain_loss"]}
        found[row["layer"]] = values
    return found


def _claims(
    setting: Setting,
    mixing: Mapping[str, list[float]],
    found: Mapping[int, Mapping[str, float]],
) -> tuple[Claim, ...]:
    depth, chosen = setting.lens.depths[0], setting.readings.change
    (weights, by_weights), (block, by_block) = ((name, sum(some) / depth) for name, some in mixing.items())
    change = sum(found[n]["relative"] for n in range(depth)) / depth
    return (
        over_layers(
            setting,
            "Uniform attention in a layer that mixes little changes little: the change grows with the mixing ratio",
            mixing[block],
            [found[n][chosen] for n in range(depth)],
            1,
            "",
        ),
        Claim(
            "Uniform attention in one layer changes the output as little as mixing by norms says, not by weights",
            abs(change - by_block) < abs(change - by_weights),
            f"change {change:.1f} %; mixing {by_block:.1f} % by {block}, {by_weights:.1f} % by {weights}",
        ),
    )


def _numbers(
    found: Mapping[int, Mapping[str, float]],
    correlations: Mapping[tuple[str, str], tuple[float | None, ...]],
    chosen: str,
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for layer, values in sorted(found.items(), key=lambda pair: (pair[0] == ALL, pair[0])):
        place = "all" if layer == ALL else f"L{layer + 1}"
        numbers |= {f"uniform.{kind}.{place}": value for kind, value in values.items() if kind != "plain"}
    if "plain" in found[ALL]:
        numbers["uniform.loss.plain"] = found[ALL]["plain"]
    for (name, kind), both in correlations.items():
        for measure, value in zip(("spearman", "p", "pearson"), both, strict=True):
            if kind == chosen and value is not None:
                numbers[f"uniform.{measure}.{name}"] = value
    return numbers


def _explained(scored: bool) -> str:
    loss = " Loss: cross-entropy in nats, and how much more it is than with the learned attention." if scored else ""
    return f"Change: ||h' - h|| / ||h||. Cosine: the cosine distance of h and h'.{loss}"


def _loss_text(setting: Setting, everywhere: Mapping[str, Any]) -> str:
    if "plain" not in everywhere:
        return "This model has no head that predicts tokens here, so that there is no loss to compare."
    masked = masked_run(setting) == "masked"
    what = "at the masked tokens" if masked else "of each next token"
    plain, guess = everywhere["plain"], math.log(setting.lens.limits.vocabulary)
    return (
        f"The loss is the cross-entropy {what} in nats; with the learned attention it is {plain:.3f}. An even guess "
        f"among all tokens would be {guess:.3f}: where the loss is near that, the model has little to lose."
    )
