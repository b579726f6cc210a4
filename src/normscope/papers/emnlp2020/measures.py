"""Corpus measures of EMNLP 2020: ||f(x)||, the weights alpha and their product, by layer, head and kind of token.

In an encoder-decoder they read the encoder, except the alignments, which read the decoder's cross-attention.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.analysis import Analysis
from normscope.corpus.measure_registry import (
    Columns,
    Sample,
    corpus_measure_has_one_side,
    corpus_measure_reachable_cells,
    register_measure,
)
from normscope.corpus.word_ids import Words, gold_word_ids
from normscope.engine.probing import probe_attention_inputs
from normscope.errors import NormscopeError
from normscope.measures import alignment
from normscope.measures.correlation import log_bins
from normscope.measures.dispersion import moments
from normscope.measures.tokens import token_category
from normscope.papers.common import paper_table_columns

# The categories of measures.tokens, plus "symbol" for punctuation marks other than comma and period, so that one
# run serves both readings of "punctuation".
KINDS = ("first", "separator", "mask", "punctuation", "symbol", "other")
WEIGHT_BINS = 8  # per octave; weights span many octaves,
NORM_BINS = 32  # norms only a few
GROUPS = 16  # of sequences, left out in turn for the uncertainty of a correlation
LAYER_LEVEL = -1  # in place of a head: the whole layer
MOMENTS: dict[str, Any] = {"count": np.int64} | dict.fromkeys(("mean", "deviations", "largest", "smallest"), np.float64)


def token_kind(token: str) -> str:
    """The papers' category, or "symbol" for a punctuation mark that is neither comma nor period."""
    found = token_category(token)
    plain = token.removeprefix("##").removeprefix("\u2581").removeprefix("\u0120")
    if found == "other" and plain and all(unicodedata.category(sign).startswith("P") for sign in plain):
        return "symbol"
    return found


@register_measure("norm_moments", scopes=("attention",), heads=True)
def measure_norm_moments(analysis: Analysis) -> Columns:
    """layer, head, kind of token -> how many ||f(x)||, their mean, sum of squared deviations, largest, smallest"""
    rows: list[tuple[Any, ...]] = []
    if corpus_measure_has_one_side(analysis):
        norms = _value_norms(analysis)
        for kind, chosen in _columns_by_kind(analysis):
            for n, layer in enumerate(analysis.layers):
                for m, head in enumerate(analysis.head_indices):
                    rows.append((layer, head, kind, *vars(moments(norms[n, m, chosen])).values()))
    return paper_table_columns({"layer": np.int16, "head": np.int16, "kind": object, **MOMENTS}, rows)


@register_measure("input_norm_moments", scopes=("attention",), whole=True)
def measure_input_norm_moments(sample: Sample) -> Columns:
    """layer, kind of token -> how many ||x||, their mean, sum of squared deviations, largest, smallest; x is the vector
    that the attention reads: the layer's input, in a pre-LN layer after the norm"""
    analysis, loaded = sample.analysis, sample.lens.loaded
    rows: list[tuple[Any, ...]] = []
    if corpus_measure_has_one_side(analysis) and analysis.info["side"] == loaded.stacks[0].side:
        norms = torch.linalg.vector_norm(probe_attention_inputs(loaded, sample.item), dim=-1).cpu().numpy()
        rows = [
            (layer, kind, *vars(moments(norms[layer, chosen])).values())
            for kind, chosen in _columns_by_kind(analysis)
            for layer in analysis.layers
        ]
    return paper_table_columns({"layer": np.int16, "kind": object, **MOMENTS}, rows)


