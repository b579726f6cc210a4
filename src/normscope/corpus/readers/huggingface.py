"""Hugging Face datasets, streamed by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.records import ColumnNames, check_record_columns, entry_from_record, select_record_columns
from normscope.errors import NormscopeError


def read_huggingface(
    name: str,
    split: str = "validation",
    config: str | None = None,
    revision: str | None = None,
    **named: Unpack[ColumnNames],
) -> Iterator[Entry | Fault]:
    """One entry per row of a split; ids are row numbers from 1. Code in the dataset repository is never run."""
    wanted = select_record_columns(**named)
    rows = _huggingface_dataset_rows(name, config, split, revision)
    checked = False
    for number, row in enumerate(rows, 1):
        where = f"{name}/{split}:{number}"
        if not checked:
            check_record_columns(wanted.names, row, where)
            checked = True
        yield entry_from_record(row, wanted, where, where)


def _huggingface_dataset_rows(
    name: str, config: str | None, split: str, revision: str | None
) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise NormscopeError(
            f"Reading the dataset {name!r} by name needs the package datasets: pip install datasets. "
            "Or save it to a file and pass its path."
        ) from error
    try:
        yield from load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # the network, the hub and datasets raise many types
        raise NormscopeError(
            f"Cannot read the dataset {name!r}, split {split!r}: {error} "
            "Check its name, config= and split=, and the connection to the Hugging Face hub."
        ) from error
