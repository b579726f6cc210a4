"""Attention as contributions (EMNLP 2020, eq. 4): ``c_ij = sum_h alpha^h_ij f^h(x_j)``, ``f^h(x_j) = v^h_j W_O^h``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from normscope.decompose.scratch import Scratch
from normscope.decompose.state import BESIDE, VECTORS, Factored, Mixture, Term, probed
from normscope.tracing.records import AttentionRecord, at_rows

ValueBias = Literal["token", "remainder"]


def attend(record: AttentionRecord, positions: Tensor | None, value_bias: ValueBias, scratch: Scratch) -> Factored:
    """A fresh state: what came in, its remainder included, is inside the values. b_O goes to the remainder. The
    record's weights may be overwritten.

    `positions` (g, R) are the columns that the rows of the record stand for; None: all, in order. With
    `value_bias="token"` the value bias (and the shift of a norm before it) is part of f, as in the papers (attention
    rows sum to one, so it is spread over j); with "remainder" it goes to b_i.
    """
    weights = record.weights.permute(0, 3, 1, 2)  # (g, j, H, R)
    items, columns, heads, rows = weights.shape
    width = record.matrix.shape[2]
    bias = (record.output.new_zeros(width) if record.bias is None else record.bias)[None, None]
    values = record.values.transpose(1, 2)  # (g, j, heads of the values, d_h)
    if value_bias == "remainder" and record.value_bias is not None:
        values = values - record.value_bias
        each = record.value_bias.repeat_interleave(heads // len(record.value_bias), dim=0)
        constant = torch.bmm(each[:, None], record.matrix)[:, 0]  # (H, d)
        bias = bias + record.weights.sum(-1).transpose(1, 2) @ constant
    if values.shape[2] != heads:
        values = values.repeat_interleave(heads // values.shape[2], dim=2)

    if record.cross:
        own_weights = weights.new_zeros(items, rows, heads)
    else:
        own_weights = own_cells(weights.transpose(1, 2), positions).transpose(1, 2)
        own_weights = own_weights.clone(memory_format=torch.contiguous_format)  # (g, R, H)
        set_own_cells(weights.transpose(1, 2), positions, 0)
    few = items * columns * (heads + BESIDE) * width <= VECTORS
    whole = probed(values, record.matrix, record.cross, scratch) if few else None
    mixture = Mixture(weights, own_weights, values, record.matrix, whole, record.cross, record.sinks)

    own = torch.empty_like(record.output)
    if record.cross:
        own.zero_()
    elif whole is not None and positions is None:
        own_vectors = whole[:heads, :, :rows].flatten(1, 2).transpose(0, 1)  # (g*R, H, d)
        torch.bmm(own_weights.flatten(0, 1)[:, None], own_vectors, out=own.view(items * rows, 1, width))
    else:
        mixed = (own_weights[..., None] * at_rows(values, positions)[:, :rows]).flatten(2)
        torch.matmul(mixed, record.matrix.flatten(0, 1), out=own)
    return Factored((Term(mixture),), own, torch.sub(record.output, own).sub_(bias), bias)


def own_cells(cells: Tensor, positions: Tensor | None) -> Tensor:
    """(..., j, R) -> (..., R): every row's own column. `positions` None: row and column indices agree."""
    if positions is None:
        return cells.diagonal(dim1=-2, dim2=-1)
    return cells.gather(-2, _at(cells, positions))[..., 0, :]


def set_own_cells(cells: Tensor, positions: Tensor | None, value: Tensor | float) -> None:
    """Overwrite every row's own column of (..., j, R) with `value` (..., R)."""
    if positions is None:
        cells.diagonal(dim1=-2, dim2=-1).copy_(torch.as_tensor(value, dtype=cells.dtype, device=cells.device))
    else:
        index = _at(cells, positions)
        source = torch.as_tensor(value, dtype=cells.dtype, device=cells.device)
        cells.scatter_(-2, index, source.expand(index[..., 0, :].shape)[..., None, :])


def _at(cells: Tensor, positions: Tensor) -> Tensor:
    """Positions (g, R) as an index (g, ..., 1, R) into cells (g, ..., j, R)."""
    shape = [len(positions), *[1] * (cells.dim() - 2), positions.shape[1]]
    return positions.view(shape).expand(*cells.shape[:-2], 1, -1)
