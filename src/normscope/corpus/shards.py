"""One shard of a corpus run: entries in, files out. A pure function of the entries, the model and the plan, so that it
does not matter when, where and beside what it is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from normscope.analysis import Analysis, EncoderDecoderAnalysis
from normscope.analyzer import Analyzer
from normscope.corpus.items import Entry, Fault
from normscope.corpus.masking import mask
from normscope.corpus.measuring import Measure, measures_of
from normscope.corpus.store import ShardFiles, table_bytes
from normscope.errors import NormscopeError
from normscope.estimate import default_budget
from normscope.inputs import Item, Tokens
from normscope.request import Request


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

    def options(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Encoded:
    """A shard's entries as model inputs, or as what was wrong with them."""

    number: int
    entries: tuple[Entry | Fault, ...]
    items: tuple[Item | Fault, ...]


def split(entries: Iterable[Entry | Fault], size: int) -> Iterator[tuple[int, tuple[Entry | Fault, ...]]]:
    """Numbered shards of a corpus, in its own order."""
    given = iter(entries)
    number = 0
    while some := tuple(islice(given, size)):
        yield number, some
        number += 1


def encode(lens: Analyzer, plan: Plan, number: int, entries: Sequence[Entry | Fault]) -> Encoded:
    """Tokenise, and mask where the plan says so."""
    items: list[Item | Fault] = []
    for entry in entries:
        if isinstance(entry, Fault):
            items.append(entry)
            continue
        try:
            found = lens.items(_given(entry, lens), plan.truncation)
            (item,) = found
            items.append(item if plan.mask_seed is None else _masked(item, lens, plan.mask_seed, entry.id))
        except NormscopeError as error:
            items.append(Fault(entry.id, "encoding", str(error)))
    return Encoded(number, tuple(entries), tuple(items))


def compute(lens: Analyzer, plan: Plan, shard: Encoded) -> ShardFiles:
    """Analyse the items in batches by length, and make the shard's files."""
    measures = measures_of(plan.measures)
    requests = lens.requests(
        scopes=wanted_scopes(plan, measures),
        layers=plan.layers,
        heads=any(measure.heads for measure in measures),
        gate=plan.gate,
        value_bias=plan.value_bias,
    )
    whole = {n: item for n, item in enumerate(shard.items) if isinstance(item, Item)}
    faults = {n: item for n, item in enumerate(shard.items) if isinstance(item, Fault)}
    tables = _Tables(plan, measures)
    done: dict[int, Analysis | EncoderDecoderAnalysis] = {}
    for batch in _batches(whole, plan.batch_size):
        done |= _analysed(lens, requests, shard, whole, batch, faults)
    for n in sorted(done):
        entry = shard.entries[n]
        assert isinstance(entry, Entry)
        tables.add(entry.id, done[n])
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
        return {"input_ids": ids} | (types if "token_type_ids" in lens.limits.keys else {})
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
    budget = default_budget() if lens.memory_budget is None else lens.memory_budget
    chosen = [items[n] for n in batch]
    try:
        if len(batch) == 1 or lens.cost(chosen, requests).memory <= budget:
            return dict(zip(batch, lens.run(chosen, requests), strict=True))
    except NormscopeError as error:
        if len(batch) == 1:
            entry = shard.entries[batch[0]]
            faults[batch[0]] = Fault(entry.id, "analysis", str(error))
            return {}
    half = len(batch) // 2
    return _analysed(lens, requests, shard, items, batch[:half], faults) | _analysed(
        lens, requests, shard, items, batch[half:], faults
    )


class _Tables:
    """The columns of a shard's tables, as they grow."""

    def __init__(self, plan: Plan, measures: Sequence[Measure]) -> None:
        self.plan, self.measures = plan, measures
        self.columns: dict[str, dict[str, list[Any]]] = {}
        self.maps: dict[str, Tensor] = {}
        self.index: list[dict[str, Any]] = []

    def add(self, id: str, result: Analysis | EncoderDecoderAnalysis) -> None:
        sides = {str(result.info["side"]): result} if isinstance(result, Analysis) else result.sides
        for side, analysis in sides.items():
            worst = max(float(error.max()) for error in analysis.completeness.values())
            self._append("items", id, side, {
                "tokens": [[label.token for label in analysis.rows]], "length": [len(analysis.rows)],
                "completeness": [worst],
            })  # fmt: skip
            for measure in self.measures:
                self._append(measure.name, id, side, measure.columns(analysis))
            for scope in self.plan.maps:
                self._keep_map(id, side, analysis, scope)

    def _keep_map(self, id: str, side: str, analysis: Analysis, scope: str) -> None:
        try:
            name = analysis.resolve(scope)
        except NormscopeError:  # the other side of an encoder-decoder has it
            return
        key = f"{len(self.maps):04d}"
        self.maps[key] = analysis[name].contiguous()
        layers, rows, columns = analysis[name].shape
        self.index.append(
            {"id": id, "side": side, "scope": name, "key": key, "layers": layers, "rows": rows, "columns": columns}
        )

    def _append(self, table: str, id: str, side: str, columns: Any) -> None:
        into = self.columns.setdefault(table, {})
        length = len(next(iter(columns.values())))
        for name, values in {"id": [id] * length, "side": [side] * length, **columns}.items():
            if len(values) != length:
                raise NormscopeError(f"The columns of the measure {table!r} are not of one length.")
            into.setdefault(name, []).append(values)

    def files(self, shard: Encoded, faults: Sequence[Fault]) -> ShardFiles:
        name = f"{shard.number:06d}"
        made = {f"{table}/{name}.parquet": table_bytes(_joined(columns)) for table, columns in self.columns.items()}
        if faults:
            made[f"errors/{name}.parquet"] = table_bytes(
                {
                    "id": [fault.id for fault in faults],
                    "where": [fault.where for fault in faults],
                    "reason": [fault.reason for fault in faults],
                }
            )
        if self.maps:
            file = f"maps/{name}.safetensors"
            made[file] = save(self.maps)
            rows = [{**row, "file": file} for row in self.index]
            made[f"maps/{name}.parquet"] = table_bytes({key: [row[key] for row in rows] for key in rows[0]})
        return ShardFiles(shard.number, len(shard.entries), len(faults), made)


def _joined(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Pieces of columns as whole ones."""
    return {
        name: np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else [x for piece in pieces for x in piece]
        for name, pieces in columns.items()
    }
