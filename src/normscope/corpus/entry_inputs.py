"""Entries as model inputs: texts and words as they are, word pieces as ids or, for another tokenizer, as text again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry
from normscope.errors import NormscopeError

FIRST, SEPARATOR = "[CLS]", "[SEP]"  # of BERT's word pieces
# Spaces that `BertTokenizer.decode` removes by default; the order matters.
TIGHT = (
    {f" {mark}": mark for mark in ".?!,"} | {" ' ": "'"} | {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}
)


def entry_input(entry: Entry, lens: Analyzer) -> Any:
    """The entry in a form that the Analyzer accepts.

    Word pieces become ids. Pieces of BERT are decoded to text if the model has another tokenizer.
    """
    if entry.pieces and entry.words is not None:
        if lens.tokenizer is None:
            raise NormscopeError("The entry consists of word pieces, but the model has no tokenizer to look them up.")
        if SEPARATOR in entry.words and lens.tokenizer.sep_token != SEPARATOR:
            texts = decode_word_pieces(entry.words)
            return texts if len(texts) == 2 else texts[0]
        return _ids_of_pieces(entry.words, lens)
    if lens.two_sided and entry.target is not None:
        source = entry.given
        target = entry.target if isinstance(entry.target, str) else " ".join(entry.target)
        return (" ".join(source) if isinstance(source, list) else source, target)
    return entry.given


def decode_word_pieces(pieces: Sequence[str]) -> tuple[str, ...]:
    """The one or two texts between [CLS] and [SEP], as the code of EMNLP 2021 makes RoBERTa's input from BERT's pieces.

    The pieces are joined as by `BertTokenizer.decode` and split at [SEP]. As in that code, a pair keeps the spaces next
    to its [SEP]: the first text ends with a space, which is a token of RoBERTa, and the second begins with one.
    """
    text = " ".join(pieces).replace(" ##", "")
    for spaced, tight in TIGHT.items():
        text = text.replace(spaced, tight)
    texts = tuple(text.removeprefix(FIRST).removesuffix(SEPARATOR).strip().split(SEPARATOR))
    if len(texts) > 2:
        raise NormscopeError(
            f"The word pieces contain {len(texts)} texts, but the model's tokenizer takes at most two."
        )
    if not all(text.strip() for text in texts):
        raise NormscopeError("One text between the separators is empty.")
    return texts


def _ids_of_pieces(words: Sequence[str], lens: Analyzer) -> dict[str, list[int]]:
    ids = lens.tokenizer.convert_tokens_to_ids(list(words))
    if None in ids or (lens.tokenizer.unk_token_id in ids and lens.tokenizer.unk_token not in words):
        raise NormscopeError("Some of the word pieces are not in the model's vocabulary.")
    separator = next((n for n, i in enumerate(ids) if i == lens.tokenizer.sep_token_id), len(ids))
    types = {"token_type_ids": [int(n > separator) for n in range(len(ids))]}
    return {"input_ids": ids} | (types if "token_type_ids" in lens.loaded.limits.keys else {})
