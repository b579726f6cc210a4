"""Measures: named pure functions of one analysis that give the rows of a table, as columns of equal length.

`register_measure` adds a measure of your own:

    @register_measure("kept", scopes=["layer"])
    def kept(analysis):
        return {"layer": analysis.layers, "mean": analysis["layer"].mean((1, 2)).numpy()}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normscope import plugins
from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError, did_you_mean
from normscope.inputs.item import Item
from normscope.measures import categories
from normscope.measures.similarity import correlation, ranks

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.items import Entry

Columns = Mapping[str, Any]  # name -> array or list; all of one length

# Modules with the measures of experiments, loaded when a name is not known without them.
EXTRA = (
    "normscope.papers.faithfulness.measures",
    "normscope.papers.emnlp2020.measures",
    "normscope.papers.emnlp2021.measures",
    "normscope.papers.feed_forward.measures",
    "normscope.papers.across_layers.measures",
    "normscope.papers.shapley.measures",
)


@dataclass(frozen=True)
class Sample:
    """One entry with all that is known about it: what a measure with `whole=True` reads."""

    entry: Entry
    item: Item  # as the model was given it, masked where the run masks
    original: Item  # before masking
    lens: Analyzer
    analysis: Analysis  # of one side
    result: Analysis | EncoderDecoderAnalysis  # of all sides
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, for measures that have any


@dataclass(frozen=True)
class Measure:
    """`scopes` None: it reads whichever were computed, and asks for all where nothing else was asked for."""

    name: str
    columns: Callable[[Any], Columns]  # of an Analysis, or of a Sample
    scopes: tuple[str, ...] | None = None
    heads: bool = False  # it reads head-level maps or ||f||
    whole: bool = False  # it reads a Sample
    summed: tuple[str, ...] = ()  # columns that are added up over a shard, by all the others; no row for each entry


_measures: dict[str, Measure] = {}


def register_measure(
    name: str,
    *,
    scopes: Iterable[str] | None = None,
    heads: bool = False,
    whole: bool = False,
    summed: Iterable[str] = (),
) -> Callable[[Callable[[Any], Columns]], Callable[[Any], Columns]]:
    """Make a measure known in this process under a name; a later one of the same name replaces it.

    A package makes its measures known to every process, the command line's and Ray's too, with an entry point
    `normscope.measures` that names the decorated function.

    Args:
        name: What the measure and its table are called: letters, digits and _.
        scopes: The scopes that it reads; by default whichever are computed.
        heads: Whether it reads head-level maps or value norms.
        whole: Whether it reads a Sample, the analysis with its entry, its input and the Analyzer, instead of an
            Analysis.
        summed: Columns that are added up over the entries of a shard, for histograms that would be too long by entry.

    Returns:
        A decorator for a function of an Analysis or a Sample that returns columns of equal length by name.

    Raises:
        NormscopeError: If the name cannot be that of a folder.
    """
    if not name.isidentifier():
        raise NormscopeError(f"The name of a measure becomes that of a folder: letters, digits and _, not {name!r}.")

    def keep(function: Callable[[Any], Columns]) -> Callable[[Any], Columns]:
        wanted = None if scopes is None else tuple(scopes)
        _measures[name] = Measure(name, function, wanted, heads, whole, tuple(summed))
        return function

    return keep


def measures_of(names: Sequence[str]) -> list[Measure]:
    """The measures of these names, each once."""
    if not all(name in _measures for name in names):
        for module in EXTRA:
            import_module(module)
        _load_installed()
    for name in names:
        if name not in _measures:
            raise NormscopeError(
                f"Unknown measure {name!r}.{did_you_mean(name, _measures)} Known: {', '.join(_measures)}."
            )
    return [_measures[name] for name in dict.fromkeys(names)]


def known() -> dict[str, str]:
    """name -> what it measures, those of other packages (entry points `normscope.measures`) included."""
    _load_installed()
    return {name: (measure.columns.__doc__ or "").strip() for name, measure in _measures.items()}


@cache
def _load_installed() -> None:
    """The measures of other packages: importing one registers it."""
    plugins.load_entry_points("normscope.measures", _check_registered)


def _check_registered(function: Any) -> None:
    if all(measure.columns is not function for measure in _measures.values()):
        raise NormscopeError("it is not decorated with normscope.register_measure")


register = register_measure  # internal: the name that the measures of the papers know


@register_measure("mixing")
def mixing(analysis: Analysis) -> Columns:
    """scope, layer, position, token, category -> the mixing ratio, and the norm of the bias remainder"""
    scopes = analysis.mixing_scopes  # cross-attention alone has no mixing ratio
    ratio = [analysis.mixing_ratio(scope).flatten() for scope in scopes]
    remainder = [analysis.remainder(scope).flatten() for scope in scopes]
    return {
        **_by_row(analysis, scopes),
        "mixing": torch.cat(ratio).numpy() if scopes else np.zeros(0),
        "remainder": torch.cat(remainder).numpy() if scopes else np.zeros(0),
    }


@register_measure("similarity")
def similarity(analysis: Analysis) -> Columns:
    """scope, other, layer -> Spearman's correlation of the two maps (of a causal model: of the cells j <= i)"""
    cells = reachable(analysis)
    ranked = {scope: ranks(analysis[scope][:, cells]) for scope in analysis.scopes}
    pairs = list(combinations(analysis.scopes, 2))
    layers = len(analysis.layers)
    values = [correlation(ranked[a], ranked[b]) for a, b in pairs]
    return {
        "scope": np.repeat(np.array([a for a, _ in pairs], dtype=object), layers),
        "other": np.repeat(np.array([b for _, b in pairs], dtype=object), layers),
        "layer": np.tile(np.array(analysis.layers, dtype=np.int16), len(pairs)),
        "spearman": torch.cat(values).numpy() if values else np.zeros(0),
    }


