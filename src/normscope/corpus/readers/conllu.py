"""CoNLL-U, the format of Universal Dependencies: words with their positions in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.text_lines import Line, first_damaged_text_line, text_line_blocks, text_lines
from normscope.errors import NormscopeError

WIDTH = 10
ID = re.compile(r"(?P<word>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9})|(?P<empty>\.[0-9]+))?")


class SurfaceToken(NamedTuple):
    """A word as written in the text, with its syntactic words."""

    line: Line
    form: str
    parts: tuple[str, ...]


class ConlluError(NormscopeError):
    """A line that violates the format."""

    def __init__(self, line: Line, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def read_conllu(path: DataFile, syntactic: bool = False) -> Iterator[Entry | Fault]:
    """One entry per sentence: words as written, or with `syntactic` the parts of multiword tokens ("de", "le").

    `# sent_id` gives the id and `# text` the surface text. Parts of a multiword token have the span of the whole.
    """
    for block in text_line_blocks(text_lines(path)):
        comments = dict(_parse_conllu_comment(line.text) for line in block if line.text.startswith("#"))
        rows = [line for line in block if not line.text.startswith("#")]
        id = comments.get("sent_id") or f"{path.name}:{block[0].number}"
        bad = first_damaged_text_line(block)
        if bad is not None:
            yield Fault(id, f"{path}:{bad.number}", bad.damage or "")
        elif rows:
            yield _conllu_entry(path, id, rows, comments.get("text"), syntactic)


def _conllu_entry(path: DataFile, id: str, rows: list[Line], text: str | None, syntactic: bool) -> Entry | Fault:
    try:
        tokens = _parse_conllu_tokens(rows)
        spans = _locate_conllu_tokens(tokens, text) if text is not None else ()
    except ConlluError as error:
        return Fault(id, f"{path}:{error.line.number}", str(error))
    if syntactic:
        spans = tuple(span for token, span in zip(tokens, spans, strict=False) for _ in token.parts)
        words = tuple(part for token in tokens for part in token.parts)
    else:
        words = tuple(token.form for token in tokens)
    return entry_or_fault(id, f"{path}:{rows[0].number}", words=words, surface=text, spans=spans)


def _parse_conllu_tokens(rows: list[Line]) -> list[SurfaceToken]:
    """The tokens as written: multiword tokens instead of their parts, without empty nodes."""
    tokens: list[SurfaceToken] = []
    done = inside = 0  # the last word so far, and the last one of the current multiword token
    for line in rows:
        cells = line.text.split("\t")
        if len(cells) != WIDTH:
            raise ConlluError(line, f"The line has {len(cells)} columns, expected {WIDTH} separated by tabs.")
        match = ID.fullmatch(cells[0])
        if match is None:
            raise ConlluError(line, f"The id {cells[0]!r} must have the form 1, 1-2 or 1.1.")
        if match["empty"]:
            continue
        number = int(match["word"])
        if number != done + 1:
            raise ConlluError(line, f"The id {cells[0]} follows {done}; expected {done + 1}.")
        if match["last"]:
            if int(match["last"]) < number or inside > done:
                raise ConlluError(line, f"The multiword token {cells[0]} is empty or nested.")
            inside = int(match["last"])
            tokens.append(SurfaceToken(line, cells[1], ()))
            continue
        if number <= inside:
            tokens[-1] = tokens[-1]._replace(parts=(*tokens[-1].parts, cells[1]))
        else:
            tokens.append(SurfaceToken(line, cells[1], (cells[1],)))
        done = number
    if inside > done:
        raise ConlluError(rows[-1], f"The sentence ends at word {done}, inside the multiword token up to {inside}.")
    return tokens


def _locate_conllu_tokens(tokens: list[SurfaceToken], text: str) -> tuple[tuple[int, int], ...]:
    spans = []
    position = 0
    for token in tokens:
        while position < len(text) and text[position].isspace():
            position += 1
        if not token.form or not text.startswith(token.form, position):
            raise ConlluError(token.line, f"The word {token.form!r} does not come next in # text.")
        spans.append((position, position + len(token.form)))
        position += len(token.form)
    if text[position:].strip():
        raise ConlluError(
            tokens[-1].line, f"The sentence ends, but # text continues with {text[position:].strip()[:40]!r}."
        )
    return tuple(spans)


def _parse_conllu_comment(text: str) -> tuple[str, str]:
    key, _, value = text.lstrip("#").partition("=")
    return key.strip(), value.strip()
