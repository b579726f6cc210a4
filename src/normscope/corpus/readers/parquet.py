"""Parquet files, read with polars in slices of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.data_files import DataFile, open_binary
from normscope.corpus.readers.records import ColumnNames, check_record_columns, entry_from_record, select_record_columns
from normscope.errors import NormscopeError

ROWS = 8192  # read at a time


def read_parquet(path: DataFile, **named: Unpack[ColumnNames]) -> Iterator[Entry | Fault]:
    """One entry per row; ids are row numbers from 1."""
    wanted = select_record_columns(**named)
    with open_binary(path):
        pass
    try:
        import polars
    except ImportError as error:
        raise NormscopeError(
            "Reading Parquet needs polars, which is not installed. Install it with: pip install 'normscope[corpus]'"
        ) from error
    try:
        table = polars.scan_parquet(str(path), glob=False)
        check_record_columns(wanted.names, table.collect_schema().names(), str(path))
        table = table.select(wanted.names)
        start = 0
        while rows := table.slice(start, ROWS).collect().rows(named=True):
            for number, record in enumerate(rows, start + 1):
                yield entry_from_record(record, wanted, f"{path.name}:{number}", f"{path}:{number}")
            start += len(rows)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise NormscopeError(f"Cannot read {path} as Parquet: {str(error).splitlines()[0]}") from error
