"""A corpus run on disk: a manifest, Parquet tables, safetensors maps with a Parquet index, one set of files per shard.

    manifest.json                      what was run: model, data, options, versions
    shards/000000.json                 written last of a shard's files, with their checksums: the shard is done
    items/000000.parquet               id, side, tokens, completeness error
    errors/000000.parquet              id, where, reason of what could not be analysed (only where there is any)
    <measure>/000000.parquet           a table for each measure
    maps/000000.safetensors            the maps that were asked for, and maps/000000.parquet, where to find them

Every file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.engine.files import write_atomically
from normscope.errors import NormscopeError, did_you_mean

if TYPE_CHECKING:
    import polars
    from torch import Tensor

FORMAT = "normscope-corpus-1"


@dataclass(frozen=True)
class ShardFiles:
    """What one shard came to: the contents of its files, by their path in the folder of the run."""

    number: int
    entries: int
    faults: int
    files: Mapping[str, bytes]


class Store:
    """The folder of a run, for writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Start a run, or go on with one that was started with the same model, data and options."""
        path = self.folder / "manifest.json"
        if path.is_file():
            _refuse_difference(read_manifest(self.folder), manifest)
            return
        check_folder(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NormscopeError(f"Cannot make the folder {self.folder}: {error.strerror}.") from error
        self._write("manifest.json", json.dumps(manifest, indent=2, sort_keys=True).encode())

    def done(self) -> dict[int, dict[str, Any]]:
        """The shards that are finished and whole; what is damaged is forgotten, and so done again."""
        found = {}
        for marker in _finished(self.folder, "shards", "json"):
            entry = _marker(marker)
            if entry is not None and all(_sound(self.folder / name, sum_) for name, sum_ in entry["files"].items()):
                found[int(marker.stem)] = entry
            else:
                marker.unlink()
        return found

    def put(self, shard: ShardFiles) -> None:
        """Write a shard's files, and last of all the marker that says so."""
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
        except (OSError, NormscopeError) as error:  # what `atomic` refuses says where and why
            reason = str(error) if isinstance(error, NormscopeError) else f"Cannot write {path}: {error.strerror}."
            raise NormscopeError(
                f"{reason} What was finished is safe; put this right and run the same command again."
            ) from error


