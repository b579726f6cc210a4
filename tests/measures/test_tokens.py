"""The word of every token, for each way in which tokenizers mark words."""

from __future__ import annotations

import pytest

from normscope import NormscopeError
from normscope.measures.tokens import is_punctuation_token, number_words
from tests.helpers.toys import toy_tokenizer

SPACE, BYTES = "\u2581", "\u0120"  # marks of sentencepiece and of byte-level BPE


def test_word_ids_that_begin_again_in_the_second_text() -> None:
    encoding = toy_tokenizer()("a cats", "cats sat")
    tokens = encoding.tokens()
    assert tokens == ["[CLS]", "a", "cat", "##s", "[SEP]", "cat", "##s", "sat", "[SEP]"]
    assert encoding.word_ids() == [None, 0, 1, 1, None, 0, 0, 1, None]
    special = [id is None for id in encoding.word_ids()]
    assert number_words(tokens, special, encoding.word_ids()) == [None, 0, 1, 1, None, 2, 2, 3, None]


def test_pair_without_a_separator() -> None:
    tokens = [SPACE + "Once", SPACE + "up", "on", SPACE + "time", "y"]
    assert number_words(tokens, [False] * 5, [0, 1, 1, 0, 0]) == [0, 1, 1, 2, 2]


def test_wordpiece_without_word_ids() -> None:
    tokens = ["[CLS]", "em", "##bed", "##ding", "s", ",", "a", "[SEP]"]
    special = [True, *[False] * 6, True]
    assert number_words(tokens, special) == [None, 0, 0, 0, 1, 2, 3, None]


def test_sentencepiece_with_one_word_id_for_all() -> None:
    tokens = [
        "<s>",
        SPACE + "Un",
        "bel",
        "iev",
        "able",
        ",",
        SPACE + "the",
        SPACE + "well",
        "-",
        "known",
        SPACE + "cat",
    ]
    words = [None, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    special = [True, *[False] * 10]
    assert number_words(tokens, special, [None, *[0] * 10]) == words
    assert number_words(tokens, special) == words


def test_bytes_of_sentencepiece() -> None:
    tokens = [SPACE + "a", "<0xE2>", "<0x9C>", "<0x93>", "<0x0A>", "New", SPACE, "1", "."]
    assert number_words(tokens, [False] * 9) == [0, 0, 0, 0, 1, 2, 3, 3, 4]


def test_byte_level() -> None:
    tokens = ["<s>", "Hel", "lo", ",", BYTES + "wor", "ld", "!", "\u010a", "End", "</s>"]
    special = [True, *[False] * 8, True]
    ids = [None, 0, 0, 1, 2, 2, 3, 4, 5, None]
    assert number_words(tokens, special, ids) == [None, 0, 0, 1, 2, 2, 3, 4, 5, None]
    assert number_words(tokens, special) == [None, 0, 0, 1, 2, 2, 3, 4, 5, None]
    assert number_words(["Hel", "lo"], [False] * 2, [0, 0]) == [0, 0]


def test_punctuation_inside_a_given_word_is_a_separate_word() -> None:
    tokens = ["[CLS]", "u", ".", "s", ".", "lamb", "-", "bas", "##ed", "[SEP]"]
    ids = [None, 0, 0, 0, 0, 1, 1, 1, 1, None]
    special = [id is None for id in ids]
    assert number_words(tokens, special, ids) == [None, 0, 1, 2, 3, 4, 5, 6, 6, None]


@pytest.mark.parametrize(
    ("token", "alone"),
    [
        *((token, True) for token in (".", "...", "--", SPACE + "(", BYTES + '"', "$", "\u2014", "\u3002", "<0x2E>")),
        *((token, False) for token in ("a.", "1,000", SPACE, "", "##s", "<0xE2>", "\u00b0", "e")),
    ],
)
def test_punctuation_tokens(token: str, alone: bool) -> None:
    assert is_punctuation_token(token) == alone


def test_an_unknown_word_is_a_word() -> None:
    assert number_words(["[UNK]", "a"], [False, False], [0, 1]) == [0, 1]


def test_lengths_must_agree() -> None:
    with pytest.raises(NormscopeError, match="same length"):
        number_words(["a"], [])
    with pytest.raises(NormscopeError, match="same length"):
        number_words(["a"], [False], [0, 1])
    assert number_words([], []) == []
