"""Alignment error rates of layers and heads over a corpus, and under resampling of its sentence pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.alignment import SETTINGS, Hits
from normscope.papers.emnlp2020.measures import LAYER_LEVEL
from normscope.reports.report import none_if_nan

Place = tuple[int, int]  # layer and head, from 0; head LAYER_LEVEL: the whole layer
METHODS = ("weight", "norm")
WAYS = tuple(product(SETTINGS, METHODS))
WORDS = ("all", "linked")  # the target words whose links are evaluated
COUNTS = ("links", "linked", "sure", "in_sure", "in_possible")


@dataclass(frozen=True)
class AlignmentRates:
    """Error rates of one layer or head."""

    all: Hits
    linked: Hits  # of target words with a gold link

    def aer(self, words: str) -> float:
        """AER in percent, over all target words or over those with a gold link."""
        return 100 * (self.linked if words == "linked" else self.all).aer

    def cells(self) -> tuple[float | None, ...]:
        """AER, AER of linked words, precision, recall, in percent."""
        values = (self.aer("all"), self.aer("linked"), 100 * self.all.precision, 100 * self.all.recall)
        return tuple(map(none_if_nan, values))


@dataclass(frozen=True)
class AlignmentResult:
    """Error rates and norms of every layer and head."""

    rates: Mapping[tuple[str, str], Mapping[Place, AlignmentRates]]  # setting, method -> place -> rates
    norms: Mapping[Place, float]  # of each head
    words: str  # over which words the error rate decides

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.norms})

    @property
    def highest_layer(self) -> int:
        """The layer with the highest norm."""
        return max(self.layers, key=lambda layer: sum(norm for (one, _), norm in self.norms.items() if one == layer))

    @property
    def highest_head(self) -> Place:
        """The head with the highest norm."""
        return max(self.norms, key=lambda place: self.norms[place])

    def by_layer(self, way: str, method: str) -> list[AlignmentRates]:
        return [self.rates[way, method][layer, LAYER_LEVEL] for layer in self.layers]

    def best_layer(self, way: str, method: str) -> int:
        """The layer with the lowest error rate."""
        rates = self.rates[way, method]
        return min(self.layers, key=lambda layer: rates[layer, LAYER_LEVEL].aer(self.words))

    def head_errors(self, way: str, method: str, words: str) -> list[float]:
        """The error rates of all heads, in the order of `norms`."""
        return [self.rates[way, method][place].aer(words) for place in self.norms]


@dataclass(frozen=True)
class AlignmentItems:
    """The counts of each sentence pair, as functions of which error rates and norms can be resampled."""

    hits: NDArray[np.float64]  # (pairs, settings, methods, layers, 1 + heads, COUNTS); the layer is before its heads
    norms: NDArray[np.float64]  # (pairs, layers, heads, 2): numerator and denominator of the mean norm


def alignment_error_rates(run: Run) -> dict[tuple[str, str], dict[Place, AlignmentRates]]:
    """The error rates of every layer (head -1) and head over the corpus."""
    keys = ("setting", "method", "layer", "head")
    frame = run.scan("alignment_hits").group_by(keys).agg(pl.col(*COUNTS).sum()).sort(keys).collect()
    found: dict[tuple[str, str], dict[Place, AlignmentRates]] = {}
    for way, method, layer, head, links, linked, sure, in_sure, in_possible in frame.iter_rows():
        both = (Hits(predicted, sure, in_sure, in_possible) for predicted in (links, linked))
        found.setdefault((way, method), {})[layer, head] = AlignmentRates(*both)
    return found


def cross_attention_head_norms(run: Run, average: str) -> dict[Place, float]:
    """layer, head -> mean of alpha ||f(x)||: over all cells of all sentences, or over the means of the sentences."""
    mean = (pl.col("sum") / pl.col("cells")).mean() if average == "sentences" else pl.col("sum").sum() / pl.sum("cells")
    frame = run.scan("cross_norms").group_by("layer", "head").agg(mean.alias("norm")).sort("layer", "head").collect()
    return {(layer, head): norm for layer, head, norm in frame.iter_rows()}


def read_alignment_items(run: Run, average: str) -> AlignmentItems:
    """The counts of each sentence pair; `average` as for `cross_attention_head_norms`."""
    frame = run.scan("alignment_hits").sort("id", "setting", "method", "layer", "head").collect()
    layers, places = frame["layer"].n_unique(), frame["head"].n_unique()
    shape = (-1, len(SETTINGS), len(METHODS), layers, places, len(COUNTS))
    hits = frame.select(COUNTS).to_numpy().astype(np.float64).reshape(shape)
    settings, methods = ([sorted(names).index(name) for name in names] for names in (SETTINGS, METHODS))
    norms = run.scan("cross_norms").sort("id", "layer", "head").collect()
    if average == "sentences":
        norms = norms.with_columns(pl.col("sum") / pl.col("cells"), cells=pl.lit(1))
    sums = norms.select("sum", "cells").to_numpy().astype(np.float64).reshape(-1, layers, places - 1, 2)
    return AlignmentItems(hits[:, settings][:, :, methods], sums)


def aer_of_sums(sums: NDArray[np.float64], words: str) -> NDArray[np.float64]:
    """AER in percent from sums (..., COUNTS) or their means over sentence pairs."""
    links, linked, sure, in_sure, in_possible = np.moveaxis(sums, -1, 0)
    drawn = linked if words == "linked" else links
    found: NDArray[np.float64] = 100 * (1 - (in_sure + in_possible) / (drawn + sure))
    return found
