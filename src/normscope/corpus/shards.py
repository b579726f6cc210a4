"""One shard of a corpus run: entries in, files out.

A pure function of entries, model and plan: the result does not depend on the process or the order of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry, Fault
from normscope.corpus.entry_inputs import entry_input
from normscope.corpus.masking import draw_masked_positions, mask_at, masked_positions
from normscope.corpus.measure_registry import Measure, Sample, find_registered_measures
from normscope.corpus.plan import Plan, scopes_required_by_plan
from normscope.corpus.store import GroupedSums, ShardFiles, parquet_bytes_for_store
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.request import Options, Request, default_budget, requests_for
from normscope.engine.run import batch_cost, run_batch
from normscope.errors import NormscopeError
from normscope.inputs.encode import encode
from normscope.inputs.item import Item, Tokens


@dataclass(frozen=True)
class EncodedShard:
    """A shard's entries as model inputs, with a Fault for each entry that could not be encoded."""

    number: int
    entries: tuple[Entry | Fault, ...]
    items: tuple[Item | Fault, ...]
    originals: tuple[Item | Fault, ...]  # before masking


def split_into_shards(entries: Iterable[Entry | Fault], size: int) -> Iterator[tuple[int, tuple[Entry | Fault, ...]]]:
    """Numbered shards of a corpus, in order."""
    given = iter(entries)
    number = 0
    while some := tuple(islice(given, size)):
        yield number, some
        number += 1


def encode_shard(lens: Analyzer, plan: Plan, number: int, entries: Sequence[Entry | Fault]) -> EncodedShard:
    """Tokenise the entries, and mask them if the plan says so."""
    pairs = [_encode_entry(lens, plan, entry) for entry in entries]
    return EncodedShard(number, tuple(entries), tuple(item for item, _ in pairs), tuple(before for _, before in pairs))


def _encode_entry(lens: Analyzer, plan: Plan, entry: Entry | Fault) -> tuple[Item | Fault, Item | Fault]:
    """The model's input for an entry, and the same before masking."""
    if isinstance(entry, Fault):
        return entry, entry
    try:
        (item,) = encode(lens.loaded, entry_input(entry, lens), plan.truncation)
        return item if plan.mask_seed is None else _mask_item(item, lens, plan.mask_seed, entry), item
    except NormscopeError as error:
        fault = Fault(entry.id, "encoding", str(error))
        return fault, fault


def compute_shard(lens: Analyzer, plan: Plan, shard: EncodedShard) -> ShardFiles:
    """Analyse the items in batches of similar length and build the shard's files."""
    measures = find_registered_measures(plan.measures)
    requests = requests_for(
        lens.loaded,
        Options(
            scopes=scopes_required_by_plan(plan, measures),
            layers=plan.layers,
            heads=any(measure.heads for measure in measures),
            gate=plan.gate,
            value_bias=plan.value_bias,
        ),
    )
    whole = {n: item for n, item in enumerate(shard.items) if isinstance(item, Item)}
    faults = {n: item for n, item in enumerate(shard.items) if isinstance(item, Fault)}
    tables = _ShardTables(plan, measures)
    for batch in _batches_by_length(whole, plan.batch_size):
        for n, result in _analyse_batch(lens, requests, shard, whole, batch, faults).items():
            entry, item, original = shard.entries[n], shard.items[n], shard.originals[n]
            assert isinstance(entry, Entry)
            assert isinstance(item, Item)
            assert isinstance(original, Item)
            try:
                tables.add_entry(n, partial(Sample, entry, item, original, lens, settings=plan.settings), result)
            except NormscopeError as error:
                faults[n] = Fault(entry.id, "measure", str(error))
    return tables.to_files(shard, [faults[n] for n in sorted(faults)])


def draw_masks_in_order(lens: Analyzer, plan: Plan, entries: Iterable[Entry | Fault]) -> Iterator[Entry | Fault]:
    """The entries with their masked positions drawn from one generator in corpus order, as the papers' code does.

    Entries that cannot be encoded draw nothing. A resumed run passes its finished entries through here again, so that
    the others are masked as in a run without interruption.
    """
    assert plan.mask_seed is not None
    generator = Random(plan.mask_seed)
    for entry in entries:
        _, item = _encode_entry(lens, replace(plan, mask_seed=None), entry)
        if isinstance(item, Fault) or isinstance(entry, Fault):
            yield entry
            continue
        try:
            drawn = draw_masked_positions(_unmaskable_tokens(item, lens), generator)
        except NormscopeError:  # nothing to mask: a fault when the entry is encoded
            yield entry
        else:
            yield replace(entry, masked=drawn)


def _unmaskable_tokens(item: Item, lens: Analyzer) -> list[bool]:
    """Whether each token is one that begins, separates or ends texts, or padding."""
    tokenizer = lens.tokenizer
    kept = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    return [token in kept for token in item.tensors["input_ids"].tolist()]


