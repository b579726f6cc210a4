"""Mixing of values by weights, one weight for each head and token.

A recurrence mixes values that a causal convolution has already mixed. With taps w_t and slopes s,

    ``sum_k A^h_ik s^h_k * (sum_t w^h_t * u^h_(k-t)) = sum_j sum_t A^h_i(j+t) (s^h_(j+t) * w^h_t * u^h_j)``,

which has the form of attention with a head for each pair (t, h). The pairs of one h share gate and output matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normscope.tracing.recorded import correlate, mixed_values
from normscope.tracing.records import AttentionRecord, FilterRecord


def mix_values(weights: Tensor, values: Tensor, gate: Tensor | None) -> Tensor:
    """(..., H d_h): values (..., K H, d_h) times weights (..., K H) and the gate (..., H, d_h), heads side by side, and
    summed over taps; without a gate there is one tap."""
    heads = weights.shape[-1] if gate is None else gate.shape[-2]
    mixed = weights[..., :heads, None] * values[..., :heads, :]
    for start in range(heads, weights.shape[-1], heads):
        some = slice(start, start + heads)
        mixed = mixed.add_(weights[..., some, None] * values[..., some, :])
    return (mixed if gate is None else mixed * gate).flatten(-2)


def sum_taps(mixed: Tensor, heads: int) -> Tensor:
    """(..., H, d_h): the sum over taps of (..., K H, d_h)."""
    return mixed if mixed.shape[-2] == heads else mixed.unflatten(-2, (-1, heads)).sum(-3)


def spread_taps(record: AttentionRecord, made: FilterRecord) -> AttentionRecord:
    """The same without a filter: a head for each tap and head, and the constant of the filter in the bias (b, R, d)."""
    taps, heads, width = made.taps.shape
    items, _, rows, _ = record.weights.shape
    gate = record.gate
    if gate is None:
        gate = record.values.new_ones(1, 1, heads, width).expand(items, rows, -1, -1)
    shares = made.shares
    if shares is None:
        shares = made.taps.new_zeros(taps * heads)
        shares[:heads] = 1 / heads
    return replace(
        record,
        shares=shares,
        weights=spread_weights(record.weights.permute(0, 3, 1, 2), taps).permute(0, 2, 3, 1),
        values=torch.cat([tap_values(made, t, record.values) for t in range(taps)], dim=1),
        bias=_bias_by_row(record, made, gate),
        gate=gate,
        filter=None,
    )


def without_filter(record: AttentionRecord) -> AttentionRecord:
    """The same as a record of the values that are mixed, for scopes of weights, which need no taps."""
    if record.filter is None or record.filter.shares is not None:
        return record
    return replace(record, values=mixed_values(record), filter=None)


def spread_weights(stored: Tensor, taps: int) -> Tensor:
    """(b, j, K H, R): the weights ``A_i(j+t)`` of each tap, from those (b, j, H, R) without taps."""
    items, columns, heads, rows = stored.shape
    weights = stored.new_zeros(items, columns, taps * heads, rows)
    for t in range(min(taps, columns)):
        weights[:, : columns - t, t * heads : (t + 1) * heads] = stored[:, t:]
    return weights


def tap_values(made: FilterRecord, t: int, values: Tensor) -> Tensor:
    """(b, H, j, d_h): ``s_(j+t) * w_t * u_j``, with the gate on u if there is one."""
    shift = torch.zeros_like(made.taps)
    shift[t] = 1
    found = correlate(shift, made.slope) * made.taps[t][:, None] * values
    return found if made.entry is None else found * made.entry


def _bias_by_row(record: AttentionRecord, made: FilterRecord, gate: Tensor) -> Tensor | None:
    """The bias, with ``sum_k A_ik constant_k`` after gate and output matrix."""
    if made.constant is None:
        return record.bias
    mixed = torch.matmul(record.weights, made.constant).transpose(1, 2) * gate
    through = mixed.flatten(2) @ record.matrix.flatten(0, 1)
    return through if record.bias is None else through + record.bias
