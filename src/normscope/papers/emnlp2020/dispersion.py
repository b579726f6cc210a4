"""How much ||f(x)|| varies (EMNLP 2020, Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.dispersion import Moments
from normscope.measures.uncertainty import Resampled, resample_means
from normscope.papers.common import finite_numbers, layer_numbers, layer_picture, scan_paper_side
from normscope.papers.emnlp2020.shared import (
    PLAIN,
    REFERENCE,
    THEIRS,
    Head,
    corpus_norm_moments,
    head_maps_picture,
)
from normscope.papers.published import quote_published
from normscope.papers.resampling import SEQUENCES
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports.report import Cell, Claim, Picture, Section, Table, none_if_nan

Values = Mapping[str, float]  # key of COLUMNS -> value

COLUMNS = {"mean": "mean", "sd": "SD", "cv": "CV", "max": "max", "min": "min"}  # key of a number -> column
FORMATS = dict.fromkeys(COLUMNS.values(), ".2f")
MIDDLE = ("mean", "sd", "cv")  # the columns that can be averaged over heads
VARIES = 0.1  # CV above which ||f|| counts as varying; the least variable head in the paper has 0.12
SDS = ("population", "sample")
TEXT = (
    "||f(x)|| is the norm of a token's value vector after the output matrix, for each head, over all tokens of all "
    "sequences, including special tokens. If it did not vary, attention weights alone would show the contributions.\n\n"
    "||x|| is the norm of the vectors that the attention reads: the layer's input, or the output of the norm before "
    "the attention if the layer has one. Where ||f(x)|| varies more than ||x||, the value and output matrices are the "
    "reason."
)


def dispersion_section(setting: Setting, runs: Runs) -> Section:
    """Table 1: mean, SD, CV, max and min of ||f(x)|| by head, and averages over heads; ||x|| by layer."""
    run, sample = runs[PLAIN], setting.readings.sd == "sample"
    moments = corpus_norm_moments(setting, run, "layer", "head")
    values = {place: _dispersion_values(found, sample) for place, found in moments.items()}
    average = _average_over_heads(values)
    by_variation = sorted(values, key=lambda place: values[place]["cv"])
    least, most = by_variation[0], by_variation[-1]
    lengths = scan_paper_side(run, "items", setting.side).select("length").collect()["length"].to_list()
    numbers = {f"dispersion.{key}": value for key, value in average.items()}
    for place, found in values.items():
        numbers |= {f"dispersion.{_head_name(place)}.{key}": value for key, value in found.items()}
    numbers |= {"data.tokens": sum(lengths), "data.pairs": sum(n * n for n in lengths)}
    summary: list[tuple[Cell, ...]] = []
    for label, head, ours, theirs in (
        ("average over heads", "", average, ""),
        ("largest CV: ", _head_name(most), values[most], "L2H4"),
        ("smallest CV: ", _head_name(least), values[least], "L2H7"),
    ):
        prefix = f"dispersion.{theirs}" if theirs else "dispersion"
        summary.append((label + head, "here", *map(ours.get, COLUMNS)))
        summary.append((theirs and label + theirs, REFERENCE, *(THEIRS.get(f"{prefix}.{key}") for key in COLUMNS)))
    maps = {COLUMNS[key]: {place: found[key] for place, found in values.items()} for key in ("mean", "cv")}
    heads = ((layer + 1, head + 1, *map(none_if_nan, found.values())) for (layer, head), found in values.items())
    columns, title = {"layer": "", "head": "", **FORMATS}, "Dispersion of ||f(x)||"
    inputs = corpus_norm_moments(setting, run, "layer", table="input_norm_moments")
    of_inputs = {layer: _dispersion_values(found, sample) for (layer,), found in inputs.items()}
    for key in MIDDLE:
        by_layer = {layer + 1: found[key] for layer, found in of_inputs.items()}
        numbers |= layer_numbers(f"dispersion.x.{key}", by_layer.values(), by_layer)
    parts = (
        Table.of("table1-dispersion", f"Table 1. {title}", {"head": "", "": "", **FORMATS}, summary),
        head_maps_picture("table1-heads", "Mean and CV of ||f(x)|| by head", maps),
        *_compare_with_inputs(values, of_inputs),
        Table.of("table1-every-head", f"{title} in every head", columns, heads, folded=True),
    )
    spread = [values[place]["cv"] for place in (least, most)]
    claim = _variation_claim(setting, run, {place: found.mean for place, found in moments.items()}, spread)
    return Section("dispersion", title, TEXT, parts, (claim,), finite_numbers(numbers))


def _compare_with_inputs(values: Mapping[Head, Values], inputs: Mapping[int, Values]) -> tuple[Picture, Table]:
    """||x|| beside ||f(x)|| by layer: the CV as a figure, mean, SD and CV as a table."""
    layers = [layer + 1 for layer in inputs]
    of_heads = [
        _average_over_heads({place: found for place, found in values.items() if place[0] == layer}) for layer in inputs
    ]
    curves = {
        "||x||": [found["cv"] for found in inputs.values()],
        "||f(x)||, average over heads": [found["cv"] for found in of_heads],
    }
    rows = (
        (layer, *(of_input[key] for key in MIDDLE), *(of_head[key] for key in MIDDLE))
        for layer, of_input, of_head in zip(layers, inputs.values(), of_heads, strict=True)
    )
    columns = [f"{COLUMNS[key]} of {what}" for what in ("||x||", "||f(x)||") for key in MIDDLE]
    title = "Dispersion of ||x|| and ||f(x)|| by layer"
    return (
        layer_picture("table1-inputs", "CV of ||x|| and ||f(x)|| by layer", curves, layers, "CV"),
        Table.of(
            "table1-by-layer",
            title,
            {"layer": "", **dict.fromkeys(columns, ".2f")},
            rows,
            "||f(x)||: average over the heads of the layer.",
            folded=len(layers) > 12,
        ),
    )


def _variation_claim(setting: Setting, run: Run, means: Mapping[Head, float], spread: list[float]) -> Claim:
    """Whether the average CV is above `VARIES`, by a bootstrap over sequences."""
    sums = resample_norm_sums(setting, run, means)
    centres = np.array([means[place] for place in sorted(means)])
    average = {sd: sums.map(partial(_average_variation, centres=centres, items=sums.items, sd=sd)) for sd in SDS}
    chosen = average[setting.readings.sd]
    margins = {sd: found.map(lambda value: value - VARIES).estimate(SEQUENCES) for sd, found in average.items()}
    template = "average CV {:.2f}, from {:.2f} to {:.2f}"
    keys = ("dispersion.cv", "dispersion.L2H7.cv", "dispersion.L2H4.cv")
    return decided_claim(
        f"||f(x)|| varies between tokens (average CV above {VARIES})",
        margins[setting.readings.sd],
        template.format(float(chosen.value), *spread),
        quote_published(THEIRS, template, *keys),
        evidence=describe_estimate(chosen.estimate(SEQUENCES), name="average CV"),
        under={f"sd={sd}": found.decide() for sd, found in margins.items() if sd != setting.readings.sd},
    )


def resample_norm_sums(setting: Setting, run: Run, centres: Mapping[Head, float]) -> Resampled:
    """(heads, 3): count of ||f||, sum of ||f|| - c and of its square, per sequence, under resampling of sequences.

    The centre c is the corpus mean of the head, so that the variance does not cancel.
    """
    places = pl.DataFrame(
        [(layer, head, centre) for (layer, head), centre in centres.items()],
        schema={"layer": pl.Int16, "head": pl.Int16, "centre": pl.Float64},
        orient="row",
    )
    count, off = pl.col("count"), pl.col("mean") - pl.col("centre")
    keys = ("id", "layer", "head")
    found = (
        scan_paper_side(run, "norm_moments", setting.side)
        .join(places.lazy(), on=["layer", "head"])
        .sort(*keys, "kind")
        .group_by(keys)
        .agg(
            count.sum(),
            (count * off).sum().alias("first"),
            (pl.col("deviations") + count * off**2).sum().alias("second"),
        )
        .sort(keys)
        .collect()
    )
    return resample_means(found.select("count", "first", "second").to_numpy().reshape(-1, len(centres), 3))


def _average_variation(sums: NDArray[Any], centres: NDArray[np.float64], items: int, sd: str) -> Any:
    """(...): the mean CV of the heads, from sums (..., heads, 3), which are means over sequences."""
    count, first, second = np.moveaxis(sums, -1, 0)
    off = first / count
    variance = np.maximum(second / count - off**2, 0)
    if sd == "sample":
        variance = variance * count * items / (count * items - 1)
    return (np.sqrt(variance) / (centres + off)).mean(-1)


def _average_over_heads(values: Mapping[Head, Values]) -> dict[str, float]:
    return {key: fmean(found[key] for found in values.values()) for key in MIDDLE}


def _dispersion_values(found: Moments, sample: bool) -> dict[str, float]:
    deviation, variation = found.deviation(sample=sample), found.variation(sample=sample)
    return dict(zip(COLUMNS, (found.mean, deviation, variation, found.largest, found.smallest), strict=True))


def _head_name(place: Head) -> str:
    return f"L{place[0] + 1}H{place[1] + 1}"
