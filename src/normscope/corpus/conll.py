"""CoNLL columns: a word per line, sentences between blank lines, entity tags in one column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from normscope.corpus.iob import SCHEMES, Scheme, TagError, entities, told_apart
from normscope.corpus.items import Entry, Fault, entry_or_fault
from normscope.corpus.text_lines import Line, blocks, first_damage, text_lines
from normscope.errors import NormscopeError

LOOK_AHEAD = 100  # sentences that tell the number of columns, and IOB1 from IOB2
Row = tuple[Line, list[str]]


def read_conll(
    path: Path, word_column: int = 0, tag_column: int | None = -1, scheme: Scheme | None = None
) -> Iterator[Entry | Fault]:
    """An entry of words and entities per sentence; -DOCSTART- lines are skipped.

    Columns count from 0, or from the end with -1; tag_column=None: no tags. Tabs separate columns, or else spaces.
    Without `scheme` the first sentences tell IOB1 from IOB2; where they do not, both are taken.
    """
    if scheme is not None and scheme not in SCHEMES:
        raise NormscopeError(f"Unknown scheme {scheme!r}. Known: {', '.join(SCHEMES)}.")
    sentences = _sentences(path)
    ahead = list(islice(sentences, LOOK_AHEAD))
    if not ahead:
        return
    width = Counter(len(cells) for sentence in ahead for _, cells in sentence).most_common(1)[0][0]
    for name, column in (("word_column", word_column), ("tag_column", tag_column)):
        if column is not None and not -width <= column < width:
            raise NormscopeError(f"{path}:{ahead[0][0][0].number}: There are {width} columns, but {name}={column}.")
    if tag_column is not None and scheme is None:
        good = [sentence for sentence in ahead if all(len(cells) == width for _, cells in sentence)]
        scheme = told_apart([cells[tag_column] for _, cells in sentence] for sentence in good)
    for sentence in chain(ahead, sentences):
        yield _entry(path, sentence, width, word_column, tag_column, scheme)


def _sentences(path: Path) -> Iterator[list[Row]]:
    for block in blocks(text_lines(path)):
        rows = [(line, _cells(line.text)) for line in block]
        sentence: list[Row] = []
        for row in rows:
            if row[1][0] != "-DOCSTART-":
                sentence.append(row)
            elif sentence:  # a document that begins without a blank line before it
                yield sentence
                sentence = []
        if sentence:
            yield sentence


def _cells(text: str) -> list[str]:
    """Other white space, such as a no-break space, may be inside a word."""
    if "\t" in text:
        return text.split("\t")
    return [cell for cell in text.split(" ") if cell] or [text]


def _entry(
    path: Path, sentence: list[Row], width: int, word_column: int, tag_column: int | None, scheme: Scheme | None
) -> Entry | Fault:
    id = f"{path.name}:{sentence[0][0].number}"
    bad = first_damage(line for line, _ in sentence)
    if bad is not None:
        return Fault(id, f"{path}:{bad.number}", bad.damage or "")
    for line, cells in sentence:
        if len(cells) != width:
            return Fault(id, f"{path}:{line.number}", f"The line has {len(cells)} columns, expected {width}.")
    try:
        found = () if tag_column is None else entities([cells[tag_column] for _, cells in sentence], scheme)
    except TagError as error:
        return Fault(id, f"{path}:{sentence[error.position][0].number}", str(error))
    words = tuple(cells[word_column] for _, cells in sentence)
    return entry_or_fault(id, f"{path}:{sentence[0][0].number}", words=words, entities=found)
