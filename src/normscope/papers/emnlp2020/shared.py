"""Shared by the sections of EMNLP 2020: run names, token categories, norms by head and maps of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from normscope.corpus.store import Run
from normscope.measures.dispersion import Moments, combine_moments
from normscope.papers.common import scan_paper_side
from normscope.papers.published import published_main_numbers
from normscope.papers.study import Setting
from normscope.reports import map_charts
from normscope.reports.report import Picture

Head = tuple[int, int]  # layer and head, from 0
NAME = "emnlp2020"
THEIRS = published_main_numbers(NAME)
REFERENCE = "BERT-base on Wikipedia, published"
PLAIN = "attention"  # the run over unmasked text
PARALLEL = "alignment"  # the run over sentence pairs
CATEGORIES = ("first", "separator", "punctuation", "other")


def token_kind_categories(readings: Any) -> dict[str, str]:
    """Kind of token, as the measures distinguish them -> the paper's category."""
    same = {category: category for category in CATEGORIES}
    return same | {"mask": "other", "symbol": "punctuation" if readings.punctuation == "all" else "other"}


def token_category_labels(readings: Any) -> dict[str, str]:
    """Display names of the categories."""
    marks = "punctuation" if readings.punctuation == "all" else "comma, period"
    return {"first": "[CLS] or first", "separator": "[SEP] or last", "punctuation": marks, "other": "other"}


def add_token_category(frame: pl.LazyFrame, readings: Any) -> pl.LazyFrame:
    """The frame with a column `category` from the column `kind`."""
    return frame.with_columns(pl.col("kind").replace_strict(token_kind_categories(readings)).alias("category"))


def corpus_norm_moments(
    setting: Setting, run: Run, *keys: str, table: str = "norm_moments"
) -> dict[tuple[Any, ...], Moments]:
    """The moments of ||f(x)|| over the corpus by `keys`: some of layer, head (both from 0) and category. With the table
    "input_norm_moments", which has no heads, those of ||x||."""
    columns = ("count", "mean", "deviations", "largest", "smallest")
    frame = add_token_category(scan_paper_side(run, table, setting.side), setting.readings)
    found = frame.group_by(keys).agg(*columns).sort(keys).collect()
    return {row[: len(keys)]: combine_moments(*row[len(keys) :]) for row in found.iter_rows()}


def other_readings(readings: Any, **choices: tuple[str, ...]) -> dict[str, Any]:
    """ "punctuation=all" -> the readings with this choice, for every other choice of the named readings."""
    return {
        f"{name}={choice}": replace(readings, **{name: choice})
        for name, options in choices.items()
        for choice in options
        if choice != getattr(readings, name)
    }


def head_maps_picture(name: str, title: str, panels: Mapping[str, Mapping[Head, float]], note: str = "") -> Picture:
    """Heat maps of all layers and heads side by side, each with its own colour scale."""
    shape = tuple(1 + max(indices) for indices in zip(*next(iter(panels.values())), strict=True))
    grids = {label: np.full(shape, np.nan) for label in panels}
    for label, values in panels.items():
        for place, value in values.items():
            grids[label][place] = value
    rows, columns = (range(1, size + 1) for size in shape)
    chart = map_charts.heat_map_charts(grids, rows=rows, columns=columns, xlabel="head", ylabel="layer", shared=False)
    return Picture(name, title, chart, note)
