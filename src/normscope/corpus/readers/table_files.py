"""JSONL, CSV and TSV files: one entry per record."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from typing import Any, Unpack

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.records import ColumnNames, check_record_columns, entry_from_record, select_record_columns
from normscope.corpus.readers.text_lines import Line, text_lines
from normscope.errors import NormscopeError

AUTO = "auto"
DELIMITERS = (",", ";", "\t", "|")


def read_jsonl_table(path: DataFile, **named: Unpack[ColumnNames]) -> Iterator[Entry | Fault]:
    """One JSON object per line. A missing column is an error in the first object and a fault in later ones."""
    wanted = select_record_columns(**named)
    checked = False
    for line, record in jsonl_table_file_objects(path):
        if isinstance(record, Fault):
            yield record
            continue
        if not checked:
            check_record_columns(wanted.names, record, f"{path}:{line.number}")
            checked = True
        yield entry_from_record(record, wanted, f"{path.name}:{line.number}", f"{path}:{line.number}")


def jsonl_table_file_objects(path: DataFile) -> Iterator[tuple[Line, dict[str, Any] | Fault]]:
    """Each non-blank line with its JSON object."""
    for line in text_lines(path):
        if not line.blank:
            yield line, _parse_jsonl_line(path, line)


def read_csv_table(
    path: DataFile,
    header: Sequence[str] | None = None,
    delimiter: str = AUTO,
    quoting: bool = True,
    **named: Unpack[ColumnNames],
) -> Iterator[Entry | Fault]:
    """One record per row. The first row has the column names, unless `header` gives them.

    With `delimiter="auto"`, a comma separates the columns or, if the first row has the required columns only so, a
    semicolon, a tab or a bar.
    """
    wanted = select_record_columns(**named)
    lines = text_lines(path)
    if delimiter == AUTO and header is None:
        delimiter, lines = _guess_csv_delimiter(path, lines, quoting, wanted.names)
    rows = _csv_rows(path, lines, "," if delimiter == AUTO else delimiter, quoting)
    if header is None:
        number, first = next(rows, (1, None))
        if first is None:
            return
        if isinstance(first, Fault):
            raise NormscopeError(str(first))
        header = first
    else:
        number = 1
    check_record_columns(wanted.names, header, f"{path}:{number}")
    for number, row in rows:
        id_, where = f"{path.name}:{number}", f"{path}:{number}"
        if isinstance(row, Fault):
            yield row
        elif len(row) != len(header):
            yield Fault(id_, where, f"The row has {len(row)} columns, expected {len(header)}: {', '.join(header)}.")
        else:
            yield entry_from_record(dict(zip(header, row, strict=True)), wanted, id_, where)


def read_tsv_table(
    path: DataFile, header: Sequence[str] | None = None, quoting: bool = False, **named: Unpack[ColumnNames]
) -> Iterator[Entry | Fault]:
    """As `read_csv_table`, with tab-separated columns and without special treatment of quotation marks."""
    return read_csv_table(path, header, "\t", quoting, **named)


def _parse_jsonl_line(path: DataFile, line: Line) -> dict[str, Any] | Fault:
    reason = line.damage
    if reason is None:
        try:
            value = json.loads(line.text)
        except json.JSONDecodeError as error:
            reason = f"The line is not valid JSON: {error.msg} (column {error.colno})."
        except (RecursionError, ValueError):
            reason = "The JSON is nested too deeply, or contains a number with too many digits."
        else:
            if isinstance(value, dict):
                return value
            reason = f"Expected a JSON object, got a {type(value).__name__}."
    return Fault(f"{path.name}:{line.number}", f"{path}:{line.number}", reason)


def _guess_csv_delimiter(
    path: DataFile, lines: Iterator[Line], quoting: bool, wanted: Sequence[str]
) -> tuple[str, Iterator[Line]]:
    """The first delimiter with which the first row has all required columns, otherwise the one with most columns, and
    the lines again: what is read may be a pipe, which can be opened only once."""
    *copies, again = tee(lines, len(DELIMITERS) + 1)
    found: dict[str, list[str]] = {}
    for delimiter, copy in zip(DELIMITERS, copies, strict=True):
        _, first = next(_csv_rows(path, copy, delimiter, quoting), (1, None))
        found[delimiter] = first if isinstance(first, list) else []
    full = (delimiter for delimiter, names in found.items() if set(wanted) <= set(names))
    return next(full, max(found, key=lambda delimiter: len(found[delimiter]))), again


def _csv_rows(
    path: DataFile, lines: Iterable[Line], delimiter: str, quoting: bool
) -> Iterator[tuple[int, list[str] | Fault]]:
    """The non-blank rows, each with the number of its first line."""
    if len(delimiter) != 1:
        raise NormscopeError(f"The delimiter must be one character, not {delimiter!r}.")
    damaged: list[Line] = []
    reader = csv.reader(
        _csv_lines(lines, damaged),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE,
        strict=True,
    )
    while True:
        start = reader.line_num + 1
        id, where = f"{path.name}:{start}", f"{path}:{start}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, Fault(id, where, f"The row cannot be read: {error}.")
            continue
        if damaged:
            yield start, Fault(id, f"{path}:{damaged[0].number}", damaged[0].damage or "")
            damaged.clear()
        elif len(row) > 1 or (row and row[0].strip()):
            yield start, row


def _csv_lines(lines: Iterable[Line], damaged: list[Line]) -> Iterator[str]:
    """The lines in the form that the csv module expects. Lines that are not UTF-8 are also appended to `damaged`."""
    for line in lines:
        if line.damage:
            damaged.append(line)
        yield line.text + "\n"
