"""Corpus measures of the feed-forward paper; for encoder-decoders, of the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.analysis import Analysis
from normscope.corpus.entries import subword_spans
from normscope.corpus.measure_registry import (
    Columns,
    Sample,
    corpus_measure_has_one_side,
    corpus_measure_reachable_cells,
    register_measure,
)
from normscope.engine import probing
from normscope.errors import NormscopeError
from normscope.measures.amplification import map_shares
from normscope.measures.correlation import average_ranks, pearson
from normscope.measures.tokens import number_words
from normscope.papers.common import paper_table_columns
from normscope.papers.feed_forward.shared import ff_layout

NORM = -1  # in place of a dimension: the norm of the whole vector
SPECIAL = -1  # in place of a word: a special token
SHARES = (0.005, 0.01, 0.02, 0.05)  # shares of the dimensions that can be removed
ROUNDINGS: Mapping[str, Callable[[float], int]] = {
    "floor": floor,
    "round": lambda count: floor(count + 0.5),
    "ceil": ceil,
}
MAGNITUDES: dict[str, Any] = {"layer": np.int16, "dimension": np.int32, "tokens": np.int64}
MAGNITUDES |= dict.fromkeys(("bypass", "input", "output"), np.float64)
NORMS = {name: type for name, type in MAGNITUDES.items() if name != "dimension"}


@register_measure("similarity_shares")
def measure_share_similarity(analysis: Analysis) -> Columns:
    """normalised (row, column), scope, other, layer -> Spearman's correlation of the maps of two scopes with each row,
    or each column, divided by its sum"""
    names: list[tuple[str, str, str]] = []
    values: list[Tensor] = []
    if corpus_measure_has_one_side(analysis):
        cells = corpus_measure_reachable_cells(analysis)
        for normalised, axis in (("row", "output"), ("column", "input")):
            shares = {scope: map_shares(analysis[scope], axis) for scope in analysis.scopes}  # type: ignore[arg-type]
            ranked = {scope: average_ranks(one[:, cells]) for scope, one in shares.items()}
            names += [(normalised, *pair) for pair in combinations(analysis.scopes, 2)]
            values += [pearson(ranked[a], ranked[b]) for a, b in combinations(analysis.scopes, 2)]
    keys = ("normalised", "scope", "other")
    return {
        **{key: [row[n] for row in names for _ in analysis.layers] for n, key in enumerate(keys)},
        "layer": np.tile(np.array(analysis.layers, dtype=np.int16), len(names)),
        "spearman": torch.cat(values).numpy() if values else np.zeros(0),
    }


@register_measure("ff_magnitudes", scopes=("weights",), whole=True, summed=("tokens", "bypass", "input", "output"))
def measure_ff_magnitudes(sample: Sample) -> Columns:
    """layer, dimension (-1: the norm of the vector) -> number of tokens, and sums over them of |value| in the bypass of
    the feed-forward, in its input and in its output"""
    vectors = _ff_vectors(sample)
    if not vectors:
        return paper_table_columns(MAGNITUDES, [])
    depth, tokens, width = vectors["bypass"].shape
    found: dict[str, Any] = {
        "layer": np.repeat(np.arange(depth), width + 1),
        "dimension": np.tile(np.arange(NORM, width), depth),
        "tokens": np.full(depth * (width + 1), tokens),
    }
    for name, given in vectors.items():
        norms = torch.linalg.vector_norm(given, dim=-1).sum(1, keepdim=True)
        found[name] = torch.cat([norms, given.abs().sum(1)], 1).flatten().cpu().numpy()
    return {name: np.asarray(found[name], dtype) for name, dtype in MAGNITUDES.items()}


@register_measure("ff_norms", scopes=("weights",), whole=True)
def measure_ff_norms(sample: Sample) -> Columns:
    """layer -> number of tokens, and sums over them of the norms of the feed-forward's bypass, input and output"""
    vectors = _ff_vectors(sample)
    if not vectors:
        return paper_table_columns(NORMS, [])
    depth, tokens, _ = vectors["bypass"].shape
    found: dict[str, Any] = {"layer": np.arange(depth), "tokens": np.full(depth, tokens)}
    for name, given in vectors.items():
        found[name] = torch.linalg.vector_norm(given, dim=-1).sum(1).cpu().numpy()
    return {name: np.asarray(found[name], dtype) for name, dtype in NORMS.items()}


