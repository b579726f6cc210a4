"""Corpus measure of the Shapley study: the maps after the feed-forward under both ways to split its activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from normscope.analysis import Analysis
from normscope.corpus.measure_registry import Columns, Sample, corpus_measure_reachable_cells, register_measure
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.measures.correlation import average_ranks, pearson

FEW = 12  # tokens up to which all coalitions are taken
PERMUTATIONS = 32
KEYS = ("spearman", "repeat", "difference", "norms", "same_top", "before_ig", "before_shapley")


@register_measure("shapley", scopes=("attention-block", "ff", "layer"), whole=True)
def measure_shapley_agreement(sample: Sample) -> Columns:
    """scope, layer -> of the maps by Shapley values and by integrated gradients: Spearman's correlation, that of two
    draws of orders, the mean difference and the ratio of norms, how often the largest other input is the same; of both
    the correlation with the map before the feed-forward"""
    ig = sample.analysis
    scopes = shapley_scopes(ig)
    many = len(ig.rows) > FEW
    way = f"shapley-sampled:{PERMUTATIONS}" if many else "shapley-exact"
    found = _analyze_with_gate(sample, scopes, way)
    again = _analyze_with_gate(sample, scopes, f"{way}:1") if many else found
    cells = corpus_measure_reachable_cells(ig)
    own = torch.tensor([[a.position == b.position for b in ig.columns] for a in ig.rows])
    others = cells & ~own
    before = average_ranks(ig["attention-block"][:, cells])
    values: dict[str, list[Any]] = {key: [] for key in KEYS}
    for scope in scopes:
        a, b, c = ig[scope], found[scope], again[scope]
        ranked = [average_ranks(one[:, cells]) for one in (a, b, c)]
        values["spearman"].append(pearson(ranked[0], ranked[1]))
        values["repeat"].append(pearson(ranked[1], ranked[2]))
        values["difference"].append((a - b)[:, cells].abs().mean(-1) / b[:, cells].mean(-1))
        values["norms"].append(a[:, cells].sum(-1) / b[:, cells].sum(-1))
        tops = [one.masked_fill(~others, -1.0).argmax(-1) for one in (a, b)]
        some = others.any(-1)  # the first token of a causal model has no other input
        values["same_top"].append((tops[0] == tops[1])[:, some].double().mean(-1))
        values["before_ig"].append(pearson(before, ranked[0]))
        values["before_shapley"].append(pearson(before, ranked[1]))
    layers = len(ig.layers)
    return {
        "scope": np.repeat(np.array(scopes, dtype=object), layers),
        "layer": np.tile(np.array(ig.layers, dtype=np.int16), len(scopes)),
        "exact": [not many] * (layers * len(scopes)),
        **{key: torch.cat(values[key]).double().numpy() for key in KEYS},
    }


def shapley_scopes(analysis: Analysis) -> list[str]:
    """The feed-forward's own scope, and the whole layer."""
    return list(dict.fromkeys(analysis.resolve(alias) for alias in ("ff", "layer")))


def _analyze_with_gate(sample: Sample, scopes: list[str], gate: str) -> Analysis:
    lens = sample.lens
    (found,) = run_batch(
        lens.loaded, [sample.item], requests_for(lens.loaded, Options(scopes=scopes, gate=gate)), lens.workspace
    )
    assert isinstance(found, Analysis)
    return found
