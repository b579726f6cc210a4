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
from normscope.measures.uncertainty import Resampled, resample_means
from normscope.papers import common
from normscope.papers.common import layer_numbers, layer_picture, masked_run, scan_paper_side
from normscope.papers.feed_forward.measures import NORM, removal_measure_name, removed_dimension_count, split_by_gain
from normscope.papers.feed_forward.sequences import interval_bands, pick_lowest_layer
from normscope.papers.feed_forward.shared import INCREASES, INTERVALS, NAME, SPEARMAN, require_ff_layout
from normscope.papers.published import published_main_numbers, quote_published
from normscope.papers.resampling import SEQUENCES, estimates_along, pick, subtract_resampled
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate, describe_layers, majority
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

SHOWN = ("feed-forward", "bypass")
LABELLED = 8  # removed dimensions that are labelled in the figure
NORMS = (
    "Mean norms of the model's vectors over all tokens, biases included. {masking} The bypass is the vector at "
    "{scopes.block}, to which the vector at {scopes.added} is added. Intervals and the verdict are from a bootstrap "
    "over sequences."
)
GAMMA = (
    "The {count} of {width} dimensions ({share}) with the lowest signed gain of LN2 are removed from the feed-forward "
    "contributions before taking norms; the map before the feed-forward ({scopes.input}) keeps all dimensions. "
    "Similarities are Spearman's correlations of these two maps, averaged over sequences. {masking}"
)
GAMMA_NOTE = (
    "{chosen} Mean of |value| over all tokens, in the feed-forward's input and output. Labels: indices of the "
    "dimensions with the lowest gains."
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
    resampled = resample_norms(runs[masked_run(setting)], scopes.side, setting.readings)
    bands = interval_bands({name: estimates_along(pick(resampled, n, -2)) for n, name in enumerate(SHOWN)})
    ratios = estimates_along(resampled.map(lambda means: means[..., 0, :] / means[..., 1, :]))
    margins = estimates_along(subtract_resampled(*(pick(resampled, n, -2) for n in (1, 0))))
    larger = [layer for layer, a, b in zip(layers, bypass, output, strict=True) if a > b]
    claim = decided_claim(
        "The bypass has a larger norm than the feed-forward output in most layers",
        margins,
        f"in {len(larger)} of {len(layers)}: {common.paper_layers_text(larger)}",
        "in most layers, except 10-11",
        at_least=majority(len(layers)),
        alpha=setting.readings.alpha,
    )
    title = "Fig. 10. Mean norm of the feed-forward output and of the bypass"
    series = dict(zip(SHOWN, (output, bypass), strict=True))
    columns = {"layer": "", **dict.fromkeys((*series, "ratio", "ratio low", "ratio high"), ".3f")}
    rows = (
        (layer, ff, past, ff / past, ratio.low, ratio.high)
        for layer, ff, past, ratio in zip(layers, output, bypass, ratios, strict=True)
    )
    return Section(
        "norms",
        "Norms of the feed-forward output and of the bypass",
        NORMS.format(scopes=scopes, masking=common.describe_common_masking(setting)),
        (
            layer_picture("fig10-norms", title, series, layers, "mean norm", INTERVALS, bands=bands),
            Table.of(
                "norms-layers",
                "Mean norms by layer",
                columns,
                rows,
                f"Ratio: feed-forward output to bypass, with its 95 % interval ({ratios[0].method}).",
            ),
        ),
        (claim,),
        layer_numbers("norm.ff", output, layers)
        | layer_numbers("norm.bypass", bypass, layers)
        | layer_numbers("norm.ratio", [ff / past for ff, past in zip(output, bypass, strict=True)], layers),
    )


def resample_norms(run: Run, side: str, readings: Any) -> Resampled:
    """(2, layers): mean norms of the feed-forward output and of the bypass over tokens, resampling sequences."""
    frame = scan_paper_side(run, "ff_norms", side).select("layer", "tokens", "output", "bypass").collect()
    # Rows are stored sequence by sequence, with the layers in order.
    depth = frame["layer"].n_unique()
    table = frame.select("tokens", "output", "bypass").to_numpy().reshape(-1, depth, 3)
    sums = resample_means(table, readings.resamples, seed=(readings.seed, 6))
    return sums.map(lambda means: np.stack([means[..., n] / means[..., 0] for n in (1, 2)], -2))


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
    resampled = resample_means(_sequence_removals(table, len(layers)), readings.resamples, seed=(readings.seed, 7))
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
    bands = interval_bands({name: estimates_along(pick(resampled, n, -2)) for n, name in enumerate(series)})
    return Section(
        "gamma",
        "Dimensions that the last norm scales down",
        GAMMA.format(count=count, width=width, share=share, scopes=scopes, masking=masking),
        (
            Picture(
                "fig11-gamma",
                f"Fig. 11. Magnitude of each dimension against LN2's gain, layer {layers[place]}",
                _gain_scatter(by_layer[place], gains[place].double().numpy(), removed[place]),
                GAMMA_NOTE.format(
                    chosen="The layer of the reading gamma_layer."
                    if readings.gamma_layer
                    else "The layer whose feed-forward changes the map most."
                ),
            ),
            layer_picture("removed-dimensions", title, series, layers, SPEARMAN, INTERVALS, bands=bands),
            Table.of(
                "removed-dimensions-layers",
                f"Similarity without the {count} dimensions with the lowest gain",
                {"layer": "", **columns, "dimensions removed": ""},
                rows,
                f"|output| and gain: {SPEARMAN} over dimensions.",
            ),
        ),
        (_low_gain_claim(layers, whole, rest, resampled, share, readings.alpha),),
        layer_numbers("removed", rest, layers)
        | layer_numbers("removed.change", [row[3] for row in rows], layers)
        | layer_numbers("gain", [row[4] for row in rows], layers),
    )


def _sequence_removals(table: pl.LazyFrame, depth: int) -> NDArray[np.float64]:
    """(sequences, 2, layers): similarity with all dimensions and without the removed ones; NaN if one is unknown."""
    found = table.select("whole", "rest").collect().to_numpy().reshape(-1, depth, 2).transpose(0, 2, 1)
    return np.where(np.isnan(found).any(1, keepdims=True), np.nan, found)


def _low_gain_claim(
    layers: list[int], whole: list[float], rest: list[float], resampled: Resampled, share: str, alpha: float
) -> Claim:
    most = int(np.argmin(whole))  # where the feed-forward changes the map most
    before, after = (pick(resampled, n, -2) for n in range(2))
    change = subtract_resampled(after, before)
    margin = pick_lowest_layer(change, before).estimate(SEQUENCES)
    by_layer = describe_layers(estimates_along(change), alpha=alpha, words=INCREASES, methods=False)
    return decided_claim(
        f"In the layer that it changes most, the feed-forward changes the map less without the {share} of dimensions "
        "with the lowest gain",
        margin,
        f"layer {layers[most]}: {whole[most]:.2f} to {rest[most]:.2f}",
        quote_published(
            published_main_numbers(NAME), "layer 10: {:.2f} to {:.2f}; layer 11: {:.2f} to {:.2f}", *PUBLISHED
        ),
        evidence=f"{describe_estimate(margin, '.2g', name='increase')}; {by_layer}",
        alpha=alpha,
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
