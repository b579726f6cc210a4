"""The lines of a UTF-8 file, numbered, without line ends and byte order mark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from normscope.corpus.readers.data_files import DataFile, open_binary
from normscope.errors import NormscopeError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")  # of UTF-16 and UTF-32


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file; `damage` describes bytes that are not UTF-8."""

    number: int
    text: str
    damage: str | None = None

    @property
    def blank(self) -> bool:
        return not self.damage and not self.text.strip()


def text_lines(path: DataFile) -> Iterator[Line]:
    """The lines of a file with LF or CRLF ends. Lines that are not UTF-8 have `damage`; binary files are refused."""
    with open_binary(path) as file:
        number = 0
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = check_first_text_line(path, raw)
            yield decode_text_line(number, raw)
    if number == 0:
        raise NormscopeError(f"{path}:1: The file is empty.")


def text_line_blocks(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Groups of lines between blank lines."""
    block: list[Line] = []
    for line in lines:
        if not line.blank:
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def first_damaged_text_line(lines: Iterable[Line]) -> Line | None:
    """The first line that is not UTF-8, if any."""
    return next((line for line in lines if line.damage), None)


def check_first_text_line(path: DataFile, raw: bytes) -> bytes:
    """The first line of a file without its byte order mark; raises if it is not text in UTF-8."""
    if raw.startswith(WIDE_MARKS):
        raise NormscopeError(f"{path}:1: The file is UTF-16 or UTF-32. Convert it to UTF-8.")
    if b"\0" in raw:
        raise NormscopeError(f"{path}:1: The file contains binary data, not UTF-8 text. Is it in another format?")
    return raw.removeprefix(BYTE_ORDER_MARK)


def decode_text_line(number: int, raw: bytes) -> Line:
    """A line without its end."""
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return Line(number, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        damage = f"The byte 0x{raw[error.start]:02x} at position {error.start + 1} of the line is not UTF-8."
        return Line(number, raw.decode("utf-8", "replace"), damage)
