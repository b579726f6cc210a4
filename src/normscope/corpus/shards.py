"""One shard of a corpus run: entries in, files out. A pure function of the entries, the model and the plan, so that it
does not matter when, where and beside what it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.corpus.items import Entry, Fault
from normscope.corpus.masking import mask
from normscope.corpus.measuring import Measure, Sample, measures_of
from normscope.corpus.store import ShardFiles, Sums, table_bytes
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.request import Options, Request, default_budget, requests_for
from normscope.engine.run import batch_cost, run_batch
from normscope.errors import NormscopeError
from normscope.inputs.encode import encode
from normscope.inputs.item import Item, Tokens


@dataclass(frozen=True)
class Plan:
    """Everything but model and data that the result depends on."""

    measures: tuple[str, ...] = ("mixing",)
    maps: tuple[str, ...] = ()  # scopes whose maps are kept
    scopes: tuple[str, ...] | None = None  # None: those that the measures and maps need, or all
    layers: tuple[int, ...] | None = None
    gate: str = "ig"
    value_bias: str = "token"
    truncation: bool = False
    mask_seed: int | None = None
    batch_size: int = 16
    shard_size: int = 128
    settings: Mapping[str, Any] = field(default_factory=dict)  # plain values for measures that read a Sample

    def options(self) -> dict[str, Any]:
        options = asdict(self)
        return options if self.settings else {key: value for key, value in options.items() if key != "settings"}


@dataclass(frozen=True)
class Encoded:
    """A shard's entries as model inputs, or as what was wrong with them."""

    number: int
    entries: tuple[Entry | Fault, ...]
    items: tuple[Item | Fault, ...]
    originals: tuple[Item | Fault, ...]  # before masking


def split(entries: Iterable[Entry | Fault], size: int) -> Iterator[tuple[int, tuple[Entry | Fault, ...]]]:
    """Numbered shards of a corpus, in its own order."""
    given = iter(entries)
    number = 0
    while some := tuple(islice(given, size)):
        yield number, some
        number += 1


def encode_shard(lens: Analyzer, plan: Plan, number: int, entries: Sequence[Entry | Fault]) -> Encoded:
    """Tokenise, and mask where the plan says so."""
    pairs = [_encoded(lens, plan, entry) for entry in entries]
    return Encoded(number, tuple(entries), tuple(item for item, _ in pairs), tuple(before for _, before in pairs))


def _encoded(lens: Analyzer, plan: Plan, entry: Entry | Fault) -> tuple[Item | Fault, Item | Fault]:
    """The entry as the model is given it, and as it was before masking."""
    if isinstance(entry, Fault):
        return entry, entry
    try:
        (item,) = encode(lens.loaded, _given(entry, lens), plan.truncation)
        return item if plan.mask_seed is None else _masked(item, lens, plan.mask_seed, entry.id), item
    except NormscopeError as error:
        fault = Fault(entry.id, "encoding", str(error))
        return fault, fault


def compute(lens: Analyzer, plan: Plan, shard: Encoded) -> ShardFiles:
    """Analyse the items in batches by length, and make the shard's files."""
    measures = measures_of(plan.measures)
    requests = requests_for(
        lens.loaded,
        Options(
            scopes=wanted_scopes(plan, measures),
            layers=plan.layers,
            heads=any(measure.heads for measure in measures),
            gate=plan.gate,
            value_bias=plan.value_bias,
        ),
    )
    whole = {n: item for n, item in enumerate(shard.items) if isinstance(item, Item)}
    faults = {n: item for n, item in enumerate(shard.items) if isinstance(item, Fault)}
    tables = _Tables(plan, measures)
    for batch in _batches(whole, plan.batch_size):
        for n, result in _analysed(lens, requests, shard, whole, batch, faults).items():
            entry, item, original = shard.entries[n], shard.items[n], shard.originals[n]
            assert isinstance(entry, Entry)
            assert isinstance(item, Item)
            assert isinstance(original, Item)
            try:
                tables.measure(n, partial(Sample, entry, item, original, lens, settings=plan.settings), result)
            except NormscopeError as error:
                faults[n] = Fault(entry.id, "measure", str(error))
    return tables.files(shard, [faults[n] for n in sorted(faults)])


