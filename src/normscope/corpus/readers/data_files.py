"""The files of a corpus: local or remote, compressed or not, given one by one, by folder or by pattern."""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from normscope.errors import NormscopeError

COMPRESSED = (".gz", ".zst")
REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")  # a drive of Windows has one letter


@dataclass(frozen=True)
class RemoteFile:
    """A file that fsspec reads: s3://..., gs://..., https://..."""

    url: str

    @property
    def name(self) -> str:
        """The last part of the address, without a query."""
        return PurePosixPath(self.url.partition("://")[2].partition("?")[0]).name

    @property
    def suffix(self) -> str:
        """The suffix of the name."""
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        return self.url


DataFile = Path | RemoteFile
Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def find_data_files(data: Data, suffixes: Collection[str]) -> list[DataFile]:
    """The files that are named, in order. A folder stands for its files with a known suffix, at any depth, and a
    pattern for those that match it, both sorted by name."""
    names = [data] if isinstance(data, str | os.PathLike) else list(data)
    if not names:
        raise NormscopeError("No data was given: pass a file, a folder or a list of files.")
    found = [file for name in names for file in _files_of_one_name(os.fspath(name), suffixes)]
    repeated = next((file for n, file in enumerate(found) if file in found[:n]), None)
    if repeated is not None:
        raise NormscopeError(f"The file {repeated} is given twice.")
    return found


def data_suffix(file: DataFile) -> str:
    """The suffix that tells the format, in lower case: that of `a.csv.gz` is .csv."""
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return PurePosixPath(name).suffix


def distinct_names(files: Sequence[DataFile]) -> list[str]:
    """A name for each file: its own or, if several have the same, the shortest end of its path that tells them
    apart."""
    parts = [str(file).replace(os.sep, "/").split("/") for file in files]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


@contextmanager
def open_binary(path: DataFile) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; .gz and .zst files are decompressed."""
    try:
        file = _open_remote(path) if isinstance(path, RemoteFile) else path.open("rb")
    except OSError as error:
        raise NormscopeError(f"Cannot read {path}: {error.strerror or error}.") from error
    with file:
        try:
            yield _decompressed(file, path)
        except Exception as error:
            if path.suffix.lower() not in COMPRESSED or not _is_damage(error):
                raise
            raise NormscopeError(f"Cannot read {path}: the compressed file is damaged ({error}).") from error


def _files_of_one_name(name: str, suffixes: Collection[str]) -> Iterator[DataFile]:
    if REMOTE.match(name):
        yield RemoteFile(name)
        return
    path = Path(name)
    if path.is_dir():
        inside = [one for one in sorted(path.rglob("*")) if one.is_file() and not one.name.startswith(".")]
        known = [one for one in inside if data_suffix(one) in suffixes]
        if not known:
            there = ", ".join(sorted({one.suffix or one.name for one in inside})) or "nothing"
            raise NormscopeError(
                f"The folder {path} has no file with a known suffix. It has: {there}. Give format= and the files' "
                f"names. Known suffixes: {', '.join(suffixes)}."
            )
        yield from known
    elif not path.exists() and glob.has_magic(name):
        matches = [Path(one) for one in sorted(glob.glob(name, recursive=True)) if Path(one).is_file()]
        if not matches:
            raise NormscopeError(f"No file matches the pattern {name!r}.")
        yield from matches
    else:
        yield path


def _open_remote(file: RemoteFile) -> Any:
    try:
        import fsspec  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise NormscopeError(f"Reading {file} needs fsspec: pip install fsspec.") from error
    try:
        return fsspec.open(file.url, "rb").open()
    except ImportError as error:
        raise NormscopeError(f"Reading {file} needs another package: {error}") from error
    except OSError:
        raise
    except Exception as error:  # each kind of storage has its own exceptions
        raise NormscopeError(f"Cannot read {file}: {' '.join(str(error).split())}.") from error


def _decompressed(file: Any, path: DataFile) -> Any:
    ending = path.suffix.lower()
    if ending == ".gz":
        return gzip.GzipFile(fileobj=file)
    if ending != ".zst":
        return file
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise NormscopeError(f"Reading {path} needs zstandard: pip install zstandard.") from error
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))


def _is_damage(error: Exception) -> bool:
    """Whether a decompressor raised the error; zstandard, which has its own, may not be installed."""
    return isinstance(error, gzip.BadGzipFile | zlib.error | EOFError) or type(error).__name__ == "ZstdError"
