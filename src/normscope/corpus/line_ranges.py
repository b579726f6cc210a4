"""Texts with one entry per line, planned without making entries: where the lines of each shard begin.

Whoever computes a shard reads its lines itself. The plan holds 20 bytes for each shard, and takes one pass over the
files, a block at a time. Ids, `file:line`, are unique by construction.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.data_files import COMPRESSED, DataFile, RemoteFile, distinct_names, open_binary
from normscope.corpus.readers.plain_text import line_entry
from normscope.corpus.readers.text_lines import BYTE_ORDER_MARK, Line, check_first_text_line, decode_text_line
from normscope.errors import NormscopeError

BLOCK = 2**23  # bytes read at a time
# First bytes of a line that may consist of white space: ASCII white space, or the first byte of another space in UTF-8.
UNCERTAIN = np.zeros(256, dtype=bool)
UNCERTAIN[[*range(33), 0xC2, 0xE1, 0xE2, 0xE3]] = True


@dataclass(frozen=True)
class LineRange:
    """Consecutive lines of a file, from a byte on."""

    file: DataFile  # as it was named
    place: DataFile  # an absolute path, for other processes
    name: str  # with which ids begin
    size: int | None  # of the file in bytes, if it is local
    start: int  # the first byte
    line: int  # the number of the first line
    entries: int  # the number of entries, which is that of lines that are not blank

    def read(self) -> Iterator[Entry | Fault]:
        """The entries."""
        if isinstance(self.place, Path) and (not self.place.is_file() or self.place.stat().st_size != self.size):
            raise NormscopeError(f"The file {self.file} is not what it was when the run began. Begin it again.")
        with open_binary(self.place) as file:
            file.seek(self.start)
            yield from islice(self._entries(file), self.entries)

    def _entries(self, file: Any) -> Iterator[Entry | Fault]:
        for number, raw in enumerate(file, self.line):
            line = decode_text_line(number, check_first_text_line(self.file, raw) if number == 1 else raw)
            if not line.blank:
                yield line_entry(self.file, self.name, line)


@dataclass(frozen=True)
class EntryRange:
    """The entries of a shard, to be read where they are computed."""

    pieces: tuple[LineRange, ...]

    def read(self) -> tuple[Entry | Fault, ...]:
        """The entries. Raises if there are not as many as when the run was planned."""
        found = tuple(entry for piece in self.pieces for entry in piece.read())
        if len(found) != sum(piece.entries for piece in self.pieces):
            raise NormscopeError(f"The file {self.pieces[-1].file} has fewer lines than when the run began.")
        return found

    def is_readable(self) -> bool:
        """Whether this process can read the files."""
        try:
            self.read()
        except NormscopeError:
            return False
        return True


ShardEntries = tuple[Entry | Fault, ...] | EntryRange


def read_shard_entries(given: ShardEntries) -> tuple[Entry | Fault, ...]:
    """The entries of a shard, read now unless they were sent along."""
    return given.read() if isinstance(given, EntryRange) else given


@dataclass
class LinePlan:
    """The shards of line-wise texts."""

    files: Sequence[DataFile]
    shard_size: int
    entries: int = 0
    faults: int = 0
    first_fault: str = ""
    of_files: list[int] = field(default_factory=list)  # the number of entries in each file
    before_files: list[int] = field(default_factory=list)  # the number of entries in all files before it
    file_of: array[int] = field(default_factory=lambda: array("l"))  # of the first entry of each shard
    start_of: array[int] = field(default_factory=lambda: array("q"))  # its byte
    line_of: array[int] = field(default_factory=lambda: array("q"))  # its line

    def __post_init__(self) -> None:
        self.names = distinct_names(self.files) if len(self.files) > 1 else [self.files[0].name]
        self.sizes = [file.stat().st_size if isinstance(file, Path) else None for file in self.files]
        self.places = [file.resolve() if isinstance(file, Path) else file for file in self.files]

    def shard(self, number: int) -> EntryRange:
        """A shard, which may continue in the next files."""
        left = min(self.shard_size, self.entries - number * self.shard_size)
        place, start, line = self.file_of[number], self.start_of[number], self.line_of[number]
        before = number * self.shard_size - self.before_files[place]  # entries of the file in earlier shards
        pieces = []
        while left:
            count = min(left, self.of_files[place] - before)
            file = (self.files[place], self.places[place], self.names[place], self.sizes[place])
            pieces.append(LineRange(*file, start, line, count))
            left, place, start, line, before = left - count, place + 1, 0, 1, 0
        return EntryRange(tuple(pieces))


def can_plan_lines(format: str, files: Sequence[Any]) -> bool:
    """Whether shards can be read from the middle of the files: uncompressed lines, and no pipes."""
    return format == "lines" and all(
        (isinstance(file, RemoteFile) or (isinstance(file, Path) and file.is_file()))
        and file.suffix.lower() not in COMPRESSED
        for file in files
    )


def plan_lines(
    files: Sequence[DataFile], shard_size: int, limit: int | None, earlier: int
) -> tuple[LinePlan, str, str]:
    """The shards of some files, the digest of their entries, and that of the first `earlier` ones ("" if there are
    fewer). The digest is that of the bytes up to the end of the last entry, with the files' names."""
    plan = LinePlan(files, shard_size)
    digest = _LineDigest(earlier)
    for number, file in enumerate(files):
        before = plan.entries
        plan.before_files.append(before)
        digest.begin_file(plan.names[number])
        with open_binary(file) as opened:
            _plan_file(plan, number, opened, digest, limit)
        plan.of_files.append(plan.entries - before)
        if plan.entries == limit:
            break
        if plan.entries == before:
            raise NormscopeError(f"{file} contains no entries (read as lines).")
    return plan, digest.value(), digest.earlier_value


