"""Entries from the records of any kind of table, by column name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.errors import NormscopeError

ITEM_COLUMNS = ("id", "side", "tokens", "length", "completeness")  # of the table of items


class ColumnNames(TypedDict, total=False):
    """The options of table formats: which columns to read."""

    text: str | None
    pair: Sequence[str] | None  # exactly two
    words: str | None
    id: str | None
    label: str | None
    target: str | None
    keep: Sequence[str] | None  # columns to take along


@dataclass(frozen=True)
class SelectedColumns:
    """The columns to read, with exactly one of `text`, `pair` and `words`."""

    text: str | None
    pair: tuple[str, str] | None
    words: str | None
    id: str | None
    label: str | None
    target: str | None
    keep: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns that are read."""
        names = (self.text, *(self.pair or ()), self.words, self.id, self.label, self.target, *self.keep)
        return tuple(dict.fromkeys(name for name in names if name is not None))


def select_record_columns(
    text: str | None = None,
    pair: Sequence[str] | None = None,
    words: str | None = None,
    id: str | None = None,
    label: str | None = None,
    target: str | None = None,
    keep: Sequence[str] | None = None,
) -> SelectedColumns:
    """The columns given by the options of a reader (default: text in "text")."""
    if sum(given is not None for given in (text, pair, words)) > 1:
        raise NormscopeError("Give only one of text=, pair= and words=, not several.")
    if pair is not None and (isinstance(pair, str) or len(pair) != 2):
        raise NormscopeError(f"pair= takes the names of two columns, not {pair!r}.")
    for name in keep or ():
        if name in ITEM_COLUMNS:
            raise NormscopeError(f"keep= cannot take {name!r}: the table of items has such a column. Rename it.")
    if text is None and pair is None and words is None:
        text = "text"
    both = None if pair is None else (pair[0], pair[1])
    return SelectedColumns(text, both, words, id, label, target, tuple(dict.fromkeys(keep or ())))


def check_record_columns(wanted: Iterable[str], present: Iterable[str], where: str) -> None:
    """Refuse a table in which a column is missing or occurs twice."""
    names = list(present)
    for name in wanted:
        if names.count(name) != 1:
            wrong = "There is no column" if name not in names else "There are several columns"
            raise NormscopeError(
                f"{where}: {wrong} {name!r}. The columns are {', '.join(map(repr, names))}; name the ones to read, "
                f"such as text={(names or [name])[0]!r}."
            )


def entry_from_record(record: Mapping[str, Any], wanted: SelectedColumns, id: str, where: str) -> Entry | Fault:
    """The entry of one record; `id` is used if no column holds the id."""
    try:
        fields: dict[str, Any] = {}
        if wanted.id is not None:
            id = _id_from_record_column(record, wanted.id)
        if wanted.text is not None:
            fields["text"] = _text_from_record_column(record, wanted.text)
        if wanted.pair is not None:
            fields["pair"] = tuple(_text_from_record_column(record, name) for name in wanted.pair)
        if wanted.words is not None:
            fields["words"] = words_from_record_column(record, wanted.words)
        if wanted.target is not None:
            target = _record_column_value(record, wanted.target)
            fields["target"] = target if isinstance(target, str) else words_from_record_column(record, wanted.target)
        if wanted.label is not None and record.get(wanted.label) is not None:
            fields["label"] = str(record[wanted.label])
        if wanted.keep:
            fields["kept"] = tuple((name, _text_of_kept_value(record.get(name))) for name in wanted.keep)
    except NormscopeError as error:
        return Fault(id, where, str(error))
    return entry_or_fault(id, where, **fields)


def _text_of_kept_value(value: Any) -> str | None:
    """A value of any type as text, so that a column has one type in all files of a run."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def words_from_record_column(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The words in a column that holds a list of words, or a text to split at white space."""
    value = _record_column_value(record, name)
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise NormscopeError(f"The column {name!r} must hold words, not {_describe_record_column_type(value)}.")
    return tuple(value)


def _record_column_value(record: Mapping[str, Any], name: str) -> Any:
    if record.get(name) is None:
        raise NormscopeError(f"The column {name!r} is missing.")
    return record[name]


def _text_from_record_column(record: Mapping[str, Any], name: str) -> str:
    value = _record_column_value(record, name)
    if not isinstance(value, str):
        raise NormscopeError(f"The column {name!r} must hold text, not {_describe_record_column_type(value)}.")
    return value


def _id_from_record_column(record: Mapping[str, Any], name: str) -> str:
    value = _record_column_value(record, name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise NormscopeError(f"The column {name!r} must hold an id, a string or an integer, not {value!r}.")
    return str(value)


def _describe_record_column_type(value: Any) -> str:
    return f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else f"a {type(value).__name__}"
