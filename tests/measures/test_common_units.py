"""Common units of two tokenizations against connected components found character by character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope import NormscopeError
from normscope.measures.common_units import Span, equal_units, find_common_units


def spans_of(text: str, cuts: set[int]) -> list[Span | None]:
    """The pieces of a text between cuts, with a special token at either end."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [None, *pairwise(places), None]


def naive_units(text: str, first: list[Span | None], other: list[Span | None]) -> list[set[int]]:
    """Sets of characters that are not spaces, joined while any token of either side has characters of two of them."""
    units = [{n} for n, char in enumerate(text) if not char.isspace()]
    for span in (*first, *other):
        if span is None:
            continue
        touched = [unit for unit in units if any(span[0] <= n < span[1] for n in unit)]
        if touched:
            units = [unit for unit in units if unit not in touched] + [set().union(*touched)]
    # a space between two characters of one token joins nothing more: tokens do
    return sorted(units, key=min)


@given(
    st.text(alphabet="ab c", min_size=1, max_size=14).filter(lambda text: bool(text.strip())),
    st.sets(st.integers(1, 13)),
    st.sets(st.integers(1, 13)),
)
def test_units_are_the_smallest_common_pieces(text: str, cuts: set[int], more: set[int]) -> None:
    first, other = spans_of(text, cuts), spans_of(text, more)
    naive = naive_units(text, first, other)
    found = find_common_units(text, first, other, [""] * len(first))
    assert len(found.texts) == len(naive) + 2  # and the special tokens
    assert ["".join(one.split()) for one in found.texts[1:-1]] == ["".join(text[n] for n in sorted(u)) for u in naive]
    for spans, units in ((first, found.first), (other, found.other)):
        assert (units[0], units[-1]) == (0, len(naive) + 1)
        for span, unit in zip(spans[1:-1], units[1:-1], strict=True):
            assert span is not None
            inside = [n for n, one in enumerate(naive, 1) if one & set(range(*span))]
            assert inside in ([unit], [])  # a token lies in one unit; white space alone may be in none
            assert inside or unit is None or text[slice(*span)].isspace()


def test_special_tokens_without_a_counterpart_are_in_no_unit() -> None:
    found = find_common_units(
        "ab c", [None, (0, 2), (2, 4), None], [(0, 1), (1, 2), (2, 4)], ["<s>", "ab", " c", "</s>"]
    )
    assert found.first == (None, 0, 1, None)
    assert found.other == (0, 0, 1)
    assert (found.texts, found.unmatched) == (("ab", "c"), 2)
    found = find_common_units("a", [None, None, (0, 1), None], [None, (0, 1)], ["<s>", "<x>", "a", "</s>"])
    assert found.first == (0, None, 1, None)
    assert found.texts == ("<s>", "a")


def test_tokens_that_share_a_character_are_one_unit() -> None:
    """As of byte-level tokenizers, whose tokens may be parts of a character."""
    found = find_common_units("é a", [(0, 1), (0, 1), (1, 3)], [(0, 1), (2, 3)], ["Ã", "©", "Ġa"])
    assert found.first == (0, 0, 1)
    assert found.other == (0, 1)


def test_characters_that_only_one_tokenizer_reads() -> None:
    found = find_common_units("a\u0001b", [(0, 1), (1, 2), (2, 3)], [(0, 1), (2, 3)], ["a", "?", "b"])
    assert found.first == (0, None, 1)
    assert found.texts == ("a", "b")
    with pytest.raises(NormscopeError, match="no text in common"):
        find_common_units("ab", [(0, 1)], [(1, 2)], ["a"])


def test_equal_tokens() -> None:
    assert equal_units(("x", "y")).first == equal_units(("x", "y")).other == (0, 1)
