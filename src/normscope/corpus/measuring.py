"""Measures: named pure functions of one analysis that give the rows of a table, as columns of equal length.

`register` adds a measure of your own:

    @register("kept", scopes=["layer"])
    def kept(analysis):
        return {"layer": analysis.layers, "mean": analysis["layer"].mean((1, 2)).numpy()}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from normscope.analysis import Analysis
from normscope.errors import NormscopeError, nearest
from normscope.measures import categories
from normscope.measures.similarity import correlation, ranks

Columns = Mapping[str, Any]  # name -> array or list; all of one length


@dataclass(frozen=True)
class Measure:
    """`scopes` None: it reads whichever were computed, and asks for all where nothing else was asked for."""

    name: str
    columns: Callable[[Analysis], Columns]
    scopes: tuple[str, ...] | None = None
    heads: bool = False  # it reads head-level maps or ||f||


_measures: dict[str, Measure] = {}


def register(
    name: str, *, scopes: Iterable[str] | None = None, heads: bool = False
) -> Callable[[Callable[[Analysis], Columns]], Callable[[Analysis], Columns]]:
    """Make a measure known under a name; a later one of the same name replaces it."""
    if not name.isidentifier():
        raise NormscopeError(f"The name of a measure becomes that of a folder: letters, digits and _, not {name!r}.")

    def keep(function: Callable[[Analysis], Columns]) -> Callable[[Analysis], Columns]:
        _measures[name] = Measure(name, function, None if scopes is None else tuple(scopes), heads)
        return function

    return keep


def measures_of(names: Sequence[str]) -> list[Measure]:
    """The measures of these names, each once."""
    for name in names:
        if name not in _measures:
            raise NormscopeError(f"Unknown measure {name!r}.{nearest(name, _measures)} Known: {', '.join(_measures)}.")
    return [_measures[name] for name in dict.fromkeys(names)]


def known() -> dict[str, str]:
    """name -> what it measures."""
    return {name: (measure.columns.__doc__ or "").strip() for name, measure in _measures.items()}


@register("mixing")
def mixing(analysis: Analysis) -> Columns:
    """scope, layer, position, token, category -> the mixing ratio, and the norm of the bias remainder"""
    ratio = torch.stack([analysis.mixing_ratio(scope) for scope in analysis.scopes])
    remainder = torch.stack([analysis.remainder(scope) for scope in analysis.scopes])
    return {
        **_by_row(analysis, analysis.scopes),
        "mixing": ratio.flatten().numpy(),
        "remainder": remainder.flatten().numpy(),
    }


@register("similarity")
def similarity(analysis: Analysis) -> Columns:
    """scope, other, layer -> Spearman's correlation of the two maps"""
    ranked = {scope: ranks(analysis[scope].flatten(1)) for scope in analysis.scopes}
    pairs = list(combinations(analysis.scopes, 2))
    layers = len(analysis.layers)
    values = [correlation(ranked[a], ranked[b]) for a, b in pairs]
    return {
        "scope": np.repeat(np.array([a for a, _ in pairs], dtype=object), layers),
        "other": np.repeat(np.array([b for _, b in pairs], dtype=object), layers),
        "layer": np.tile(np.array(analysis.layers, dtype=np.int16), len(pairs)),
        "spearman": torch.cat(values).numpy() if values else np.zeros(0),
    }


@register("category_sums")
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


@register("value_norms", scopes=("attention",), heads=True)
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


@register("vector_norms")
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
