"""One way into every format: `read`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
SAID = {
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    Sequence: "a list of names",
    os.PathLike: "a path",
    NoneType: "none",
}


def read(path_or_name: str | os.PathLike[str], format: str | None = None, **options: Any) -> Iterator[Entry | Fault]:
    """The entries of a corpus, one at a time: `read("sst2.tsv", label="label")`.

    A malformed entry comes as a Fault, so that a run can go on; `strict(read(...))` stops at the first. A file that is
    wrong as a whole (missing, binary, empty, without the column) is a NormscopeError at once. The suffix tells the
    format; `format` names it otherwise, one of FORMATS. The options are those of the format's reader.
    """
    format, given = check(path_or_name, format, **options)
    entries = FORMATS[format](given, **options)
    first = next(entries, None)  # opens the file, so that a wrong one is refused here and not at its first use
    if first is None:
        raise NormscopeError(f"{given}: There is no entry in it (read as {format}).")
    return _following(first, entries)


def check(path_or_name: str | os.PathLike[str], format: str | None = None, **options: Any) -> tuple[str, str | Path]:
    """The format of a corpus and its path or name. Refuses wrong options and paths without reading anything."""
    format = format or _guess(path_or_name)
    if format not in FORMATS:
        raise NormscopeError(f"Unknown format {format!r}. Known: {', '.join(FORMATS)}.")
    _check_options(FORMATS[format], format, options)
    if format == "huggingface":
        return format, os.fspath(path_or_name)
    given = Path(path_or_name)
    if given.is_dir():
        raise NormscopeError(f"Cannot read {given}: it is a folder. Give a file.")
    if not given.exists():
        raise NormscopeError(f"Cannot read {given}: No such file or directory.")
    return format, given


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
    hints = get_type_hints(reader)
    known: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            known |= get_type_hints(Named)
        else:
            known[parameter.name] = hints.get(parameter.name, Any)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise NormscopeError(
            f"The format {format!r} has no option {', '.join(unknown)}. It takes {', '.join(known) or 'none'}."
        )
    for name, value in options.items():
        kinds = _kinds(known[name])
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(SAID.get(kind, "a value") for kind in kinds)
            raise NormscopeError(f"The option {name} of the format {format!r} takes {wanted}, not {value!r}.")


def _kinds(hint: Any) -> list[Any]:
    """The kinds of value that an annotation names: `Sequence[str] | None` is a Sequence or None."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is Literal:  # the reader says itself which it knows
        return [str]
    return [get_origin(hint) or hint]


def _is(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is Sequence:
        several = isinstance(value, Sequence) and not isinstance(value, str)
        return several and all(isinstance(one, str) for one in value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _following(first: Entry | Fault, rest: Iterator[Entry | Fault]) -> Iterator[Entry | Fault]:
    yield first
    yield from rest
