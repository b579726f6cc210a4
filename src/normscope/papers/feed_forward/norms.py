"""Why residual and norm counteract the feed-forward (FF paper, section 6): norms and gains."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.engine import probing
from normscope.errors import NormscopeError
from normscope.measures.correlation import spearman
from normscope.papers import common
from normscope.papers.common import layer_numbers, layer_picture, masked_run, scan_paper_side
from normscope.papers.feed_forward.measures import NORM, removal_measure_name, removed_dimension_count, split_by_gain
from normscope.papers.feed_forward.shared import NAME, SPEARMAN, require_ff_layout
from normscope.papers.published import published_main_numbers, quote_published
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

LABELLED = 8  # removed dimensions that are labelled in the figure
NORMS = (
    "Mean norms of the model's vectors over all tokens, biases included. {masking} The bypass is the vector at "
    "{scopes.block}, to which the vector at {scopes.added} is added."
)
GAMMA = (
    "The {count} of {width} dimensions ({share}) with the lowest signed gain of LN2 are removed from the feed-forward "
    "contributions before taking norms; the map before the feed-forward ({scopes.input}) keeps all dimensions. "
    "Similarities are Spearman's correlations of these two maps, averaged over sequences. {masking}"
)
GAMMA_NOTE = (
    "Mean of |value| over all tokens, in the feed-forward's input and output. Labels: indices of the dimensions with "
    "the lowest gains."
)
PUBLISHED = tuple(key for n in (10, 11) for key in (f"similarity.ATTNRESLNFF-N.L{n}", f"removed.L{n}"))


def mean_ff_magnitudes(run: Run, side: str) -> pl.DataFrame:
    """layer (from 1), dimension (NORM: the norm of the vector) -> means over tokens of bypass, input, output."""
    means = [(pl.col(n).sum() / pl.col("tokens").sum()).alias(n) for n in ("bypass", "input", "output")]
    return _aggregate_by_layer(scan_paper_side(run, "ff_magnitudes", side), means, "dimension")


def bypass_norms_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 10: norms of the feed-forward output and of the bypass."""
    scopes = require_ff_layout(setting)
    frame = mean_ff_magnitudes(runs[masked_run(setting)], scopes.side).filter(pl.col("dimension") == NORM)
    layers, bypass, output = (frame[name].to_list() for name in ("layer", "bypass", "output"))
    larger = [layer for layer, a, b in zip(layers, bypass, output, strict=True) if a > b]
    claim = Claim(
        "The bypass has a larger norm than the feed-forward output in most layers",
        2 * len(larger) > len(layers),
        f"in {len(larger)} of {len(layers)}: {common.paper_layers_text(larger)}",
        "in most layers, except 10-11",
    )
    title = "Fig. 10. Mean norm of the feed-forward output and of the bypass"
    series = {"feed-forward": output, "bypass": bypass}
    columns = {"layer": "", **dict.fromkeys((*series, "ratio"), ".2f")}
    rows = ((layer, ff, past, ff / past) for layer, ff, past in zip(layers, output, bypass, strict=True))
    return Section(
        "norms",
        "Norms of the feed-forward output and of the bypass",
        NORMS.format(scopes=scopes, masking=common.describe_common_masking(setting)),
        (
            layer_picture("fig10-norms", title, series, layers, "mean norm"),
            Table.of("norms-layers", "Mean norms by layer", columns, rows),
        ),
        (claim,),
        layer_numbers("norm.ff", output, layers) | layer_numbers("norm.bypass", bypass, layers),
    )


