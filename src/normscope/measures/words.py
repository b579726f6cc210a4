"""The word of every token: which subwords make up one word (FF paper, section 5.2).

A word is what stands between spaces, and every punctuation mark by itself, as BERT's basic tokens are. Several signs
tell where one begins, and each of them is enough:

- the tokenizer's own word ids change. They begin again in the second text of a pair, and some tokenizers give all
  tokens of a text the same one, so that only a change between neighbours says something;
- the token carries the mark of a word's beginning, "\\u2581" of sentencepiece or "\\u0120" of byte-level BPE;
- the token, or the one before it, is punctuation, white space or special;
- where there are neither word ids nor such marks: the token has no "##" of WordPiece, which continues a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from normscope.errors import NormscopeError

BEGINS = ("\u2581", "\u0120")  # of sentencepiece and of byte-level BPE
CONTINUES = "##"  # of WordPiece
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's token of one byte
NEWLINES = {"\u010a", "\u010d"}  # as byte-level BPE spells "\n" and "\r"


def words_of(
    tokens: Sequence[str], special: Sequence[bool], word_ids: Sequence[int | None] | None = None
) -> list[int | None]:
    """The number of each token's word, counted from 0 through the whole input; None for special tokens."""
    if len(special) != len(tokens) or (word_ids is not None and len(word_ids) != len(tokens)):
        raise NormscopeError("There must be as many marks of special tokens, and word ids, as tokens.")
    marked = any(token.startswith(BEGINS) for token in tokens)
    words: list[int | None] = []
    count = 0
    apart = True  # the token before does not belong to a word that could go on
    for n, token in enumerate(tokens):
        if special[n]:
            words.append(None)
            apart = True
            continue
        alone = stands_alone(token)
        new = apart or alone or token.startswith(BEGINS)
        if word_ids is not None:
            new = new or word_ids[n] != word_ids[n - 1]
        elif not marked:
            new = new or not token.startswith(CONTINUES)
        count += new
        words.append(count - 1)
        apart = alone
    return words


def stands_alone(token: str) -> bool:
    """Whether a token is made of punctuation only (ASCII's and Unicode's, as BERT counts them), or of a line's end."""
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
