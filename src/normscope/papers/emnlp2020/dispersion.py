"""How much ||f(x)|| varies (EMNLP 2020, Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from normscope.measures.dispersion import Moments
from normscope.papers import map_charts, published
from normscope.papers.emnlp2020.shared import PAPER, PLAIN, REFERENCE, finite, lengths, norm_moments
from normscope.papers.published import said
from normscope.papers.report import Cell, Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

KEYS = ("mean", "sd", "cv", "max", "min")
COLUMNS = ("mean", "SD", "CV", "max", "min")
VARIES = 0.1  # a CV above which ||f|| is said to vary; the head that varies least in the paper has 0.12
TEXT = (
    "||f(x)|| is the norm of a token's value vector after the output matrix, by head, over all tokens of all "
    "sequences, special ones included. If it did not vary, attention weights alone would tell contributions."
)


def dispersion(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Table 1: mean, SD, CV, max and min of ||f(x)|| by head, and averages over heads."""
    run = runs[PLAIN]
    sample = setting.readings.sd == "sample"
    moments = norm_moments(setting, run, "layer", "head")
    values = {place: _values(found, sample) for place, found in moments.items()}
    average = [fmean(found[n] for found in values.values()) for n in range(3)]
    order = sorted(values, key=lambda place: values[place][2])
    reference = published.reference(PAPER)
    theirs = [[reference.get(f"dispersion{head}.{key}") for key in KEYS] for head in ("", ".L2H4", ".L2H7")]
    tokens = lengths(setting, run)
    numbers = dict(zip((f"dispersion.{key}" for key in KEYS), average, strict=False))
    numbers |= {
        f"dispersion.{_name(place)}.{key}": value
        for place, found in values.items()
        for key, value in zip(KEYS, found, strict=True)
    }
    numbers |= {"data.tokens": sum(tokens), "data.pairs": sum(n * n for n in tokens)}
    rows: list[tuple[Cell, ...]] = [
        ("average over heads", "here", *average, None, None),
        ("", REFERENCE, *theirs[0]),
        (f"largest CV: {_name(order[-1])}", "here", *values[order[-1]]),
        ("largest CV: L2H4", REFERENCE, *theirs[1]),
        (f"smallest CV: {_name(order[0])}", "here", *values[order[0]]),
        ("smallest CV: L2H7", REFERENCE, *theirs[2]),
    ]
    formats = dict.fromkeys(COLUMNS, ".2f")
    every = tuple((layer + 1, head + 1, *map(known, values[layer, head])) for layer, head in values)
    return Section(
        "dispersion",
        "Dispersion of ||f(x)||",
        TEXT,
        (
            Table("table1-dispersion", "Table 1. Dispersion of ||f(x)||", ("head", "", *COLUMNS), tuple(rows), formats),
            Picture("table1-heads", "Mean and CV of ||f(x)|| by head", _drawn(values)),
            Table(
                "table1-every-head",
                "Dispersion of ||f(x)|| in every head",
                ("layer", "head", *COLUMNS),
                every,
                formats,
                folded=True,
            ),
        ),
        (
            Claim(
                f"||f(x)|| varies between tokens (average CV above {VARIES})",
                average[2] > VARIES,
                f"average CV {average[2]:.2f}, from {values[order[0]][2]:.2f} to {values[order[-1]][2]:.2f}",
                said(
                    reference,
                    "average CV {:.2f}, from {:.2f} to {:.2f}",
                    "dispersion.cv",
                    "dispersion.L2H7.cv",
                    "dispersion.L2H4.cv",
                ),
            ),
        ),
        finite(numbers),
    )


def _values(found: Moments, sample: bool) -> tuple[float, ...]:
    return (
        found.mean,
        found.deviation(sample=sample),
        found.variation(sample=sample),
        found.largest,
        found.smallest,
    )


def _name(place: tuple[int, int]) -> str:
    return f"L{place[0] + 1}H{place[1] + 1}"


def _drawn(values: Mapping[tuple[int, int], tuple[float, ...]]) -> Figure:
    layers, heads = ([*range(max(place[n] for place in values) + 1)] for n in (0, 1))
    panels = {
        name: np.array([[values.get((layer, head), (nan,) * 5)[n] for head in heads] for layer in layers])
        for name, n in (("mean", 0), ("CV", 2))
    }
    return map_charts.heat_maps(
        panels,
        rows=[layer + 1 for layer in layers],
        columns=[head + 1 for head in heads],
        xlabel="head",
        ylabel="layer",
        shared=False,
    )