def _ff_vectors(sample: Sample) -> dict[str, Tensor]:
    """The model's own vectors (layers, tokens, width) in float64: bypass, input and output of the feed-forward. Empty
    for the other side of an encoder-decoder."""
    scopes = ff_layout(sample.lens)
    if scopes is None:
        raise NormscopeError("The feed-forward of this model has no separate scope.")
    if sample.analysis.info["side"] != scopes.side:
        return {}
    wanted = {"bypass": scopes.block, "input": scopes.input, "output": scopes.added}
    found = probing.probe_scope_outputs(sample.lens.loaded, sample.item, list(dict.fromkeys(wanted.values())))
    return {name: found[scope].double() for name, scope in wanted.items()}


@register_measure("token_words", scopes=("weights",), whole=True)
def measure_token_words(sample: Sample) -> Columns:
    """-> the word of each token, counted from 0; -1 for special tokens"""
    side = sample.analysis.info["side"]
    tokens, tensors = sample.original.sides[side], sample.original.tensors
    ids = tensors["input_ids" if side == sample.lens.loaded.stacks[0].side else "decoder_input_ids"].tolist()
    special = _special_ids(sample.lens.tokenizer)
    marks = [id in special or (tokens.word_ids is not None and tokens.word_ids[n] is None) for n, id in enumerate(ids)]
    words = number_words(tokens.names, marks, tokens.word_ids)
    chosen = [words[label.position] for label in sample.analysis.rows]
    return {"words": [[SPECIAL if word is None else word for word in chosen]]}


@register_measure("entity_spans", scopes=("weights",), whole=True)
def measure_entity_spans(sample: Sample) -> Columns:
    """start, end (not included), label of every named entity, in tokens"""
    side = sample.lens.loaded.stacks[0].side
    spans = []
    if sample.entry.entities and sample.analysis.info["side"] == side:
        word_ids = sample.original.sides[side].word_ids
        if word_ids is None:
            raise NormscopeError("Locating entities needs a fast tokenizer, which reports the word of each token.")
        spans = list(subword_spans(sample.entry, word_ids))
    types = {"start": np.int32, "end": np.int32, "label": object}
    return paper_table_columns(types, [(span.start, span.end, span.label) for span in spans])


def removal_measure_name(share: float, rounding: str) -> str:
    """Name of the measure that removes this share of the dimensions: `lowest_gains_10_floor` for 1 %."""
    return f"lowest_gains_{round(1000 * share)}_{rounding}"


def removed_dimension_count(width: int, share: float, rounding: str) -> int:
    """The number of dimensions to remove, at least 1: 768 x 1 % = 7.68 becomes 7 or 8."""
    return max(1, ROUNDINGS[rounding](round(width * share, 9)))


def split_by_gain(gains: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The dimensions with the lowest (signed) gains, and all others, each sorted."""
    order = gains.argsort(stable=True)
    return order[:count].sort().values, order[count:].sort().values


def _removal_measure(share: float, rounding: str) -> Callable[[Sample], Columns]:
    def measure(sample: Sample) -> Columns:
        """layer -> number of dimensions with the lowest gain of the last norm that were removed from the feed-forward's
        contributions, and Spearman's correlation of the maps before and after it, with and without them"""
        analysis, lens = sample.analysis, sample.lens
        if analysis.info["side"] != lens.loaded.stacks[0].side:
            types = {"layer": np.int16, "removed": np.int32, "whole": np.float64, "rest": np.float64}
            return paper_table_columns(types, [])
        gains = probing.probe_norm_gains(lens.loaded, "layer")
        count = removed_dimension_count(gains.shape[1], share, rounding)
        rest = {layer: split_by_gain(gains[layer], count)[1] for layer in range(len(gains))}
        cells = corpus_measure_reachable_cells(analysis)
        before = average_ranks(analysis["attention-block"][:, cells])
        maps = probing.probe_map_within(lens.loaded, sample.item, rest)
        return {
            "layer": np.array(analysis.layers, dtype=np.int16),
            "removed": np.full(len(analysis.layers), count, dtype=np.int32),
            "whole": pearson(before, average_ranks(analysis["ff"][:, cells])).numpy(),
            "rest": pearson(before, average_ranks(maps[list(analysis.layers)][:, cells])).numpy(),
        }

    return measure


for _share in SHARES:
    for _rounding in ROUNDINGS:
        register_measure(removal_measure_name(_share, _rounding), scopes=("attention-block", "ff"), whole=True)(
            _removal_measure(_share, _rounding)
        )


def _special_ids(tokenizer: Any) -> set[int]:
    """Ids of the special tokens, except the unknown token, which represents a word."""
    if tokenizer is None:
        return set()
    return set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
