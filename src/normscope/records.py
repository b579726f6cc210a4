"""What one layer did in a forward pass, as plain tensors: written by `trace`, read by `decompose`.

b items, n tokens, H heads, d model width. i runs over output tokens, j over input tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class AttentionRecord:
    """``output_i = sum_j sum_h weights_hij values_hj matrix_h + bias``."""

    weights: (
        Tensor  # (b, H, i, j) attention probabilities, stored as (b, j, H, i); the decomposition may overwrite them
    )
    values: Tensor  # (b, H, j, d_h) as the model used them, value bias inside
    value_bias: Tensor | None  # (H, d_h)
    matrix: Tensor  # (H, d_h, d): W_O, the rows of each head
    bias: Tensor | None  # (d,): b_O
    output: Tensor  # (b, i, d) the model's own


@dataclass(frozen=True)
class ResidualRecord:
    output: Tensor  # (b, i, d) the model's own sum


@dataclass(frozen=True)
class NormRecord:
    """``output = gain * (x - mean x) / s + shift``; kind "rms" subtracts no mean."""

    kind: Literal["layer", "rms"]
    inverse: Tensor  # (b, i): 1 / s_i of the real forward pass
    gain: Tensor  # (d,)
    shift: Tensor | None  # (d,)
    output: Tensor  # (b, i, d)


@dataclass(frozen=True)
class FeedForwardRecord:
    """``output = g(hidden) W_2 + b_2`` with ``hidden = x W_1 + b_1``."""

    into: Tensor  # (d, d_ff): W_1
    into_bias: Tensor | None
    hidden: Tensor  # (b, i, d_ff) pre-activations
    activation: Callable[[Tensor], Tensor]
    activation_name: str | None  # None: no closed form is known, integrate numerically
    out: Tensor  # (d_ff, d): W_2
    out_bias: Tensor | None
    output: Tensor  # (b, i, d)


Record = AttentionRecord | ResidualRecord | NormRecord | FeedForwardRecord


@dataclass(frozen=True)
class LayerRecord:
    index: int
    input: Tensor  # (b, n, d)
    parts: tuple[Record, ...]  # one for each step of the layer, as far as it was asked for


BATCHED = {"weights", "values", "output", "inverse", "hidden"}  # the fields that have an item dimension


def select_items(layer: LayerRecord, items: slice) -> LayerRecord:
    """The same record of some of the items."""
    if len(layer.input[items]) == len(layer.input):
        return layer
    parts = (
        replace(part, **{f.name: getattr(part, f.name)[items] for f in fields(part) if f.name in BATCHED})
        for part in layer.parts
    )
    return LayerRecord(layer.index, layer.input[items], tuple(parts))


def select_rows(layer: LayerRecord, positions: Tensor | None) -> LayerRecord:
    """The record with its outputs at `positions` (b, R) only; the input and the attention's columns stay whole."""
    if positions is None:
        return layer
    return LayerRecord(layer.index, layer.input, tuple(_part_at_rows(part, positions) for part in layer.parts))


def at_rows(x: Tensor, positions: Tensor | None) -> Tensor:
    """(b, n, ...) at the wanted positions."""
    if positions is None:
        return x
    index = positions.view(*positions.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _part_at_rows(part: Record, positions: Tensor) -> Record:
    changed = {"output": at_rows(part.output, positions)}
    if isinstance(part, AttentionRecord):
        changed["weights"] = at_rows(part.weights.transpose(1, 2), positions).transpose(1, 2)
    elif isinstance(part, FeedForwardRecord):
        changed["hidden"] = at_rows(part.hidden, positions)
    elif isinstance(part, NormRecord):
        changed["inverse"] = at_rows(part.inverse, positions)
    return replace(part, **changed)  # type: ignore[arg-type]
