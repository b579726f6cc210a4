"""Parallel text: files with one sentence per line, where lines of the same number belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from os import PathLike
from pathlib import Path

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.text_lines import Line, first_damaged_text_line, text_lines
from normscope.errors import NormscopeError


def read_parallel_text(path: DataFile, target: str | PathLike[str] | None = None) -> Iterator[Entry | Fault]:
    """One entry per line: the text of this file, and the same line of the file target= as its translation."""
    if target is None:
        raise NormscopeError(f"{path}: Parallel text needs the file with the translations, target=.")
    for given in parallel_text_rows((path, Path(target))):
        if isinstance(given, Fault):
            yield given
            continue
        source, translation = given
        id, where = f"{path.name}:{source.number}", f"{path}:{source.number}"
        yield entry_or_fault(id, where, text=source.text, target=translation.text)


def parallel_text_rows(files: Sequence[DataFile]) -> Iterator[tuple[Line, ...] | Fault]:
    """The lines of the same number of several files, which must have equally many; a Fault if one is damaged."""
    for number, rows in enumerate(zip_longest(*(text_lines(file) for file in files)), 1):
        for file, row in zip(files, rows, strict=True):
            if row is None:
                raise NormscopeError(f"{file}:{number}: The file ends here, but its parallel files have more lines.")
        bad = first_damaged_text_line(rows)
        if bad is None:
            yield rows
        else:
            file = files[rows.index(bad)]
            yield Fault(f"{files[0].name}:{number}", f"{file}:{number}", bad.damage or "")
