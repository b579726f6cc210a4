"""One way into every format: `read`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from normscope.corpus.alignments import read_alignments
from normscope.corpus.conll import read_conll
from normscope.corpus.conllu import read_conllu
from normscope.corpus.huggingface import read_huggingface
from normscope.corpus.items import Entry, Fault
from normscope.corpus.papers_pickle import read_papers
from normscope.corpus.paragraph_pairs import read_pairs
from normscope.corpus.parquet import read_parquet
from normscope.corpus.plain_text import read_lines, read_paragraphs
from normscope.corpus.records import Named
from normscope.corpus.table_files import read_csv, read_jsonl, read_tsv
from normscope.errors import NormscopeError

FORMATS: dict[str, Callable[..., Iterator[Entry | Fault]]] = {
    "lines": read_lines,
    "paragraphs": read_paragraphs,
    "pairs": read_pairs,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
    "conll": read_conll,
    "conllu": read_conllu,
    "alignments": read_alignments,
    "huggingface": read_huggingface,
    "papers": read_papers,
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


def read(path_or_name: str | os.PathLike[str], format: str | None = None, **options: Any) -> Iterator[Entry | Fault]:
    """The entries of a corpus, one at a time: `read("sst2.tsv", label="label")`.

    A malformed entry comes as a Fault, so that a run can go on; `strict(read(...))` stops at the first. A file that is
    wrong as a whole (missing, binary, empty, without the column) is a NormscopeError at once. The suffix tells the
    format; `format` names it otherwise, one of FORMATS. The options are those of the format's reader.
    """
    format = format or _guess(path_or_name)
    if format not in FORMATS:
        raise NormscopeError(f"Unknown format {format!r}. Known: {', '.join(FORMATS)}.")
    reader = FORMATS[format]
    _check_options(reader, format, options)
    given = os.fspath(path_or_name) if format == "huggingface" else Path(path_or_name)
    if isinstance(given, Path) and given.is_dir():
        raise NormscopeError(f"Cannot read {given}: it is a folder. Give a file.")
    entries = reader(given, **options)
    first = next(entries, None)  # opens the file, so that a wrong one is refused here and not at its first use
    if first is None:
        raise NormscopeError(f"{given}: There is no entry in it (read as {format}).")
    return _following(first, entries)


def _guess(path_or_name: str | os.PathLike[str]) -> str:
    path = Path(path_or_name)
    format = SUFFIXES.get(path.suffix.lower())
    if format is not None:
        return format
    if not path.exists():
        raise NormscopeError(
            f"There is no file {path}. For a dataset of the Hugging Face hub, say format='huggingface'."
        )
    raise NormscopeError(
        f"The format of {path} cannot be told from its name. Say format=, one of {', '.join(FORMATS)}."
    )


def _check_options(reader: Callable[..., Any], format: str, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(reader).parameters.values())[1:]  # the first is the path
    known: list[str] = []
    for parameter in parameters:
        known.extend(Named.__annotations__ if parameter.kind is parameter.VAR_KEYWORD else [parameter.name])
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise NormscopeError(
            f"The format {format!r} has no option {', '.join(unknown)}. It takes {', '.join(known) or 'none'}."
        )


def _following(first: Entry | Fault, rest: Iterator[Entry | Fault]) -> Iterator[Entry | Fault]:
    yield first
    yield from rest
