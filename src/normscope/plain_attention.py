"""Softmax attention of one item, as BERT and its relatives have it, straight into the layout that decomposition reads.

A family's own eager attention puts out probabilities (H, i, j); decomposition wants (H, j, i). To compute them that way
saves a pass that transposes them and one that scales them, which at 512 tokens is a third of the attention's time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.models.bert import modeling_bert

SCORES = 2**20  # attention scores computed at a time


@lru_cache(maxsize=64)
def is_plain(eager: Callable[..., Any]) -> bool:
    """Whether an eager attention is ``softmax(scaling Q K^T + mask) V``: the code of BERT's, and that does it."""
    code, known = (getattr(function, "__code__", None) for function in (eager, modeling_bert.eager_attention_forward))
    same = all(
        getattr(code, name, eager) == getattr(known, name, known) for name in ("co_code", "co_names", "co_consts")
    )
    return same and _agrees(eager)


def _agrees(eager: Callable[..., Any]) -> bool:
    make = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 3, generator=make, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(1, 1, 5, 5, generator=make, dtype=torch.float64)
    weights = torch.empty(2, 5, 5, dtype=torch.float64)
    output = attend(query, key, value, mask, 0.3, weights)
    with torch.no_grad():
        own, probabilities = eager(torch.nn.Identity().eval(), query, key, value, mask, scaling=0.3, dropout=0.0)
    return torch.allclose(output, own) and torch.allclose(weights.mT, probabilities[0])


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, weights: Tensor
) -> Tensor:
    """The output (1, i, H, d_h) for queries (1, H, i, d_h), keys and values (1, H, j, d_h) and an additive mask
    (1, 1 or H, i, j); writes the probabilities to `weights` (H, j, i)."""
    heads, columns, rows = weights.shape
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    output = query.new_empty(1, rows, heads, value.shape[3])
    step = max(1, SCORES // (rows * columns))
    for head in range(0, heads, step):
        some = slice(head, min(head + step, heads))
        q, k, v = query[0, some], key[0, some], value[0, some]
        if mask is None:
            scores = query.new_empty(len(q), columns, rows)
            torch.baddbmm(scores, k, q.mT, beta=0, alpha=scaling, out=scores)
        else:
            added = (mask[0] if mask.shape[1] == 1 else mask[0, some]).mT.expand(len(q), -1, -1)
            scores = torch.baddbmm(added, k, q.mT, alpha=scaling)
        torch.softmax(scores, 1, out=weights[some])
        output[0, :, some] = torch.bmm(weights[some].mT, v).transpose(0, 1)
    return output
