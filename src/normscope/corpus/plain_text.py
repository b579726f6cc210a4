"""Plain text: an entry per line, or per paragraph between blank lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normscope.corpus.items import Entry, Fault, entry_or_fault
from normscope.corpus.text_lines import Line, blocks, first_damage, text_lines


def read_lines(path: Path) -> Iterator[Entry | Fault]:
    """An entry per line that is not blank."""
    for line in text_lines(path):
        if not line.blank:
            yield _entry(path, [line])


def read_paragraphs(path: Path) -> Iterator[Entry | Fault]:
    """An entry per paragraph: its lines joined by spaces."""
    for block in blocks(text_lines(path)):
        yield _entry(path, block)


def joined(lines: list[Line]) -> str:
    """Lines as one text."""
    return " ".join(line.text.strip() for line in lines)


def _entry(path: Path, lines: list[Line]) -> Entry | Fault:
    id = f"{path.name}:{lines[0].number}"
    bad = first_damage(lines)
    if bad is not None:
        return Fault(id, f"{path}:{bad.number}", bad.damage or "")
    return entry_or_fault(id, f"{path}:{lines[0].number}", text=joined(lines))
