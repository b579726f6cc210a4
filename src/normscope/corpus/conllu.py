"""CoNLL-U: sentences of the Universal Dependencies, as words with their place in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from normscope.corpus.items import Entry, Fault, entry_or_fault
from normscope.corpus.text_lines import Line, blocks, first_damage, text_lines
from normscope.errors import NormscopeError

WIDTH = 10
ID = re.compile(r"(?P<word>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9})|(?P<empty>\.[0-9]+))?")


class Token(NamedTuple):
    """A word as written in the text, and the syntactic words it stands for."""

    line: Line
    form: str
    parts: tuple[str, ...]


class RowError(NormscopeError):
    """A line that breaks the format."""

    def __init__(self, line: Line, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def read_conllu(path: Path, syntactic: bool = False) -> Iterator[Entry | Fault]:
    """An entry of words per sentence: words as written, or with `syntactic` the parts of multiword tokens ("de", "le").

    The id is `# sent_id`, the surface text `# text`, where they are given; a part has the characters of its whole.
    """
    for block in blocks(text_lines(path)):
        comments = dict(_comment(line.text) for line in block if line.text.startswith("#"))
        rows = [line for line in block if not line.text.startswith("#")]
        id = comments.get("sent_id") or f"{path.name}:{block[0].number}"
        bad = first_damage(block)
        if bad is not None:
            yield Fault(id, f"{path}:{bad.number}", bad.damage or "")
        elif rows:
            yield _entry(path, id, rows, comments.get("text"), syntactic)


def _entry(path: Path, id: str, rows: list[Line], text: str | None, syntactic: bool) -> Entry | Fault:
    try:
        tokens = _tokens(rows)
        spans = _spans(tokens, text) if text is not None else ()
    except RowError as error:
        return Fault(id, f"{path}:{error.line.number}", str(error))
    if syntactic:
        spans = tuple(span for token, span in zip(tokens, spans, strict=False) for _ in token.parts)
        words = tuple(part for token in tokens for part in token.parts)
    else:
        words = tuple(token.form for token in tokens)
    return entry_or_fault(id, f"{path}:{rows[0].number}", words=words, surface=text, spans=spans)


def _tokens(rows: list[Line]) -> list[Token]:
    """The tokens as written: a multiword token takes the place of its parts; empty nodes are dropped."""
    tokens: list[Token] = []
    done = inside = 0  # the last word, and the last word of the multiword token that is open
    for line in rows:
        cells = line.text.split("\t")
        if len(cells) != WIDTH:
            raise RowError(line, f"The line has {len(cells)} columns, expected {WIDTH} with tabs between them.")
        match = ID.fullmatch(cells[0])
        if match is None:
            raise RowError(line, f"The id {cells[0]!r} is none of 1, 1-2 and 1.1.")
        if match["empty"]:
            continue
        number = int(match["word"])
        if number != done + 1:
            raise RowError(line, f"The id {cells[0]} follows {done}; expected {done + 1}.")
        if match["last"]:
            if int(match["last"]) < number or inside > done:
                raise RowError(line, f"The multiword token {cells[0]} is empty, or inside another.")
            inside = int(match["last"])
            tokens.append(Token(line, cells[1], ()))
            continue
        if number <= inside:
            tokens[-1] = tokens[-1]._replace(parts=(*tokens[-1].parts, cells[1]))
        else:
            tokens.append(Token(line, cells[1], (cells[1],)))
        done = number
    if inside > done:
        raise RowError(rows[-1], f"The sentence ends at word {done}, inside a multiword token that goes to {inside}.")
    return tokens


def _spans(tokens: list[Token], text: str) -> tuple[tuple[int, int], ...]:
    spans = []
    position = 0
    for token in tokens:
        while position < len(text) and text[position].isspace():
            position += 1
        if not token.form or not text.startswith(token.form, position):
            raise RowError(token.line, f"The word {token.form!r} is not what follows in # text.")
        spans.append((position, position + len(token.form)))
        position += len(token.form)
    if text[position:].strip():
        raise RowError(tokens[-1].line, f"The sentence ends, but # text goes on with {text[position:].strip()[:40]!r}.")
    return tuple(spans)


def _comment(text: str) -> tuple[str, str]:
    key, _, value = text.lstrip("#").partition("=")
    return key.strip(), value.strip()
