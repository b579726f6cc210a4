"""Map each token to a word of the gold data, which may split words differently from the tokenizer.

The model reads the words joined by spaces. A fast tokenizer reports which characters each token covers. A slow one
(such as Marian's) does not: the words are tokenised one by one, and the entry is refused unless this gives the same
tokens in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normscope.errors import NormscopeError

Words = tuple[int | None, ...]  # the word of each token, from 0; None for special tokens


def gold_word_ids(words: Sequence[str], ids: Sequence[int], tokenizer: Any, *, target: bool = False) -> Words:
    """The word of each token in `ids`, which encode `" ".join(words)`; `target`: tokenise as target text."""
    if tokenizer is None:
        raise NormscopeError("Assigning tokens to words needs a tokenizer.")
    if getattr(tokenizer, "is_fast", False):
        made, owners = _word_ids_by_offsets(words, tokenizer, target)
    else:
        made, owners = _word_ids_one_by_one(words, tokenizer, target)
    found = _word_ids_of_model_tokens(made, owners, list(ids), set(tokenizer.all_special_ids))
    missing = [n for n in range(len(words)) if n not in set(found)]
    if missing:
        raise NormscopeError(
            f"The {'target ' if target else ''}word {missing[0] + 1} ({words[missing[0]]!r}) has no token."
        )
    return found


def _word_ids_by_offsets(words: Sequence[str], tokenizer: Any, target: bool) -> tuple[list[int], list[int | None]]:
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
                f"The token {text[start:end]!r} covers characters of two words, so it cannot be assigned to one."
            )
        owners.append(those.pop())
    return list(encoding["input_ids"]), owners


def _word_ids_one_by_one(words: Sequence[str], tokenizer: Any, target: bool) -> tuple[list[int], list[int | None]]:
    made: list[int] = []
    owners: list[int | None] = []
    for n, word in enumerate(words):
        given = {"text_target": word} if target else {"text": word}
        some = list(tokenizer(**given, add_special_tokens=False)["input_ids"])
        made += some
        owners += [n] * len(some)
    return made, owners


def _word_ids_of_model_tokens(made: list[int], owners: list[int | None], ids: list[int], special: set[int]) -> Words:
    """The word of each model token: `made` must occur in `ids` with only special tokens before and after it."""
    for start in range(len(ids) - len(made) + 1):
        end = start + len(made)
        if ids[start:end] == made and special.issuperset(ids[:start] + ids[end:]):
            return (None,) * start + tuple(owners) + (None,) * (len(ids) - end)
    raise NormscopeError(
        "Tokenising the words one by one does not give the tokens of the whole sentence, so tokens cannot be assigned "
        "to words."
    )