def reachable(analysis: Analysis) -> Tensor:
    """(rows, columns): the cells where there can be a contribution. A causal model has none from later tokens, and
    zeros that are there by construction would make any two of its maps alike."""
    rows = torch.tensor([label.position for label in analysis.rows])[:, None]
    columns = torch.tensor([label.position for label in analysis.columns])
    if not analysis.info.get("causal"):
        return torch.ones(len(rows), len(columns), dtype=torch.bool)
    elsewhere = torch.tensor([label.side != analysis.info["side"] for label in analysis.columns])
    return (columns <= rows) | elsewhere


def reads_itself(analysis: Analysis) -> bool:
    """Whether this is not the decoder of an encoder-decoder, which reads the encoder too."""
    side = analysis.info["side"]
    return all(label.side == side for label in analysis.columns)


@register_measure("category_sums")
def category_sums(analysis: Analysis) -> Columns:
    """scope, category, layer -> how much of a map falls to the columns of a category, mean over rows"""
    tokens = [label.token for label in analysis.columns]
    found = {scope: categories.sums(analysis[scope], tokens) for scope in analysis.scopes}
    layers, kinds = len(analysis.layers), len(categories.CATEGORIES)
    return {
        "scope": np.repeat(np.array(analysis.scopes, dtype=object), layers * kinds),
        "category": np.tile(np.repeat(np.array(categories.CATEGORIES, dtype=object), layers), len(analysis.scopes)),
        "layer": np.tile(np.array(analysis.layers, dtype=np.int16), len(analysis.scopes) * kinds),
        "sum": torch.cat([found[s][k] for s in analysis.scopes for k in categories.CATEGORIES]).numpy(),
    }


@register_measure("value_norms", scopes=("attention",), heads=True)
def value_norms(analysis: Analysis) -> Columns:
    """layer, head, position, token -> ||f(x)||, the value vector through W_O (EMNLP 2020)"""
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
def vector_norms(analysis: Analysis) -> Columns:
    """scope, layer, position, token, category -> the norm of the own contribution, and of the largest of another's"""
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
        **_by_row(analysis, scopes),
        "own": torch.cat(own).numpy() if own else np.zeros(0),
        "largest_other": torch.cat(other).numpy() if other else np.zeros(0),
    }


def _by_row(analysis: Analysis, scopes: Sequence[str]) -> dict[str, Any]:
    """The columns that say which scope, layer and output a row is about."""
    layers, rows, count = len(analysis.layers), len(analysis.rows), len(scopes)
    tokens = [label.token for label in analysis.rows]
    return {
        "scope": np.repeat(np.array(scopes, dtype=object), layers * rows),
        "layer": np.tile(np.repeat(np.array(analysis.layers, dtype=np.int16), rows), count),
        "position": np.tile(np.array([label.position for label in analysis.rows], dtype=np.int32), layers * count),
        "token": tokens * (layers * count),
        "category": [categories.category(token) for token in tokens] * (layers * count),
    }
