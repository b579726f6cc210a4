"""Run a corpus through a model: read, skip finished shards, compute the others, write tables.

The module is not called `run`, because `normscope.corpus.run` is the function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from normscope.analyzer import Analyzer
from normscope.arguments import check_integers
from normscope.corpus import engines
from normscope.corpus.committed import Marker, WrittenShard
from normscope.corpus.csv_export import write_csv_tables
from normscope.corpus.plan import MaskDraw, Plan, check_plan, check_plan_counts, names_in_plan_option
from normscope.corpus.readers.data_files import Data
from normscope.corpus.run_manifest import RunSource, Survey, make_run_manifest
from normscope.corpus.shard_tables import ShardFiles
from normscope.corpus.shards import draw_masks_in_order, split_into_shards
from normscope.corpus.stop_signals import stop_after_shard
from normscope.corpus.store import Run
from normscope.corpus.writing import Store
from normscope.engine.request import default_budget
from normscope.errors import NormscopeError
from normscope.model_loading import as_analyzer, load_source
from normscope.models.source import ModelSource

SHOWN = 3  # faults in a summary
WIDTH = 200  # characters of a reason in a summary
Results = Iterator[ShardFiles | WrittenShard]
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
    reasons: tuple[str, ...] = ()  # of the first faults, at most three

    @property
    def finished(self) -> bool:
        """Whether every entry is done."""
        return self.done == self.entries

    @property
    def errors(self) -> Path | None:
        """The folder of the table of faults, if there are any."""
        return self.folder / "errors" if self.faults else None

    def __str__(self) -> str:
        if self.finished and not self.computed:
            text = f"{self.folder}: all {self.entries} entries were done before"
        else:
            rate = f", {self.computed / self.seconds:.1f}/s" if self.computed else ""
            text = (
                f"{self.folder}: {self.done} of {self.entries} entries done, {self.computed} of them now in "
                f"{self.seconds:.1f} s{rate}"
            )
        if not self.faults:
            return f"{text}; 0 could not be analysed"
        more = self.faults - len(self.reasons)
        lines = [*self.reasons, *([f"and {more} more"] if more else []), f"all of them: {self.errors}"]
        return "\n  ".join([f"{text}; {self.faults} could not be analysed:", *lines])


def run(
    data: Data,
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
    memory_budget: int | None = None,
    retry_errors: bool = False,
    allow_versions: bool = False,
    csv: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Measure every entry of `data` with `model` and write tables (and `maps`) to the folder `out`.

    The same call resumes an interrupted run, repairs a damaged one, and does nothing if the run is finished. If the
    folder contains a run with another model, data or options, other code of a measure or other versions, the call is
    refused, with what differs. `limit` may be raised.

    Args:
        data: The file with the entries; a folder, a pattern or several files; or the name of a Hugging Face dataset.
            See `read`.
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
        memory_budget: Memory limit of a batch in bytes (default: that of the run so far, that of the Analyzer, or most
            of the free memory at the start). It is stored with the run. A batch that does not fit is split, an entry
            that does not fit is computed in pieces of its rows, and if these do not fit the run stops.
        retry_errors: Compute the shards with faults again.
        allow_versions: Resume although normscope, torch or transformers is another patch release.
        csv: Write the tables of the finished run as CSV files too, into the folder csv.
        progress: A function called with the number of finished entries and of all entries.

    Returns:
        A summary of the run.

    Raises:
        NormscopeError: If an argument is invalid, the data cannot be read, or the folder contains a different run.
    """
    begin = time.perf_counter()
    counts = (batch_size, shard_size, workers, threads, limit, memory_budget)
    check_plan_counts(**_named_counts(*counts))
    how = (gate, value_bias, truncation, mask_seed, batch_size, shard_size, dict(settings or {}), mask_draw)
    tables, kept, wanted, chosen = _parse_names(measures, maps, scopes, layers)
    plan = Plan(tables, kept, wanted, chosen, *how)
    lens = _checked_analyzer(model, engine)
    check_plan(plan, lens)
    store, source = Store(Path(out)), RunSource(data, format, dict(reader or {}), limit)
    before = store.stored_manifest(restore=False)
    survey = source.survey(lens.tokenizer, shard_size, before["data"]["entries"] if before else 0)
    source.check_readable(survey)
    budget = memory_budget or lens.memory_budget or _stored_budget(before) or _free_memory(lens, engine, workers)
    plan = replace(plan, memory_budget=budget)
    with store.locked():
        manifest = make_run_manifest(lens, source, survey, plan)
        store.begin(manifest, survey.earlier, allow_versions)
        done = store.done(retry_errors)
        missing = _missing_shards(lens, plan, source, survey, done)
        if isinstance(model, Analyzer) or engine == "local":
            results: Results = engines.compute_locally(lens, plan, missing)
        else:
            load = partial(load_source, ModelSource.of(model))
            results = engines.compute_with_ray(load, plan, missing, workers, threads, address, manifest, store.target)
        finished, faults, computed = _write_shards(store, done, results, survey.entries, strict, progress)
        if csv and finished == survey.entries:
            write_csv_tables(Run(store.folder))
    reasons = _first_reasons(store.folder) if faults else ()
    return Summary(survey.entries, finished, faults, computed, time.perf_counter() - begin, store.folder, reasons)


