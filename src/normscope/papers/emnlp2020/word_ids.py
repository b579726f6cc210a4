"""The word of every token, if the words are those of gold data and not the tokenizer's own.

The model is given the words joined by spaces. A fast tokenizer knows which characters each token covers. A slow one
(Marian's sentencepiece) does not: its words are tokenised one by one, which must give the same tokens in the same
order, otherwise the entry is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normscope.errors import NormscopeError

Words = tuple[int | None, ...]  # the word of each token, from 0; None for special tokens


def gold_word_ids(words: Sequence[str], ids: Sequence[int], tokenizer: Any, *, target: bool = False) -> Words:
    """The word of each of the model's tokens `ids`, made of `" ".join(words)`; `target`: on the decoder's side."""
    if tokenizer is None:
        raise NormscopeError("Without a tokenizer it cannot be told which word a token belongs to.")
    if getattr(tokenizer, "is_fast", False):
        made, owners = _words_by_offsets(words, tokenizer, target)
    else:
        made, owners = _words_one_by_one(words, tokenizer, target)
    found = _place_among_model_tokens(made, owners, list(ids), set(tokenizer.all_special_ids))
    missing = [n for n in range(len(words)) if n not in set(found)]
    if missing:
        raise NormscopeError(
            f"The {'target ' if target else ''}word {missing[0] + 1} ({words[missing[0]]!r}) has no token of its own."
        )
    return found


def _words_by_offsets(words: Sequence[str], tokenizer: Any, target: bool) -> tuple[list[int], list[int | None]]:
    text = " ".join(words)
    given = {"text_target": text} if target else {"text": text}
    encoding = tokenizer(**given, add_special_tokens=False, return_offsets_mapping=True)
    owner: list[int] = []  # of each character; a space belongs to the word after it
    for n, word in enumerate(words):
        owner += [n] * (len(word) + (n > 0))
    owners: list[int | None] = []
    for start, end in encoding["offset_mapping"]:
        letters = [at for at in range(start, end) if not text[at].isspace()]
        those = {owner[at] for at in letters} or {owner[min(start, len(text) - 1)]}
        if len(those) > 1:
            raise NormscopeError(
                f"The token {text[start:end]!r} holds letters of two words: they cannot be told apart."
            )
        owners.append(those.pop())
    return list(encoding["input_ids"]), owners


def _words_one_by_one(words: Sequence[str], tokenizer: Any, target: bool) -> tuple[list[int], list[int | None]]:
    made: list[int] = []
    owners: list[int | None] = []
    for n, word in enumerate(words):
        given = {"text_target": word} if target else {"text": word}
        some = list(tokenizer(**given, add_special_tokens=False)["input_ids"])
        made += some
        owners += [n] * len(some)
    return made, owners


def _place_among_model_tokens(made: list[int], owners: list[int | None], ids: list[int], special: set[int]) -> Words:
    """The owners where the tokens stand among the model's own, with special ones before and after them only."""
    for start in range(len(ids) - len(made) + 1):
        end = start + len(made)
        if ids[start:end] == made and special.issuperset(ids[:start] + ids[end:]):
            return (None,) * start + tuple(owners) + (None,) * (len(ids) - end)
    raise NormscopeError(
        "The words one by one do not give the tokens that the model was given, so it cannot be told which word a token "
        "belongs to."
    )