def low_gain_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 11 and section 6.2: the dimensions that the last norm scales down, and the map without them."""
    scopes, readings, run = require_ff_layout(setting), setting.readings, runs[masked_run(setting)]
    table = scan_paper_side(run, removal_measure_name(readings.gamma_share, readings.gamma_rounding), scopes.side)
    known = pl.col("whole").is_not_nan() & pl.col("rest").is_not_nan()
    frame = _aggregate_by_layer(table, [pl.col("whole", "rest").filter(known).mean()])
    layers, whole, rest = (frame[column].to_list() for column in ("layer", "whole", "rest"))
    gains = probing.probe_norm_gains(setting.lens.loaded, "layer")
    width = gains.shape[1]
    count = removed_dimension_count(width, readings.gamma_share, readings.gamma_rounding)
    removed = [split_by_gain(row, count)[0].tolist() for row in gains]
    most = int(np.argmin(whole))  # where the feed-forward changes the map most
    place = _check_gamma_layer(readings.gamma_layer, len(layers)) - 1 if readings.gamma_layer else most
    sizes = mean_ff_magnitudes(run, scopes.side).filter(pl.col("dimension") != NORM)
    by_layer = [sizes.filter(pl.col("layer") == layer) for layer in range(1, len(layers) + 1)]
    rows = []
    for n, layer in enumerate(layers):
        rho = float(spearman(torch.tensor(by_layer[n]["output"].to_numpy()), gains[n].double()))
        rows.append((layer, whole[n], rest[n], rest[n] - whole[n], rho, ", ".join(map(str, removed[n]))))
    columns = dict.fromkeys(("all dimensions", "without", "change", "|output| and gain"), ".3f")
    share, masking = f"{100 * readings.gamma_share:g} %", common.describe_common_masking(setting)
    title = "Section 6.2. Similarity of the maps before and after the feed-forward"
    series = {"all dimensions": whole, f"without {count} with the lowest gain": rest}
    return Section(
        "gamma",
        "Dimensions that the last norm scales down",
        GAMMA.format(count=count, width=width, share=share, scopes=scopes, masking=masking),
        (
            Picture(
                "fig11-gamma",
                f"Fig. 11. Magnitude of each dimension against LN2's gain, layer {layers[place]}",
                _gain_scatter(by_layer[place], gains[place].double().numpy(), removed[place]),
                GAMMA_NOTE,
            ),
            layer_picture("removed-dimensions", title, series, layers, SPEARMAN),
            Table.of(
                "removed-dimensions-layers",
                f"Similarity without the {count} dimensions with the lowest gain",
                {"layer": "", **columns, "dimensions removed": ""},
                rows,
                f"|output| and gain: {SPEARMAN} over dimensions.",
            ),
        ),
        (_low_gain_claim(layers, whole, rest, share),),
        layer_numbers("removed", rest, layers),
    )


def _low_gain_claim(layers: list[int], whole: list[float], rest: list[float], share: str) -> Claim:
    most = int(np.argmin(whole))  # where the feed-forward changes the map most
    rising = common.paper_layers_text([layer for n, layer in enumerate(layers) if rest[n] > whole[n]])
    return Claim(
        f"In the layer that it changes most, the feed-forward changes the map less without the {share} of dimensions "
        "with the lowest gain",
        rest[most] > whole[most],
        f"layer {layers[most]}: {whole[most]:.2f} to {rest[most]:.2f}; it increases in {rising}",
        quote_published(
            published_main_numbers(NAME), "layer 10: {:.2f} to {:.2f}; layer 11: {:.2f} to {:.2f}", *PUBLISHED
        ),
    )


def _aggregate_by_layer(table: pl.LazyFrame, aggregates: list[pl.Expr], *keys: str) -> pl.DataFrame:
    """Aggregates by layer (from 1) and further keys."""
    groups = table.group_by((pl.col("layer") + 1).alias("layer"), *keys)
    return groups.agg(*aggregates).sort("layer", *keys).collect()


def _check_gamma_layer(given: int, depth: int) -> int:
    if not 1 <= given <= depth:
        raise NormscopeError(f"The reading gamma_layer must be a layer from 1 to {depth}, or 0, not {given}.")
    return given


def _gain_scatter(sizes: pl.DataFrame, gains: NDArray[np.float64], removed: list[int]) -> Any:
    width = len(gains)
    numbers = [str(n) if n in removed[:LABELLED] else "" for n in range(width)]
    return charts.scatter_chart(
        np.concatenate([gains, gains]),
        np.concatenate([sizes["input"].to_numpy(), sizes["output"].to_numpy()]),
        xlabel="gain of LN2",
        ylabel="mean |value|",
        labels=[""] * width + numbers,
        groups=["feed-forward's input"] * width + ["feed-forward's output"] * width,
    )
