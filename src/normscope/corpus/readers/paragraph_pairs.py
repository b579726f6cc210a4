"""Pairs of consecutive paragraphs of an article, cut to a number of tokens, as in the papers' Wikipedia data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.plain_text import join_lines
from normscope.corpus.readers.text_lines import Line, first_damaged_text_line, text_lines
from normscope.errors import NormscopeError

ESCAPE = re.compile(r" @([-,.])@ ")


class Paragraph(NamedTuple):
    """The lines of a paragraph, or of a heading of the given level."""

    lines: list[Line]
    level: int = 0


def read_paragraph_pairs(
    path: DataFile, tokenizer: Any = None, max_tokens: int = 128, overlap: bool = False
) -> Iterator[Entry | Fault]:
    """Paragraphs 1 and 2, 3 and 4, ... of each article; with `overlap`, also 2 and 3 and so on.

    An article begins at a WikiText heading ` = Title = `; headings are dropped, and so is an unpaired last paragraph.
    WikiText's escapes ` @-@ `, ` @,@ ` and ` @.@ `, which stand for a hyphen in a word and for the marks in a number,
    are undone: "mid @-@ 20th" is read as "mid-20th", "1 @,@ 000" as "1,000". With a (fast) tokenizer, pairs are cut to
    `max_tokens` including special tokens.
    """
    if tokenizer is not None:
        _check_paragraph_pair_tokenizer(tokenizer, max_tokens)
    before: Paragraph | None = None
    for paragraph in _split_paragraphs_for_pairs(text_lines(path)):
        bad = first_damaged_text_line(paragraph.lines)
        if bad is not None:
            yield Fault(f"{path.name}:{paragraph.lines[0].number}", f"{path}:{bad.number}", bad.damage or "")
            before = None
        elif paragraph.level:
            before = None if paragraph.level == 1 else before
        elif before is None:
            before = paragraph
        else:
            yield _paragraph_pair_entry(path, before, paragraph, tokenizer, max_tokens)
            before = paragraph if overlap else None


def paragraph_pairs_heading_level(text: str) -> int:
    """1 for ` = Title = `, 2 for ` = = Section = = `, ...; 0 for other lines."""
    marks = text.split()
    level = 0
    while level < len(marks) and marks[level] == "=":
        level += 1
    inner = marks[level : len(marks) - level]
    balanced = marks[len(marks) - level :] == ["="] * level
    return level if inner and balanced and inner[-1] != "=" else 0


def undo_wikitext_escapes(text: str) -> str:
    """The text with ` @-@ `, ` @,@ ` and ` @.@ ` replaced by the mark alone."""
    return ESCAPE.sub(r"\1", text)


def cut_paragraph_pair(pair: tuple[str, str], tokenizer: Any, max_tokens: int) -> tuple[str, str]:
    """The pair with the end of each text cut off, so that both together have at most `max_tokens` tokens.

    The longer text is cut first; each keeps at least half of the available tokens if it has that many.
    """
    room = max_tokens - tokenizer.num_special_tokens_to_add(pair=True)
    ends = [_paragraph_pair_token_ends(text, tokenizer) for text in pair]
    if not all(ends):
        raise NormscopeError("The tokenizer yields no tokens for one text of the pair.")
    first = min(len(ends[0]), max(room - room // 2, room - len(ends[1])))
    second = min(len(ends[1]), room - first)
    while first > 0 and second > 0:
        cut = _cut_paragraph_pair_text(pair[0], ends[0], first), _cut_paragraph_pair_text(pair[1], ends[1], second)
        if len(tokenizer(*cut, verbose=False)["input_ids"]) <= max_tokens:
            return cut
        # Some tokenizers split the beginning of a word into more tokens than they did within the whole word.
        first, second = (first - 1, second) if first > second else (first, second - 1)
    raise NormscopeError(f"The pair cannot be cut to {max_tokens} tokens.")


def _split_paragraphs_for_pairs(lines: Iterable[Line]) -> Iterator[Paragraph]:
    """Paragraphs and headings; after a WikiText heading each line is a paragraph, as WikiText is distributed."""
    block: list[Line] = []
    wikitext = False
    for line in lines:
        level = 0 if line.damage else paragraph_pairs_heading_level(line.text)
        wikitext = wikitext or level > 0
        if block and (line.blank or wikitext):
            yield Paragraph(block)
            block = []
        if level:
            yield Paragraph([line], level)
        elif not line.blank:
            block.append(line)
    if block:
        yield Paragraph(block)


def _paragraph_pair_entry(path: DataFile, a: Paragraph, b: Paragraph, tokenizer: Any, max_tokens: int) -> Entry | Fault:
    id, where = f"{path.name}:{a.lines[0].number}", f"{path}:{a.lines[0].number}"
    pair = undo_wikitext_escapes(join_lines(a.lines)), undo_wikitext_escapes(join_lines(b.lines))
    if tokenizer is not None:
        try:
            pair = cut_paragraph_pair(pair, tokenizer, max_tokens)
        except NormscopeError as error:
            return Fault(id, where, str(error))
    return entry_or_fault(id, where, pair=pair)


def _check_paragraph_pair_tokenizer(tokenizer: Any, max_tokens: int) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise NormscopeError("Cutting pairs needs a fast tokenizer, which provides the characters of each token.")
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if max_tokens < special + 2:
        raise NormscopeError(
            f"max_tokens={max_tokens} leaves no room for two texts besides {special} special tokens; "
            f"use at least {special + 2}."
        )


def _paragraph_pair_token_ends(text: str, tokenizer: Any) -> list[int]:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [end for _, end in encoding["offset_mapping"]]


def _cut_paragraph_pair_text(text: str, ends: list[int], count: int) -> str:
    return text if count == len(ends) else text[: ends[count - 1]].rstrip()
