"""Corpus measures of EMNLP 2021: how much of a map is on its diagonal, and how uniform attention changes the output."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.corpus.measure_registry import Columns, Sample, register_measure
from normscope.measures.change import cosine_distance, cross_entropy, relative_change
from normscope.measures.first_token import normalise_rows
from normscope.papers.common import paper_table_columns
from normscope.tracing.uniform_attention import run_uniform_attention

ALL = -1  # all layers at once, in the column `layer`
OWN_TYPES: dict[str, Any] = {"scope": object, "layer": np.int16, "share": np.float64}
TYPES: dict[str, Any] = {
    **{"layer": np.int16, "tokens": np.int32, "relative": np.float64, "cosine": np.float64},
    **{"loss": np.float64, "plain_loss": np.float64, "scored": np.int32},
}


@register_measure("own_share", whole=True)
def measure_own_share(sample: Sample) -> Columns:
    """scope, layer -> share of a map's diagonal: m_ii / sum_j m_ij, mean over the tokens of the sequence"""
    analysis = sample.analysis
    if analysis.info["side"] != sample.lens.loaded.stacks[0].side:
        return paper_table_columns(OWN_TYPES, [])
    rows = []
    for scope in analysis.scopes:
        shares = normalise_rows(analysis[scope].double()).diagonal(dim1=1, dim2=2).mean(-1)
        rows += list(zip([scope] * len(shares), analysis.layers, shares.tolist(), strict=True))
    return paper_table_columns(OWN_TYPES, rows)


@register_measure("uniform_attention", scopes=("weights",), whole=True)
def measure_uniform_attention(sample: Sample) -> Columns:
    """layer (-1: all at once) -> effect of uniform attention in it: relative change and cosine distance of the final
    hidden states (means over tokens), loss with and without it over the scored tokens if the model has a head"""
    lens, item, layers = sample.lens, sample.item, list(sample.analysis.layers)
    if sample.analysis.info["side"] != lens.loaded.stacks[0].side:
        return paper_table_columns(TYPES, [])
    positions, targets = scored_tokens(sample)
    plain, plain_loss = (
        run_uniform_attention(lens.loaded, item, ()),
        _loss_with_uniform_attention(sample, [], positions, targets),
    )
    rows = []
    for layer in (*layers, ALL):
        chosen = layers if layer == ALL else [layer]
        changed = run_uniform_attention(lens.loaded, item, chosen)
        apart = [float(measure(plain, changed).mean()) for measure in (relative_change, cosine_distance)]
        rows.append(
            (
                layer,
                len(plain),
                *apart,
                _loss_with_uniform_attention(sample, chosen, positions, targets),
                plain_loss,
                len(positions),
            )
        )
    return paper_table_columns(TYPES, rows)


def scored_tokens(sample: Sample) -> tuple[Tensor, Tensor]:
    """Positions whose prediction is scored, and the correct tokens: the masked positions of a masked language model,
    all but the last of a causal one (next token). Empty for models without a language-modelling head."""
    none = torch.zeros(0, dtype=torch.long)
    lens, side = sample.lens, sample.lens.loaded.stacks[0].side
    if lens.two_sided or not has_vocabulary_head(lens):
        return none, none
    real = sample.item.sides[side].real
    ids, before = sample.item.tensors["input_ids"][real], sample.original.tensors["input_ids"][real]
    if sample.analysis.info["causal"]:
        return torch.arange(len(ids) - 1), ids[1:]
    positions = (ids != before).nonzero().flatten()
    return positions, before[positions]


def has_vocabulary_head(lens: Any) -> bool:
    """Whether the model has a head that scores its vocabulary."""
    return lens.model is not lens.loaded.base and lens.model.get_output_embeddings() is not None


def _loss_with_uniform_attention(sample: Sample, layers: list[int], positions: Tensor, targets: Tensor) -> float:
    """Mean cross-entropy at the positions, in nats; NaN if there are none."""
    if not len(positions):
        return nan
    logits = run_uniform_attention(sample.lens.loaded, sample.item, layers, logits=True)
    return float(cross_entropy(logits, targets, positions).mean())
