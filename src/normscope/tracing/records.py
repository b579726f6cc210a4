"""Records of the computation of one layer, as plain tensors: built by `tracing`, read by `decompose`.

b items, n tokens, H heads, d model width; i indexes output tokens, j input tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor

from normscope.models.scopes import Step


@dataclass(frozen=True)
class AttentionRecord:
    """``output_i = sum_j sum_h weights_hij values_hj matrix_h + bias``."""

    weights: Tensor  # (b, H, i, j) probabilities, stored as (b, j, H, i); the decomposition may overwrite them
    values: Tensor  # (b, H, j, d_h), including the value bias; fewer heads if several share one
    value_bias: Tensor | None  # (heads of the values, d_h): the part that depends on no token, b_V and W_V beta
    matrix: Tensor  # (H, d_h, d): W_O, the rows of each head
    bias: Tensor | None  # (d,): b_O
    output: Tensor  # (b, i, d) as computed by the model
    cross: bool = False  # j indexes encoder tokens
    sinks: bool = False  # part of each row's weight goes to no token
    latent: NormRecord | None = None  # between the two projections that make the values


@dataclass(frozen=True)
class ResidualRecord:
    """The sum of a residual connection."""

    output: Tensor  # (b, i, d) as computed by the model


@dataclass(frozen=True)
class ScaleRecord:
    """LayerScale or a multiplier: ``gain * x``."""

    gain: Tensor  # (d,)


@dataclass(frozen=True)
class NormRecord:
    """``output = gain * (x - mean x) / s + shift``; kind "rms" does not subtract the mean."""

    kind: Literal["layer", "rms"]
    inverse: Tensor  # (b, i): 1 / s_i in the forward pass
    gain: Tensor  # (d,)
    shift: Tensor | None  # (d,)
    output: Tensor  # (b, i, d)


@dataclass(frozen=True)
class Projection:
    """``hidden = x weight + bias``."""

    weight: Tensor  # (d, d_ff)
    bias: Tensor | None
    hidden: Tensor  # (b, i, d_ff)


@dataclass(frozen=True)
class Unit:
    """``g(into) out + out_bias``, or gated ``(g(into) * up) out + out_bias``, times `routing` if it is an expert."""

    into: Projection
    up: Projection | None
    activation: Callable[[Tensor], Tensor]
    activation_name: str | None  # None: no known closed form, integrate numerically
    out: Tensor  # (d_ff, d)
    out_bias: Tensor | None
    routing: Tensor | None = None  # (b, i), zero if the expert was not chosen
    joint: Callable[[Tensor, Tensor], Tensor] | None = None  # replaces g(into) * up
    bend: float | None = None  # position of the kinks of `joint`, in either argument


@dataclass(frozen=True)
class FeedForwardRecord:
    """The sum over units: one, or several in a mixture of experts."""

    units: tuple[Unit, ...]
    output: Tensor  # (b, i, d)


Record = AttentionRecord | ResidualRecord | ScaleRecord | NormRecord | FeedForwardRecord


@dataclass(frozen=True)
class ProofRecord:
    """Inputs and outputs of submodules, by path, which a proof needs to connect the parts of a layer."""

    read: Mapping[str, Tensor]  # (b, n, ...): inputs of linear submodules
    plain: frozenset[str]  # unmodified linear submodules, whose outputs need no proof
    values: Mapping[str, Tensor]  # (b, heads of the values, n, d_h): outputs of modified value projections
    encoder: Tensor | None  # (b, n_encoder, d): encoder states passed to the layer


@dataclass(frozen=True)
class LayerRecord:
    """The input of one layer and the records of its components."""

    index: int
    input: Tensor  # (b, n, d)
    parts: tuple[Record, ...]  # one for each requested step of the layer
    steps: tuple[Step, ...]  # these steps, as the layer itself has them
    proof: ProofRecord | None = None  # only while a model is proved


BATCHED = {"weights", "values", "output", "inverse", "hidden", "routing"}  # fields with an item dimension
BY_ROW = {"output", "inverse", "hidden", "routing"}  # fields whose second dimension is the output position


def select_items(layer: LayerRecord, items: slice) -> LayerRecord:
    """The record of some of the items."""
    if len(layer.input[items]) == len(layer.input):
        return layer
    parts = tuple(_map_record(part, BATCHED, lambda x: x[items]) for part in layer.parts)
    return LayerRecord(layer.index, layer.input[items], parts, layer.steps)


def select_rows(layer: LayerRecord, positions: Tensor | None) -> LayerRecord:
    """The record with outputs only at `positions` (b, R); the input and the attention's columns stay complete."""
    if positions is None:
        return layer
    parts = []
    for part in layer.parts:
        chosen = _map_record(part, BY_ROW, lambda x: gather_rows(x, positions))
        if isinstance(part, AttentionRecord):
            chosen = replace(chosen, weights=gather_rows(part.weights.transpose(1, 2), positions).transpose(1, 2))
        parts.append(chosen)
    return LayerRecord(layer.index, layer.input, tuple(parts), layer.steps)


def gather_rows(x: Tensor, positions: Tensor | None) -> Tensor:
    """(b, R, ...): x (b, n, ...) at `positions` (b, R)."""
    if positions is None:
        return x
    index = positions.view(*positions.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _map_record(record: Any, names: set[str], change: Callable[[Tensor], Tensor]) -> Any:
    """The record with `change` applied to the fields in `names`, also in nested records."""
    changed: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor) and field.name in names:
            changed[field.name] = change(value)
        elif isinstance(value, Projection):
            changed[field.name] = _map_record(value, names, change)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(_map_record(one, names, change) for one in value)
    return replace(record, **changed)
