"""Recompute a layer from its record, each component from the input that it had in the model.

If a component differs from the model, the record does not describe it: the family is described incorrectly, a module is
wrapped, or a hook changes values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normscope.models.scopes import Step
from normscope.models.spec import Attention, FeedForward
from normscope.tracing.recorded import gated_hidden, mixed_values, replay_with_bias
from normscope.tracing.records import (
    AttentionRecord,
    FeedForwardRecord,
    LayerRecord,
    NormRecord,
    ScaleRecord,
    Unit,
)


def replay_layer(layer: LayerRecord) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """For every component, the expected and the actual input or output, (b, n, ...) each; n counts encoder tokens for
    the inputs of cross-attention."""
    assert layer.proof is not None
    read, plain = layer.proof.read, layer.proof.plain
    entry = state = layer.input
    done: list[Tensor] = []  # outputs of the finished branches of the block
    for step, part in zip(layer.steps, layer.parts, strict=True):
        op = step.part
        if step.starts:
            if state is not entry:
                done.append(state)
            state = entry
        if isinstance(part, ScaleRecord):
            state = state * part.gain
            continue
        if isinstance(part, AttentionRecord):
            assert isinstance(op, Attention)
            if op.value in layer.proof.values:
                source, values = layer.proof.encoder if op.cross else state, layer.proof.values[op.value]
                if source is not None:
                    yield step, source, read[op.value]
                yield (
                    step,
                    _replay_values_by_token(values),
                    _replay_values_by_token(part.values[:, :, : values.shape[2]]),
                )
            mixed = _replay_mixed_values(part)
            yield step, mixed if part.inner is None else _replay_norm(part.inner, mixed), read[op.output]
            if op.output not in plain:
                mixed = mixed if part.row_scale is None else mixed * part.row_scale[..., None]
                yield step, replay_with_bias(mixed @ part.matrix.flatten(0, 1), part.bias), part.output
        elif isinstance(part, FeedForwardRecord) and isinstance(op, FeedForward):
            (unit,) = part.units
            for path in (op.into,) if op.up is None else (op.into, op.up):
                yield step, state, read[path]
            if {op.into, op.up} - plain - {None}:
                yield from ((step, *projected) for projected in _replay_projections(state, unit))
            hidden = gated_hidden(unit)
            yield step, hidden if part.inner is None else _replay_norm(part.inner, hidden), read[op.out]
            if op.out not in plain:
                yield step, _replay_unit_output(unit), part.output
        elif isinstance(part, FeedForwardRecord):
            for unit in part.units:
                given = state * unit.routing[..., None] if unit.scaled_input and unit.routing is not None else state
                yield from ((step, *projected) for projected in _replay_projections(given, unit))
            first, *others = (_replay_unit_output(unit) for unit in part.units)
            yield step, sum(others, first), part.output
        elif isinstance(part, NormRecord):
            yield step, _replay_norm(part, state), part.output
        else:
            yield step, sum((*done, entry if part.skip is None else entry * part.skip), state), part.output
        state = part.output
        if step.role == "sum":
            done = []
        if step.role in ("sum", "after"):
            entry = state


def _replay_norm(part: NormRecord, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if part.kind == "layer" else x
    return replay_with_bias(centred * part.inverse[..., None] * part.gain, part.shift)


def _replay_mixed_values(part: AttentionRecord) -> Tensor:
    """(b, i, H d_h): the values mixed by the weights, times the gate."""
    shared, values = part.weights.shape[1] // part.values.shape[1], mixed_values(part)
    values = values if shared == 1 else values.repeat_interleave(shared, dim=1)
    mixed = torch.matmul(part.weights, values).transpose(1, 2)
    return (mixed if part.gate is None else mixed * part.gate).flatten(2)


def _replay_values_by_token(values: Tensor) -> Tensor:
    return values.transpose(1, 2).flatten(2)


def _replay_projections(x: Tensor, unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
    for one in (unit.into, unit.up):
        if one is not None:
            yield replay_with_bias(x @ one.weight, one.bias), one.hidden


def _replay_unit_output(unit: Unit) -> Tensor:
    hidden = gated_hidden(unit)
    hidden = hidden if unit.inverse is None else hidden * unit.inverse[..., None]
    output = replay_with_bias(hidden @ unit.out, unit.out_bias)
    return output if unit.routing is None or unit.scaled_input else output * unit.routing[..., None]
