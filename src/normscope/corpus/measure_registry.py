"""Corpus measures: named functions of one analysis that return the columns of a table.

`register_measure` adds one:

    @register_measure("kept", scopes=["layer"])
    def kept(analysis):
        return {"layer": analysis.layers, "mean": analysis["layer"].mean((1, 2)).numpy()}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope import plugins
from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError, did_you_mean
from normscope.inputs.item import Item
from normscope.measures.correlation import average_ranks, pearson
from normscope.measures.tokens import CATEGORIES, sum_by_category, token_category

GROUP = "normscope.measures"  # of entry points
RESERVED = ("items", "errors", "maps", "shards", "csv", "report")  # folders of a run

Columns = Mapping[str, Any]  # name -> array or list, all of the same length


@dataclass(frozen=True)
class Sample:
    """One entry with everything known about it: the argument of measures with `whole=True`."""

    entry: Entry
    item: Item  # the model's input, masked if the run masks
    original: Item  # before masking
    lens: Analyzer
    analysis: Analysis  # of one side
    result: Analysis | EncoderDecoderAnalysis  # of all sides
    settings: Mapping[str, Any] = field(default_factory=dict)  # the run's settings for measures


@dataclass(frozen=True)
class Measure:
    """A registered measure."""

    name: str
    columns: Callable[[Any], Columns]  # called with an Analysis, or with a Sample if `whole`
    scopes: tuple[str, ...] | None = None  # scopes it reads; None: those computed, all by default
    heads: bool = False  # reads head-level maps or ||f||
    whole: bool = False  # reads a Sample
    summed: tuple[str, ...] = ()  # columns summed over a shard, grouped by all other columns


_measures: dict[str, Measure] = {}


def register_measure(
    name: str,
    *,
    scopes: Iterable[str] | None = None,
    heads: bool = False,
    whole: bool = False,
    summed: Iterable[str] = (),
) -> Callable[[Callable[[Any], Columns]], Callable[[Any], Columns]]:
    """Register a measure in this process; a later one with the same name replaces it.

    To make measures available in every process, including the command line and Ray workers, a package declares an entry
    point `normscope.measures` for each decorated function.

    Args:
        name: The name of the measure and its table, a Python identifier.
        scopes: The scopes it reads (default: all that are computed).
        heads: Whether it reads head-level maps or value norms.
        whole: Whether it takes a Sample (the analysis with its entry, its input and the Analyzer) instead of an
            Analysis.
        summed: Columns to sum over the entries of a shard, for histograms that would be too large per entry.

    Returns:
        A decorator for a function of an Analysis or a Sample that returns columns of equal length by name.

    Raises:
        NormscopeError: If the name is not a Python identifier, or a folder of every run.
    """
    if not name.isidentifier():
        raise NormscopeError(
            f"The name of a measure is also a folder name: use letters, digits and _ only, not {name!r}."
        )

    if name in RESERVED:
        raise NormscopeError(f"{name!r} is a folder of every run, so no measure can have this name. Choose another.")

    def keep(function: Callable[[Any], Columns]) -> Callable[[Any], Columns]:
        wanted = None if scopes is None else tuple(scopes)
        _measures[name] = Measure(name, function, wanted, heads, whole, tuple(summed))
        return function

    return keep


def find_registered_measures(names: Sequence[str]) -> list[Measure]:
    """The measures with these names, without duplicates."""
    if not all(name in _measures for name in names):
        plugins.import_own_modules(GROUP)
        _fill_measure_registry()
    for name in names:
        if name not in _measures:
            raise NormscopeError(
                f"Unknown measure {name!r}.{did_you_mean(name, _measures)} Known: {', '.join(_measures)}."
            )
    return [_measures[name] for name in dict.fromkeys(names)]


def describe_measures() -> dict[str, str]:
    """name -> description, in one line, of every measure: general ones, those of the papers, and those of other
    packages."""
    plugins.import_own_modules(GROUP)
    _fill_measure_registry()
    return {name: " ".join((measure.columns.__doc__ or "").split()) for name, measure in _measures.items()}


@cache
def _fill_measure_registry() -> None:
    """Import the measures of other packages, which registers them."""
    plugins.load_entry_points(GROUP, _check_measure_registered)


def _check_measure_registered(function: Any) -> None:
    if all(measure.columns is not function for measure in _measures.values()):
        raise NormscopeError("it is not decorated with normscope.register_measure")


@register_measure("mixing")
def corpus_measure_mixing(analysis: Analysis) -> Columns:
    """scope, layer, position, token, category -> the mixing ratio and the norm of the bias remainder"""
    scopes = analysis.mixing_scopes  # cross-attention alone has none
    ratio = [analysis.mixing_ratio(scope).flatten() for scope in scopes]
    remainder = [analysis.remainder(scope).flatten() for scope in scopes]
    return {
        **_row_labels(analysis, scopes),
        "mixing": torch.cat(ratio).numpy() if scopes else np.zeros(0),
        "remainder": torch.cat(remainder).numpy() if scopes else np.zeros(0),
    }


@register_measure("similarity")
def corpus_measure_similarity(analysis: Analysis) -> Columns:
    """scope, other, layer -> Spearman's correlation of the two maps (causal models: cells j <= i only)"""
    cells = corpus_measure_reachable_cells(analysis)
    ranked = {scope: average_ranks(analysis[scope][:, cells]) for scope in analysis.scopes}
    pairs = list(combinations(analysis.scopes, 2))
    layers = len(analysis.layers)
    values = [pearson(ranked[a], ranked[b]) for a, b in pairs]
    return {
        "scope": np.repeat(np.array([a for a, _ in pairs], dtype=object), layers),
        "other": np.repeat(np.array([b for _, b in pairs], dtype=object), layers),
        "layer": np.tile(np.array(analysis.layers, dtype=np.int16), len(pairs)),
        "spearman": torch.cat(values).numpy() if values else np.zeros(0),
    }


