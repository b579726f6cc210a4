"""A corpus run on disk: a manifest, Parquet tables, safetensors maps with a Parquet index, one set of files per shard.

    manifest.json                      what was run: model, data, options, versions
    shards/000000.json                 the checksums of a shard's files; written last, so it marks the shard as done
    items/000000.parquet               id, side, tokens, completeness error
    errors/000000.parquet              id, where and reason of entries that could not be analysed, if any
    <measure>/000000.parquet           one table per measure
    maps/000000.safetensors            the requested maps, indexed by maps/000000.parquet

Files are written atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from normscope.errors import NormscopeError, did_you_mean
from normscope.files import write_atomically

if TYPE_CHECKING:
    import polars
    from torch import Tensor

FORMAT = "normscope-corpus-1"


@dataclass(frozen=True)
class ShardFiles:
    """The results of one shard: file contents by path in the folder of the run."""

    number: int
    entries: int
    faults: int
    files: Mapping[str, bytes]


class Store:
    """The folder of a run, for writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Start a run, or resume one with the same model, data and options."""
        path = self.folder / "manifest.json"
        if path.is_file():
            _check_same_run(read_store_manifest(self.folder), manifest)
            return
        check_store_folder(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NormscopeError(f"Cannot create the folder {self.folder}: {error.strerror}.") from error
        self._write("manifest.json", json.dumps(manifest, indent=2, sort_keys=True).encode())

    def done(self) -> dict[int, dict[str, Any]]:
        """The markers of finished shards by number. Shards with damaged files are unmarked, so that they are redone."""
        found = {}
        for marker in _shard_files(self.folder, "shards", "json"):
            entry = _read_marker(marker)
            if entry is not None and not _damaged_files(self.folder, entry):
                found[int(marker.stem)] = entry
            else:
                marker.unlink()
        return found

    def write_shard(self, shard: ShardFiles) -> None:
        """Write a shard's files, then the marker that it is done."""
        for name, content in shard.files.items():
            self._write(name, content)
        marker = {
            "entries": shard.entries,
            "faults": shard.faults,
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in shard.files.items()},
        }
        self._write(f"shards/{shard.number:06d}.json", json.dumps(marker, sort_keys=True).encode())

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            with write_atomically(path) as temporary:
                Path(temporary).write_bytes(content)
        except (OSError, NormscopeError) as error:  # NormscopeErrors of `write_atomically` name the file and the reason
            reason = str(error) if isinstance(error, NormscopeError) else f"Cannot write {path}: {error.strerror}."
            raise NormscopeError(
                f"{reason} Finished shards are kept; fix the problem and run the same command again to resume."
            ) from error


class Run:
    """A corpus run on disk, for queries; `normscope.corpus.open(folder)` returns one.

    Args:
        folder: The folder of the run, finished or not.

    Raises:
        NormscopeError: If the folder does not contain a run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_store_manifest(self.folder)

    def __repr__(self) -> str:
        model, entries = self.manifest["model"].get("name", ""), self.manifest["data"]["entries"]
        done = sum(int(entry["entries"]) for entry in self._markers())
        return (
            f"Run({str(self.folder)!r}, model={model!r}, {done} of {entries} entries, tables: {', '.join(self.tables)})"
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables: items, one per measure, errors (if any) and maps (the index of maps)."""
        return tuple(sorted({path.parent.name for path in _shard_files(self.folder, "*", "parquet")}))

    @property
    def finished(self) -> bool:
        """Whether every entry of the data is done."""
        done = sum(int(entry["entries"]) for entry in self._markers())
        return done == int(self.manifest["data"]["entries"])

    def scan(self, table: str) -> polars.LazyFrame:
        """A table as a lazy polars frame."""
        if table not in self.tables:
            raise NormscopeError(
                f"This run has no table {table!r}.{did_you_mean(table, self.tables)} Tables: {', '.join(self.tables)}."
            )
        frame: polars.LazyFrame = _import_polars().scan_parquet(_shard_files(self.folder, table, "parquet"))
        return frame

    def map(self, id: str, scope: str, side: str | None = None) -> Tensor:
        """The map (layers, rows, columns) of an entry."""
        places = self._index.get((id, self._names.get(scope.lower(), scope.upper())), {})
        if not places or (side is not None and side not in places):
            raise NormscopeError(f"This run has no map of {scope!r} for {id!r}. See scan('maps').")
        name, key = places[side if side is not None else next(iter(places))]
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                found: Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise NormscopeError(
                f"{self.folder / name} is missing or damaged. Run the same command again to restore it."
            ) from error
        return found

    def verify(self) -> list[str]:
        """The files that are missing or damaged."""
        return [name for marker in self._markers() for name in _damaged_files(self.folder, marker)]

    def _markers(self) -> Iterator[dict[str, Any]]:
        for marker in _shard_files(self.folder, "shards", "json"):
            entry = _read_marker(marker)
            if entry is not None:
                yield entry

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
    if folder.exists() and not (folder / "manifest.json").is_file() and any(folder.iterdir()):
        raise NormscopeError(f"{folder} is not empty and does not contain a corpus run. Choose another folder.")


