"""What the sections of EMNLP 2020 have in common: their runs, the categories of tokens, what was published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normscope.measures.dispersion import Moments, combined

if TYPE_CHECKING:
    import polars

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

PAPER = "emnlp2020"
REFERENCE = "BERT-base on Wikipedia, published"
PLAIN = "attention"  # the run over the text as it is
PARALLEL = "alignment"  # the run over sentence pairs
CLEAR = 0.1  # a correlation nearer to zero is a mere trace: no claim about its sign holds
CATEGORIES = ("first", "separator", "punctuation", "other")


def category_of(readings: Any) -> dict[str, str]:
    """The paper's category of each kind of token that the measures tell apart."""
    same = {category: category for category in CATEGORIES}
    return same | {"mask": "other", "symbol": "punctuation" if readings.punctuation == "all" else "other"}


def labels(readings: Any) -> dict[str, str]:
    """The categories as people call them."""
    marks = "punctuation" if readings.punctuation == "all" else "comma, period"
    return {"first": "[CLS] or first", "separator": "[SEP] or last", "punctuation": marks, "other": "other"}


def rows_of(setting: Setting, run: Run, table: str) -> polars.LazyFrame:
    """A table of a run, of the side that the paper reads: of an encoder-decoder, the encoder."""
    import polars as pl

    return run.scan(table).filter(pl.col("side") == setting.lens.stacks[0].side)


def with_category(frame: polars.LazyFrame, readings: Any) -> polars.LazyFrame:
    """With a column `category` after the column `kind`."""
    import polars as pl

    return frame.with_columns(pl.col("kind").replace_strict(category_of(readings)).alias("category"))


def norm_moments(setting: Setting, run: Run, *keys: str) -> dict[tuple[Any, ...], Moments]:
    """The moments of ||f(x)|| over the corpus by `keys`: some of layer, head (both from 0) and category."""
    columns = ("count", "mean", "deviations", "largest", "smallest")
    frame = with_category(rows_of(setting, run, "norm_moments"), setting.readings)
    grouped = frame.group_by(keys).agg(*columns).sort(keys).collect()
    return {row[: len(keys)]: combined(*row[len(keys) :]) for row in grouped.iter_rows()}


def lengths(setting: Setting, run: Run) -> list[int]:
    """The tokens of each sequence."""
    return [int(length) for length in rows_of(setting, run, "items").select("length").collect()["length"]]


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are defined."""
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def published_curves(reference: Mapping[str, float], keys: Mapping[str, str], depth: int) -> dict[str, Sequence[float]]:
    """name -> the published values of layers 1 to `depth`, by the key before ".L<layer>"; none of another depth."""
    if any(f"{key}.L{depth + 1}" in reference for key in keys.values()):
        return {}
    found = {name: [reference.get(f"{key}.L{n}") for n in range(1, depth + 1)] for name, key in keys.items()}
    return {name: [v for v in some if v is not None] for name, some in found.items() if None not in some}
