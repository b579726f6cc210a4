"""The formats of corpora, and `read`, which reads any of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.alignments import read_alignments
from normscope.corpus.readers.conll import read_conll
from normscope.corpus.readers.conllu import read_conllu
from normscope.corpus.readers.huggingface import read_huggingface
from normscope.corpus.readers.papers_pickle import read_papers_pickle
from normscope.corpus.readers.paragraph_pairs import read_paragraph_pairs
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
KIND_NAMES = {
    int: "an integer",
    bool: "true or false",
    str: "a string",
    Sequence: "a list of names",
    os.PathLike: "a path",
    NoneType: "none",
}


def read(path_or_name: str | os.PathLike[str], format: str | None = None, **options: Any) -> Iterator[Entry | Fault]:
    """Iterate over the entries of a corpus: `read("sst2.tsv", label="label")`.

    A malformed entry is yielded as a Fault; `strict(read(...))` raises it instead. A file that cannot be used at all
    (missing, binary, empty, without a required column) raises a NormscopeError immediately. `format` is one of FORMATS
    (default: from the suffix); the options are those of the format's reader.
    """
    format, given = check_corpus_format(path_or_name, format, **options)
    entries = FORMATS[format](given, **options)
    first = next(entries, None)  # opens the file, so that errors are raised here
    if first is None:
        raise NormscopeError(f"{given} contains no entries (read as {format}).")
    return _prepend_entry(first, entries)


def check_corpus_format(
    path_or_name: str | os.PathLike[str], format: str | None = None, **options: Any
) -> tuple[str, str | Path]:
    """The format of a corpus and its path or name, after a check of path and options. Nothing is read."""
    format = format or _guess_corpus_format(path_or_name)
    if format not in FORMATS:
        raise NormscopeError(f"Unknown format {format!r}. Known: {', '.join(FORMATS)}.")
    _check_reader_options(FORMATS[format], format, options)
    if format == "huggingface":
        return format, os.fspath(path_or_name)
    given = Path(path_or_name)
    if given.is_dir():
        raise NormscopeError(f"Cannot read {given}: it is a folder, not a file.")
    if not given.exists():
        raise NormscopeError(f"Cannot read {given}: No such file or directory.")
    return format, given


def _guess_corpus_format(path_or_name: str | os.PathLike[str]) -> str:
    path = Path(path_or_name)
    format = SUFFIXES.get(path.suffix.lower())
    if format is not None:
        return format
    if not path.exists():
        raise NormscopeError(
            f"The file {path} does not exist. For a dataset on the Hugging Face hub, use format='huggingface'."
        )
    raise NormscopeError(
        f"The format of {path} is not clear from its suffix. Use format= with one of {', '.join(FORMATS)}."
    )


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
