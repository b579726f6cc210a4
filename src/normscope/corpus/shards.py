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
from normscope.corpus.entries import Entry, Fault, fault_from_error
from normscope.corpus.entry_inputs import entry_input
from normscope.corpus.masking import draw_masked_positions, mask_at, masked_positions
from normscope.corpus.measure_registry import Columns, Measure, Sample, find_registered_measures
from normscope.corpus.plan import Plan, scopes_required_by_plan
from normscope.corpus.shard_tables import GroupedSums, ShardFiles, import_polars, parquet_bytes_for_store
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.request import Options, Request, default_budget, is_out_of_memory, requests_for
from normscope.engine.row_pieces import OverBudgetError, run_in_row_pieces
from normscope.engine.run import Workspace, batch_cost, run_batch
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
    except Exception as error:  # tokenizers raise many types
        if is_out_of_memory(error):
            raise _stop_for_memory(entry, error) from error
        fault = fault_from_error(entry.id, "encoding", error)
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
        for n, result in _analyse_batch(lens, plan, requests, shard, whole, batch, faults).items():
            entry, item, original = shard.entries[n], shard.items[n], shard.originals[n]
            assert isinstance(entry, Entry)
            assert isinstance(item, Item)
            assert isinstance(original, Item)
            try:
                tables.add_entry(n, partial(Sample, entry, item, original, lens, settings=plan.settings), result)
            except Exception as error:  # a user's measure may raise anything
                if is_out_of_memory(error):
                    raise _stop_for_memory(entry, error) from error
                faults[n] = fault_from_error(entry.id, "measure", error)
    return tables.to_files(shard, [faults[n] for n in sorted(faults)])


def shard_of_faults(plan: Plan, number: int, entries: Sequence[Entry | Fault], where: str, reason: str) -> ShardFiles:
    """A shard that was given up: all of its entries are faults."""
    faults = tuple(one if isinstance(one, Fault) else Fault(one.id, where, reason) for one in entries)
    return _ShardTables(plan, ()).to_files(EncodedShard(number, tuple(entries), faults, faults), faults)


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
    plan: Plan,
    requests: Sequence[Request],
    shard: EncodedShard,
    items: dict[int, Item],
    batch: Sequence[int],
    faults: dict[int, Fault],
) -> dict[int, Any]:
    """The results of a batch by item number.

    A batch that fails or needs too much memory is halved, down to single items. One that still fails becomes a fault.
    One that needs too much memory is computed in pieces of rows; if that is too much, too, the run stops, so that the
    entry is computed when there is more memory.
    """
    budget = plan.memory_budget or default_budget(lens.loaded.base.device)
    workspace = Workspace(budget, lens.workspace.free)
    chosen = [items[n] for n in batch]
    entry = shard.entries[batch[0]]
    try:
        if batch_cost(lens.loaded, chosen, requests).memory <= budget:
            return dict(zip(batch, run_batch(lens.loaded, chosen, requests, workspace), strict=True))
    except Exception as error:  # models and tokenizers raise many types
        if len(batch) == 1 and not is_out_of_memory(error):
            faults[batch[0]] = fault_from_error(entry.id, "analysis", error)
            return {}
    if len(batch) == 1:
        try:
            return {batch[0]: run_in_row_pieces(lens.loaded, chosen[0], requests, workspace, budget)}
        except OverBudgetError as error:
            raise _stop_for_memory(entry, error) from error
        except Exception as error:
            faults[batch[0]] = fault_from_error(entry.id, "analysis", error)
            return {}
    half = len(batch) // 2
    return _analyse_batch(lens, plan, requests, shard, items, batch[:half], faults) | _analyse_batch(
        lens, plan, requests, shard, items, batch[half:], faults
    )


def _stop_for_memory(entry: Entry | Fault, error: Exception) -> NormscopeError:
    return NormscopeError(
        f"There is too little memory for the entry {entry.id}. {' '.join(str(error).split())} Finished shards are "
        "kept: run the same command again with a larger memory_budget, on a larger machine, or with fewer workers. "
        "In another folder, fewer layers=[...] or scopes=[...] or truncation=True need less."
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
                | {name: [value] for name, value in whole.entry.kept}
            }
            for measure in self.measures:
                columns = _checked_columns(measure, whole if measure.whole else analysis)
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
        texts = {"items": sorted({key for one in shard.entries if isinstance(one, Entry) for key, _ in one.kept})}
        made = {
            f"{table}/{name}.parquet": _joined_table(table, partial(_join_columns, pieces, texts.get(table, ())))
            for table, pieces in columns.items()
        }
        made |= {
            f"{table}/{name}.parquet": _joined_table(table, sums.table)
            for table, sums in self.sums.items()
            if sums.rows
        }
        if faults:
            made[f"errors/{name}.parquet"] = parquet_bytes_for_store(
                {
                    "id": [fault.id for fault in faults],
                    "where": [fault.where for fault in faults],
                    "reason": [fault.reason for fault in faults],
                    "traceback": [fault.traceback for fault in faults],
                }
            )
        return ShardFiles(shard.number, len(shard.entries), len(faults), made | _map_files(name, rows))


def _joined_table(table: str, join: Callable[[], Mapping[str, Any]]) -> bytes:
    """The Parquet file of a table from the columns of all entries of a shard."""
    try:
        return parquet_bytes_for_store(join())
    except Exception as error:  # numpy and polars raise many types
        raise NormscopeError(
            f"The columns that the measure {table!r} returned for different entries cannot be joined: "
            f"{str(error).splitlines()[0]} Return columns of the same type for every entry."
        ) from error


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


def _checked_columns(measure: Measure, given: Analysis | Sample) -> Columns:
    columns = measure.columns(given)
    if not isinstance(columns, Mapping) or not columns:  # type: ignore[redundant-expr]
        raise NormscopeError(
            f"The measure {measure.name!r} must return columns by name, not {type(columns).__name__} {columns!r}."
        )
    return columns


def _column_length(table: str, columns: Any) -> int:
    length = len(next(iter(columns.values())))
    if any(len(values) != length for values in columns.values()):
        raise NormscopeError(f"The columns of the measure {table!r} differ in length.")
    return length


def _join_columns(columns: dict[str, list[Any]], texts: Iterable[str] = ()) -> dict[str, Any]:
    """Each column's pieces joined. The columns `texts` are text even if every value is missing."""
    joined: dict[str, Any] = {
        name: np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else [x for piece in pieces for x in piece]
        for name, pieces in columns.items()
    }
    polars = import_polars()
    return joined | {name: polars.Series(name, joined[name], dtype=polars.String) for name in texts if name in joined}