def wanted_scopes(plan: Plan, measures: Sequence[Measure]) -> list[str] | None:
    """The scopes to compute: those named, else what the measures and maps need; None for all."""
    if plan.scopes is not None:
        return list(dict.fromkeys([*plan.scopes, *plan.maps]))
    if any(measure.scopes is None for measure in measures):
        return None
    return list(dict.fromkeys([*(scope for measure in measures for scope in measure.scopes or ()), *plan.maps]))


def _given(entry: Entry, lens: Analyzer) -> Any:
    """The entry as the Analyzer takes it; tokens that are a tokenizer's own become their ids."""
    if entry.pieces and entry.words is not None:
        if lens.tokenizer is None:
            raise NormscopeError("These are tokens of a tokenizer, but the Analyzer has none.")
        ids = lens.tokenizer.convert_tokens_to_ids(list(entry.words))
        if None in ids or (lens.tokenizer.unk_token_id in ids and lens.tokenizer.unk_token not in entry.words):
            raise NormscopeError("These tokens are not all in the model's vocabulary.")
        separator = next((n for n, i in enumerate(ids) if i == lens.tokenizer.sep_token_id), len(ids))
        types = {"token_type_ids": [int(n > separator) for n in range(len(ids))]}
        return {"input_ids": ids} | (types if "token_type_ids" in lens.loaded.limits.keys else {})
    if lens.two_sided and entry.target is not None:
        source = entry.given
        target = entry.target if isinstance(entry.target, str) else " ".join(entry.target)
        return (" ".join(source) if isinstance(source, list) else source, target)
    return entry.given


def _masked(item: Item, lens: Analyzer, seed: int, id: str) -> Item:
    tokenizer = lens.tokenizer
    ids = item.tensors["input_ids"].tolist()
    kept = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    special = [token in kept for token in ids]
    masked = mask(ids, special, tokenizer.mask_token_id, seed, id)
    (side,) = item.sides
    tokens = item.sides[side]
    names = tuple(tokenizer.convert_ids_to_tokens(masked))
    tensors = {**item.tensors, "input_ids": torch.tensor(masked)}
    return Item(tensors, {side: Tokens(names, tokens.real, tokens.word_ids)}, item.grid)


def _batches(items: dict[int, Item], size: int) -> Iterator[list[int]]:
    """Items of one kind and of nearly one length together; fixed by the items alone."""
    kinds: dict[Any, list[int]] = {}
    for n in sorted(items, key=lambda n: (-len(items[n]), n)):
        kinds.setdefault(items[n].kind, []).append(n)
    for order in kinds.values():
        for start in range(0, len(order), size):
            yield order[start : start + size]


def _analysed(
    lens: Analyzer,
    requests: Sequence[Request],
    shard: Encoded,
    items: dict[int, Item],
    batch: Sequence[int],
    faults: dict[int, Fault],
) -> dict[int, Any]:
    """A batch's results. One that is too large for the memory, or that fails, is cut in two, down to single items;
    what cannot be analysed alone is a fault."""
    budget = default_budget() if lens.workspace.budget is None else lens.workspace.budget
    chosen = [items[n] for n in batch]
    try:
        if len(batch) == 1 or batch_cost(lens.loaded, chosen, requests).memory <= budget:
            return dict(zip(batch, run_batch(lens.loaded, chosen, requests, lens.workspace), strict=True))
    except NormscopeError as error:
        if len(batch) == 1:
            entry = shard.entries[batch[0]]
            faults[batch[0]] = Fault(entry.id, "analysis", str(error))
            return {}
    half = len(batch) // 2
    return _analysed(lens, requests, shard, items, batch[:half], faults) | _analysed(
        lens, requests, shard, items, batch[half:], faults
    )


