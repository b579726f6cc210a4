"""The tables of a shard as Parquet files, and tables of running sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from normscope.errors import NormscopeError


@dataclass(frozen=True)
class ShardFiles:
    """The results of one shard: file contents by path in the folder of the run."""

    number: int
    entries: int
    faults: int
    files: Mapping[str, bytes]


def parquet_bytes_for_store(columns: Mapping[str, Any]) -> bytes:
    """A table as the bytes of a Parquet file; equal rows give equal bytes."""
    polars, buffer = import_polars(), BytesIO()
    # Parquet has no object columns, and polars cannot infer that empty ones hold strings.
    strings = {
        name: polars.String for name, values in columns.items() if len(values) == 0 and _is_object_column(values)
    }
    polars.DataFrame(dict(columns), schema_overrides=strings).write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _is_object_column(values: Any) -> bool:
    return isinstance(values, list) or getattr(getattr(values, "dtype", None), "kind", None) == "O"


class GroupedSums:
    """A table of running sums: the columns `summed`, grouped by all other columns."""

    AT_ONCE = 2**20  # rows held before they are summed

    def __init__(self, summed: Sequence[str]) -> None:
        self.summed = list(summed)
        self.waiting: list[Any] = []
        self.rows = 0
        self.most = self.AT_ONCE

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add rows."""
        self.waiting.append(import_polars().DataFrame(dict(columns)))
        self.rows += len(self.waiting[-1])
        if self.rows > self.most:
            self.waiting = [self._grouped_sums()]
            self.rows = len(self.waiting[0])
            self.most = max(self.AT_ONCE, 4 * self.rows)  # so that many groups do not cause a sum at every entry

    def table(self) -> dict[str, Any]:
        """The sums, sorted by the grouping columns."""
        return {column.name: column for column in self._grouped_sums().get_columns()}

    def _grouped_sums(self) -> Any:
        polars = import_polars()
        together = polars.concat(self.waiting)
        keys = [name for name in together.columns if name not in self.summed]
        return together.group_by(keys).agg(polars.col(*self.summed).sum()).sort(keys)


def import_polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise NormscopeError("Corpus runs need polars: pip install 'normscope[corpus]'.") from error
    return polars
