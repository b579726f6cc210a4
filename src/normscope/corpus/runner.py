"""Run a corpus through a model: read, skip finished shards, compute the others, write tables.

The module is not called `run`, because `normscope.corpus.run` is the function.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from normscope._version import __version__
from normscope.analyzer import Analyzer
from normscope.arguments import check_integers
from normscope.corpus import engines
from normscope.corpus.entries import Entry, Fault
from normscope.corpus.plan import MaskDraw, Plan, check_plan, check_plan_counts, names_in_plan_option
from normscope.corpus.readers.formats import read
from normscope.corpus.shards import draw_masks_in_order, split_into_shards
from normscope.corpus.store import FORMAT, ShardFiles, Store, fingerprint
from normscope.errors import NormscopeError
from normscope.model_loading import as_analyzer, load_source
from normscope.models.scopes import scope_aliases
from normscope.models.source import ModelSource

Progress = Callable[[int, int], None]  # called with the number of finished entries and of all entries


@dataclass(frozen=True)
class Summary:
    """How a run went."""

    entries: int  # in the data
    done: int  # finished entries, including those of earlier calls
    faults: int  # finished entries that could not be analysed
    computed: int  # entries finished by this call
    seconds: float
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether every entry is done."""
        return self.done == self.entries

    def __str__(self) -> str:
        if self.finished and not self.computed:
            return f"{self.folder}: all {self.entries} entries were done before ({self.faults} could not be analysed)"
        rate = f", {self.computed / self.seconds:.1f}/s" if self.computed else ""
        return (
            f"{self.folder}: {self.done} of {self.entries} entries done, {self.computed} of them now in "
            f"{self.seconds:.1f} s{rate}; {self.faults} could not be analysed{' (see errors)' if self.faults else ''}"
        )


@dataclass(frozen=True)
class _Source:
    """Where the entries of a run come from."""

    data: str | Path
    format: str | None
    reader: Mapping[str, Any]  # options of the format's reader
    limit: int | None

    def read_entries(self, tokenizer: Any) -> Iterator[Entry | Fault]:
        """The entries, from the start."""
        options = dict(self.reader)
        if self.format == "pairs":
            options.setdefault("tokenizer", tokenizer)
        return islice(read(self.data, self.format, **options), self.limit)


