"""Shared by several papers: plans of runs, tables and figures by layer, and claims next to published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from normscope.corpus.measure_registry import Columns
from normscope.corpus.store import Run
from normscope.labels import number_ranges_label
from normscope.measures import correlation
from normscope.papers.runs import RunPlan
from normscope.papers.study import Setting
from normscope.reports import charts
from normscope.reports.report import Picture, Table, none_if_nan

CLEAR = 0.1  # absolute correlation below which no claim about the sign is supported


def masked_run(setting: Setting) -> str:
    """The name of the run that papers mask; models without masked-LM training read unmasked text."""
    return "masked" if setting.masks and getattr(setting.readings, "masking", True) else "plain"


def describe_common_masking(setting: Setting) -> str:
    """Whether the text of `masked_run` is masked, with the reason if it is not."""
    if masked_run(setting) == "masked":
        return "12 % of the tokens of each sequence are masked, as in the paper."
    why = "as requested" if setting.masks else "since this model was not trained with masked tokens"
    return f"The text is not masked, {why}; the paper masks 12 % of the tokens."


def masked_plan(setting: Setting, measures: tuple[str, ...], scopes: tuple[str, ...], name: str = "") -> RunPlan:
    """A plan for the run that papers mask, or for another run with the same masking."""
    run = masked_run(setting)
    return RunPlan(name or run, measures, scopes, masked=run == "masked")


def layer_numbers(key: str, values: Iterable[float], layers: Iterable[int] | None = None) -> dict[str, float]:
    """Numbers `key.L1`, `key.L2`, ... from the values of the layers."""
    numbered = enumerate(values, 1) if layers is None else zip(layers, values, strict=True)
    return {f"{key}.L{layer}": value for layer, value in numbered}


def finite_numbers(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers that are defined."""
    return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}


def paper_layers_text(layers: Sequence[int]) -> str:
    """ "layers 3-7, 9-11" for sorted numbers, "layer 6" for one, "no layer" for none."""
    return f"layer{'s' if len(layers) > 1 else ''} {number_ranges_label(layers)}" if layers else "no layer"


def paper_table_columns(types: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> Columns:
    """Rows converted to columns of the given types. Text columns (type object) are lists, since an empty object array
    cannot be written."""
    values = list(zip(*rows, strict=True)) or [()] * len(types)
    return {
        name: list(column) if type is object else np.array(column, dtype=type)
        for (name, type), column in zip(types.items(), values, strict=True)
    }


def published_curves(reference: Mapping[str, float], keys: Mapping[str, str], depth: int) -> dict[str, list[float]]:
    """name -> published values of layers 1 to `depth`, given keys with {} for the layer. Only complete curves are
    returned, and none if the published model has more layers."""
    if any(key.format(depth + 1) in reference for key in keys.values()):
        return {}
    found = {name: [reference.get(key.format(n)) for n in range(1, depth + 1)] for name, key in keys.items()}
    return {name: [v for v in values if v is not None] for name, values in found.items() if None not in values}


def layer_picture(
    name: str,
    title: str,
    series: Mapping[str, Sequence[float]],
    layers: Sequence[float],
    ylabel: str,
    note: str = "",
    **options: Any,
) -> Picture:
    """A figure with one line per series over layers; `options` are those of `charts.line_chart`."""
    return Picture(name, title, charts.line_chart(series, x=layers, ylabel=ylabel, **options), note)


def layer_table(
    name: str,
    title: str,
    columns: Mapping[str, Sequence[Any]],
    layers: Sequence[int],
    spec: str,
    note: str = "",
    folded: bool = False,
) -> Table:
    """A table with one row per layer and one column of numbers, displayed as `spec`, for each series."""
    rows = zip(layers, *columns.values(), strict=True)
    return Table.of(name, title, {"layer": "", **dict.fromkeys(columns, spec)}, rows, note, folded)


def scan_paper_side(run: Run, table: str, side: str) -> pl.LazyFrame:
    """A table of a run, restricted to one side of the model."""
    return run.scan(table).filter(pl.col("side") == side)


def plan_run(
    name: str, *measures: str, scopes: tuple[str, ...] | None = None
) -> Callable[[Setting], tuple[RunPlan, ...]]:
    """`runs` of an experiment that reads one run, the same for every model."""
    return lambda setting: (RunPlan(name, measures, scopes),)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three pairs, or if one side is constant."""
    return _correlation_or_none(correlation.spearman, a, b)


def linear_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's; None for fewer than three pairs, or if one side is constant."""
    return _correlation_or_none(correlation.pearson, a, b)


def _correlation_or_none(measure: Any, a: Sequence[float], b: Sequence[float]) -> float | None:
    if len(a) < 3:
        return None
    return none_if_nan(float(measure(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))))
