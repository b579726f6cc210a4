"""What one layer did in a forward pass, as plain tensors: written by `trace`, read by `decompose`.

b items, n tokens, H heads, d model width. i runs over output tokens, j over input tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class AttentionRecord:
    """``output_i = sum_j sum_h weights_hij values_hj matrix_h + bias``."""

    weights: Tensor  # (b, H, i, j) probabilities, stored as (b, j, H, i); the decomposition may overwrite them
    values: Tensor  # (b, H, j, d_h) as the model used them, value bias inside; or fewer heads, each shared by several
    value_bias: Tensor | None  # (heads of the values, d_h): what does not come from the tokens, b_V and W_V beta
    matrix: Tensor  # (H, d_h, d): W_O, the rows of each head
    bias: Tensor | None  # (d,): b_O
    output: Tensor  # (b, i, d) the model's own
    cross: bool = False  # j runs over the encoder's tokens
    sinks: bool = False  # a part of each row's weight goes to no token


@dataclass(frozen=True)
class ResidualRecord:
    """The sum of a residual connection."""

    output: Tensor  # (b, i, d) the model's own sum


@dataclass(frozen=True)
class ScaleRecord:
    """LayerScale or a multiplier: ``gain * x``."""

    gain: Tensor  # (d,)


@dataclass(frozen=True)
class NormRecord:
    """``output = gain * (x - mean x) / s + shift``; kind "rms" subtracts no mean."""

    kind: Literal["layer", "rms"]
    inverse: Tensor  # (b, i): 1 / s_i of the real forward pass
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
    """``g(into) out + out_bias``, or gated ``(g(into) * up) out + out_bias``, times `routing` where it is an expert."""

    into: Projection
    up: Projection | None
    activation: Callable[[Tensor], Tensor]
    activation_name: str | None  # None: no closed form is known, integrate numerically
    out: Tensor  # (d_ff, d)
    out_bias: Tensor | None
    routing: Tensor | None = None  # (b, i), zero where the expert was not chosen
    joint: Callable[[Tensor, Tensor], Tensor] | None = None  # instead of g(into) * up, any function of the two
    bend: float | None = None  # where it has kinks, in either


@dataclass(frozen=True)
class FeedForwardRecord:
    """The sum of one unit or, for a mixture of experts, several."""

    units: tuple[Unit, ...]
    output: Tensor  # (b, i, d)


Record = AttentionRecord | ResidualRecord | ScaleRecord | NormRecord | FeedForwardRecord


@dataclass(frozen=True)
class Links:
    """What ties the parts of a layer together: what its linear submodules read, by path, and which of those are plain,
    so that what they put out needs no proof; the values that a projection put out, by its path."""

    read: Mapping[str, Tensor]  # (b, n, ...)
    plain: frozenset[str]
    values: Mapping[str, Tensor]  # (b, heads of the values, n, d_h), where somebody may have changed them
    encoder: Tensor | None  # (b, n_encoder, d): what the layer was given to read


@dataclass(frozen=True)
class LayerRecord:
    """What one layer did: its input and its parts."""

    index: int
    input: Tensor  # (b, n, d)
    parts: tuple[Record, ...]  # one for each step of the layer, as far as it was asked for
    links: Links | None = None  # only for a proof


BATCHED = {"weights", "values", "output", "inverse", "hidden", "routing"}  # the fields that have an item dimension
BY_ROW = {"output", "inverse", "hidden", "routing"}  # and those whose next dimension is the output position


def select_items(layer: LayerRecord, items: slice) -> LayerRecord:
    """The same record of some of the items."""
    if len(layer.input[items]) == len(layer.input):
        return layer
    parts = tuple(_map_record(part, BATCHED, lambda x: x[items]) for part in layer.parts)
    return LayerRecord(layer.index, layer.input[items], parts)


def select_rows(layer: LayerRecord, positions: Tensor | None) -> LayerRecord:
    """The record with its outputs at `positions` (b, R) only; the input and the attention's columns stay whole."""
    if positions is None:
        return layer
    parts = []
    for part in layer.parts:
        chosen = _map_record(part, BY_ROW, lambda x: gather_rows(x, positions))
        if isinstance(part, AttentionRecord):
            chosen = replace(chosen, weights=gather_rows(part.weights.transpose(1, 2), positions).transpose(1, 2))
        parts.append(chosen)
    return LayerRecord(layer.index, layer.input, tuple(parts))


def gather_rows(x: Tensor, positions: Tensor | None) -> Tensor:
    """(b, n, ...) at the wanted positions."""
    if positions is None:
        return x
    index = positions.view(*positions.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _map_record(record: Any, names: set[str], change: Callable[[Tensor], Tensor]) -> Any:
    """The record, and the records inside it, with `change` applied to the fields of these names."""
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
