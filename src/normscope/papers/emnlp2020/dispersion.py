"""How much ||f(x)|| varies (EMNLP 2020, Table 1)."""

from __future__ import annotations

from math import nan
from statistics import fmean

import numpy as np

from normscope.measures.dispersion import Moments
from normscope.papers.common import claim_with_published, finite_numbers
from normscope.papers.emnlp2020.shared import NAME, PLAIN, REFERENCE, merged_norm_moments, scan_side
from normscope.papers.published import paper_numbers
from normscope.papers.study import Runs, Setting
from normscope.reports import map_charts
from normscope.reports.report import Cell, Picture, Section, Table, none_if_nan

COLUMNS = {"mean": "mean", "sd": "SD", "cv": "CV", "max": "max", "min": "min"}  # key of a number -> column
FORMATS = dict.fromkeys(COLUMNS.values(), ".2f")
VARIES = 0.1  # a CV above which ||f|| is said to vary; the head that varies least in the paper has 0.12
TEXT = (
    "||f(x)|| is the norm of a token's value vector after the output matrix, by head, over all tokens of all "
    "sequences, special ones included. If it did not vary, attention weights alone would show the contributions."
)


def dispersion_section(setting: Setting, runs: Runs) -> Section:
    """Table 1: mean, SD, CV, max and min of ||f(x)|| by head, and averages over heads."""
    run, published = runs[PLAIN], paper_numbers(NAME)
    moments = merged_norm_moments(setting, run, "layer", "head")
    values = {place: _dispersion_values(found, setting.readings.sd == "sample") for place, found in moments.items()}
    average = [fmean(found[n] for found in values.values()) for n in range(3)]
    order = sorted(values, key=lambda place: values[place][2])
    lengths = [int(length) for length in scan_side(setting, run, "items").select("length").collect()["length"]]
    numbers = dict(zip((f"dispersion.{key}" for key in COLUMNS), average, strict=False))
    for place, found in values.items():
        numbers |= {f"dispersion.{_head_name(place)}.{k}": value for k, value in zip(COLUMNS, found, strict=True)}
    numbers |= {"data.tokens": sum(lengths), "data.pairs": sum(n * n for n in lengths)}
    summary: list[tuple[Cell, ...]] = []
    for label, head, ours, theirs in (
        ("average over heads", "", (*average, None, None), ""),
        ("largest CV: ", _head_name(order[-1]), values[order[-1]], "L2H4"),
        ("smallest CV: ", _head_name(order[0]), values[order[0]], "L2H7"),
    ):
        prefix = f"dispersion.{theirs}" if theirs else "dispersion"
        summary.append((label + head, "here", *ours))
        summary.append((theirs and label + theirs, REFERENCE, *(published.get(f"{prefix}.{key}") for key in COLUMNS)))
    heads = [(layer + 1, head + 1, *map(none_if_nan, found)) for (layer, head), found in values.items()]
    claim = claim_with_published(
        f"||f(x)|| varies between tokens (average CV above {VARIES})",
        average[2] > VARIES,
        "average CV {:.2f}, from {:.2f} to {:.2f}",
        (average[2], values[order[0]][2], values[order[-1]][2]),
        published,
        *("dispersion.cv", "dispersion.L2H7.cv", "dispersion.L2H4.cv"),
    )
    return Section(
        "dispersion",
        "Dispersion of ||f(x)||",
        TEXT,
        (
            Table.of("table1-dispersion", "Table 1. Dispersion of ||f(x)||", {"head": "", "": "", **FORMATS}, summary),
            _dispersion_picture(values),
            Table.of(
                "table1-every-head",
                "Dispersion of ||f(x)|| in every head",
                {"layer": "", "head": "", **FORMATS},
                heads,
                folded=True,
            ),
        ),
        (claim,),
        finite_numbers(numbers),
    )


def _dispersion_values(found: Moments, sample: bool) -> tuple[float, ...]:
    deviation, variation = found.deviation(sample=sample), found.variation(sample=sample)
    return (found.mean, deviation, variation, found.largest, found.smallest)


def _head_name(place: tuple[int, int]) -> str:
    return f"L{place[0] + 1}H{place[1] + 1}"


def _dispersion_picture(values: dict[tuple[int, int], tuple[float, ...]]) -> Picture:
    layers, heads = ([*range(max(place[n] for place in values) + 1)] for n in (0, 1))
    panels = {
        name: np.array([[values.get((layer, head), (nan,) * 5)[n] for head in heads] for layer in layers])
        for name, n in (("mean", 0), ("CV", 2))
    }
    axes = {"rows": [n + 1 for n in layers], "columns": [n + 1 for n in heads], "xlabel": "head", "ylabel": "layer"}
    chart = map_charts.heat_map_charts(panels, shared=False, **axes)  # type: ignore[arg-type]
    return Picture("table1-heads", "Mean and CV of ||f(x)|| by head", chart)
