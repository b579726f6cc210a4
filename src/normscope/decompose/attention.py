"""Attention as contributions (EMNLP 2020, eq. 4): ``c_ij = sum_h alpha^h_ij f^h(x_j)``, ``f^h(x_j) = v^h_j W_O^h``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from normscope.decompose.contributions import Factored, Mixture, Term
from normscope.decompose.scratch import Scratch
from normscope.records import AttentionRecord

ValueBias = Literal["token", "remainder"]


def attend(record: AttentionRecord, positions: Tensor | None, value_bias: ValueBias, scratch: Scratch) -> Factored:
    """A fresh state: what came in, its remainder included, is inside the values. b_O goes to the remainder.

    `positions` (g, R) are the columns that the rows of the record stand for; None: all, in order. With
    `value_bias="token"` the value bias is part of f, as in the papers (attention rows sum to one, so it is spread over
    j); with "remainder" it goes to b_i.
    """
    values = record.values.transpose(1, 2)  # (g, j, H, d_h)
    items, columns, heads, _ = values.shape
    rows = record.weights.shape[2]
    width = record.matrix.shape[2]

    bias = (record.output.new_zeros(width) if record.bias is None else record.bias)[None, None]
    if value_bias == "remainder" and record.value_bias is not None:
        values = values - record.value_bias
        constant = torch.bmm(record.value_bias[:, None], record.matrix)[:, 0]  # (H, d)
        bias = bias + record.weights.sum(-1).transpose(1, 2) @ constant

    vectors = scratch.like("vectors", (items * columns, heads, width), values)
    by_head = values.flatten(0, 1).transpose(0, 1)  # (H, g*j, d_h)
    torch.bmm(by_head, record.matrix, out=vectors.transpose(0, 1))

    # Our own copy, (g, j, H, R). Of one long item a plain transpose is three times faster than a full permutation, and
    # as good for products per column; several items need one stride for the columns of all.
    if items == 1:
        weights = scratch.like("weights", (items, heads, columns, rows), values)
        weights = weights.copy_(record.weights.transpose(2, 3)).transpose(1, 2)
    else:
        weights = scratch.like("weights", (items, columns, heads, rows), values)
        weights.copy_(record.weights.permute(0, 3, 1, 2))
    item, column, row = own_index(positions, items, rows, weights.device)
    own_weights = weights[item, column, :, row]  # (g, R, H)
    weights[item, column, :, row] = 0
    own_vectors = vectors if positions is None else vectors.unflatten(0, (items, columns))[item, column].flatten(0, 1)
    own = torch.bmm(own_weights.flatten(0, 1)[:, None], own_vectors).view(items, rows, width)

    mixture = Mixture(weights, own_weights, values, record.matrix, vectors.unflatten(0, (items, columns)))
    others = record.output - bias - own
    return Factored(Term(mixture, values.new_ones(items, rows)), own, others, bias)


def own_index(positions: Tensor | None, items: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (item, column, row), each (g, R), of every row's own column."""
    item = torch.arange(items, device=device)[:, None].expand(items, rows)
    row = torch.arange(rows, device=device).expand(items, rows)
    return item, row if positions is None else positions, row
