"""A corpus run on disk, for queries: a manifest, Parquet tables, and maps with an index, one set of files per shard.

    manifest.json                      what was run: model, data, options, versions
    shards/000000.json                 marks a shard as done, with the sizes and checksums of its files
    items/000000.parquet               id, side, tokens, completeness error
    errors/000000.parquet              id, where, reason and traceback of entries that could not be analysed, if any
    <measure>/000000.parquet           one table per measure
    maps/000000.safetensors            the requested maps, indexed by maps/000000.parquet
    .normscope/                        the lock, a copy of the manifest, and files on their way to their tables

Only files that a marker names are read, and each is checked before it is read for the first time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from normscope.corpus.committed import (
    COPY,
    CSV_FOLDER,
    CSV_SUMS,
    INTERNAL,
    MANIFEST,
    DamagedError,
    FileSum,
    Marker,
    committed_path,
    damaged_files,
    marker_name,
    marker_numbers,
    read_marker,
    read_signed_json,
)
from normscope.corpus.shard_tables import import_polars
from normscope.errors import NormscopeError, did_you_mean

if TYPE_CHECKING:
    import polars
    from matplotlib.axes import Axes
    from torch import Tensor

    from normscope.view.figure.axes import AxesGrid

FORMAT = "normscope-corpus-2"
REPAIR = "Run the same command again to repair it; `normscope corpus verify` names all damaged files."


class Run:
    """A corpus run on disk, for queries; `normscope.corpus.open(folder)` returns one.

    It serves the shards that were done when it was opened. The size and checksum of a file are compared before it is
    read for the first time; a damaged file raises an error.

    Args:
        folder: The folder of the run, finished or not.

    Raises:
        NormscopeError: If the folder does not contain a run, or its manifest is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_store_manifest(self.folder)
        self._checked: dict[str, Path] = {}

    def __repr__(self) -> str:
        model, entries = self.manifest["model"].get("name", ""), self.manifest["data"]["entries"]
        done = sum(self.shard_entries())
        return (
            f"Run({str(self.folder)!r}, model={model!r}, {done} of {entries} entries, tables: {', '.join(self.tables)})"
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables: items, one per measure, errors (if any) and maps (the index of maps)."""
        names = (name for marker in self._markers for name in marker.files if name.endswith(".parquet"))
        return tuple(sorted({name.partition("/")[0] for name in names}))

    @property
    def finished(self) -> bool:
        """Whether every entry of the data is done."""
        return sum(self.shard_entries()) == int(self.manifest["data"]["entries"])

    def shard_entries(self) -> list[int]:
        """The number of entries in each finished shard."""
        return [marker.entries for marker in self._markers]

    def scan(self, table: str) -> polars.LazyFrame:
        """A table as a lazy polars frame. Raises if one of its files is missing or damaged."""
        paths = [self._checked_path(name, expected) for name, expected in self._table_files(table)]
        frame: polars.LazyFrame = import_polars().scan_parquet(paths, glob=False)
        return frame

    def table(self, name: str) -> polars.LazyFrame:
        """A table as `scan`, with the columns that were kept from the data (`keep`) joined to its rows by their id."""
        frame = self.scan(name)
        kept = list(self.manifest["data"]["options"].get("keep") or ())
        if not kept or name == "items" or not {"id", "side"} <= set(frame.collect_schema().names()):
            return frame
        items = self.scan("items").select("id", "side", *kept)
        return frame.join(items, on=["id", "side"], how="left", suffix="_kept", maintain_order="left")

    def plot(
        self,
        name: str,
        *,
        by: str | None = None,
        scope: str | None = None,
        value: str | None = None,
        ax: Axes | None = None,
    ) -> Axes | AxesGrid:
        """Draw the table of a measure: means over entries by layer, each entry counting once, with 95 % intervals.

        A table without layers is drawn as the distribution over entries; one with many rows per layer, such as heads,
        as a heat map.

        Args:
            name: The table.
            by: A column to compare the groups of: one of the table, or one kept from the data
                (``reader={"keep": ["label"]}``).
            scope: The scope to draw, if the table has several (default: all).
            value: The column of numbers (default: the first).
            ax: Axes to draw into, for a single panel; default: those of a new figure.

        Returns:
            The axes, or an array of the axes of several panels. Both have a `.figure`:
            ``run.plot("mixing", by="label").figure.savefig("mixing.pdf")``.

        Raises:
            NormscopeError: If the table or a column does not exist, or there are more groups or panels than a figure
                can show.
        """
        from normscope.view.figure.corpus_tables import plot_corpus_table

        return plot_corpus_table(self, name, by, scope, value, ax)

    def resolve_scope(self, scope: str) -> str:
        """The name of a scope in the tables, given case-insensitively or as an alias."""
        return self._names.get(scope.lower(), scope.upper())

    def map(self, id: str, scope: str, side: str | None = None) -> Tensor:
        """The map (layers, rows, columns) of an entry."""
        places = self._index.get((id, self.resolve_scope(scope)), {})
        if not places or (side is not None and side not in places):
            raise NormscopeError(f"This run has no map of {scope!r} for {id!r}. See scan('maps').")
        name, key = places[side if side is not None else next(iter(places))]
        path = self._checked_path(name, self._files[name])
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise NormscopeError(f"{path} is missing or damaged. {REPAIR}") from error
        return found

    def verify(self) -> list[str]:
        """The files that are missing or damaged, after reading all files of the run."""
        found = []
        for number in marker_numbers(self.folder):
            try:
                found += damaged_files(self.folder, read_marker(self.folder, number, self.manifest["run"]))
            except DamagedError:
                found.append(marker_name(number))
        try:
            read_signed_json(self.folder / COPY)
        except DamagedError:
            found.append(COPY)
        return found + self.damaged_csv_files()

    def damaged_csv_files(self) -> list[str]:
        """The CSV files that are missing or damaged, if this run was written as CSV too."""
        folder = self.folder / CSV_FOLDER
        if not folder.is_dir():
            return []
        try:
            files = read_signed_json(folder / CSV_SUMS)["files"]
        except DamagedError:
            return [f"{CSV_FOLDER}/{CSV_SUMS}"]
        return [f"{CSV_FOLDER}/{name}" for name, pair in files.items() if not FileSum(*pair).fits(folder / name)]

    def strays(self) -> list[str]:
        """Files beside those of the run in the folders of its tables: copies, and remains of unfinished shards. `Run`
        does not read them, but other tools that read a whole folder do."""
        found = []
        for table in sorted({name.partition("/")[0] for name in self._files}):
            there = (path for path in (self.folder / table).iterdir() if not path.name.startswith("."))
            found += sorted(name for path in there if (name := f"{table}/{path.name}") not in self._files)
        return found

    def _table_files(self, table: str) -> list[tuple[str, FileSum]]:
        """The committed Parquet files of a table, in order."""
        prefix = f"{table}/"
        files = [item for item in self._files.items() if item[0].startswith(prefix) and item[0].endswith(".parquet")]
        if not files:
            raise NormscopeError(
                f"This run has no table {table!r}.{did_you_mean(table, self.tables)} Tables: {', '.join(self.tables)}."
            )
        return files

    def _checked_path(self, name: str, expected: FileSum) -> Path:
        """Where a committed file is, after its first check."""
        if name not in self._checked:
            path = committed_path(self.folder, name, expected)
            if path is None:
                raise NormscopeError(f"{self.folder / name} is missing or damaged. {REPAIR}")
            self._checked[name] = path
        path = self._checked[name]
        if path.exists():
            return path
        del self._checked[name]  # moved to its table since, or lost
        return self._checked_path(name, expected)

    @cached_property
    def _markers(self) -> list[Marker]:
        try:
            return [read_marker(self.folder, number, self.manifest["run"]) for number in marker_numbers(self.folder)]
        except DamagedError as error:
            raise NormscopeError(f"{error} {REPAIR}") from error

    @cached_property
    def _files(self) -> dict[str, FileSum]:
        return {name: expected for marker in self._markers for name, expected in marker.files.items()}

    @cached_property
    def _names(self) -> dict[str, str]:
        """alias, in lower case -> scope"""
        return {asked.lower(): name for asked, name in self.manifest.get("aliases", {}).items()}

    @cached_property
    def _index(self) -> dict[tuple[str, str], dict[str, tuple[str, str]]]:
        if "maps" not in self.tables:
            return {}
        index: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
        frame = self.scan("maps").select("id", "scope", "side", "file", "key").collect()
        for id, scope, side, name, key in frame.iter_rows():
            index.setdefault((id, scope), {})[side] = (name, key)
        return index


def check_store_folder(folder: Path) -> None:
    """Refuse a path that is a file, or a folder with other contents than a run."""
    if folder.exists() and not folder.is_dir():
        raise NormscopeError(f"{folder} is a file. Give a folder for the run.")
    if not folder.exists() or any((folder / name).is_file() for name in (MANIFEST, COPY)):
        return
    if any(path.name != INTERNAL for path in folder.iterdir()):
        raise NormscopeError(f"{folder} is not empty and does not contain a corpus run. Choose another folder.")


def open(folder: str | Path) -> Run:
    """Open a corpus run, finished or not, for queries."""
    return Run(folder)


def read_store_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the run in a folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise NormscopeError(f"{folder} does not contain a corpus run: {MANIFEST} is missing.")
    try:
        manifest = read_signed_json(path)
    except DamagedError as error:
        if _has_no_checksum(path):
            raise NormscopeError(
                f"{path} is not the manifest of a corpus run ({FORMAT}). If an earlier version of normscope made this "
                "run, make it again in another folder."
            ) from error
        raise DamagedError(f"{error} {REPAIR}") from error
    if manifest.get("format") != FORMAT:
        raise NormscopeError(f"{path} is not the manifest of a corpus run ({FORMAT}).")
    return manifest


def _has_no_checksum(path: Path) -> bool:
    """Whether the file is a JSON object without the checksum of this format."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return not isinstance(content, dict) or "checksum" not in content


def fingerprint(chunks: Iterable[bytes]) -> str:
    """The SHA-256 digest of the concatenated chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