@register_measure("category_shares", scopes=("weights", "attention"), heads=True)
def measure_category_shares(analysis: Analysis) -> Columns:
    """layer, kind of token -> how many keys, and the sum over them of alpha (mean over heads), of alpha ||f|| (mean
    over heads) and of the layer's ||sum alpha f||; each the mean over queries"""
    types: dict[str, Any] = {"layer": np.int16, "kind": object, "keys": np.int32}
    types |= dict.fromkeys(("weight", "norm", "layer_norm"), np.float64)
    rows: list[tuple[Any, ...]] = []
    if corpus_measure_has_one_side(analysis):
        codes = _kind_codes(analysis)
        head_norms = analysis.heads["attention"].mean((1, 2)).double()  # (layers, columns): over heads and queries
        maps = (analysis["weights"].mean(1).double(), head_norms, analysis["attention"].mean(1).double())
        for code, name in enumerate(KINDS):
            chosen = torch.from_numpy(codes == code)
            sums = [found[:, chosen].sum(-1).tolist() for found in maps]
            rows += [(layer, name, int(chosen.sum()), *(s[n] for s in sums)) for n, layer in enumerate(analysis.layers)]
    return paper_table_columns(types, rows)


@register_measure("head_shares", scopes=("weights", "attention"), heads=True)
def measure_head_shares(analysis: Analysis) -> Columns:
    """layer, head, kind of token -> the sum over its keys of alpha and of alpha ||f||, each the mean over queries"""
    types: dict[str, Any] = {"layer": np.int16, "head": np.int16, "kind": object}
    types |= dict.fromkeys(("weight", "norm"), np.float64)
    if not corpus_measure_has_one_side(analysis):
        return paper_table_columns(types, [])
    codes = _kind_codes(analysis)
    # (layers, heads, columns) -> (layers, heads, kinds)
    member = torch.from_numpy(codes[:, None] == np.arange(len(KINDS))).double()
    sums = [(analysis.heads[scope].mean(2).double() @ member).flatten().numpy() for scope in ("weights", "attention")]
    layers, heads = len(analysis.layers), len(analysis.head_indices)
    return {
        "layer": np.repeat(np.array(analysis.layers, dtype=np.int16), heads * len(KINDS)),
        "head": np.tile(np.repeat(np.array(analysis.head_indices, dtype=np.int16), len(KINDS)), layers),
        "kind": list(KINDS) * (layers * heads),
        "weight": sums[0],
        "norm": sums[1],
    }


@register_measure("weight_norm_pairs", scopes=("attention",), heads=True)
def measure_weight_norm_pairs(analysis: Analysis) -> Columns:
    """layer, kind of token (its place in KINDS) -> lists: of each head and key, ||f|| and how many queries can see the
    key, then alpha of these queries, key by key; one number per pair, for small corpora"""
    types: dict[str, Any] = {"layer": np.int16, "kind": np.int8}
    types |= dict.fromkeys(("norms", "queries", "weights"), object)
    rows: list[tuple[Any, ...]] = []
    if corpus_measure_has_one_side(analysis):
        norms, weights = _value_norms(analysis), analysis.heads["weights"].numpy()
        cells = corpus_measure_reachable_cells(analysis).numpy()
        for kind, chosen in _columns_by_kind(analysis):
            seen = cells[:, chosen].T  # (keys, queries)
            queries = np.tile(seen.sum(1, dtype=np.int32), len(analysis.head_indices))
            for n, layer in enumerate(analysis.layers):
                alpha = weights[n][:, :, chosen].transpose(0, 2, 1)[:, seen].ravel()
                rows.append((layer, KINDS.index(kind), norms[n][:, chosen].ravel(), queries, alpha))
    return paper_table_columns(types, rows)


