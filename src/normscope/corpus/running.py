"""Run a corpus through a model: plan, skip what is done, compute the rest, write it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from normscope._version import __version__
from normscope.analyzer import Analyzer
from normscope.corpus import engines
from normscope.corpus.items import Entry, Fault
from normscope.corpus.measuring import measures_of
from normscope.corpus.readers import read
from normscope.corpus.shards import Plan, split, wanted_scopes
from normscope.corpus.store import FORMAT, Store, fingerprint
from normscope.engine.request import Options, check_integers, requests_for
from normscope.errors import NormscopeError
from normscope.model_source import ModelSource, analyzer_of
from normscope.models.scopes import scope_aliases

Progress = Callable[[int, int], None]  # entries done, entries in all


@dataclass(frozen=True)
class Summary:
    """How a run went."""

    entries: int  # in the data
    done: int  # of these, now finished (with those that were before)
    faults: int  # of these, could not be analysed
    computed: int  # in this call
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
    """Measure every entry of `data` with `model` and keep the tables (and `maps`) in the folder `out`.

    The same call goes on where an earlier one stopped, and does nothing when all is done; with another model, data or
    option it is refused.

    Args:
        data: The file or folder with the entries.
        model: A model by name or path, a ModelSource (a name with device, dtype and revision), or, for the engine
            "local", an Analyzer.
        out: The folder of the run.
        measures: Names of measures, each of which becomes a table. `normscope.corpus.measures()` lists them.
        maps: Scopes whose maps are kept too.
        scopes: Scopes for measures that read whichever are computed; by default all.
        layers: Layers to compute, counted from 0; by default all.
        gate: As for `Analyzer.analyze`.
        value_bias: As for `Analyzer.analyze`.
        truncation: Cut entries that are too long; else they go to the table of errors.
        mask_seed: The seed of the papers' masking; by default nothing is masked.
        batch_size: How many entries go through the model at a time.
        shard_size: How many entries are written at a time.
        format: The format of the data; by default told from its name.
        reader: Options of the format's reader.
        engine: "local", in this process, or "ray".
        workers: For Ray, how many models are loaded.
        threads: For Ray, the threads of each worker.
        address: For Ray, the cluster; by default one on this machine.
        strict: Stop at the first entry that cannot be analysed; else such entries go to the table of errors.
        limit: Take only so many entries from the start.
        settings: Settings for measures that have any.
        progress: A function that is called with the number of entries done and of all entries.

    Returns:
        How the run went.

    Raises:
        NormscopeError: If an argument is wrong, the data cannot be read, or the folder holds another run.
    """
    if engine not in ("local", "ray"):
        raise NormscopeError(f"Unknown engine {engine!r}. Known: local, ray.")
    for name, value in (
        ("batch_size", batch_size),
        ("shard_size", shard_size),
        ("workers", workers),
        ("threads", threads),
        ("limit", 1 if limit is None else limit),
    ):
        if not _counts(value):
            raise NormscopeError(f"{name} must be an integer of at least 1, not {value!r}.")
    begin = time.perf_counter()
    plan = Plan(
        tuple(dict.fromkeys(_names("measures", measures))),
        _names("maps", maps),
        None if scopes is None else _names("scopes", scopes),
        None if layers is None else tuple(check_integers("layer", layers)),
        gate,
        value_bias,
        truncation,
        mask_seed,
        batch_size,
        shard_size,
        dict(settings or {}),
    )
    lens = analyzer_of(model, engine)
    if mask_seed is not None and (lens.two_sided or getattr(lens.tokenizer, "mask_token_id", None) is None):
        raise NormscopeError(f"{lens.family.name} here has no mask token to put into a text: leave the masking out.")
    chosen = measures_of(plan.measures)
    options = Options(scopes=wanted_scopes(plan, chosen), layers=plan.layers, gate=gate, value_bias=value_bias)
    requests_for(lens.loaded, options)  # refused here, not in the first shard
    given = dict(reader or {})
    if format == "pairs":
        given.setdefault("tokenizer", lens.tokenizer)

    def entries() -> Iterator[Entry | Fault]:
        return islice(read(data, format, **given), limit)

    total = _count(entries())
    store = Store(Path(out))
    store.begin(_manifest(lens, Path(data), format, reader, total, limit, plan))
    done = store.done()
    finished = sum(entry["entries"] for entry in done.values())
    faults = sum(entry["faults"] for entry in done.values())
    computed = 0
    if progress is not None:
        progress(finished, total)
    missing = (shard for shard in split(entries(), shard_size) if shard[0] not in done)
    if engine == "local":
        results = engines.local(lens, plan, missing)
    else:
        if isinstance(model, Analyzer):
            raise NormscopeError("The engine 'ray' loads the model in each worker: give its name or path.")
        results = engines.on_ray(ModelSource.of(model).load, plan, missing, workers, threads, address)
    with _interruptible() as stopped:
        for shard in results if finished < total else ():
            if strict and shard.faults:
                raise NormscopeError(_first_fault(shard.files))
            store.put(shard)
            finished, faults, computed = finished + shard.entries, faults + shard.faults, computed + shard.entries
            if progress is not None:
                progress(finished, total)
            if stopped.is_set():
                break
    return Summary(total, finished, faults, computed, time.perf_counter() - begin, store.folder)


def _count(entries: Iterator[Entry | Fault]) -> int:
    """How many entries there are; their ids must differ, or rows could not be told apart."""
    seen: set[int] = set()
    for number, entry in enumerate(entries, 1):
        seen.add(hash(entry.id))
        if len(seen) != number:
            raise NormscopeError(f"The id {entry.id!r} occurs twice (entry {number}): ids must differ.")
    return len(seen)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _names(what: str, given: Any) -> tuple[str, ...]:
    """Names, given as one or as several."""
    names = (given,) if isinstance(given, str) or not hasattr(given, "__iter__") else tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise NormscopeError(f"{what} are names, not {type(name).__name__} {name!r}.")
    return names


def _manifest(
    lens: Analyzer,
    data: Path,
    format: str | None,
    reader: Mapping[str, Any] | None,
    entries: int,
    limit: int | None,
    plan: Plan,
) -> dict[str, Any]:
    options = {key: value for key, value in dict(reader or {}).items() if key != "tokenizer"}
    return {
        "format": FORMAT,
        "model": {
            "name": lens.model_name,
            "family": lens.family.name,
            "dtype": str(lens.dtype).removeprefix("torch."),
            "fingerprint": model_fingerprint(lens),
        }
        | ({} if lens.revision is None else {"revision": lens.revision}),
        "data": {
            "path": str(data),
            "format": format,
            "options": options,
            "limit": limit,
            "entries": entries,
            "fingerprint": fingerprint(_chunks(data)) if data.is_file() else None,
        },
        "options": plan.options(),
        "aliases": {alias: name for stack in lens.loaded.stacks for alias, name in scope_aliases(stack.blocks).items()},
        "versions": {
            "normscope": __version__,
            "transformers": transformers.__version__,
            "torch": str(torch.__version__),
        },
    }


def model_fingerprint(lens: Analyzer) -> str:
    """Of all weights that an analysis reads, by name: a pooler is none of them, and may be random where the checkpoint
    has none."""
    weights = {name: tensor for name, tensor in lens.loaded.base.state_dict().items() if "pooler." not in name}

    def parts() -> Iterator[bytes]:
        for name, tensor in sorted(weights.items()):
            yield name.encode()
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return fingerprint(parts())


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            yield chunk


def _first_fault(files: Mapping[str, bytes]) -> str:
    from io import BytesIO

    import polars

    content = next(content for name, content in files.items() if name.startswith("errors/"))
    row = polars.read_parquet(BytesIO(content)).row(0, named=True)
    return f"{row['id']} ({row['where']}): {row['reason']}"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the shard under way is finished and kept; a second one interrupts at once."""
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
