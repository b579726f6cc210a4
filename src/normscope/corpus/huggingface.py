"""Hugging Face datasets by name, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from normscope.corpus.items import Entry, Fault
from normscope.corpus.records import Named, check_columns, columns, entry_from
from normscope.errors import NormscopeError


def read_huggingface(
    name: str,
    split: str = "validation",
    config: str | None = None,
    revision: str | None = None,
    **named: Unpack[Named],
) -> Iterator[Entry | Fault]:
    """An entry per row of a split, named by its number from 1. No code of the dataset's is run."""
    wanted = columns(**named)
    rows = _rows(name, config, split, revision)
    checked = False
    for number, row in enumerate(rows, 1):
        where = f"{name}/{split}:{number}"
        if not checked:
            check_columns(wanted.names, row, where)
            checked = True
        yield entry_from(row, wanted, where, where)


def _rows(name: str, config: str | None, split: str, revision: str | None) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise NormscopeError(
            f"Reading the dataset {name!r} by name needs the package datasets: pip install datasets. "
            "Or save it to a file and give its path."
        ) from error
    try:
        yield from load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # whatever the network, the hub or the library reports
        raise NormscopeError(
            f"Cannot read the dataset {name!r}, split {split!r}: {error} "
            "Check its name, config= and split=, and that the Hugging Face hub can be reached."
        ) from error