@register_measure("weight_norm_counts", scopes=("attention",), heads=True, whole=True, summed=("count",))
def measure_weight_norm_counts(sample: Sample) -> Columns:
    """layer, kind of token (its place in KINDS), bins of alpha and of ||f||, group of sequences -> how many pairs of a
    query and a key; bins are logarithmic, 8 of alpha and 32 of ||f|| an octave; 16 groups, by the CRC-32 of the id"""
    analysis = sample.analysis
    types: dict[str, Any] = {
        "layer": np.int16,
        "kind": np.int8,
        "weight_bin": np.int16,
        "norm_bin": np.int16,
        "group": np.int8,
        "count": np.int64,  # last, as in the sums of a shard
    }
    if not corpus_measure_has_one_side(analysis):
        return paper_table_columns(types, [])
    kinds = _kind_codes(analysis)
    norm_bins = log_bins(_value_norms(analysis), NORM_BINS)
    weights = analysis.heads["weights"]
    cells = corpus_measure_reachable_cells(analysis).numpy()
    # Layer by layer: only one layer's cells are held.
    found = [
        _weight_norm_histogram(layer, weights[n], norm_bins[n], kinds, cells) for n, layer in enumerate(analysis.layers)
    ]
    joined = [np.concatenate(column) for column in zip(*found, strict=True)]
    joined.insert(-1, np.full(len(joined[0]), crc32(sample.entry.id.encode()) % GROUPS))
    return {name: column.astype(type) for (name, type), column in zip(types.items(), joined, strict=True)}


def _weight_norm_histogram(
    layer: int, weights: Tensor, norm_bins: NDArray[np.int16], kinds: NDArray[np.int32], cells: NDArray[np.bool_]
) -> tuple[NDArray[Any], ...]:
    """The joint histogram of one layer: weights (heads, rows, columns), norm bins (heads, columns)."""
    weight_bins, by_weight = _index_bins(log_bins(weights.numpy(), WEIGHT_BINS))
    norm_bins, by_norm = _index_bins(norm_bins)
    place = (kinds * len(weight_bins) + by_weight) * len(norm_bins) + by_norm[:, None]
    counts = np.bincount((place if cells.all() else place[:, cells]).ravel())
    occupied = np.flatnonzero(counts)
    rest, norm = np.divmod(occupied, len(norm_bins))
    kind, weight = np.divmod(rest, len(weight_bins))
    return np.full(len(occupied), layer), kind, weight_bins[weight], norm_bins[norm], counts[occupied]


def _index_bins(bins: NDArray[np.int16]) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """The bins that occur, sorted, and the index of each value's bin among them."""
    least = int(bins.min())
    shifted = bins.astype(np.int32) - least
    there = np.bincount(shifted.ravel()) > 0
    places = np.cumsum(there, dtype=np.int32) - 1
    return (np.flatnonzero(there) + least).astype(np.int16), places[shifted]


@register_measure("token_means", scopes=("attention",), heads=True, whole=True)
def measure_token_means(sample: Sample) -> Columns:
    """position, token, token id, kind -> attention received (mean of alpha over layers, heads and the queries that can
    see the token), ||f|| (mean over layers and heads)"""
    analysis = sample.analysis
    types: dict[str, Any] = {"position": np.int32, "token": object, "token_id": np.int64, "kind": object}
    types |= {"weight": np.float64, "norm": np.float64}
    if not corpus_measure_has_one_side(analysis):
        return paper_table_columns(types, [])
    if "input_ids" not in sample.item.tensors:
        raise NormscopeError("Word frequencies need a model that reads text.")
    ids = sample.item.tensors["input_ids"].tolist()
    seen = corpus_measure_reachable_cells(analysis).sum(0)  # of each column, the rows that can see it
    received = analysis.heads["weights"].mean((0, 1)).double().sum(0) / seen
    norms = _value_norms(analysis).astype(np.float64).mean((0, 1))
    rows = [
        (label.position, label.token, ids[label.position], token_kind(label.token), weight, norm)
        for label, weight, norm in zip(analysis.columns, received.tolist(), norms.tolist(), strict=True)
    ]
    return paper_table_columns(types, rows)


