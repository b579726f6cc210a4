"""Corpus measures that compare the model of a run with others on the same inputs, token by token.

The other models are named in the run's settings under "compare", each with the digest of what it was when the run
began. Where tokenizers differ, tokens are put together to the units that both have in common; the contribution of a
unit is the norm of the sum of its tokens' vectors (`Analysis.words`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.corpus.entry_inputs import entry_input
from normscope.corpus.fingerprints import describe_model_for_manifest
from normscope.corpus.measure_registry import Columns, Sample, register_measure
from normscope.corpus.store import fingerprint
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.errors import NormscopeError
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.measures.amplification import amplification, map_shares
from normscope.measures.common_units import CommonUnits, equal_units, find_common_units
from normscope.measures.correlation import spearman
from normscope.model_loading import load_source
from normscope.models.scopes import scope_aliases
from normscope.models.source import ModelSource

SCOPES = ("weights", "attention", "attention-block", "ff", "layer")  # compared if all models have them
BEFORE_FF, AFTER_FF = "attention-block", "ff"
WHOLE = "layer"  # the scope of changed units and pairs
MOST = 5  # pairs of each entry and model
KEYS = ("model", "scope", "layer", "other_layer", "units", "unmatched")
QUANTITIES = ("similarity", "distance", "mixing_first", "mixing", "sink_first", "sink", "ff_first", "ff")


@dataclass(frozen=True)
class ComparedSource:
    """A model to compare with: how to load it, and the digest of what it is."""

    name: str
    device: str | None
    dtype: str | None
    revision: str | None
    digest: str

    @classmethod
    def of(cls, source: ModelSource, lens: Analyzer) -> ComparedSource:
        """The source of a model that was loaded."""
        return cls(source.name, source.device, source.dtype, source.revision, compared_model_digest(lens))


@dataclass(frozen=True)
class ComparedMaps:
    """Maps of two models between the same units, at one scope: (layers of the first, units, units)."""

    scope: str
    first: Tensor
    other: Tensor
    mixing_first: Tensor  # (layers, units)
    mixing: Tensor
    sinks: tuple[Tensor, Tensor]  # (layers,) of each: the share of the first token
    movements: tuple[Tensor, Tensor]  # (layers,) of each: by the feed-forward; NaN at other scopes


@dataclass(frozen=True)
class ComparedSample:
    """An input as two models see it."""

    model: int  # number of the other model, from 2
    units: CommonUnits
    layers: tuple[tuple[int, int], ...]  # of the first model, and the corresponding one of the other
    causal: bool
    maps: tuple[ComparedMaps, ...]

    @property
    def cells(self) -> Tensor:
        """(units, units): True where both models allow a contribution."""
        count = len(self.units.texts)
        every = torch.ones(count, count, dtype=torch.bool)
        return every.tril() if self.causal else every


def compared_model_digest(lens: Analyzer) -> str:
    """The digest of a model and its tokenizer."""
    described = describe_model_for_manifest(lens, head=False)
    return fingerprint(
        repr((key, described[key])).encode() for key in sorted(described) if key not in ("name", "revision")
    )


def common_scopes(models: Sequence[Analyzer]) -> list[str]:
    """The scopes to compare, by the names that they have in every architecture."""
    known = [scope_aliases(lens.loaded.stacks[-1].blocks) for lens in models]
    return [scope for scope in SCOPES if all(scope in aliases for aliases in known)]


def corresponding_layers(layers: Sequence[int], depth: int, other_depth: int) -> tuple[tuple[int, int], ...]:
    """For each layer l of L the layer of M at the same relative depth: l (M - 1) / (L - 1), rounded to the nearest."""
    step = (other_depth - 1) / max(depth - 1, 1)
    return tuple((layer, int(layer * step + 0.5)) for layer in layers)


@register_measure("comparison", whole=True)
def measure_comparison(sample: Sample) -> Columns:
    """model (from 2), scope, layer, other_layer -> Spearman's correlation of the maps of the first model and this one,
    the total variation distance of their rows, and of both the mean mixing ratio, the share of the first token, and how
    much the feed-forward moves (total variation distance of rows before and after it)"""
    rows: list[tuple[Any, ...]] = []
    for found in _compare_sample(sample):
        for maps in found.maps:
            quantities = _compared_quantities(found, maps)
            for n, (layer, other) in enumerate(found.layers):
                keys = (found.model, maps.scope, layer, other, len(found.units.texts), found.units.unmatched)
                rows.append((*keys, *(float(quantities[name][n]) for name in QUANTITIES)))
    return _columns_of_rows((*KEYS, *QUANTITIES), rows)


@register_measure("compared_units", whole=True)
def measure_compared_units(sample: Sample) -> Columns:
    """model (from 2), unit, text -> by how much the share of all rows that comes from this unit changed, and its mixing
    ratio, from the first model to this one, at the scope of the whole layer, averaged over layers"""
    rows: list[tuple[Any, ...]] = []
    for found in _compare_sample(sample):
        for maps in (one for one in found.maps if one.scope == WHOLE):
            received = (map_shares(maps.other) - map_shares(maps.first)).mean((0, 1)).tolist()
            mixing = (maps.mixing.double() - maps.mixing_first.double()).mean(0).tolist()
            texts = found.units.texts
            rows += [(found.model, n, texts[n], received[n], mixing[n]) for n in range(len(texts))]
    return _columns_of_rows(("model", "unit", "text", "received", "mixing"), rows)


@register_measure("compared_pairs", whole=True)
def measure_compared_pairs(sample: Sample) -> Columns:
    """model (from 2), layer, output, input -> the five shares of rows that changed most from the first model to this
    one, at the scope of the whole layer"""
    rows: list[tuple[Any, ...]] = []
    for found in _compare_sample(sample):
        for maps in (one for one in found.maps if one.scope == WHOLE):
            before, after = map_shares(maps.first), map_shares(maps.other)
            change = after - before
            for at in change.abs().flatten().topk(min(MOST, change.numel())).indices.tolist():
                layer, i, j = (int(one) for one in torch.unravel_index(torch.tensor(at), change.shape))
                texts = (found.units.texts[i], found.units.texts[j])
                values = (float(before[layer, i, j]), float(after[layer, i, j]), float(change[layer, i, j]))
                rows.append((found.model, found.layers[layer][0], *texts, *values))
    return _columns_of_rows(("model", "layer", "output", "input", "before", "after", "change"), rows)


_compared: WeakKeyDictionary[Analysis, list[ComparedSample]] = WeakKeyDictionary()  # three measures share the work


def _compare_sample(sample: Sample) -> list[ComparedSample]:
    if sample.analysis not in _compared:
        _compared[sample.analysis] = list(_compare_with_each(sample))
    return _compared[sample.analysis]


def _compare_with_each(sample: Sample) -> Iterator[ComparedSample]:
    settings = sample.settings.get("compare")
    if not isinstance(settings, Mapping):
        raise NormscopeError("This measure belongs to `normscope compare`, which names the models to compare with.")
    for number, given in enumerate(settings["models"], 2):
        lens = _load_compared_model(ComparedSource(**given))
        yield _compare_two(sample, lens, number, list(settings["scopes"]))


@lru_cache(maxsize=16)
def _load_compared_model(source: ComparedSource) -> Analyzer:
    lens = load_source(ModelSource(source.name, source.device, source.dtype, source.revision))
    if compared_model_digest(lens) != source.digest:
        raise NormscopeError(f"The model {source.name} has changed since the run began.")
    return lens


def _compare_two(sample: Sample, lens: Analyzer, number: int, scopes: Sequence[str]) -> ComparedSample:
    analysis = sample.analysis
    (item,) = encode(lens.loaded, entry_input(sample.entry, lens))
    units = _units_of_items(sample, item)
    layers = corresponding_layers(analysis.layers, sample.lens.depth, lens.depth)
    others = sorted({other for _, other in layers})
    requests = requests_for(lens.loaded, Options(scopes, others, gate=str(analysis.info["gate"])))
    result = run_batch(lens.loaded, [item], requests, lens.workspace)[0]
    assert isinstance(result, Analysis)
    first, other = _between_units(analysis, units.first, scopes), _between_units(result, units.other, scopes)
    at = [other[0].layer_position(layer) for _, layer in layers]
    maps = []
    for scope in scopes:
        (before, mixing_first), (after, mixing) = (
            (one[scope][:, kept][:, :, kept], one.mixing_ratio(scope)[:, kept]) for one, kept in (first, other)
        )
        sinks = _sink(analysis, scope), _sink(result, scope)[at]
        movements = _ff_movement(analysis, scope), _ff_movement(result, scope)[at]
        maps.append(ComparedMaps(scope, before, after[at], mixing_first, mixing[at], sinks, movements))
    causal = bool(analysis.info.get("causal")) or bool(result.info.get("causal"))
    return ComparedSample(number, units, layers, causal, tuple(maps))


def _units_of_items(sample: Sample, item: Item) -> CommonUnits:
    """The units that the tokens of the sample and of an item of another model have in common."""
    (ours,), (theirs,) = sample.item.sides.values(), item.sides.values()
    if ours.names == theirs.names:
        return equal_units(ours.names)
    if ours.spans is None or theirs.spans is None or sample.entry.text is None:
        raise NormscopeError(
            "The tokenizers differ, so tokens are aligned by their characters: this needs plain texts and fast "
            "tokenizers."
        )
    return find_common_units(sample.entry.text, ours.spans, theirs.spans, ours.names)


def _between_units(
    analysis: Analysis, units: Sequence[int | None], scopes: Sequence[str]
) -> tuple[Analysis, list[int]]:
    """The analysis between units and tokens without a unit, and the places of the units in it, in order."""
    groups = [
        unit
        for unit, _ in groupby(
            zip(units, range(len(units)), strict=True), key=lambda one: (one[0], one[1] if one[0] is None else -1)
        )
    ]
    numbers = [unit for unit, _ in groups]
    places = {unit: n for n, unit in enumerate(numbers) if unit is not None}
    kept = [places[unit] for unit in sorted(places)]
    if len(numbers) == len(units):
        return analysis, kept
    if sum(unit is not None for unit in numbers) != len(places):
        raise NormscopeError("The tokens of a unit are not next to one another, so they cannot be put together.")
    return analysis.words(scopes, word_ids=units), kept


def _compared_quantities(found: ComparedSample, maps: ComparedMaps) -> dict[str, Tensor]:
    """(layers,) of every quantity."""
    cells = found.cells
    return {
        "similarity": spearman(maps.first[:, cells].double(), maps.other[:, cells].double()),
        "distance": (map_shares(maps.first) - map_shares(maps.other)).abs().sum(-1).mean(-1) / 2,
        "mixing_first": maps.mixing_first.mean(-1),
        "mixing": maps.mixing.mean(-1),
        "sink_first": maps.sinks[0],
        "sink": maps.sinks[1],
        "ff_first": maps.movements[0],
        "ff": maps.movements[1],
    }


def _sink(analysis: Analysis, scope: str) -> Tensor:
    """(layers,): the share of the first token in the outputs of all others; NaN if it is alone."""
    return analysis.first_token_share(scope)[:, 1:].double().mean(-1)


def _ff_movement(analysis: Analysis, scope: str) -> Tensor:
    """(layers,): half the sum of |FF-amp| of a row, averaged over rows; NaN at other scopes than that after the FF."""
    if scope != AFTER_FF or not analysis.has(BEFORE_FF):
        return torch.full((len(analysis.layers),), torch.nan)
    return amplification(analysis[BEFORE_FF], analysis[AFTER_FF]).abs().sum(-1).mean(-1) / 2


def _columns_of_rows(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns:
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}
