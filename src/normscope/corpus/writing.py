"""The folder of a run, for writing: its manifest, and shards that are committed whole or not at all.

The order of events makes every moment safe for a kill. A shard's files are written to the internal folder, then its
marker is replaced, then the files are moved to their tables. The next run completes such moves and removes what was
not committed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from normscope.corpus.committed import (
    COPY,
    CSV_FOLDER,
    CSV_SUMS,
    INTERNAL,
    MANIFEST,
    PENDING,
    DamagedError,
    FileSum,
    Marker,
    ShardTarget,
    WrittenShard,
    committed_path,
    damaged_files,
    files_like_those_of_shards,
    marker_name,
    marker_numbers,
    pending_path,
    read_marker,
    read_signed_json,
    signed_json,
)
from normscope.corpus.folder_lock import lock_folder
from normscope.corpus.same_run import continued_manifest
from normscope.corpus.shard_tables import ShardFiles, import_polars
from normscope.corpus.store import check_store_folder, read_store_manifest
from normscope.errors import NormscopeError

OWN_TABLES = ("items", "errors", "maps")


@dataclass
class Store:
    """The folder of a run, for writing."""

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)  # after `begin`

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if need be, and hold its lock; raise if another run holds it."""
        check_store_folder(self.folder)
        try:
            (self.folder / INTERNAL).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NormscopeError(f"Cannot create the folder {self.folder}: {error.strerror}.") from error
        with lock_folder(self.folder, self.folder / INTERNAL / "lock"):
            yield

    def stored_manifest(self, restore: bool = True) -> dict[str, Any] | None:
        """The manifest of the run in the folder, or None. If it is damaged or missing, that of its copy, which replaces
        it with `restore`."""
        check_store_folder(self.folder)
        path = self.folder / MANIFEST
        if not path.is_file() and not marker_numbers(self.folder):
            return None  # also if an earlier run was killed while it began
        try:
            return read_store_manifest(self.folder)
        except NormscopeError as error:
            if path.is_file() and not isinstance(error, DamagedError):
                raise
            try:
                copy = read_signed_json(self.folder / COPY)
            except DamagedError:
                raise NormscopeError(
                    f"{path} is damaged, and so is its copy: nothing can say what this run was. Choose another folder."
                ) from error
            if restore:
                self._write_json(MANIFEST, copy)
            return copy

    def begin(self, manifest: Mapping[str, Any], earlier_digest: str = "", allow_versions: bool = False) -> None:
        """Start a run, or resume one with the same model, data and options.

        Args:
            manifest: What is to be run.
            earlier_digest: The digest of as many entries as the run in the folder has.
            allow_versions: Accept other patch releases of the packages.
        """
        before = self.stored_manifest()
        if before is None:
            self.manifest = {**json.loads(json.dumps(manifest)), "run": uuid.uuid4().hex}
        else:
            self.manifest = continued_manifest(before, manifest, earlier_digest, allow_versions)
        if self.manifest != before or not (self.folder / COPY).is_file():
            self._write_json(COPY, self.manifest)
            self._write_json(MANIFEST, self.manifest)
        self._repair_copy()
        self._sweep()

    def done(self, retry_errors: bool = False) -> dict[int, Marker]:
        """The markers of finished shards by number. A shard that is damaged, or holds fewer entries than it should, is
        not finished; with `retry_errors`, nor is one with faults."""
        manifest = self.manifest or read_store_manifest(self.folder)
        total, size = int(manifest["data"]["entries"]), int(manifest["options"]["shard_size"])
        found = {}
        for number in marker_numbers(self.folder):
            marker = self._intact_marker(number, manifest["run"])
            if marker is None or marker.entries != min(size, total - number * size):
                continue
            if not (retry_errors and marker.faults):
                found[number] = marker
        return found

    def remove_csv(self) -> None:
        """Remove the CSV files, which a new shard would make incomplete."""
        folder = self.folder / CSV_FOLDER
        for path in (folder / CSV_SUMS, *folder.glob("*.csv")):
            path.unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    @property
    def target(self) -> ShardTarget:
        """Where workers write their shards."""
        return ShardTarget(str(self.folder.resolve()), self.manifest["run"])

    def write_shard(self, shard: ShardFiles | WrittenShard) -> None:
        """Commit a shard, whose files may have been written by a worker. It replaces an earlier one with its number."""
        self.remove_csv()
        before = self._readable_marker(shard.number)
        written = write_pending_files(self.folder, shard) if isinstance(shard, ShardFiles) else shard
        for name in written.files:
            with self._explain(name):
                pending_path(self.folder, name, written.attempt).replace(pending_path(self.folder, name))
        marker = Marker(shard.number, self.manifest["run"], shard.entries, shard.faults, written.files)
        self._replace(marker_name(shard.number), marker.to_json())
        for name in written.files:
            self._publish(name)
        for name in before.files if before else ():
            if name not in written.files:
                (self.folder / name).unlink(missing_ok=True)

    def first_fault(self, shard: ShardFiles | WrittenShard) -> str:
        """The first fault of a shard that is not committed yet."""
        name = next(name for name in shard.files if name.startswith("errors/"))
        content = (
            shard.files[name]
            if isinstance(shard, ShardFiles)
            else pending_path(self.folder, name, shard.attempt).read_bytes()
        )
        row = import_polars().read_parquet(BytesIO(content)).row(0, named=True)
        return f"{row['id']} ({row['where']}): {row['reason']}"

    def _intact_marker(self, number: int, run: str) -> Marker | None:
        try:
            marker = read_marker(self.folder, number, run)
        except DamagedError:
            return None
        return None if damaged_files(self.folder, marker) else marker

    def _readable_marker(self, number: int) -> Marker | None:
        try:
            return read_marker(self.folder, number, self.manifest["run"])
        except DamagedError:
            return None

    def _sweep(self) -> None:
        """Complete the moves of committed files, and remove what was not committed or is damaged."""
        committed: dict[str, FileSum] = {}
        for number in marker_numbers(self.folder):
            marker = self._readable_marker(number)
            committed |= marker.files if marker else {}
        for name, expected in committed.items():
            pending = pending_path(self.folder, name)
            if pending.is_file() and committed_path(self.folder, name, expected) == pending:
                self._publish(name)
        if (self.folder / PENDING).is_dir():
            for path in (self.folder / PENDING).iterdir():
                path.unlink()
        for name in files_like_those_of_shards(self.folder, (*OWN_TABLES, *self.manifest["options"]["measures"])):
            if name not in committed:
                (self.folder / name).unlink()

    def _repair_copy(self) -> None:
        try:
            read_signed_json(self.folder / COPY)
        except DamagedError:
            self._write_json(COPY, self.manifest)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self._replace(name, signed_json(content))

    def _publish(self, name: str) -> None:
        """Move a committed file to its table."""
        with self._explain(name):
            (self.folder / name).parent.mkdir(exist_ok=True)
            pending_path(self.folder, name).replace(self.folder / name)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file whose temporary is in the internal folder."""
        with self._explain(name):
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            pending = pending_path(self.folder, name)
            pending.parent.mkdir(exist_ok=True)
            pending.write_bytes(content)
            pending.replace(path)

    def _explain(self, name: str) -> AbstractContextManager[None]:
        return _explain_write_error(self.folder / name)


def write_pending_files(folder: Path, shard: ShardFiles) -> WrittenShard:
    """Write the files of a shard to the internal folder of a run, each under a name of its own: several processes may
    compute the same shard."""
    attempt = uuid.uuid4().hex[:12]
    for name, content in shard.files.items():
        path = pending_path(folder, name, attempt)
        with _explain_write_error(folder / name):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    sums = {name: FileSum.of(content) for name, content in shard.files.items()}
    return WrittenShard(shard.number, shard.entries, shard.faults, sums, attempt)


@contextmanager
def _explain_write_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NormscopeError(
            f"Cannot write {path}: {error.strerror}. Finished shards are kept; fix the problem and run the same "
            "command again to resume."
        ) from error