@register_measure("alignment_hits", scopes=("XATTN-W", "XATTN-N"), heads=True, whole=True)
def measure_alignment_hits(sample: Sample) -> Columns:
    """setting (AWO, AWI), method (weight, norm), layer, head (-1: the layer) -> sure gold links, links drawn, those
    of target words that have a gold link, those that are sure, those that are possible"""
    counted = ("links", "linked", "in_sure", "in_possible")
    types: dict[str, Any] = {"setting": object, "method": object, "layer": np.int16, "head": np.int16}
    types |= dict.fromkeys(("sure", *counted), np.int32)
    analysis, entry = sample.analysis, sample.entry
    if not analysis.has("XATTN-N"):
        return paper_table_columns(types, [])
    source, target = aligned_word_ids(sample)
    rows: list[tuple[Any, ...]] = []
    heads = (LAYER_LEVEL, *analysis.head_indices)
    for method, maps in cross_attention_maps(analysis).items():
        for setting in alignment.SETTINGS:
            words = alignment.alignment_maps_of_words(maps, source, target, setting)
            best = alignment.argmax_alignment_links(words, len(entry.words or ()))
            found = alignment.count_gold_alignment_hits(best, len(entry.words or ()), entry.sure, entry.possible)
            counts = torch.stack([found[name] for name in counted], -1).tolist()
            rows += [
                (setting, method, layer, head, len(entry.sure), *counts[n][m])
                for n, layer in enumerate(analysis.layers)
                for m, head in enumerate(heads)
            ]
    return paper_table_columns(types, rows)


@register_measure("cross_norms", scopes=("XATTN-N",), heads=True)
def measure_cross_norms(analysis: Analysis) -> Columns:
    """layer, head -> how many cells of the cross-attention, and the sum of alpha ||f|| over them"""
    rows: list[tuple[Any, ...]] = []
    if analysis.has("XATTN-N"):
        maps = _encoder_columns(analysis, analysis.heads["XATTN-N"]).double()
        cells, sums = maps.shape[-2] * maps.shape[-1], maps.sum((-2, -1)).tolist()
        rows = [
            (layer, head, cells, sums[n][m])
            for n, layer in enumerate(analysis.layers)
            for m, head in enumerate(analysis.head_indices)
        ]
    return paper_table_columns({"layer": np.int16, "head": np.int16, "cells": np.int64, "sum": np.float64}, rows)


def aligned_word_ids(sample: Sample) -> tuple[Words, Words]:
    """The word of each source token, and of each decoder input."""
    entry, tensors = sample.entry, sample.item.tensors
    if entry.words is None or not isinstance(entry.target, tuple):
        raise NormscopeError("Alignments need entries with words on both sides.")
    source = gold_word_ids(entry.words, tensors["input_ids"].tolist(), sample.lens.tokenizer)
    target = gold_word_ids(entry.target, tensors["decoder_input_ids"].tolist(), sample.lens.tokenizer, target=True)
    return source, target


def cross_attention_maps(decoder: Analysis) -> dict[str, Tensor]:
    """method -> (layers, 1 + heads, rows, source tokens): the layer's map (mean of alpha over heads; norm of the sum
    over heads), then the head's."""
    found = {}
    for method, scope in (("weight", "XATTN-W"), ("norm", "XATTN-N")):
        both = torch.cat([decoder[scope][:, None], decoder.heads[scope]], 1)
        found[method] = _encoder_columns(decoder, both)
    return found


def _encoder_columns(decoder: Analysis, maps: Tensor) -> Tensor:
    return maps[..., [label.side == "encoder" for label in decoder.columns]]


def _value_norms(analysis: Analysis) -> NDArray[Any]:
    assert analysis.value_norms is not None
    return analysis.value_norms.numpy()


def _columns_by_kind(analysis: Analysis) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """The kinds of token that occur, each with the columns (True) of that kind."""
    codes = _kind_codes(analysis)
    return ((KINDS[code], codes == code) for code in np.unique(codes))


def _kind_codes(analysis: Analysis) -> NDArray[np.int32]:
    """The kind of each column, as an index into KINDS."""
    return np.array([KINDS.index(token_kind(label.token)) for label in analysis.columns], dtype=np.int32)