@dataclass(frozen=True)
class _Rows:
    """What one side of one entry adds to a shard's files."""

    id: str
    side: str
    tables: Mapping[str, Any]  # name -> columns
    maps: Mapping[str, Tensor]


class _Tables:
    """A shard's tables. Entries come batch by batch, and leave in the corpus's order."""

    def __init__(self, plan: Plan, measures: Sequence[Measure]) -> None:
        self.plan, self.measures = plan, measures
        self.found: dict[int, list[_Rows]] = {}
        self.sums = {measure.name: Sums(measure.summed) for measure in measures if measure.summed}

    def measure(self, number: int, sample: Callable[..., Sample], result: Analysis | EncoderDecoderAnalysis) -> None:
        """Keep an entry's rows, of all measures or, where one of them refuses it, of none; the maps are gone then."""
        sides = {str(result.info["side"]): result} if isinstance(result, Analysis) else result.sides
        rows, sums = [], []
        for side, analysis in sides.items():
            whole = sample(analysis, result)
            worst = max(float(error.max()) for error in analysis.completeness.values())
            tables: dict[str, Any] = {
                "items": {
                    "tokens": [[label.token for label in analysis.rows]],
                    "length": [len(analysis.rows)],
                    "completeness": [worst],
                }
            }
            for measure in self.measures:
                columns = measure.columns(whole if measure.whole else analysis)
                length = _length(measure.name, columns)
                if measure.summed:
                    sums.append((measure.name, {"side": [side] * length, **columns}))
                else:
                    tables[measure.name] = columns
            kept = [analysis.resolve(scope) for scope in self.plan.maps if analysis.has(scope)]
            rows.append(_Rows(whole.entry.id, side, tables, {name: analysis[name].contiguous() for name in kept}))
        self.found[number] = rows
        for name, columns in sums:
            self.sums[name].add(columns)

    def files(self, shard: Encoded, faults: Sequence[Fault]) -> ShardFiles:
        name = f"{shard.number:06d}"
        rows = [one for n in sorted(self.found) for one in self.found[n]]
        columns: dict[str, dict[str, list[Any]]] = {}
        for one in rows:
            for table, added in one.tables.items():
                length = _length(table, added)
                for key, values in {"id": [one.id] * length, "side": [one.side] * length, **added}.items():
                    columns.setdefault(table, {}).setdefault(key, []).append(values)
        made = {f"{table}/{name}.parquet": table_bytes(_joined(pieces)) for table, pieces in columns.items()}
        made |= {f"{table}/{name}.parquet": table_bytes(sums.table()) for table, sums in self.sums.items() if sums.rows}
        if faults:
            made[f"errors/{name}.parquet"] = table_bytes(
                {
                    "id": [fault.id for fault in faults],
                    "where": [fault.where for fault in faults],
                    "reason": [fault.reason for fault in faults],
                }
            )
        return ShardFiles(shard.number, len(shard.entries), len(faults), made | _map_files(name, rows))


def _map_files(name: str, rows: Sequence[_Rows]) -> dict[str, bytes]:
    """The maps of a shard, and the table that says where each is."""
    file = f"maps/{name}.safetensors"
    maps: dict[str, Tensor] = {}
    index: list[dict[str, Any]] = []
    for one in rows:
        for scope, found in one.maps.items():
            key = f"{len(maps):04d}"
            maps[key] = found
            layers, height, width = found.shape
            index.append(
                {"id": one.id, "side": one.side, "scope": scope, "key": key, "layers": layers}
                | {"rows": height, "columns": width, "file": file}
            )
    if not maps:
        return {}
    table = {key: [row[key] for row in index] for key in index[0]}
    return {file: save(maps), f"maps/{name}.parquet": table_bytes(table)}


def _length(table: str, columns: Any) -> int:
    length = len(next(iter(columns.values())))
    if any(len(values) != length for values in columns.values()):
        raise NormscopeError(f"The columns of the measure {table!r} are not of one length.")
    return length


def _joined(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Pieces of columns as whole ones."""
    return {
        name: np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else [x for piece in pieces for x in piece]
        for name, pieces in columns.items()
    }