def _mask_item(item: Item, lens: Analyzer, seed: int, entry: Entry) -> Item:
    """The item with its masked positions, which are those of the entry if they were drawn for the whole corpus."""
    tokenizer = lens.tokenizer
    drawn = entry.masked
    if drawn is None:
        drawn = masked_positions(_unmaskable_tokens(item, lens), seed, entry.id)
    masked = mask_at(item.tensors["input_ids"].tolist(), drawn, tokenizer.mask_token_id)
    (side,) = item.sides
    tokens = item.sides[side]
    names = tuple(tokenizer.convert_ids_to_tokens(masked))
    tensors = {**item.tensors, "input_ids": torch.tensor(masked)}
    return Item(tensors, {side: Tokens(names, tokens.real, tokens.word_ids)}, item.grid)


def _batches_by_length(items: dict[int, Item], size: int) -> Iterator[list[int]]:
    """Batches of items of the same kind and similar length. The order depends on the items alone."""
    kinds: dict[Any, list[int]] = {}
    for n in sorted(items, key=lambda n: (-len(items[n]), n)):
        kinds.setdefault(items[n].kind, []).append(n)
    for order in kinds.values():
        for start in range(0, len(order), size):
            yield order[start : start + size]


def _analyse_batch(
    lens: Analyzer,
    requests: Sequence[Request],
    shard: EncodedShard,
    items: dict[int, Item],
    batch: Sequence[int],
    faults: dict[int, Fault],
) -> dict[int, Any]:
    """The results of a batch by item number.

    A batch that fails or needs too much memory is halved, down to single items; one that still fails becomes a fault.
    """
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
    return _analyse_batch(lens, requests, shard, items, batch[:half], faults) | _analyse_batch(
        lens, requests, shard, items, batch[half:], faults
    )


@dataclass(frozen=True)
class _SideRows:
    """The rows and maps of one side of one entry."""

    id: str
    side: str
    tables: Mapping[str, Any]  # name -> columns
    maps: Mapping[str, Tensor]


class _ShardTables:
    """The tables of a shard. Entries are added batch by batch and written in corpus order."""

    def __init__(self, plan: Plan, measures: Sequence[Measure]) -> None:
        self.plan, self.measures = plan, measures
        self.found: dict[int, list[_SideRows]] = {}
        self.sums = {measure.name: GroupedSums(measure.summed) for measure in measures if measure.summed}

    def add_entry(self, number: int, sample: Callable[..., Sample], result: Analysis | EncoderDecoderAnalysis) -> None:
        """Add the rows of an entry: those of all measures, or none if a measure raises an error."""
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
                length = _column_length(measure.name, columns)
                if measure.summed:
                    sums.append((measure.name, {"side": [side] * length, **columns}))
                else:
                    tables[measure.name] = columns
            kept = [analysis.resolve(scope) for scope in self.plan.maps if analysis.has(scope)]
            rows.append(_SideRows(whole.entry.id, side, tables, {name: analysis[name].contiguous() for name in kept}))
        self.found[number] = rows
        for name, columns in sums:
            self.sums[name].add(columns)

    def to_files(self, shard: EncodedShard, faults: Sequence[Fault]) -> ShardFiles:
        """The contents of the shard's files."""
        name = f"{shard.number:06d}"
        rows = [one for n in sorted(self.found) for one in self.found[n]]
        columns: dict[str, dict[str, list[Any]]] = {}
        for one in rows:
            for table, added in one.tables.items():
                length = _column_length(table, added)
                for key, values in {"id": [one.id] * length, "side": [one.side] * length, **added}.items():
                    columns.setdefault(table, {}).setdefault(key, []).append(values)
        made = {
            f"{table}/{name}.parquet": parquet_bytes_for_store(_join_columns(pieces))
            for table, pieces in columns.items()
        }
        made |= {
            f"{table}/{name}.parquet": parquet_bytes_for_store(sums.table())
            for table, sums in self.sums.items()
            if sums.rows
        }
        if faults:
            made[f"errors/{name}.parquet"] = parquet_bytes_for_store(
                {
                    "id": [fault.id for fault in faults],
                    "where": [fault.where for fault in faults],
                    "reason": [fault.reason for fault in faults],
                }
            )
        return ShardFiles(shard.number, len(shard.entries), len(faults), made | _map_files(name, rows))


def _map_files(name: str, rows: Sequence[_SideRows]) -> dict[str, bytes]:
    """The file with a shard's maps, and the table that locates each map in it."""
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
    return {file: save(maps), f"maps/{name}.parquet": parquet_bytes_for_store(table)}


def _column_length(table: str, columns: Any) -> int:
    length = len(next(iter(columns.values())))
    if any(len(values) != length for values in columns.values()):
        raise NormscopeError(f"The columns of the measure {table!r} differ in length.")
    return length


def _join_columns(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Each column's pieces joined."""
    return {
        name: np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else [x for piece in pieces for x in piece]
        for name, pieces in columns.items()
    }
