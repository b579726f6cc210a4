"""What only EMNLP 2021's experiments measure: how the output changes when attention is uniform."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.corpus.measuring import Columns, Sample, register
from normscope.measures.change import cosine_distance, cross_entropy, relative_change
from normscope.tracing.uniform_attention import uniform

ALL = -1  # stands for all layers at once in the column `layer`


@register("uniform_attention", scopes=("weights",), whole=True)
def uniform_attention(sample: Sample) -> Columns:
    """layer (-1: all at once) -> with uniform attention there: relative change and cosine distance of the final hidden
    states (means over tokens), loss and plain loss over so many scored tokens, where the model has a head"""
    lens, item = sample.lens, sample.item
    side = lens.stacks[0].side
    layers = [] if sample.analysis.info["side"] != side else [*sample.analysis.layers, ALL]
    chosen = [list(sample.analysis.layers) if layer == ALL else [layer] for layer in layers]
    positions, targets = scored(sample)
    plain = uniform(lens, item, ()) if layers else torch.zeros(0, 0)
    plain_loss = _loss(sample, (), positions, targets) if layers else nan
    changes: list[tuple[float, float, float]] = []
    for some in chosen:
        changed = uniform(lens, item, some)
        changes.append(
            (
                float(relative_change(plain, changed).mean()),
                float(cosine_distance(plain, changed).mean()),
                _loss(sample, some, positions, targets),
            )
        )
    rows = len(layers)
    return {
        "layer": np.array(layers, dtype=np.int16),
        "tokens": np.full(rows, len(plain), dtype=np.int32),
        "relative": np.array([one for one, _, _ in changes], dtype=np.float64),
        "cosine": np.array([one for _, one, _ in changes], dtype=np.float64),
        "loss": np.array([one for _, _, one in changes], dtype=np.float64),
        "plain_loss": np.full(rows, plain_loss, dtype=np.float64),
        "scored": np.full(rows, len(positions), dtype=np.int32),
    }


def scored(sample: Sample) -> tuple[Tensor, Tensor]:
    """Where the head is asked for a token, and which one is right: the masked positions of a masked language model, all
    but the last of a causal one (for the next token). None of a model without a head over its vocabulary."""
    none = torch.zeros(0, dtype=torch.long)
    lens, side = sample.lens, sample.lens.stacks[0].side
    if lens.two_sided or not has_head(lens):
        return none, none
    real = sample.item.sides[side].real
    ids, before = sample.item.tensors["input_ids"][real], sample.original.tensors["input_ids"][real]
    if sample.analysis.info["causal"]:
        return torch.arange(len(ids) - 1), ids[1:]
    positions = (ids != before).nonzero().flatten()
    return positions, before[positions]


def has_head(lens: Any) -> bool:
    """Whether the model gives a score to every token of its vocabulary."""
    head = None if lens.model is lens.base else lens.model.get_output_embeddings()
    return head is not None


def _loss(sample: Sample, layers: tuple[int, ...] | list[int], positions: Tensor, targets: Tensor) -> float:
    """Mean cross-entropy at the positions, in nats; NaN where there are none."""
    if not len(positions):
        return nan
    logits = uniform(sample.lens, sample.item, layers, logits=True)
    return float(cross_entropy(logits, targets, positions).mean())
