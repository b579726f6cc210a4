"""What a reader yields: entries, and faults in the place of entries that could not be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from normscope.errors import NormscopeError

Links = frozenset[tuple[int, int]]


class Entity(NamedTuple):
    """A named entity: the words `start_word` to `end_word`, the last one not included."""

    start_word: int
    end_word: int
    label: str


class TokenSpan(NamedTuple):
    """An entity as positions of tokens: `start` to `end`, the last one not included."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing to analyse: exactly one of `text`, `pair` and `words`, with what is known about it."""

    id: str  # as given, or "name:line"
    text: str | None = None
    pair: tuple[str, str] | None = None
    words: tuple[str, ...] | None = None
    pieces: bool = False  # the words are a tokenizer's own tokens, special ones included
    surface: str | None = None  # the running text that the words were taken from
    spans: tuple[tuple[int, int], ...] = ()  # the characters of each word in `surface`
    entities: tuple[Entity, ...] = ()
    label: str | None = None
    target: str | tuple[str, ...] | None = None  # the other side of parallel text
    sure: Links = frozenset()  # (word, target word), from 0
    possible: Links = frozenset()  # the sure links and the merely possible ones

    def __post_init__(self) -> None:
        _check_content(self)
        _check_spans(self)
        _check_entities(self)
        _check_links(self)

    @property
    def given(self) -> str | tuple[str, str] | list[str]:
        """The input as `Analyzer.analyze` takes it."""
        if self.words is not None:
            return list(self.words)
        return self.pair or self.text or ""


@dataclass(frozen=True)
class Fault:
    """An entry that could not be read: `where` is "file:line"."""

    id: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def entry_or_fault(id: str, where: str, **fields: Any) -> Entry | Fault:
    """The entry, or the fault that says why there can be none."""
    try:
        return Entry(id=id, **fields)
    except NormscopeError as error:
        return Fault(id, where, str(error))


def strict(entries: Iterable[Entry | Fault]) -> Iterator[Entry]:
    """The entries; the first fault is raised as a NormscopeError."""
    for entry in entries:
        if isinstance(entry, Fault):
            raise NormscopeError(str(entry))
        yield entry


def subword_spans(entry: Entry, word_ids: Sequence[int | None]) -> tuple[TokenSpan, ...]:
    """The entities of an entry as spans of tokens, given the word of each token (None: a special token).

    An entity none of whose words has a token, as after truncation, is left out.
    """
    count = len(entry.words or ())
    tokens: dict[int, tuple[int, int]] = {}
    for position, word in enumerate(word_ids):
        if word is None:
            continue
        if not 0 <= word < count:
            raise NormscopeError(
                f"The word ids do not belong to {entry.id}: token {position} is of word {word}, but there are {count}."
            )
        tokens[word] = (tokens.get(word, (position, position))[0], position + 1)
    found = []
    for start, end, label in entry.entities:
        inside = [tokens[word] for word in range(start, end) if word in tokens]
        if inside:
            found.append(TokenSpan(min(first for first, _ in inside), max(last for _, last in inside), label))
    return tuple(found)


def _check_content(entry: Entry) -> None:
    given = [part for part in (entry.text, entry.pair, entry.words) if part is not None]
    if len(given) != 1:
        raise NormscopeError("An entry is exactly one of text, pair and words.")
    if entry.pair is not None and not all(part.strip() for part in entry.pair):
        raise NormscopeError("One text of the pair is empty.")
    if entry.text is not None and not entry.text.strip():
        raise NormscopeError("The text is empty.")
    if entry.words is not None:
        _check_words(entry.words, "word")
    if isinstance(entry.target, tuple):
        _check_words(entry.target, "target word")
    elif entry.target is not None and not entry.target.strip():
        raise NormscopeError("The target text is empty.")
    singles = [text for text in (entry.id, entry.text, entry.surface, entry.label) if text is not None]
    target = (entry.target,) if isinstance(entry.target, str) else entry.target or ()
    for text in chain(singles, entry.pair or (), entry.words or (), target):
        if not _encodable(text):
            raise NormscopeError(f"{text[:40]!r} holds half of a surrogate pair, which is no character.")


def _check_words(words: tuple[str, ...], what: str) -> None:
    if not words:
        raise NormscopeError(f"There is no {what}.")
    for position, word in enumerate(words, 1):
        if not word.strip():
            raise NormscopeError(f"The {what} {position} is empty.")


def _check_spans(entry: Entry) -> None:
    if not entry.spans:
        return
    if entry.words is None or entry.surface is None or len(entry.spans) != len(entry.words):
        raise NormscopeError("Spans need a surface text and as many words as spans.")
    if not all(0 <= start < end <= len(entry.surface) for start, end in entry.spans):
        raise NormscopeError("A word's span lies outside the surface text.")


def _check_entities(entry: Entry) -> None:
    count = len(entry.words or ())
    for entity in entry.entities:
        if not 0 <= entity.start_word < entity.end_word <= count:
            raise NormscopeError(f"The entity {tuple(entity)} lies outside the {count} words.")


def _check_links(entry: Entry) -> None:
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


def _encodable(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