class Run:
    """A corpus run that can be queried: `normscope.corpus.open(folder)`.

    Args:
        folder: The folder of the run, finished or not.

    Raises:
        NormscopeError: If the folder holds no run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)

    def __repr__(self) -> str:
        model, entries = self.manifest["model"].get("name", ""), self.manifest["data"]["entries"]
        done = sum(int(entry["entries"]) for entry in self._markers())
        return (
            f"Run({str(self.folder)!r}, model={model!r}, {done} of {entries} entries, tables: {', '.join(self.tables)})"
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables: items, one for each measure, errors where there are any, maps (their index)."""
        return tuple(sorted({path.parent.name for path in _finished(self.folder, "*", "parquet")}))

    @property
    def finished(self) -> bool:
        """Whether every entry of the data is done."""
        done = sum(int(entry["entries"]) for entry in self._markers())
        return done == int(self.manifest["data"]["entries"])

    def scan(self, table: str) -> polars.LazyFrame:
        """A table as a lazy polars frame."""
        if table not in self.tables:
            raise NormscopeError(
                f"No table {table!r} here.{did_you_mean(table, self.tables)} Tables: {', '.join(self.tables)}."
            )
        frame: polars.LazyFrame = _polars().scan_parquet(_finished(self.folder, table, "parquet"))
        return frame

    def map(self, id: str, scope: str, side: str | None = None) -> Tensor:
        """One map, (layers, rows, columns), by the id of its entry."""
        from safetensors import SafetensorError, safe_open

        places = self._index.get((id, self._names.get(scope.lower(), scope.upper())), {})
        if not places or (side is not None and side not in places):
            raise NormscopeError(f"There is no map of {scope!r} for {id!r} in this run. See scan('maps').")
        name, key = places[side if side is not None else next(iter(places))]
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                found: Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise NormscopeError(
                f"{self.folder / name} is missing or damaged. The command that made this run does it again."
            ) from error
        return found

    def verify(self) -> list[str]:
        """The files that are missing or damaged."""
        return [
            name
            for entry in self._markers()
            for name, checksum in entry["files"].items()
            if not _sound(self.folder / name, checksum)
        ]

    def _markers(self) -> Iterator[dict[str, Any]]:
        for marker in _finished(self.folder, "shards", "json"):
            entry = _marker(marker)
            if entry is not None:
                yield entry

    @cached_property
    def _names(self) -> dict[str, str]:
        """Scopes as they were asked for, with aliases, and as they are called."""
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


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a run."""
    if folder.exists() and not folder.is_dir():
        raise NormscopeError(f"{folder} is a file. Name a folder for the run.")
    if folder.exists() and not (folder / "manifest.json").is_file() and any(folder.iterdir()):
        raise NormscopeError(f"{folder} is not empty and holds no corpus run. Choose another folder.")


def open(folder: str | Path) -> Run:
    """A corpus run, finished or not, to be queried."""
    return Run(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise NormscopeError(f"{folder} holds no corpus run: there is no manifest.json.") from error
    except (OSError, ValueError) as error:
        raise NormscopeError(f"{path} cannot be read: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NormscopeError(f"{path} is not the manifest of a corpus run ({FORMAT}).")
    return manifest


def table_bytes(columns: Mapping[str, Any]) -> bytes:
    """A table as a Parquet file, the same bytes for the same rows."""
    from io import BytesIO

    polars, buffer = _polars(), BytesIO()
    # Without rows nothing tells that objects are strings, and Parquet has no column of objects.
    strings = {name: polars.String for name, values in columns.items() if len(values) == 0 and _objects(values)}
    polars.DataFrame(dict(columns), schema_overrides=strings).write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _objects(values: Any) -> bool:
    return isinstance(values, list) or getattr(getattr(values, "dtype", None), "kind", None) == "O"  # of NumPy


class Sums:
    """A table whose rows are added up as they come: the columns `summed`, over rows that agree in all the others."""

    AT_ONCE = 2**20  # rows that wait before they are added up

    def __init__(self, summed: Sequence[str]) -> None:
        self.summed = list(summed)
        self.waiting: list[Any] = []
        self.rows = 0
        self.most = self.AT_ONCE

    def add(self, columns: Mapping[str, Any]) -> None:
        self.waiting.append(_polars().DataFrame(dict(columns)))
        self.rows += len(self.waiting[-1])
        if self.rows > self.most:
            self.waiting = [self._added()]
            self.rows = len(self.waiting[0])
            self.most = max(self.AT_ONCE, 4 * self.rows)  # not at every entry, however many rows stay

    def table(self) -> dict[str, Any]:
        return {column.name: column for column in self._added().get_columns()}

    def _added(self) -> Any:
        polars = _polars()
        together = polars.concat(self.waiting)
        keys = [name for name in together.columns if name not in self.summed]
        return together.group_by(keys).agg(polars.col(*self.summed).sum()).sort(keys)


def fingerprint(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _finished(folder: Path, table: str, kind: str) -> list[Path]:
    """The files of shards, in order. What a killed process left half-written has a dot before its name."""
    return sorted(folder.glob(f"{table}/[0-9]*.{kind}"))


def _marker(path: Path) -> dict[str, Any] | None:
    try:
        entry = json.loads(path.read_text())
        return entry if isinstance(entry["files"], dict) and isinstance(entry["entries"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sound(path: Path, checksum: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == checksum
    except OSError:
        return False


def _refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changed = []
    for part in ("model", "data", "options"):
        now = json.loads(json.dumps(new[part]))  # as it will be read again: lists, not tuples
        keys = [key for key in sorted({*old[part], *now}) if old[part].get(key) != now.get(key)]
        if part == "model" and len(keys) > 1:  # another model, precision or revision has other weights
            keys = [key for key in keys if key != "fingerprint"]
        changed += [f"{part}.{key}: was {old[part].get(key)!r}, is {now.get(key)!r}" for key in keys]
    if changed:
        raise NormscopeError(
            "This folder holds a run of something else: "
            + "; ".join(changed)
            + ". Choose another folder, or run it as "
            "it was."
        )


def _polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise NormscopeError("Corpus runs need polars: pip install 'normscope[corpus]'.") from error
    return polars
