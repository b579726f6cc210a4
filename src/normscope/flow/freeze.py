"""Run a model once and freeze it: its layers, the norm behind them, and its head down to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn

from normscope.decompose.activations import Gate
from normscope.errors import NormscopeError
from normscope.flow.forms import known_of
from normscope.flow.frozen import (
    FrozenBlock,
    FrozenLayer,
    FrozenNorm,
    Map,
    frozen_feed_forward,
    frozen_layer,
    frozen_parts,
)
from normscope.flow.heads import head_of, tail_of
from normscope.flow.passes import another_pass, logits_of, pass_of
from normscope.flow.verify import mistake
from normscope.flow.watch import Watch, named, watching
from normscope.inputs.encode import real_tokens
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import value_map
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Attention, Stack
from normscope.tracing.build import RecordRequest
from normscope.tracing.closeness import coarser, equal
from normscope.tracing.records import AttentionRecord, FeedForwardRecord, LayerRecord
from normscope.tracing.trace import trace


@dataclass(frozen=True)
class FrozenStack:
    """One side of a model."""

    side: str
    states: tuple[Tensor, ...]  # (n, d): what entered the first layer, and what each layer put out
    layers: tuple[FrozenLayer, ...]
    tail: tuple[Map, ...]  # from the last layer to what the decoder or the head reads
    real: Tensor  # (n,)

    @property
    def end(self) -> FrozenBlock:
        """The tail as a block without a residual connection."""
        return FrozenBlock((self.tail,), None, residual=False)


@dataclass(frozen=True)
class FrozenModel:
    stacks: tuple[FrozenStack, ...]
    head: tuple[Map, ...]  # from what the last stack puts out to the logits
    logits: Tensor | None  # (n or 1, classes or vocabulary), the model's own; None: no head
    notes: tuple[str, ...] = ()  # what to know about the head
    outputs: tuple[str, ...] = ()  # the names of what the model returns


@dataclass
class _Side:
    """One side of a model while it is being frozen."""

    stack: Stack
    real: Tensor  # (n,)
    states: list[Tensor] = field(default_factory=list)
    layers: list[FrozenLayer] = field(default_factory=list)
    tail: tuple[Map, ...] = ()
    end: Tensor | None = None  # (n, d): what the model made behind the tail

    def frozen(self) -> FrozenStack:
        return FrozenStack(self.stack.side, tuple(self.states), tuple(self.layers), self.tail, self.real)


def freeze(loaded: LoadedModel, item: Item, gate: Gate = "ig", head: bool = True) -> FrozenModel:
    """One traced forward pass of the model, with its head if it has one and that is wanted. Every layer, and every step
    of the head, is compared with what the model computed there."""
    sides = [_Side(stack, item.sides[stack.side].real.to(loaded.base.device)) for stack in loaded.stacks]
    with watching(loaded) as watch:
        requests = [_request(loaded, item, gate, sides, n, watch) for n in range(len(sides))]
        made = trace(loaded, [item], requests, head=head, to_the_end=True)
    for side in sides:
        if not equal(side.states[-1][side.real], watch.outputs[side.stack.side][side.real], _rounding(loaded)):
            _refuse(loaded, side.stack, len(side.layers) - 1, "what it outputs is not what its last part made")
    last = sides[-1]
    outputs = tuple(made) if isinstance(made, dict) else ()
    logits = logits_of(made) if head else None  # a model may have been run with its head all the same
    if logits is None:
        return FrozenModel(tuple(side.frozen() for side in sides), (), None, outputs=outputs)
    run = pass_of(loaded, watch, logits, last.states[-1])
    known = known_of(loaded.model, last.real, loaded.dtype)
    with torch.no_grad():
        found = head_of(run, known, loaded.model, lambda: another_pass(loaded, item))
    count = next((n for n, one in enumerate(found.maps) if not isinstance(one, FrozenNorm)), len(found.maps))
    last.tail = found.maps[:count]
    return FrozenModel(tuple(side.frozen() for side in sides), found.maps[count:], run.logits, found.notes, outputs)


def _rounding(loaded: LoadedModel) -> torch.dtype:
    return coarser(loaded.dtype, loaded.base.dtype)


def _request(
    loaded: LoadedModel, item: Item, gate: Gate, sides: Sequence[_Side], number: int, watch: Watch
) -> RecordRequest:
    side = sides[number]
    stack, states = side.stack, side.states
    steps = layer_steps(stack.blocks)
    modules = loaded.calls.modules[stack.side]

    def on_layer(record: LayerRecord) -> None:
        if not states:
            states.append(record.input[0].clone())
            if number > 0:
                sides[0].tail, sides[0].end = tail_of(watch.calls[sides[0].stack.side], sides[0].states[-1])
        elif not equal(states[-1][side.real], record.input[0][side.real], _rounding(loaded)):
            _refuse(loaded, stack, record.index, f"what enters it is not what layer {record.index - 1} output")
        try:
            values = _values(loaded, modules[record.index], steps, record)
        except NormscopeError as error:
            _refuse(loaded, stack, record.index, str(error))
        parts = frozen_parts(record, values, gate)
        wrong = mistake(record, steps, _complete(record, parts, gate), sides[0].end, side.real, _rounding(loaded))
        if wrong:
            _refuse(loaded, stack, record.index, wrong)
        side.layers.append(frozen_layer(steps, parts))
        states.append(record.parts[-1].output[0].clone())  # type: ignore[union-attr]  # a layer ends with a sum or norm

    real = real_tokens([item], stack.side, loaded.base.device)
    return RecordRequest(stack, steps, range(len(modules)), on_layer, real, calls=modules)


def _values(
    loaded: LoadedModel, layer: nn.Module, steps: Sequence[Step], record: LayerRecord
) -> list[tuple[Tensor, Tensor | None]]:
    """W_V and b_V of the attentions in a layer."""
    found = []
    for step, part in zip(steps, record.parts, strict=True):
        if isinstance(step.part, Attention) and isinstance(part, AttentionRecord):
            heads, shared, width = part.weights.shape[1], part.values.shape[1], part.values.shape[3]
            weight, bias = value_map(layer.get_submodule(step.part.value), step.part.packing, heads, shared, width)
            found.append((weight.to(loaded.dtype), None if bias is None else bias.to(loaded.dtype)))
    return found


def _complete(record: LayerRecord, parts: tuple[Map | None, ...], gate: Gate) -> tuple[Map | None, ...]:
    """The maps as they can be verified: the slopes of a feed-forward do not add up to what it computes."""
    if gate != "tangent":
        return parts
    pairs = zip(record.parts, parts, strict=True)
    return tuple(frozen_feed_forward(p, "ig") if isinstance(p, FeedForwardRecord) else one for p, one in pairs)


def _refuse(loaded: LoadedModel, stack: Stack, index: int, why: str) -> NoReturn:
    module = loaded.calls.modules[stack.side][index]
    raise NormscopeError(
        f"Layer {index} (counted from 0) of the {stack.side}, {named(loaded.model, module)}, does not compute what the "
        f"family {loaded.family.name} says: {why.rstrip('.')}. Contributions would miss the model's own states."
    )