def _named_counts(
    batch_size: Any, shard_size: Any, workers: Any, threads: Any, limit: Any, memory_budget: Any
) -> dict[str, Any]:
    """The options that are counts; the last two may be missing."""
    optional = {"limit": limit, "memory_budget": memory_budget}
    counts = {"batch_size": batch_size, "shard_size": shard_size, "workers": workers, "threads": threads}
    return counts | {name: value for name, value in optional.items() if value is not None}


def _stored_budget(manifest: Mapping[str, Any] | None) -> int | None:
    return None if manifest is None else int(manifest["memory"]["budget"])


def _parse_names(measures: Any, maps: Any, scopes: Any, layers: Any) -> tuple[Any, Any, Any, Any]:
    """The first four fields of a plan."""
    return (
        tuple(dict.fromkeys(names_in_plan_option("measures", measures))),
        names_in_plan_option("maps", maps),
        None if scopes is None else names_in_plan_option("scopes", scopes),
        None if layers is None else tuple(check_integers("layer", layers)),
    )


def _checked_analyzer(model: str | Path | ModelSource | Analyzer, engine: Literal["local", "ray"]) -> Analyzer:
    if engine not in ("local", "ray"):
        raise NormscopeError(f"Unknown engine {engine!r}. Known: local, ray.")
    if engine == "ray" and isinstance(model, Analyzer):
        raise NormscopeError("The engine 'ray' loads the model in each worker: give its name or path.")
    return as_analyzer(model, engine)


def _free_memory(lens: Analyzer, engine: str, workers: int) -> int:
    """The memory budget of a new run; Ray's workers share the machine."""
    return max(1, default_budget(lens.loaded.base.device) // (workers if engine == "ray" else 1))


def _missing_shards(
    lens: Analyzer, plan: Plan, source: RunSource, survey: Survey, done: Mapping[int, Marker]
) -> Iterator[engines.Shard]:
    """The shards that are not done, with their entries or where these are."""
    lines = survey.lines
    if lines is not None and not plan.draws_in_order:
        return ((number, lines.shard(number)) for number in range(len(lines.file_of)) if number not in done)
    entries = source.read_entries(lens.tokenizer)
    shards = split_into_shards(
        draw_masks_in_order(lens, plan, entries) if plan.draws_in_order else entries, plan.shard_size
    )
    return (shard for shard in shards if shard[0] not in done)


def _write_shards(
    store: Store,
    done: Mapping[int, Marker],
    results: Results,
    total: int,
    strict: bool,
    progress: Progress | None,
) -> tuple[int, int, int]:
    """Write shards as they are computed.

    Returns the numbers of finished entries, of faults among them, and of entries computed by this call.
    """
    finished = sum(marker.entries for marker in done.values())
    faults = sum(marker.faults for marker in done.values())
    computed = 0
    if progress is not None:
        progress(finished, total)
    with stop_after_shard() as stopped:
        for shard in results if finished < total else ():
            if strict and shard.faults:
                raise NormscopeError(store.first_fault(shard))
            store.write_shard(shard)
            finished, faults, computed = finished + shard.entries, faults + shard.faults, computed + shard.entries
            if progress is not None:
                progress(finished, total)
            if stopped.is_set():
                break
    return finished, faults, computed


def _first_reasons(folder: Path) -> tuple[str, ...]:
    """The first faults of a run, in the order of the data."""
    rows = Run(folder).scan("errors").select("id", "where", "reason").head(SHOWN).collect().rows()
    lines = [f"{id} ({where}): {' '.join(reason.split())}" for id, where, reason in rows]
    return tuple(line if len(line) <= WIDTH else f"{line[:WIDTH]}..." for line in lines)
