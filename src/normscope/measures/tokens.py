"""What the tokens of an input are: their categories (EMNLP 2020, Fig. 3) and the words they make up.

A word is a run of subwords between spaces; every punctuation mark is a word by itself, as in BERT's basic tokenizer (FF
paper, section 5.2). A token starts a word if any of these holds:

- the tokenizer's word id changes. Only a change between neighbours counts, because ids restart in the second text of a
  pair and some tokenizers give all tokens of a text the same id;
- the token has the prefix of a word start, "\\u2581" in sentencepiece or "\\u0120" in byte-level BPE;
- the token, or the one before it, is punctuation, white space or special;
- there are neither word ids nor such prefixes, and the token lacks WordPiece's "##".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

from normscope.errors import NormscopeError

CATEGORIES = ("first", "separator", "mask", "punctuation", "other")
FIRST = {"[CLS]", "<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"}
SEPARATOR = {"[SEP]", "</s>", "<eos>", "<|eot_id|>", "<|end_of_text|>"}
MASK = {"[MASK]", "<mask>"}
PUNCTUATION = {",", "."}

BEGINS = ("\u2581", "\u0120")  # prefixes of a word start: sentencepiece, byte-level BPE
CONTINUES = "##"  # WordPiece's prefix inside a word
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's token for one byte
NEWLINES = {"\u010a", "\u010d"}  # "\n" and "\r" in byte-level BPE


def token_category(token: str) -> str:
    """The papers' categories: [CLS] or another start token, [SEP], [MASK], comma and period, all others."""
    plain = token.removeprefix("\u2581").removeprefix("\u0120")
    for name, members in (("first", FIRST), ("separator", SEPARATOR), ("mask", MASK), ("punctuation", PUNCTUATION)):
        if plain in members:
            return name
    return "other"


def sum_by_category(maps: Tensor, tokens: Sequence[str]) -> dict[str, Tensor]:
    """category -> (layers,): the sum over the category's columns, averaged over rows; 0 if it has no column."""
    kinds = [token_category(token) for token in tokens]
    found = {}
    for name in CATEGORIES:
        chosen = torch.tensor([kind == name for kind in kinds])
        found[name] = maps[..., chosen].sum(-1).mean(-1)
    return found


def number_words(
    tokens: Sequence[str], special: Sequence[bool], word_ids: Sequence[int | None] | None = None
) -> list[int | None]:
    """The index of each token's word, counted from 0 through the whole input; None for special tokens."""
    if len(special) != len(tokens) or (word_ids is not None and len(word_ids) != len(tokens)):
        raise NormscopeError("Tokens, marks of special tokens and word ids must have the same length.")
    marked = any(token.startswith(BEGINS) for token in tokens)
    words: list[int | None] = []
    count = 0
    apart = True  # the previous token cannot be continued
    for n, token in enumerate(tokens):
        if special[n]:
            words.append(None)
            apart = True
            continue
        alone = is_punctuation_token(token)
        new = apart or alone or token.startswith(BEGINS)
        if word_ids is not None:
            new = new or word_ids[n] != word_ids[n - 1]
        elif not marked:
            new = new or not token.startswith(CONTINUES)
        count += new
        words.append(count - 1)
        apart = alone
    return words


def is_punctuation_token(token: str) -> bool:
    """Whether a token consists of punctuation (ASCII and Unicode, as in BERT) or of white space such as a newline."""
    plain = token
    for mark in BEGINS:
        plain = plain.removeprefix(mark)
    plain = BYTE.sub(lambda found: chr(int(found[1], 16)) if int(found[1], 16) < 128 else found[0], plain)
    if plain in NEWLINES or (plain and plain.isspace()):
        return True
    return bool(plain) and not BYTE.fullmatch(plain) and all(map(_is_punctuation, plain))


def _is_punctuation(char: str) -> bool:
    return (char.isascii() and char.isprintable() and not char.isalnum() and char != " ") or (
        unicodedata.category(char).startswith("P")
    )
