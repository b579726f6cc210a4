"""What readers yield: entries, and faults for entries that could not be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from traceback import format_exception
from typing import Any, NamedTuple

from normscope.errors import NormscopeError

Links = frozenset[tuple[int, int]]


class Entity(NamedTuple):
    """A named entity: the words from `start_word` up to but not including `end_word`."""

    start_word: int
    end_word: int
    label: str


class TokenSpan(NamedTuple):
    """An entity as token positions, from `start` up to but not including `end`."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One input to analyse, with its annotations: exactly one of `text`, `pair` and `words`."""

    id: str  # from the data, or "name:line"
    text: str | None = None
    pair: tuple[str, str] | None = None
    words: tuple[str, ...] | None = None
    pieces: bool = False  # the words are tokens of a tokenizer, including special ones
    surface: str | None = None  # the running text that contains the words
    spans: tuple[tuple[int, int], ...] = ()  # the characters of each word in `surface`
    entities: tuple[Entity, ...] = ()
    label: str | None = None
    target: str | tuple[str, ...] | None = None  # the other side of parallel text
    sure: Links = frozenset()  # (word, target word), from 0
    possible: Links = frozenset()  # the sure links and the merely possible ones
    masked: tuple[int, ...] | None = None  # positions of masked tokens, if drawn for the whole corpus
    kept: tuple[tuple[str, str | None], ...] = ()  # (name, text) of further columns of the data

    def __post_init__(self) -> None:
        _check_entry_content(self)
        _check_entry_word_spans(self)
        _check_entry_entities(self)
        _check_entry_links(self)

    @property
    def given(self) -> str | tuple[str, str] | list[str]:
        """The input in a form that `Analyzer.analyze` accepts."""
        if self.words is not None:
            return list(self.words)
        return self.pair or self.text or ""


@dataclass(frozen=True)
class Fault:
    """An entry that could not be read or analysed: `where` is "file:line", or the step that failed."""

    id: str
    where: str
    reason: str
    traceback: str = ""  # of an unexpected exception

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def entry_or_fault(id: str, where: str, **fields: Any) -> Entry | Fault:
    """An entry, or a fault with the reason if its fields are invalid."""
    try:
        return Entry(id=id, **fields)
    except NormscopeError as error:
        return Fault(id, where, str(error))


def fault_from_error(id: str, where: str, error: Exception) -> Fault:
    """The fault of an entry at which an exception was raised. One that is not a NormscopeError has a traceback, without
    addresses in memory, which differ between runs."""
    if isinstance(error, NormscopeError):
        return Fault(id, where, str(error))
    lines = "".join(format_exception(error))
    return Fault(id, where, _without_addresses(f"{type(error).__name__}: {error}"), _without_addresses(lines))


def _without_addresses(text: str) -> str:
    return re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x...", text).encode("utf-8", "backslashreplace").decode()


def strict(entries: Iterable[Entry | Fault]) -> Iterator[Entry]:
    """Yield the entries; raise the first fault as a NormscopeError."""
    for entry in entries:
        if isinstance(entry, Fault):
            raise NormscopeError(str(entry))
        yield entry


def subword_spans(entry: Entry, word_ids: Sequence[int | None]) -> tuple[TokenSpan, ...]:
    """The entities of an entry as spans of tokens, given the word index of each token (None for special tokens).

    Entities without any token, for example after truncation, are left out.
    """
    count = len(entry.words or ())
    tokens: dict[int, tuple[int, int]] = {}
    for position, word in enumerate(word_ids):
        if word is None:
            continue
        if not 0 <= word < count:
            raise NormscopeError(
                f"The word ids do not belong to {entry.id}: token {position} has word {word} of only {count}."
            )
        tokens[word] = (tokens.get(word, (position, position))[0], position + 1)
    found = []
    for start, end, label in entry.entities:
        inside = [tokens[word] for word in range(start, end) if word in tokens]
        if inside:
            found.append(TokenSpan(min(first for first, _ in inside), max(last for _, last in inside), label))
    return tuple(found)


def _check_entry_content(entry: Entry) -> None:
    given = [part for part in (entry.text, entry.pair, entry.words) if part is not None]
    if len(given) != 1:
        raise NormscopeError("An entry needs exactly one of text, pair and words.")
    if entry.pair is not None and not all(part.strip() for part in entry.pair):
        raise NormscopeError("One text of the pair is empty.")
    if entry.text is not None and not entry.text.strip():
        raise NormscopeError("The text is empty.")
    if entry.words is not None:
        _check_entry_words(entry.words, "word")
    if isinstance(entry.target, tuple):
        _check_entry_words(entry.target, "target word")
    elif entry.target is not None and not entry.target.strip():
        raise NormscopeError("The target text is empty.")
    singles = [text for text in (entry.id, entry.text, entry.surface, entry.label) if text is not None]
    target = (entry.target,) if isinstance(entry.target, str) else entry.target or ()
    kept = (text for pair in entry.kept for text in pair if text is not None)
    for text in chain(singles, entry.pair or (), entry.words or (), target, kept):
        if not _is_encodable_entry_text(text):
            raise NormscopeError(f"{text[:40]!r} contains an unpaired surrogate, which is not a character.")


def _check_entry_words(words: tuple[str, ...], what: str) -> None:
    if not words:
        raise NormscopeError(f"The list of {what}s is empty.")
    for position, word in enumerate(words, 1):
        if not word.strip():
            raise NormscopeError(f"{what.capitalize()} {position} is empty.")


def _check_entry_word_spans(entry: Entry) -> None:
    if not entry.spans:
        return
    if entry.words is None or entry.surface is None or len(entry.spans) != len(entry.words):
        raise NormscopeError("Spans need a surface text and as many words as spans.")
    if not all(0 <= start < end <= len(entry.surface) for start, end in entry.spans):
        raise NormscopeError("The span of a word is outside the surface text.")


def _check_entry_entities(entry: Entry) -> None:
    count = len(entry.words or ())
    for entity in entry.entities:
        if not 0 <= entity.start_word < entity.end_word <= count:
            raise NormscopeError(f"The entity {tuple(entity)} is outside the {count} words.")


def _check_entry_links(entry: Entry) -> None:
    if not entry.sure <= entry.possible:
        raise NormscopeError("The possible links must contain the sure ones.")
    if entry.possible and (entry.words is None or not isinstance(entry.target, tuple)):
        raise NormscopeError("Links need words on both sides.")
    rows, columns = len(entry.words or ()), len(entry.target or ())
    for source, target in sorted(entry.possible):
        if not (0 <= source < rows and 0 <= target < columns):
            raise NormscopeError(
                f"A link joins word {source + 1} to target word {target + 1} (counted from 1), "
                f"but there are {rows} words and {columns} target words."
            )


def _is_encodable_entry_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