def corpus_measure_reachable_cells(analysis: Analysis) -> Tensor:
    """(rows, columns): True where the model allows a contribution.

    Causal models have none from later tokens; correlations over these zeros would make any two maps look similar.
    """
    rows = torch.tensor([label.position for label in analysis.rows])[:, None]
    columns = torch.tensor([label.position for label in analysis.columns])
    if not analysis.info.get("causal"):
        return torch.ones(len(rows), len(columns), dtype=torch.bool)
    elsewhere = torch.tensor([label.side != analysis.info["side"] for label in analysis.columns])
    return (columns <= rows) | elsewhere


def corpus_measure_has_one_side(analysis: Analysis) -> bool:
    """True unless the columns include encoder tokens."""
    side = analysis.info["side"]
    return all(label.side == side for label in analysis.columns)


@register_measure("category_sums")
def corpus_measure_category_sums(analysis: Analysis) -> Columns:
    """scope, category, layer -> the sum of a map over the columns of a category, averaged over rows"""
    tokens = [label.token for label in analysis.columns]
    found = {scope: sum_by_category(analysis[scope], tokens) for scope in analysis.scopes}
    layers, kinds = len(analysis.layers), len(CATEGORIES)
    return {
        "scope": np.repeat(np.array(analysis.scopes, dtype=object), layers * kinds),
        "category": np.tile(np.repeat(np.array(CATEGORIES, dtype=object), layers), len(analysis.scopes)),
        "layer": np.tile(np.array(analysis.layers, dtype=np.int16), len(analysis.scopes) * kinds),
        "sum": torch.cat([found[s][k] for s in analysis.scopes for k in CATEGORIES]).numpy(),
    }


@register_measure("value_norms", scopes=("attention",), heads=True)
def corpus_measure_value_norms(analysis: Analysis) -> Columns:
    """layer, head, position, token -> ||f(x)||, the norm of the value vector after W_O (EMNLP 2020)"""
    assert analysis.value_norms is not None
    layers, heads, columns = analysis.value_norms.shape
    return {
        "layer": np.repeat(np.array(analysis.layers, dtype=np.int16), heads * columns),
        "head": np.tile(np.repeat(np.array(analysis.head_indices, dtype=np.int16), columns), layers),
        "position": np.tile(np.array([label.position for label in analysis.columns], dtype=np.int32), layers * heads),
        "token": [label.token for label in analysis.columns] * (layers * heads),
        "norm": analysis.value_norms.flatten().numpy(),
    }


@register_measure("vector_norms")
def corpus_measure_vector_norms(analysis: Analysis) -> Columns:
    """scope, layer, position, token, category -> the norm of a token's own contribution and the largest of another"""
    scopes = [scope for scope in analysis.scopes if scope.endswith("-N")]
    place = {(label.side, label.position): n for n, label in enumerate(analysis.columns)}
    index = torch.tensor([place[label.side, label.position] for label in analysis.rows])[None, :, None]
    own, other = [], []
    for scope in scopes:
        maps = analysis[scope].clone()
        at = index.expand(len(maps), -1, 1)
        own.append(maps.gather(2, at).flatten())
        other.append(maps.scatter_(2, at, 0.0).amax(-1).flatten())
    return {
        **_row_labels(analysis, scopes),
        "own": torch.cat(own).numpy() if own else np.zeros(0),
        "largest_other": torch.cat(other).numpy() if other else np.zeros(0),
    }


def _row_labels(analysis: Analysis, scopes: Sequence[str]) -> dict[str, Any]:
    """The columns that identify the scope, layer and output of each row."""
    layers, rows, count = len(analysis.layers), len(analysis.rows), len(scopes)
    tokens = [label.token for label in analysis.rows]
    return {
        "scope": np.repeat(np.array(scopes, dtype=object), layers * rows),
        "layer": np.tile(np.repeat(np.array(analysis.layers, dtype=np.int16), rows), count),
        "position": np.tile(np.array([label.position for label in analysis.rows], dtype=np.int32), layers * count),
        "token": tokens * (layers * count),
        "category": [token_category(token) for token in tokens] * (layers * count),
    }
