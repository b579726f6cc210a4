"""What the sections of EMNLP 2020 have in common: their runs, the categories of tokens, what was published."""

from __future__ import annotations

from typing import Any

import polars as pl

from normscope.corpus.store import Run
from normscope.measures.dispersion import Moments, combined
from normscope.papers.study import Setting

NAME = "emnlp2020"
REFERENCE = "BERT-base on Wikipedia, published"
PLAIN = "attention"  # the run over the text as it is
PARALLEL = "alignment"  # the run over sentence pairs
CATEGORIES = ("first", "separator", "punctuation", "other")


def categories_by_kind(readings: Any) -> dict[str, str]:
    """The paper's category of each kind of token that the measures distinguish."""
    same = {category: category for category in CATEGORIES}
    return same | {"mask": "other", "symbol": "punctuation" if readings.punctuation == "all" else "other"}


def category_labels(readings: Any) -> dict[str, str]:
    """The categories as people call them."""
    marks = "punctuation" if readings.punctuation == "all" else "comma, period"
    return {"first": "[CLS] or first", "separator": "[SEP] or last", "punctuation": marks, "other": "other"}


def scan_side(setting: Setting, run: Run, table: str) -> pl.LazyFrame:
    """A table of a run, of the side that the paper reads."""
    return run.scan(table).filter(pl.col("side") == setting.side)


def add_category(frame: pl.LazyFrame, readings: Any) -> pl.LazyFrame:
    """The frame with a column `category` from the column `kind`."""
    return frame.with_columns(pl.col("kind").replace_strict(categories_by_kind(readings)).alias("category"))


def merged_norm_moments(setting: Setting, run: Run, *keys: str) -> dict[tuple[Any, ...], Moments]:
    """The moments of ||f(x)|| over the corpus by `keys`: some of layer, head (both from 0) and category."""
    columns = ("count", "mean", "deviations", "largest", "smallest")
    frame = add_category(scan_side(setting, run, "norm_moments"), setting.readings)
    found = frame.group_by(keys).agg(*columns).sort(keys).collect()
    return {row[: len(keys)]: combined(*row[len(keys) :]) for row in found.iter_rows()}
