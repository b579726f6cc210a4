"""Why residual and norm undo what the feed-forward does (FF paper, section 6): norms and gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from normscope.engine import probing
from normscope.errors import NormscopeError
from normscope.measures.similarity import spearman
from normscope.papers import charts, published
from normscope.papers.feed_forward.measures import NORM, lowest, removed_count, removed_name
from normscope.papers.feed_forward.shared import PAPER, described_input, known_layout, listed, masked_run
from normscope.papers.published import said
from normscope.papers.report import Claim, Picture, Section, Table

if TYPE_CHECKING:
    import polars
    from matplotlib.figure import Figure

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

LABELLED = 8  # of the removed dimensions, those that are written beside their points


def magnitudes(run: Run, side: str) -> polars.DataFrame:
    """layer (from 1), dimension (NORM: the norm of the vector) -> means over tokens of bypass, input, output."""
    import polars as pl

    names = ("bypass", "input", "output")
    return (
        run.scan("ff_magnitudes")
        .filter(pl.col("side") == side)
        .group_by((pl.col("layer") + 1).alias("layer"), "dimension")
        .agg(*((pl.col(name).sum() / pl.col("tokens").sum()).alias(name) for name in names))
        .sort("layer", "dimension")
        .collect()
    )


def norms(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Fig. 10: the feed-forward's output against what passes it by."""
    import polars as pl

    scopes = known_layout(setting)
    frame = magnitudes(runs[masked_run(setting)], scopes.side).filter(pl.col("dimension") == NORM)
    layers, bypass, output = (frame[name].to_list() for name in ("layer", "bypass", "output"))
    larger = [layer for layer, a, b in zip(layers, bypass, output, strict=True) if a > b]
    return Section(
        "norms",
        "Norms of the feed-forward's output and of what passes it by",
        f"Means over all tokens of the norms of the model's own vectors, biases included. {described_input(setting)} "
        f"What passes by is the vector at {scopes.block}, what is added to it that at {scopes.added}.",
        (
            Picture(
                "fig10-norms",
                "Fig. 10. Mean norm of what the feed-forward adds, and of what it is added to",
                charts.line_chart({"feed-forward": output, "passes by": bypass}, x=layers, ylabel="mean norm"),
            ),
            Table(
                "norms-layers",
                "Mean norms, layer by layer",
                ("layer", "feed-forward", "passes by", "ratio"),
                tuple((a, b, c, b / c) for a, b, c in zip(layers, output, bypass, strict=True)),
                {"feed-forward": ".2f", "passes by": ".2f", "ratio": ".2f"},
            ),
        ),
        (
            Claim(
                "What passes the feed-forward by is larger than its output in most layers",
                2 * len(larger) > len(layers),
                f"in {len(larger)} of {len(layers)}: {listed(larger)}",
                "in most layers, but not in 10-11",
            ),
        ),
        {f"norm.ff.L{layer}": value for layer, value in zip(layers, output, strict=True)}
        | {f"norm.bypass.L{layer}": value for layer, value in zip(layers, bypass, strict=True)},
    )


