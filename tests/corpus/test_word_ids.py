"""The word of every token: fast tokenizers by characters, slow ones word by word."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from normscope import NormscopeError
from normscope.corpus import strict
from normscope.corpus.readers.formats import read
from normscope.corpus.word_ids import gold_word_ids
from tests.helpers.files import real_file
from tests.helpers.toys import letters_tokenizer


class Slow:
    """A slow tokenizer: pieces of at most two letters, the first of a word with its space, and an end token."""

    is_fast = False
    all_special_ids = (0, 1, 2)

    def __init__(self, merges: bool = False) -> None:
        self.known: dict[str, int] = {}
        self.merges = merges  # "of the" becomes one piece

    def __call__(self, text: str = "", text_target: str = "", add_special_tokens: bool = True) -> dict[str, list[int]]:
        given = f" {text or text_target}"
        pieces = []
        for word in given.replace(" of the", " of_the" if self.merges else " of the").split(" ")[1:]:
            marked = f"_{word}" if text else f"^{word}"  # the two sides have different pieces
            pieces += [marked] if "_" in word else [marked[n : n + 2] for n in range(0, len(marked), 2)]
        ids = [self.known.setdefault(piece, 3 + len(self.known)) for piece in pieces]
        return {"input_ids": [*ids, 2] if add_special_tokens else ids}


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, where a space belongs to the token after it and one merge joins two words."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", "a"), ("b", "c"), ("\u00c3", "\u00a9")]
    vocabulary = {sign: n for n, sign in enumerate(["<s>", "</s>", *signs, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def given(tokenizer: Any, words: list[str], before: list[int], after: list[int]) -> list[int]:
    return [*before, *tokenizer(" ".join(words), add_special_tokens=False)["input_ids"], *after]


def test_a_fast_tokenizer_with_special_tokens() -> None:
    tokenizer = letters_tokenizer()
    ids = tokenizer("ab c-d e")["input_ids"]  # the mark is a word of the tokenizer's own
    assert tokenizer("ab c-d e").word_ids() == [None, 0, 0, 1, 2, 3, 4, None]
    assert gold_word_ids(["ab", "c-d", "e"], ids, tokenizer) == (None, 0, 0, 1, 1, 1, 2, None)


def test_decoder_inputs_begin_with_a_start_token_and_lack_the_last() -> None:
    tokenizer = letters_tokenizer()
    ids = [3, *tokenizer(text_target="ab c")["input_ids"][:-1]]
    assert gold_word_ids(["ab", "c"], ids, tokenizer, target=True) == (None, None, 0, 0, 1)


def test_byte_level_tokens() -> None:
    tokenizer = bytes_tokenizer()
    words = ["bc", "a", "\u00e9a", "\u20ac"]  # e acute is one token, the euro sign three
    ids = given(tokenizer, words, [0], [1])
    assert gold_word_ids(words, ids, tokenizer) == (None, 0, 1, 2, 2, 2, 3, 3, 3, 3, None)


def test_a_token_of_two_words_is_refused() -> None:
    backend = Tokenizer(models.BPE({"<s>": 0, "a": 1, " ": 2, "a ": 3, "a a": 4}, [("a", " "), ("a ", "a")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    with pytest.raises(NormscopeError, match="'a a' covers characters of two words"):
        gold_word_ids(["a", "a"], [0, 4], tokenizer)


@pytest.mark.parametrize("target", [False, True])
def test_a_slow_tokenizer(target: bool) -> None:
    tokenizer = Slow()
    words = ["of", "the", "a"]
    ids = tokenizer(**{"text_target" if target else "text": "of the a"})["input_ids"]
    assert gold_word_ids(words, [1, *ids], tokenizer, target=target) == (None, 0, 0, 1, 1, 2, None)
    with pytest.raises(NormscopeError, match="one by one"):
        gold_word_ids(words, ids, tokenizer, target=not target)


@pytest.mark.parametrize(
    ("words", "change", "said"),
    [
        (["of", "the"], lambda ids: ids, "one by one"),  # whole they are one token
        (["a", "b"], lambda ids: ids[1:], "one by one"),  # cut
        (["a", "b"], lambda ids: [9, *ids], "one by one"),  # a token that is not special before them
    ],
)
def test_tokens_that_are_not_those_of_the_words(
    words: list[str], change: Callable[[list[int]], list[int]], said: str
) -> None:
    tokenizer = Slow(merges=True)
    with pytest.raises(NormscopeError, match=said):
        gold_word_ids(words, change(tokenizer(" ".join(words))["input_ids"]), tokenizer)


def test_a_word_without_a_token() -> None:
    class Deaf(Slow):
        def __call__(self, text: str = "", text_target: str = "", add_special_tokens: bool = True) -> Any:
            kept = (text or text_target).replace("x", "").split()
            return super().__call__(" ".join(kept), "", add_special_tokens) if kept else {"input_ids": []}

    tokenizer = Deaf()
    with pytest.raises(NormscopeError, match=r"word 2 \('x'\) has no token"):
        gold_word_ids(["a", "x"], tokenizer("a x")["input_ids"], tokenizer)
    with pytest.raises(NormscopeError, match="needs a tokenizer"):
        gold_word_ids(["a"], [3], None)


@pytest.mark.filterwarnings("ignore:Recommended")
def test_marian_on_the_hansards() -> None:
    folder = real_file("hansards.en-fr.jsonl").parents[1] / "models" / "opus-mt-en-fr"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for entry in strict(islice(read(real_file("hansards.en-fr.jsonl"), "alignments"), 40)):
        assert entry.words is not None
        assert isinstance(entry.target, tuple)
        source = gold_word_ids(entry.words, tokenizer(" ".join(entry.words))["input_ids"], tokenizer)
        fed = [tokenizer.pad_token_id, *tokenizer(text_target=" ".join(entry.target))["input_ids"][:-1]]
        target = gold_word_ids(entry.target, fed, tokenizer, target=True)
        assert (source[-1], target[0], target[-1]) == (None, None, len(entry.target) - 1)
        for found, words in ((source[:-1], entry.words), (target[1:], entry.target)):
            assert list(found) == sorted(found)  # type: ignore[type-var]
            assert set(found) == set(range(len(words)))
