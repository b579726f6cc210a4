"""Parquet files, through polars, a slice of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

from normscope.corpus.items import Entry, Fault
from normscope.corpus.records import Named, check_columns, columns, entry_from
from normscope.corpus.text_lines import opened
from normscope.errors import NormscopeError

ROWS = 8192  # read at a time


def read_parquet(path: Path, **named: Unpack[Named]) -> Iterator[Entry | Fault]:
    """An entry per row, named by its number from 1."""
    wanted = columns(**named)
    with opened(path):
        pass
    try:
        import polars
    except ImportError as error:
        raise NormscopeError(
            "Reading Parquet needs polars, which is not installed. Install it with: pip install 'normscope[corpus]'"
        ) from error
    try:
        table = polars.scan_parquet(path, glob=False)
        check_columns(wanted.names, table.collect_schema().names(), str(path))
        table = table.select(wanted.names)
        start = 0
        while rows := table.slice(start, ROWS).collect().rows(named=True):
            for number, record in enumerate(rows, start + 1):
                yield entry_from(record, wanted, f"{path.name}:{number}", f"{path}:{number}")
            start += len(rows)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise NormscopeError(f"Cannot read {path} as Parquet: {str(error).splitlines()[0]}") from error