def gamma(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Fig. 11 and section 6.2: the dimensions that the last norm makes small, and the map without them."""
    import polars as pl

    scopes, readings, theirs = known_layout(setting), setting.readings, published.reference(PAPER)
    run = runs[masked_run(setting)]
    name = removed_name(readings.gamma_share, readings.gamma_rounding)
    frame = (
        run.scan(name)
        .filter(pl.col("side") == scopes.side)
        .group_by((pl.col("layer") + 1).alias("layer"))
        .agg(pl.col("whole", "rest").filter(pl.col("whole").is_not_nan() & pl.col("rest").is_not_nan()).mean())
        .sort("layer")
        .collect()
    )
    layers, whole, rest = (frame[column].to_list() for column in ("layer", "whole", "rest"))
    gains = probing.gains(setting.lens, "layer")
    count = removed_count(gains.shape[1], readings.gamma_share, readings.gamma_rounding)
    most = int(np.argmin(whole))  # where the feed-forward changes the map most
    place = _layer(readings.gamma_layer, len(layers)) - 1 if readings.gamma_layer else most
    sizes = magnitudes(run, scopes.side).filter(pl.col("dimension") != NORM)
    ours = {n: sizes.filter(pl.col("layer") == n + 1) for n in range(len(layers))}
    rho = [_rank_correlation(ours[n]["output"].to_numpy(), gains[n].double().numpy()) for n in range(len(layers))]
    rows = tuple(
        (layer, whole[n], rest[n], rest[n] - whole[n], rho[n], ", ".join(map(str, lowest(gains[n], count)[0].tolist())))
        for n, layer in enumerate(layers)
    )
    columns = ("layer", "all dimensions", "without", "change", "|output| and gain", "dimensions removed")
    risen = [layer for n, layer in enumerate(layers) if rest[n] > whole[n]]
    share = f"{100 * readings.gamma_share:g} %"
    return Section(
        "gamma",
        "Dimensions that the last norm makes small",
        f"The {count} of {gains.shape[1]} dimensions ({share}) with the lowest gain of LN2, as a signed number, are "
        "removed from the feed-forward's contributions, whose norms are then taken anew; the map before the "
        f"feed-forward ({scopes.input}) keeps all. Similarities are Spearman's correlations of these two maps, means "
        f"over sequences. {described_input(setting)}",
        (
            Picture(
                "fig11-gamma",
                f"Fig. 11. Magnitude of each dimension against LN2's gain, layer {layers[place]}",
                _scatter(ours[place], gains[place].double().numpy(), lowest(gains[place], count)[0].tolist()),
                "Mean of |value| over all tokens, in the feed-forward's input and output. The number of a dimension is "
                "written beside those of the lowest gains.",
            ),
            Picture(
                "removed-dimensions",
                "Section 6.2. Similarity of the maps before and after the feed-forward",
                charts.line_chart(
                    {"all dimensions": whole, f"without {count} of the lowest gain": rest},
                    x=layers,
                    ylabel="Spearman's correlation",
                ),
            ),
            Table(
                "removed-dimensions-layers",
                f"Similarity without {count} dimensions of the lowest gain",
                columns,
                rows,
                dict.fromkeys(columns[1:5], ".3f"),
                "|output| and gain: Spearman's correlation over dimensions.",
            ),
        ),
        (
            Claim(
                f"Without the {share} of dimensions of the lowest gain the feed-forward changes the map less, where it "
                "changes it most",
                rest[most] > whole[most],
                f"layer {layers[most]}: {whole[most]:.2f} to {rest[most]:.2f}; it rises in {listed(risen)}",
                said(theirs, "layer 10: {:.2f} to {:.2f}; layer 11: {:.2f} to {:.2f}", *_published_keys()),
            ),
        ),
        {f"removed.L{layer}": value for layer, value in zip(layers, rest, strict=True)},
    )


def _layer(given: int, depth: int) -> int:
    if not 1 <= given <= depth:
        raise NormscopeError(f"The reading gamma_layer is a layer from 1 to {depth}, or 0, not {given}.")
    return given


def _published_keys() -> tuple[str, ...]:
    return tuple(key for layer in (10, 11) for key in (f"similarity.ATTNRESLNFF-N.L{layer}", f"removed.L{layer}"))


def _scatter(sizes: polars.DataFrame, gains: NDArray[np.float64], removed: list[int]) -> Figure:
    width = len(gains)
    numbers = [str(n) if n in removed[:LABELLED] else "" for n in range(width)]
    return charts.scatter(
        np.concatenate([gains, gains]),
        np.concatenate([sizes["input"].to_numpy(), sizes["output"].to_numpy()]),
        xlabel="gain of LN2",
        ylabel="mean |value|",
        labels=[""] * width + numbers,
        groups=["feed-forward's input"] * width + ["feed-forward's output"] * width,
    )


def _rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    return float(spearman(torch.tensor(a), torch.tensor(b)))
