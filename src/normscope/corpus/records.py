"""Records with named columns, from whatever table they come, as entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from normscope.corpus.items import Entry, Fault, entry_or_fault
from normscope.errors import NormscopeError


class Named(TypedDict, total=False):
    """What a user may say about columns."""

    text: str | None
    pair: Sequence[str] | None  # two of them
    words: str | None
    id: str | None
    label: str | None
    target: str | None


@dataclass(frozen=True)
class Columns:
    """Which columns hold what: exactly one of `text`, `pair` and `words`."""

    text: str | None
    pair: tuple[str, str] | None
    words: str | None
    id: str | None
    label: str | None
    target: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns in use."""
        names = (self.text, *(self.pair or ()), self.words, self.id, self.label, self.target)
        return tuple(dict.fromkeys(name for name in names if name is not None))


def columns(
    text: str | None = None,
    pair: Sequence[str] | None = None,
    words: str | None = None,
    id: str | None = None,
    label: str | None = None,
    target: str | None = None,
) -> Columns:
    """The columns named by a user; the text is in "text" unless told otherwise."""
    if sum(given is not None for given in (text, pair, words)) > 1:
        raise NormscopeError("Name one of the columns text=, pair= and words=, not several.")
    if pair is not None and (isinstance(pair, str) or len(pair) != 2):
        raise NormscopeError(f"pair= takes the names of two columns, got {pair!r}.")
    if text is None and pair is None and words is None:
        text = "text"
    return Columns(text, (pair[0], pair[1]) if pair is not None else None, words, id, label, target)


def check_columns(wanted: Iterable[str], present: Iterable[str], where: str) -> None:
    """Refuse a table that lacks a column, or has it twice."""
    names = list(present)
    for name in wanted:
        if names.count(name) != 1:
            wrong = "There is no column" if name not in names else "There are several columns"
            raise NormscopeError(
                f"{where}: {wrong} {name!r}. The columns are {', '.join(map(repr, names))}; "
                "say which of them to read by their names."
            )


def entry_from(record: Mapping[str, Any], wanted: Columns, id: str, where: str) -> Entry | Fault:
    """The entry of one record; `id` is its id where no column gives one."""
    try:
        fields: dict[str, Any] = {}
        if wanted.id is not None:
            id = _name(record, wanted.id)
        if wanted.text is not None:
            fields["text"] = _text(record, wanted.text)
        if wanted.pair is not None:
            fields["pair"] = tuple(_text(record, name) for name in wanted.pair)
        if wanted.words is not None:
            fields["words"] = words_in(record, wanted.words)
        if wanted.target is not None:
            target = _value(record, wanted.target)
            fields["target"] = target if isinstance(target, str) else words_in(record, wanted.target)
        if wanted.label is not None and record.get(wanted.label) is not None:
            fields["label"] = str(record[wanted.label])
    except NormscopeError as error:
        return Fault(id, where, str(error))
    return entry_or_fault(id, where, **fields)


def words_in(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The words in a column: a list of them, or a text that white space splits."""
    value = _value(record, name)
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise NormscopeError(f"The column {name!r} must hold words, not {_kind(value)}.")
    return tuple(value)


def _value(record: Mapping[str, Any], name: str) -> Any:
    if record.get(name) is None:
        raise NormscopeError(f"The column {name!r} is missing.")
    return record[name]


def _text(record: Mapping[str, Any], name: str) -> str:
    value = _value(record, name)
    if not isinstance(value, str):
        raise NormscopeError(f"The column {name!r} must hold text, not {_kind(value)}.")
    return value


def _name(record: Mapping[str, Any], name: str) -> str:
    value = _value(record, name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise NormscopeError(f"The column {name!r} must hold an id, a text or a whole number, not {value!r}.")
    return str(value)


def _kind(value: Any) -> str:
    return f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else f"a {type(value).__name__}"