def _plan_file(plan: LinePlan, number: int, opened: Any, digest: _LineDigest, limit: int | None) -> None:
    """Add the shards of a file to a plan."""
    at, line, carry = 0, 1, b""
    while True:
        read = opened.read(BLOCK)
        block = carry + read
        cut = block.rfind(b"\n") + 1 if read else len(block)
        block, carry = block[:cut], block[cut:]
        if line == 1 and block:
            check_first_text_line(plan.files[number], block[: block.find(b"\n") + 1] or block)
        elif line == 1 and not read:
            raise NormscopeError(f"{plan.files[number]}:1: The file is empty.")
        starts, ends = _line_places(block)
        kept = np.flatnonzero(~_blank_lines(block, starts, ends, line))
        if limit is not None:
            kept = kept[: limit - plan.entries]
        first = -plan.entries % plan.shard_size
        for k in kept[first :: plan.shard_size].tolist():
            plan.file_of.append(number)
            plan.start_of.append(at + int(starts[k]))
            plan.line_of.append(line + k)
        _count_faults(plan, number, block, starts, ends, kept, line)
        digest.add(block, ends[kept], plan.entries)
        plan.entries += len(kept)
        at, line = at + len(block), line + len(starts)
        if not read or plan.entries == limit:
            return


def _line_places(block: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first byte of each line of a block, and the one after its last, without the line's end."""
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10).astype(np.int64)
    if len(block) and not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate([np.zeros(min(len(ends), 1), dtype=np.int64), ends[:-1] + 1])
    return starts, ends


def _blank_lines(block: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], line: int) -> NDArray[np.bool_]:
    """Which lines are blank. Only those whose first byte does not tell are decoded."""
    blank: NDArray[np.bool_] = ends == starts
    if not len(starts):
        return blank
    first = np.frombuffer(block, dtype=np.uint8)[np.minimum(starts, len(block) - 1)]
    unclear = UNCERTAIN[first] & ~blank
    if line == 1:
        unclear[0] = True  # there may be a byte order mark
    for k in np.flatnonzero(unclear).tolist():
        blank[k] = _decoded(line + k, block[starts[k] : ends[k]]).blank
    return blank


def _count_faults(
    plan: LinePlan,
    number: int,
    block: bytes,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    kept: NDArray[np.int64],
    line: int,
) -> None:
    """Count the lines that are not UTF-8."""
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        for k in kept.tolist():
            found = _decoded(line + k, block[starts[k] : ends[k]])
            if found.damage:
                plan.faults += 1
                plan.first_fault = plan.first_fault or str(line_entry(plan.files[number], plan.names[number], found))


def _decoded(number: int, raw: bytes) -> Line:
    """A line; the first one without its byte order mark."""
    return decode_text_line(number, raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw)


class _LineDigest:
    """A running digest of bytes that stops at the end of the last entry."""

    def __init__(self, earlier: int) -> None:
        self.earlier, self.earlier_value = earlier, ""
        self._digest = hashlib.sha256()
        self._tail = b""  # after the last entry

    def begin_file(self, name: str) -> None:
        """Go on with a file whose ids begin with a name."""
        self._tail += f"\nfile {name}\n".encode("utf-8", "surrogatepass")

    def add(self, block: bytes, ends: NDArray[np.int64], before: int) -> None:
        """Add whole lines, with the ends of the entries in them; `before` entries were added before."""
        done = 0
        if before < self.earlier <= before + len(ends):
            done = int(ends[self.earlier - before - 1])
            self._add_to_entry(block[:done])
            self.earlier_value = self._digest.hexdigest()
        if len(ends):
            last = int(ends[-1])
            if last > done or not done:
                self._add_to_entry(block[done:last])
            done = last
        self._tail += block[done:]

    def value(self) -> str:
        """The digest of the entries."""
        return self._digest.hexdigest()

    def _add_to_entry(self, content: bytes) -> None:
        self._digest.update(self._tail)
        self._digest.update(content)
        self._tail = b""