def open(folder: str | Path) -> Run:
    """Open a corpus run, finished or not, for queries."""
    return Run(folder)


def read_store_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the run in a folder."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise NormscopeError(f"{folder} does not contain a corpus run: manifest.json is missing.") from error
    except (OSError, ValueError) as error:
        raise NormscopeError(f"{path} cannot be read: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NormscopeError(f"{path} is not the manifest of a corpus run ({FORMAT}).")
    return manifest


def parquet_bytes_for_store(columns: Mapping[str, Any]) -> bytes:
    """A table as the bytes of a Parquet file; equal rows give equal bytes."""
    polars, buffer = _import_polars(), BytesIO()
    # Parquet has no object columns, and polars cannot infer that empty ones hold strings.
    strings = {
        name: polars.String for name, values in columns.items() if len(values) == 0 and _is_object_column(values)
    }
    polars.DataFrame(dict(columns), schema_overrides=strings).write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _is_object_column(values: Any) -> bool:
    return isinstance(values, list) or getattr(getattr(values, "dtype", None), "kind", None) == "O"


class GroupedSums:
    """A table of running sums: the columns `summed`, grouped by all other columns."""

    AT_ONCE = 2**20  # rows held before they are summed

    def __init__(self, summed: Sequence[str]) -> None:
        self.summed = list(summed)
        self.waiting: list[Any] = []
        self.rows = 0
        self.most = self.AT_ONCE

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add rows."""
        self.waiting.append(_import_polars().DataFrame(dict(columns)))
        self.rows += len(self.waiting[-1])
        if self.rows > self.most:
            self.waiting = [self._grouped_sums()]
            self.rows = len(self.waiting[0])
            self.most = max(self.AT_ONCE, 4 * self.rows)  # so that many groups do not cause a sum at every entry

    def table(self) -> dict[str, Any]:
        """The sums, sorted by the grouping columns."""
        return {column.name: column for column in self._grouped_sums().get_columns()}

    def _grouped_sums(self) -> Any:
        polars = _import_polars()
        together = polars.concat(self.waiting)
        keys = [name for name in together.columns if name not in self.summed]
        return together.group_by(keys).agg(polars.col(*self.summed).sum()).sort(keys)


def fingerprint(chunks: Iterable[bytes]) -> str:
    """The SHA-256 digest of the concatenated chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _shard_files(folder: Path, table: str, kind: str) -> list[Path]:
    """The shards' files in a table's folder, in order. Temporary files of a killed process start with a dot."""
    return sorted(folder.glob(f"{table}/[0-9]*.{kind}"))


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        entry = json.loads(path.read_text())
        return entry if isinstance(entry["files"], dict) and isinstance(entry["entries"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _damaged_files(folder: Path, marker: Mapping[str, Any]) -> list[str]:
    """The files of a shard that are missing or differ from their checksums."""
    return [name for name, checksum in marker["files"].items() if not _has_checksum(folder / name, checksum)]


def _has_checksum(path: Path, checksum: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == checksum
    except OSError:
        return False


def _check_same_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changed = []
    for part in ("model", "data", "options"):
        now = json.loads(json.dumps(new[part]))  # as it is read back: lists, not tuples
        keys = [key for key in sorted({*old[part], *now}) if old[part].get(key) != now.get(key)]
        if part == "model" and len(keys) > 1:  # another name, dtype or revision explains other weights
            keys = [key for key in keys if key != "fingerprint"]
        changed += [f"{part}.{key}: was {old[part].get(key)!r}, is {now.get(key)!r}" for key in keys]
    if changed:
        raise NormscopeError(
            "The folder contains a run with a different model, data or options: "
            + "; ".join(changed)
            + ". Choose another folder, or use the same settings."
        )


def _import_polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise NormscopeError("Corpus runs need polars: pip install 'normscope[corpus]'.") from error
    return polars
