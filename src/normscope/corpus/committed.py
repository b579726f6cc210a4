"""What a run folder has committed: signed JSON files, and the files of each shard with their sizes and checksums.

A JSON file of a run holds the SHA-256 digest of its other content, and is accepted only if it is, byte for byte, what
`signed_json` writes. So a changed bit is noticed in any of them.

A shard is committed by its marker, shards/000000.json. Its files are written to the internal folder first, then the
marker, and then they are moved to their tables: whoever lists a table's folder sees committed files only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import NormscopeError

MANIFEST = "manifest.json"
INTERNAL = ".normscope"  # folder for what is not part of the results
COPY = f"{INTERNAL}/{MANIFEST}"  # repairs a damaged manifest
PENDING = f"{INTERNAL}/pending"  # files on their way to their tables
CSV_FOLDER = "csv"  # a copy of the tables of a finished run
CSV_SUMS = "checksums.json"
SHARD_FILE = re.compile(r"(?P<table>[^\W\d]\w*)/(?P<number>\d{6,})\.(parquet|safetensors)")
MARKER_FILE = re.compile(r"\d{6,}\.json")


class DamagedError(NormscopeError):
    """A file of a run is not what was written."""


@dataclass(frozen=True)
class FileSum:
    """The size and SHA-256 digest of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileSum:
        """The sum of a content."""
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> FileSum:
        """The sum of a file."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    def fits(self, path: Path) -> bool:
        """Whether the file exists and has this size and digest."""
        try:
            return path.stat().st_size == self.size and FileSum.of_file(path) == self
        except OSError:
            return False


@dataclass(frozen=True)
class Marker:
    """A committed shard."""

    number: int
    run: str  # id of the run
    entries: int
    faults: int
    files: Mapping[str, FileSum]  # by path in the folder of the run

    def to_json(self) -> bytes:
        """The content of the marker's file."""
        files = {name: [one.size, one.sha256] for name, one in self.files.items()}
        counts = {"number": self.number, "entries": self.entries, "faults": self.faults}
        return signed_json({**counts, "run": self.run, "files": files})


@dataclass(frozen=True)
class ShardTarget:
    """Where workers write the files of their shards."""

    folder: str  # an absolute path
    run: str  # id of the run

    def is_reachable(self) -> bool:
        """Whether this process sees the folder of the run."""
        try:
            return bool(read_signed_json(Path(self.folder) / COPY)["run"] == self.run)
        except (DamagedError, KeyError):
            return False


@dataclass(frozen=True)
class WrittenShard:
    """A shard whose files a worker has written, but nobody committed."""

    number: int
    entries: int
    faults: int
    files: Mapping[str, FileSum]  # by path in the folder of the run
    attempt: str  # of the worker


def signed_json(content: Mapping[str, Any]) -> bytes:
    """A JSON object with the digest of its content as "checksum"."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "checksum": digest}, indent=1, sort_keys=True).encode()


def read_signed_json(path: Path) -> dict[str, Any]:
    """The content of a file that `signed_json` made. Raises DamagedError if it is not, byte for byte, such a file."""
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
        del content["checksum"]
        signed = signed_json(content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}.") from error
    if signed != raw:
        raise DamagedError(f"{path} is damaged: its checksum differs.")
    return dict(content)


def marker_name(number: int) -> str:
    """The path of a shard's marker in the folder of the run."""
    return f"shards/{number:06d}.json"


def marker_numbers(folder: Path) -> list[int]:
    """The numbers of the shards that have a marker, damaged or not."""
    try:
        return sorted(int(path.stem) for path in (folder / "shards").iterdir() if MARKER_FILE.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_marker(folder: Path, number: int, run: str) -> Marker:
    """The marker of a shard. Raises DamagedError if it is damaged, or belongs to another run or shard."""
    path = folder / marker_name(number)
    content = read_signed_json(path)
    try:
        files = {name: FileSum(*pair) for name, pair in content["files"].items()}
        found = Marker(content["number"], content["run"], content["entries"], content["faults"], files)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not the marker of a shard.") from error
    named = [SHARD_FILE.fullmatch(name) for name in files]
    if found.number != number or found.run != run or any(m is None or int(m["number"]) != number for m in named):
        raise DamagedError(f"{path} belongs to another run or shard.")
    return found


def pending_path(folder: Path, name: str, attempt: str = "") -> Path:
    """Where a shard's file is before it is moved to its table. The name has no suffix that other tools look for. With
    `attempt`, the file of one of several processes that may compute the same shard."""
    return folder / PENDING / f"{name.replace('/', '-')}{f'.{attempt}' if attempt else ''}.part"


def committed_path(folder: Path, name: str, expected: FileSum) -> Path | None:
    """Where a committed file is: in its table or, after a kill, still on its way. None if it is missing or damaged."""
    places = (folder / name, pending_path(folder, name), folder / name)  # the last: moved in the meantime
    return next((path for path in places if expected.fits(path)), None)


def damaged_files(folder: Path, marker: Marker) -> list[str]:
    """The files of a shard that are missing or damaged."""
    return [name for name, expected in marker.files.items() if committed_path(folder, name, expected) is None]


def files_like_those_of_shards(folder: Path, tables: Iterable[str]) -> Iterator[str]:
    """The files in the folders of these tables whose names are those of shards' files."""
    for table in tables:
        try:
            names = [f"{table}/{path.name}" for path in (folder / table).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield from sorted(name for name in names if SHARD_FILE.fullmatch(name))
