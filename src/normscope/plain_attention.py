"""Softmax attention of an item, as BERT and its relatives have it, straight into the layout that decomposition reads.

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
MANY = 2**13  # scores of a head from which on it pays to compute every item of a batch on its own


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
    query, key, value = (torch.randn(3, 2, 5, 4, generator=make, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(3, 1, 5, 5, generator=make, dtype=torch.float64)
    weights = torch.empty(3, 5, 2, 5, dtype=torch.float64)
    output = attend(query, key, value, mask, 0.3, weights)
    with torch.no_grad():
        own, probabilities = eager(torch.nn.Identity().eval(), query, key, value, mask, scaling=0.3, dropout=0.0)
    return torch.allclose(output, own) and torch.allclose(weights.permute(0, 2, 3, 1), probabilities)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, weights: Tensor
) -> Tensor:
    """The output (b, i, H, d_h) for queries (b, H, i, d_h), keys and values (b, H, j, d_h) and an additive mask
    (1 or b, 1 or H, i, j); writes the probabilities to `weights` (b, j, H, i)."""
    items, columns, heads, rows = weights.shape
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    output = query.new_empty(items, rows, heads, value.shape[3])
    step = min(heads, max(1, SCORES // (rows * columns)))
    # One item's probabilities are stored as they are made, (H, j, i); those of several are put into their order.
    passing = None if items == 1 else query.new_empty(step, columns, rows)
    scores = query.new_empty(step, columns, rows)
    for item in range(items):
        for head in range(0, heads, step):
            some = slice(head, min(head + step, heads))
            q, k, v = query[item, some], key[item, some], value[item, some]
            found = scores[: len(q)]
            if mask is None:
                torch.baddbmm(found, k, q.mT, beta=0, alpha=scaling, out=found)
            else:
                added = mask[item if len(mask) > 1 else 0]
                added = (added[some] if len(added) > 1 else added).mT.expand(found.shape)
                torch.baddbmm(added, k, q.mT, alpha=scaling, out=found)
            kept = weights[item].transpose(0, 1)[some]
            made = torch.softmax(found, 1, out=kept if passing is None else passing[: len(q)])
            output[item, :, some] = torch.bmm(made.mT, v).transpose(0, 1)
            if passing is not None:
                kept.copy_(made)
    return output
