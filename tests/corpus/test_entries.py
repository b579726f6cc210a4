"""Entries, faults, and entities carried to tokens."""

from __future__ import annotations

from typing import Any

import pytest

from normscope import NormscopeError
from normscope.corpus import Entity, Entry, Fault, TokenSpan, strict, subword_spans
from tests.helpers.toys import letters_tokenizer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"text": "a", "words": ("a",)}, "exactly one"),
        ({"text": "  "}, "empty"),
        ({"pair": ("a", " ")}, "empty"),
        ({"words": ()}, "list of words is empty"),
        ({"words": ("a", "")}, "Word 2 is empty"),
        ({"text": "a\ud800"}, "surrogate"),
        ({"words": ("a",), "entities": (Entity(0, 2, "X"),)}, "outside"),
        ({"text": "a", "entities": (Entity(0, 1, "X"),)}, "outside"),
        ({"words": ("a",), "spans": ((0, 1),)}, "surface"),
        ({"words": ("a",), "surface": "a", "spans": ((0, 2),)}, "outside"),
        ({"words": ("a",), "target": ("b",), "sure": frozenset({(0, 0)})}, "contain"),
        ({"words": ("a",), "target": ("b",), "possible": frozenset({(0, 1)})}, "target word 2"),
        ({"text": "a", "target": "b", "possible": frozenset({(0, 0)})}, "both sides"),
    ],
)
def test_impossible_entries(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(NormscopeError, match=message):
        Entry(id="x", **fields)


def test_given_is_what_analyze_takes() -> None:
    assert Entry(id="x", text="a").given == "a"
    assert Entry(id="x", pair=("a", "b")).given == ("a", "b")
    assert Entry(id="x", words=("a", "b")).given == ["a", "b"]


def test_strict_stops_at_the_first_fault() -> None:
    entries = strict([Entry(id="x", text="a"), Fault("y", "f:2", "It is bad."), Entry(id="z", text="b")])
    assert next(entries).id == "x"
    with pytest.raises(NormscopeError, match="f:2: It is bad"):
        next(entries)


ENTRY = Entry(id="x", words=("ab", "c", "def", "g"), entities=(Entity(0, 1, "A"), Entity(2, 4, "B")))


def test_entities_become_token_spans() -> None:
    encoding = letters_tokenizer()(list(ENTRY.words or ()), is_split_into_words=True)
    assert subword_spans(ENTRY, encoding.word_ids()) == (TokenSpan(1, 3, "A"), TokenSpan(4, 8, "B"))


def test_entities_of_a_truncated_sentence() -> None:
    assert subword_spans(ENTRY, [None, 0, 0, 1, None]) == (TokenSpan(1, 3, "A"),)
    assert subword_spans(ENTRY, [None, 0, 0, 1, 2, 2, None])[1] == TokenSpan(4, 6, "B")
    assert subword_spans(ENTRY, [None, 0, 0, 1, 3, None])[1] == TokenSpan(4, 5, "B")  # a word without tokens


def test_word_ids_of_something_else() -> None:
    with pytest.raises(NormscopeError, match="do not belong to x"):
        subword_spans(ENTRY, [None, 4, None])
