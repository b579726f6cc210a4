"""Tables of a run in short: the mean of every entry, means over entries with intervals, and the entries far from all
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normscope.corpus.shard_tables import import_polars
from normscope.corpus.store import Run
from normscope.errors import NormscopeError, did_you_mean
from normscope.measures.uncertainty import mean_interval

if TYPE_CHECKING:
    import polars

OWN = ("items", "errors", "maps")  # tables that are not those of measures
LABELS = ("id", "side", "token", "pharaoh")  # texts that differ from row to row
NUMBERS = ("layer", "head", "position", "dimension")  # integers that say what a row is about
MISSING = "(none)"
MAD = 1.4826  # a normal distribution's SD divided by its median absolute deviation


@dataclass(frozen=True)
class TableShape:
    """The columns of a measure's table: its numbers, and what identifies them besides entry and layer."""

    values: tuple[str, ...]
    keys: tuple[str, ...]
    layered: bool


@dataclass(frozen=True)
class Outlier:
    """An entry far from the others: by `distance` median absolute deviations, scaled to the SD of a normal
    distribution, in the place where it is farthest."""

    id: str
    side: str
    place: tuple[str, ...]  # the values of the table's keys, for people
    layer: int | None
    value: float
    median: float
    distance: float


def measure_tables(run: Run) -> list[str]:
    """The tables of measures that have numbers."""
    return [name for name in run.tables if name not in OWN and table_shape(run, name).values]


def table_shape(run: Run, name: str) -> TableShape:
    """What the columns of a table are. Texts are keys, but for tokens and what belongs to a token."""
    polars = import_polars()
    schema = run.scan(name).collect_schema()
    kinds = {column: kind for column, kind in schema.items() if column not in LABELS}
    if "token" in schema:
        kinds.pop("category", None)
    floats = [column for column, kind in kinds.items() if kind.is_float() and column != "completeness"]
    whole = [column for column, kind in kinds.items() if kind.is_integer() and column not in NUMBERS]
    keys = [column for column, kind in kinds.items() if kind == polars.String or column == "head"]
    return TableShape(tuple(floats or whole), tuple(keys), "layer" in schema)


def entry_means(run: Run, name: str, value: str | None = None, by: str | None = None) -> polars.LazyFrame:
    """The mean of a number for each entry, layer and key; with `by`, also for each value of that column.

    Columns: id, side, the table's keys, group (with `by`), layer (if the table has it) and value.
    """
    pl = import_polars()
    shape = table_shape(run, name)
    value = _checked_value(name, shape, value)
    frame = run.table(name) if by is None or by not in run.scan(name).collect_schema() else run.scan(name)
    names = frame.collect_schema().names()
    if by is not None and (by not in names or by in ("id", value)):
        known = [column for column in names if column not in ("id", "side", *shape.values)]
        raise NormscopeError(
            f"The table {name!r} has no column {by!r} to group by.{did_you_mean(by, known)} Columns: "
            f"{', '.join(known)}. Columns of the data are kept with keep, such as reader={{'keep': ['label']}}."
        )
    keys = [key for key in shape.keys if key != by]
    grouped = ["id", "side", *keys, *(["layer"] if shape.layered and by != "layer" else [])]
    columns = [pl.col(key).cast(pl.String) if key == "head" else pl.col(key) for key in grouped]
    if by is not None:
        columns.append(pl.col(by).cast(pl.String).fill_null(MISSING).alias("group"))
    number = pl.col(value).cast(pl.Float64).fill_nan(None).alias("value")
    places = [*grouped, *(["group"] if by is not None else [])]
    means: polars.LazyFrame = (
        frame.select(*columns, number).group_by(places, maintain_order=True).agg(pl.col("value").mean())
    )
    return means


def means_over_entries(frame: polars.LazyFrame) -> polars.DataFrame:
    """The means of `entry_means` over entries, each entry counting once, with the ends of their 95 % intervals.

    Columns: those of the given frame but for id, and entries, mean, low, high.
    """
    polars = import_polars()
    places = [column for column in frame.collect_schema().names() if column not in ("id", "value")]
    known = frame.filter(polars.col("value").is_not_null())
    value = polars.col("value")
    found = (
        known.group_by(places, maintain_order=True)
        .agg(polars.len().alias("entries"), value.mean().alias("mean"), value.std().alias("spread"))
        .collect()
    )
    ends = [mean_interval(*row) for row in found.select("mean", "spread", "entries").iter_rows()]
    low, high = (
        polars.Series(name, [end[n] for end in ends], dtype=polars.Float64) for n, name in enumerate(("low", "high"))
    )
    return found.drop("spread").with_columns(low, high)


def find_outliers(frame: polars.LazyFrame, count: int) -> list[Outlier]:
    """The `count` entries that are farthest from the others, each in the place where it is farthest:
    |x - median| / (1.4826 MAD) over the entries of the same side, keys and layer. Places where more than half of the
    entries agree have no spread and are left out."""
    polars = import_polars()
    names = frame.collect_schema().names()
    places = [column for column in names if column not in ("id", "value")]
    value, median = polars.col("value"), polars.col("median")
    known = frame.filter(value.is_not_null()).with_columns(value.median().over(places).alias("median"))
    spread = MAD * (value - median).abs().median().over(places)
    scored = known.with_columns(((value - median).abs() / spread).alias("distance"))
    found = (
        scored.filter(polars.col("distance").is_finite() & (spread > 0))
        .sort("distance", "id", descending=[True, False])
        .unique("id", keep="first", maintain_order=True)
        .head(count)
        .collect()
    )
    keys = [column for column in places if column not in ("side", "layer")]
    return [
        Outlier(
            row["id"],
            row["side"],
            tuple(f"head {int(row[key]) + 1}" if key == "head" else str(row[key]) for key in keys),
            row.get("layer"),
            row["value"],
            row["median"],
            row["distance"],
        )
        for row in found.iter_rows(named=True)
    ]


def distinct_values(frame: polars.DataFrame, column: str) -> list[str]:
    """The values of a column, in order of appearance."""
    found: Sequence[Any] = frame[column].unique(maintain_order=True).to_list()
    return [str(one) for one in found]


def _checked_value(name: str, shape: TableShape, value: str | None) -> str:
    if not shape.values:
        raise NormscopeError(f"The table {name!r} has no column of numbers to summarise.")
    if value is None:
        return shape.values[0]
    if value not in shape.values:
        raise NormscopeError(
            f"The table {name!r} has no numbers {value!r}.{did_you_mean(value, shape.values)} It has: "
            f"{', '.join(shape.values)}."
        )
    return value
