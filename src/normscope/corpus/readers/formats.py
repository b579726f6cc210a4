"""The formats of corpora, and `read`, which reads any of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.alignments import read_alignments
from normscope.corpus.readers.conll import read_conll
from normscope.corpus.readers.conllu import read_conllu
from normscope.corpus.readers.data_files import Data, DataFile, data_suffix, distinct_names, find_data_files
from normscope.corpus.readers.first_line import describe_first_line
from normscope.corpus.readers.huggingface import read_huggingface
from normscope.corpus.readers.papers_pickle import read_papers_pickle
from normscope.corpus.readers.paragraph_pairs import read_paragraph_pairs
from normscope.corpus.readers.parallel_text import read_parallel_text
from normscope.corpus.readers.parquet import read_parquet
from normscope.corpus.readers.plain_text import read_plain_text_by_line, read_plain_text_by_paragraph
from normscope.corpus.readers.records import ColumnNames
from normscope.corpus.readers.table_files import read_csv_table, read_jsonl_table, read_tsv_table
from normscope.errors import NormscopeError

FORMATS: dict[str, Callable[..., Iterator[Entry | Fault]]] = {
    "lines": read_plain_text_by_line,
    "paragraphs": read_plain_text_by_paragraph,
    "pairs": read_paragraph_pairs,
    "jsonl": read_jsonl_table,
    "csv": read_csv_table,
    "tsv": read_tsv_table,
    "parquet": read_parquet,
    "conll": read_conll,
    "conllu": read_conllu,
    "parallel": read_parallel_text,
    "alignments": read_alignments,
    "huggingface": read_huggingface,
    "papers": read_papers_pickle,
}
SUFFIXES = {
    ".txt": "lines",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".conll": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".conllu": "conllu",
    ".talp": "alignments",
    ".pharaoh": "alignments",
    ".pkl": "papers",
    ".pickle": "papers",
}
UNCOMPRESSED = ("parquet",)  # formats whose files are not decompressed
KIND_NAMES = {
    int: "an integer",
    bool: "true or false",
    str: "a string",
    Sequence: "a list of names",
    os.PathLike: "a path",
    NoneType: "none",
}


def read(data: Data, format: str | None = None, **options: Any) -> Iterator[Entry | Fault]:
    """Iterate over the entries of a corpus: `read("sst2.tsv", label="label")`.

    A malformed entry is yielded as a Fault; `strict(read(...))` raises it instead. A file that cannot be used at all
    (missing, binary, empty, without a required column) raises a NormscopeError immediately.

    Args:
        data: A file, a folder, a pattern such as "data/*.jsonl", several of these, or the name of a Hugging Face
            dataset. Files may be compressed (.gz, .zst), and remote (s3://..., https://...) if fsspec is installed.
        format: One of FORMATS (default: from the suffix).
        **options: Those of the format's reader.
    """
    format, files = check_corpus_format(data, format, **options)
    entries = _entries_of_files(FORMATS[format], format, files, options)
    first = next(entries, None)  # opens the file, so that errors are raised here
    if first is None:
        raise NormscopeError(f"{', '.join(map(str, files))} contains no entries (read as {format}).")
    return _prepend_entry(first, entries)


def check_corpus_format(data: Data, format: str | None = None, **options: Any) -> tuple[str, list[DataFile | str]]:
    """The format of a corpus and its files, or its name, after a check of these and of the options. Nothing is read
    but a first line, if the suffix of a file does not tell the format."""
    if format is not None and format not in FORMATS:
        raise NormscopeError(f"Unknown format {format!r}. Known: {', '.join(FORMATS)}.")
    if format == "huggingface":
        _check_reader_options(FORMATS[format], format, options)
        if not isinstance(data, str | os.PathLike):
            raise NormscopeError("format='huggingface' takes the name of one dataset.")
        return format, [os.fspath(data)]
    files = find_data_files(data, SUFFIXES)
    format = format or _guess_corpus_format(files)
    _check_reader_options(FORMATS[format], format, options)
    for file in files:
        if isinstance(file, Path) and not file.exists():
            raise NormscopeError(f"Cannot read {file}: No such file or directory.")
        if data_suffix(file) != file.suffix.lower() and format in UNCOMPRESSED:
            raise NormscopeError(f"Cannot read {file}: decompress it first, because {format} is not read as a stream.")
    return format, list(files)


def _entries_of_files(
    reader: Callable[..., Iterator[Entry | Fault]], format: str, files: Sequence[Any], options: dict[str, Any]
) -> Iterator[Entry | Fault]:
    """The entries of one file after the other. Where files share a name, ids begin with a longer part of the path."""
    if len(files) == 1:
        yield from reader(files[0], **options)
        return
    for file, name in zip(files, distinct_names(files), strict=True):
        empty = True
        for entry in reader(file, **options):
            empty = False
            own = f"{file.name}:"
            if name != file.name and entry.id.startswith(own):
                entry = replace(entry, id=f"{name}:{entry.id.removeprefix(own)}")
            yield entry
        if empty:
            raise NormscopeError(f"{file} contains no entries (read as {format}).")


def _guess_corpus_format(files: Sequence[DataFile]) -> str:
    found = {file: SUFFIXES.get(data_suffix(file)) for file in files}
    for file, format in found.items():
        if format is None and isinstance(file, Path) and not file.exists():
            raise NormscopeError(
                f"The file {file} does not exist. For a dataset on the Hugging Face hub, use format='huggingface'."
            )
        if format is None:
            raise NormscopeError(
                f"The format of {file} is not clear from its suffix.{describe_first_line(file)} Use format= with one "
                f"of {', '.join(FORMATS)}."
            )
    formats = {format for format in found.values() if format is not None}
    if len(formats) > 1:
        raise NormscopeError(
            f"The files have several formats: {', '.join(sorted(formats))}. Run them one by one, or use format=."
        )
    return formats.pop()


def _check_reader_options(reader: Callable[..., Any], format: str, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(reader).parameters.values())[1:]  # the first is the path
    hints = get_type_hints(reader)
    known: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            known |= get_type_hints(ColumnNames)
        else:
            known[parameter.name] = hints.get(parameter.name, Any)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise NormscopeError(
            f"The format {format!r} has no option {', '.join(unknown)}. It takes {', '.join(known) or 'none'}."
        )
    for name, value in options.items():
        kinds = _reader_option_kinds(known[name])
        if not any(_is_reader_option_kind(value, kind) for kind in kinds):
            wanted = " or ".join(KIND_NAMES.get(kind, "a value") for kind in kinds)
            raise NormscopeError(f"The option {name} of the format {format!r} takes {wanted}, not {value!r}.")


def _reader_option_kinds(hint: Any) -> list[Any]:
    """The types that an annotation allows: `Sequence[str] | None` allows Sequence and None."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _reader_option_kinds(part)]
    if get_origin(hint) is Literal:  # the reader checks the value
        return [str]
    return [get_origin(hint) or hint]


def _is_reader_option_kind(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is Sequence:
        several = isinstance(value, Sequence) and not isinstance(value, str)
        return several and all(isinstance(one, str) for one in value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _prepend_entry(first: Entry | Fault, rest: Iterator[Entry | Fault]) -> Iterator[Entry | Fault]:
    yield first
    yield from rest