def run(
    data: str | Path,
    model: str | Path | ModelSource | Analyzer,
    out: str | Path,
    *,
    measures: Iterable[str] | str = ("mixing",),
    maps: Iterable[str] | str = (),
    scopes: Iterable[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    gate: str = "ig",
    value_bias: str = "token",
    truncation: bool = False,
    mask_seed: int | None = None,
    mask_draw: MaskDraw = "sequence",
    batch_size: int = 16,
    shard_size: int = 128,
    format: str | None = None,
    reader: Mapping[str, Any] | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int = 2,
    threads: int = 1,
    address: str | None = None,
    strict: bool = False,
    limit: int | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Measure every entry of `data` with `model` and write tables (and `maps`) to the folder `out`.

    The same call resumes an interrupted run, and does nothing if the run is finished. If the folder contains a run with
    another model, data or options, the call is refused.

    Args:
        data: The file with the entries, or the name of a Hugging Face dataset.
        model: A model by name or path, a ModelSource (a name with device, dtype and revision) or, for the engine
            "local", an Analyzer.
        out: The folder of the run.
        measures: Names of measures; each becomes a table. `normscope.corpus.measures()` lists them.
        maps: Scopes whose maps are stored too.
        scopes: Scopes for measures that use every computed one (default: all).
        layers: Layers to compute, counted from 0 (default: all).
        gate: As for `Analyzer.analyze`.
        value_bias: As for `Analyzer.analyze`.
        truncation: Truncate entries that are too long; otherwise they go to the table of errors.
        mask_seed: Seed of the papers' masking (default: no masking).
        mask_draw: How masked tokens are drawn: "sequence", for each sequence by its id, whatever the others are; or
            "authors", for all sequences in their order from one generator, as in the papers' code.
        batch_size: Number of entries per forward pass.
        shard_size: Number of entries per set of files.
        format: The format of the data (default: from the file name).
        reader: Options of the format's reader.
        engine: "local" (this process) or "ray".
        workers: Number of Ray workers, each with its own copy of the model.
        threads: Threads per Ray worker.
        address: Address of the Ray cluster (default: start one on this machine).
        strict: Stop at the first entry that cannot be analysed; otherwise such entries go to the table of errors.
        limit: Read only this many entries.
        settings: Settings for measures that have any.
        progress: A function called with the number of finished entries and of all entries.

    Returns:
        A summary of the run.

    Raises:
        NormscopeError: If an argument is invalid, the data cannot be read, or the folder contains a different run.
    """
    begin = time.perf_counter()
    if engine not in ("local", "ray"):
        raise NormscopeError(f"Unknown engine {engine!r}. Known: local, ray.")
    if engine == "ray" and isinstance(model, Analyzer):
        raise NormscopeError("The engine 'ray' loads the model in each worker: give its name or path.")
    counts = {"batch_size": batch_size, "shard_size": shard_size, "workers": workers, "threads": threads}
    check_plan_counts(**counts, limit=1 if limit is None else limit)
    tables = tuple(dict.fromkeys(names_in_plan_option("measures", measures)))
    kept = names_in_plan_option("maps", maps)
    wanted = None if scopes is None else names_in_plan_option("scopes", scopes)
    chosen = None if layers is None else tuple(check_integers("layer", layers))
    how = (gate, value_bias, truncation, mask_seed, batch_size, shard_size, dict(settings or {}), mask_draw)
    plan = Plan(tables, kept, wanted, chosen, *how)
    lens = as_analyzer(model, engine)
    check_plan(plan, lens)
    source = _Source(data, format, dict(reader or {}), limit)
    total = _count_entries(source.read_entries(lens.tokenizer))
    store = Store(Path(out))
    store.begin(_run_manifest(lens, source, total, plan))
    done = store.done()
    entries = source.read_entries(lens.tokenizer)
    shards = split_into_shards(draw_masks_in_order(lens, plan, entries) if plan.draws_in_order else entries, shard_size)
    missing = (shard for shard in shards if shard[0] not in done)
    if engine == "local" or isinstance(model, Analyzer):
        results = engines.compute_locally(lens, plan, missing)
    else:
        results = engines.compute_with_ray(
            partial(load_source, ModelSource.of(model)), plan, missing, workers, threads, address
        )
    finished, faults, computed = _write_shards(store, done, results, total, strict, progress)
    return Summary(total, finished, faults, computed, time.perf_counter() - begin, store.folder)


def _write_shards(
    store: Store,
    done: Mapping[int, Mapping[str, Any]],
    results: Iterator[ShardFiles],
    total: int,
    strict: bool,
    progress: Progress | None,
) -> tuple[int, int, int]:
    """Write shards as they are computed.

    Returns the numbers of finished entries, of faults among them, and of entries computed by this call.
    """
    finished = sum(marker["entries"] for marker in done.values())
    faults = sum(marker["faults"] for marker in done.values())
    computed = 0
    if progress is not None:
        progress(finished, total)
    with _stop_after_shard() as stopped:
        for shard in results if finished < total else ():
            if strict and shard.faults:
                raise NormscopeError(_first_fault_message(shard.files))
            store.write_shard(shard)
            finished, faults, computed = finished + shard.entries, faults + shard.faults, computed + shard.entries
            if progress is not None:
                progress(finished, total)
            if stopped.is_set():
                break
    return finished, faults, computed


def _count_entries(entries: Iterator[Entry | Fault]) -> int:
    """The number of entries, after a check that their ids are unique."""
    seen: set[int] = set()
    for number, entry in enumerate(entries, 1):
        seen.add(hash(entry.id))
        if len(seen) != number:
            raise NormscopeError(f"The id {entry.id!r} occurs twice (entry {number}). Ids must be unique.")
    return len(seen)


def _run_manifest(lens: Analyzer, source: _Source, entries: int, plan: Plan) -> dict[str, Any]:
    path = Path(source.data)
    return {
        "format": FORMAT,
        "model": {
            "name": lens.model_name,
            "family": lens.family.name,
            "dtype": str(lens.dtype).removeprefix("torch."),
            "fingerprint": runner_model_fingerprint(lens),
        }
        | ({} if lens.revision is None else {"revision": lens.revision}),
        "data": {
            "path": str(path),
            "format": source.format,
            "options": {key: value for key, value in source.reader.items() if key != "tokenizer"},
            "limit": source.limit,
            "entries": entries,
            "fingerprint": fingerprint(_file_chunks(path)) if path.is_file() else None,
        },
        "options": plan.to_manifest(),
        "aliases": {alias: name for stack in lens.loaded.stacks for alias, name in scope_aliases(stack.blocks).items()},
        "versions": {
            "normscope": __version__,
            "transformers": transformers.__version__,
            "torch": str(torch.__version__),
        },
    }


def runner_model_fingerprint(lens: Analyzer) -> str:
    """A digest of the names and values of all weights that an analysis reads.

    The pooler is excluded: it is not read, and is randomly initialised if the checkpoint has none.
    """
    weights = {name: tensor for name, tensor in lens.loaded.base.state_dict().items() if "pooler." not in name}

    def parts() -> Iterator[bytes]:
        for name, tensor in sorted(weights.items()):
            yield name.encode()
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return fingerprint(parts())


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            yield chunk


def _first_fault_message(files: Mapping[str, bytes]) -> str:
    import polars

    content = next(content for name, content in files.items() if name.startswith("errors/"))
    row = polars.read_parquet(BytesIO(content)).row(0, named=True)
    return f"{row['id']} ({row['where']}): {row['reason']}"


@contextmanager
def _stop_after_shard() -> Iterator[threading.Event]:
    """Make the first Ctrl-C set the event, so that the current shard is completed; a second one interrupts at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    previous = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, once)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)
