"""Parallel text with gold word alignments, in talp, Pharaoh and JSONL format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from normscope.corpus.entries import Entry, Fault, Links, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.parallel_text import parallel_text_rows
from normscope.corpus.readers.records import check_record_columns, words_from_record_column
from normscope.corpus.readers.table_files import jsonl_table_file_objects
from normscope.corpus.readers.text_lines import Line
from normscope.errors import NormscopeError


class Notation(NamedTuple):
    """How links are written: `3p4` or `3?4` is a possible link, `3-4` a sure one."""

    possible: str
    base: int  # the number of the first word


NOTATIONS = {"talp": Notation("p", 1), "pharaoh": Notation("?", 0)}
SUFFIXES = {".talp": "talp", ".pharaoh": "pharaoh", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def read_alignments(
    path: DataFile,
    notation: str | None = None,
    source: str | PathLike[str] | None = None,
    target: str | PathLike[str] | None = None,
    words: str = "src_words",
    target_words: str = "tgt_words",
    sure: str = "alignment",
    possible: str | None = None,
    base: int = 0,
) -> Iterator[Entry | Fault]:
    """One entry per sentence pair: words, target words, sure and possible links, counted from 0.

    talp (`1-2 3p4`, counted from 1) and Pharaoh (`0-1 1?2`, from 0) need source= and target=, files with one sentence
    per line and spaces between words. jsonl has the columns words=, target_words=, sure= and possible=, and counts
    words from base=.
    """
    notation = notation or SUFFIXES.get(path.suffix.lower())
    if notation == "jsonl":
        return _read_jsonl_alignments(path, words, target_words, sure, possible, base)
    if notation not in NOTATIONS:
        known = ", ".join([*NOTATIONS, "jsonl"])
        raise NormscopeError(f"{path}: Pass notation=, one of {known}: how the links are written.")
    if source is None or target is None:
        raise NormscopeError(f"{path}: {notation} links need the files with the sentences, source= and target=.")
    return _read_parallel_alignments(path, Path(source), Path(target), NOTATIONS[notation])


def parse_alignment_links(text: str, notation: Notation) -> tuple[Links, Links]:
    """The sure links and the possible ones (including the sure ones) of one line, counted from 0."""
    pattern = re.compile(rf"([0-9]{{1,9}})([-{notation.possible}])([0-9]{{1,9}})")
    sure, possible = set(), set()
    for written in text.split():
        match = pattern.fullmatch(written)
        if match is None:
            raise NormscopeError(f"The link {written!r} must be written as 1-2 or 1{notation.possible}2.")
        link = int(match[1]) - notation.base, int(match[3]) - notation.base
        if min(link) < 0:
            raise NormscopeError(f"The link {written!r} is out of range: words count from {notation.base}.")
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return frozenset(sure), frozenset(possible)


def _read_parallel_alignments(
    path: DataFile, source: DataFile, target: DataFile, notation: Notation
) -> Iterator[Entry | Fault]:
    for rows in parallel_text_rows((path, source, target)):
        yield rows if isinstance(rows, Fault) else _alignment_entry(path, rows, notation)


def _alignment_entry(path: DataFile, rows: tuple[Line, ...], notation: Notation) -> Entry | Fault:
    number = rows[0].number
    id, where = f"{path.name}:{number}", f"{path}:{number}"
    try:
        sure, possible = parse_alignment_links(rows[0].text, notation)
    except NormscopeError as error:
        return Fault(id, where, str(error))
    words, target = (tuple(row.text.split()) for row in rows[1:])
    return entry_or_fault(id, where, words=words, target=target, sure=sure, possible=possible)


def _read_jsonl_alignments(
    path: DataFile, words: str, target_words: str, sure: str, possible: str | None, base: int
) -> Iterator[Entry | Fault]:
    wanted = [name for name in (words, target_words, sure, possible) if name is not None]
    checked = False
    for line, record in jsonl_table_file_objects(path):
        id, where = f"{path.name}:{line.number}", f"{path}:{line.number}"
        if isinstance(record, Fault):
            yield record
            continue
        if not checked:
            check_record_columns(wanted, record, where)
            checked = True
        try:
            fields: dict[str, Any] = {
                "words": words_from_record_column(record, words),
                "target": words_from_record_column(record, target_words),
                "sure": _alignment_links_from_column(record, sure, base),
            }
            more = _alignment_links_from_column(record, possible, base) if possible is not None else frozenset()
        except NormscopeError as error:
            yield Fault(id, where, str(error))
        else:
            yield entry_or_fault(id, where, **fields, possible=fields["sure"] | more)


def _alignment_links_from_column(record: Mapping[str, Any], name: str, base: int) -> Links:
    value = record.get(name)
    if not isinstance(value, list) or not all(_is_jsonl_alignment_link(link) for link in value):
        raise NormscopeError(f"The column {name!r} must hold links, a list of pairs of integers.")
    return frozenset((source - base, target - base) for source, target in value)


def _is_jsonl_alignment_link(link: Any) -> bool:
    return isinstance(link, list) and len(link) == 2 and all(type(word) is int for word in link)
