"""Plain text: one entry per line, or per paragraph between blank lines."""

from __future__ import annotations

from collections.abc import Iterator

from normscope.corpus.entries import Entry, Fault, entry_or_fault
from normscope.corpus.readers.data_files import DataFile
from normscope.corpus.readers.text_lines import Line, first_damaged_text_line, text_line_blocks, text_lines


def read_plain_text_by_line(path: DataFile) -> Iterator[Entry | Fault]:
    """One entry per non-blank line."""
    for line in text_lines(path):
        if not line.blank:
            yield line_entry(path, path.name, line)


def read_plain_text_by_paragraph(path: DataFile) -> Iterator[Entry | Fault]:
    """One entry per paragraph, with its lines joined by spaces."""
    for block in text_line_blocks(text_lines(path)):
        yield _plain_text_entry(path, block)


def line_entry(path: DataFile, name: str, line: Line) -> Entry | Fault:
    """The entry of a line; its id begins with `name`."""
    id, where = f"{name}:{line.number}", f"{path}:{line.number}"
    if line.damage is not None:
        return Fault(id, where, line.damage)
    return entry_or_fault(id, where, text=line.text.strip())


def join_lines(lines: list[Line]) -> str:
    """The lines joined by spaces."""
    return " ".join(line.text.strip() for line in lines)


def _plain_text_entry(path: DataFile, lines: list[Line]) -> Entry | Fault:
    id = f"{path.name}:{lines[0].number}"
    bad = first_damaged_text_line(lines)
    if bad is not None:
        return Fault(id, f"{path}:{bad.number}", bad.damage or "")
    return entry_or_fault(id, f"{path}:{lines[0].number}", text=join_lines(lines))
