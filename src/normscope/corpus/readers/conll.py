"""CoNLL columns: one word per line, sentences separated by blank lines, entity tags in one column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.iob import SCHEMES, Scheme, TagError, entities_from_iob_tags, guess_iob_scheme
from normscope.corpus.readers.text_lines import Line, first_damaged_text_line, text_line_blocks, text_lines
from normscope.errors import NormscopeError

LOOK_AHEAD = 100  # sentences used to find the number of columns and the tag scheme
Row = tuple[Line, list[str]]


def read_conll(
    path: DataFile, word_column: int = 0, tag_column: int | None = -1, scheme: Scheme | None = None
) -> Iterator[Entry | Fault]:
    """One entry of words and entities per sentence; -DOCSTART- lines are skipped.

    Columns are numbered from 0, or from -1 backwards, and separated by tabs or spaces; tag_column=None reads no tags.
    The tag scheme is guessed from the first sentences (IOB1 or IOB2); if these do not decide, both are accepted.
    """
    if scheme is not None and scheme not in SCHEMES:
        raise NormscopeError(f"Unknown scheme {scheme!r}. Known: {', '.join(SCHEMES)}.")
    sentences = _conll_sentences(path)
    ahead = list(islice(sentences, LOOK_AHEAD))
    if not ahead:
        return
    width = Counter(len(cells) for sentence in ahead for _, cells in sentence).most_common(1)[0][0]
    for name, column in (("word_column", word_column), ("tag_column", tag_column)):
        if column is not None and not -width <= column < width:
            raise NormscopeError(f"{path}:{ahead[0][0][0].number}: There are {width} columns, but {name}={column}.")
    if tag_column is not None and scheme is None:
        good = [sentence for sentence in ahead if all(len(cells) == width for _, cells in sentence)]
        scheme = guess_iob_scheme([cells[tag_column] for _, cells in sentence] for sentence in good)
    for sentence in chain(ahead, sentences):
        yield _conll_entry(path, sentence, width, word_column, tag_column, scheme)


def _conll_sentences(path: DataFile) -> Iterator[list[Row]]:
    for block in text_line_blocks(text_lines(path)):
        rows = [(line, _split_conll_columns(line.text)) for line in block]
        sentence: list[Row] = []
        for row in rows:
            if row[1][0] != "-DOCSTART-":
                sentence.append(row)
            elif sentence:  # a new document without a blank line before it
                yield sentence
                sentence = []
        if sentence:
            yield sentence


def _split_conll_columns(text: str) -> list[str]:
    """The columns of a line. Other white space, such as a no-break space, may be part of a word."""
    if "\t" in text:
        return text.split("\t")
    return [cell for cell in text.split(" ") if cell] or [text]


def _conll_entry(
    path: DataFile, sentence: list[Row], width: int, word_column: int, tag_column: int | None, scheme: Scheme | None
) -> Entry | Fault:
    id = f"{path.name}:{sentence[0][0].number}"
    bad = first_damaged_text_line(line for line, _ in sentence)
    if bad is not None:
        return Fault(id, f"{path}:{bad.number}", bad.damage or "")
    for line, cells in sentence:
        if len(cells) != width:
            return Fault(id, f"{path}:{line.number}", f"The line has {len(cells)} columns, expected {width}.")
    try:
        found = (
            () if tag_column is None else entities_from_iob_tags([cells[tag_column] for _, cells in sentence], scheme)
        )
    except TagError as error:
        return Fault(id, f"{path}:{sentence[error.position][0].number}", str(error))
    words = tuple(cells[word_column] for _, cells in sentence)
    return entry_or_fault(id, f"{path}:{sentence[0][0].number}", words=words, entities=found)
