"""Tables of a run: means over questions with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
from rich.table import Table

from normscope.measures.uncertainty import Estimate, Resampled, resample_means

Record = Mapping[str, Any]


def estimates(records: Sequence[Record], metric: str) -> dict[str, Estimate]:
    """The mean of a metric for every method, all over the same resamples of the questions that were answered right."""
    right = [one["methods"] for one in records if one["right"]]
    names = list(dict.fromkeys(name for methods in right for name in methods))
    table = [[methods.get(name, {}).get(metric, nan) for name in names] for methods in right]
    values = np.array(table, dtype=np.float64).reshape(len(right), len(names))
    drawn = resample_means(values)
    found = {}
    for n, name in enumerate(names):
        if np.isfinite(values[:, n]).any():
            found[name] = Resampled(drawn.value[n], drawn.draws[:, n], drawn.items).estimate("questions")
    return found


def summary_tables(records: Sequence[Record]) -> Iterator[Table]:
    """Recovery by kind of question and place of the decoy, then every other metric, then what was refused."""
    yield _table(records, "Recovery", _recovery_columns(records))
    names = dict.fromkeys(
        key for one in records if one["right"] for method in one["methods"].values() for key in method
    )
    others = [name for name in names if name not in ("recovery", "refusal", "scores")]
    whole = {name: (records, name) for name in others}
    yield _table(records, "All questions", whole)
    refused = {
        name: method["refusal"]
        for one in records
        if one["right"]
        for name, method in one["methods"].items()
        if "refusal" in method
    }
    if refused:
        table = Table("method", "why not", title="Refused")
        for name, reason in refused.items():
            table.add_row(name, reason)
        yield table


def _recovery_columns(records: Sequence[Record]) -> dict[str, tuple[Sequence[Record], str]]:
    columns: dict[str, tuple[Sequence[Record], str]] = {}
    for kind in dict.fromkeys(one["kind"] for one in records):
        for first in (False, True):
            some = [one for one in records if one["kind"] == kind and one["right"] and one["decoy_first"] == first]
            columns[f"{kind}, decoy {'first' if first else 'last'} ({len(some)})"] = some, "recovery"
    return columns


def _table(records: Sequence[Record], title: str, columns: Mapping[str, tuple[Sequence[Record], str]]) -> Table:
    right = sum(bool(one["right"]) for one in records)
    table = Table("method", title=f"{title}: {right} of {len(records)} questions answered right")
    cells = {}
    for heading, (some, metric) in columns.items():
        table.add_column(heading, justify="right")
        cells[heading] = estimates(some, metric)
    for name in dict.fromkeys(name for found in cells.values() for name in found):
        table.add_row(name, *(_cell(found.get(name)) for found in cells.values()))
    return table


def _cell(one: Estimate | None) -> str:
    if one is None:
        return ""
    return f"{one.value:.2f}" if np.isnan(one.low) else f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"
