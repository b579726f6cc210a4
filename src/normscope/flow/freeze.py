"""Freeze the layers of a model at one input: one traced forward pass, with every layer checked against it.

Each map of a layer is compared with what the model computed at that step. The completeness of a flow would not show a
mistake there: a large residual stream hides what a small part adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from normscope.decompose.activations import Gate, gated_constant, gated_unit, projections_of
from normscope.decompose.mixing import mix_values
from normscope.errors import NormscopeError
from normscope.flow.filters import freeze_filter
from normscope.flow.freeze_check import find_freeze_mismatch
from normscope.flow.maps import (
    FrozenAttention,
    FrozenBlock,
    FrozenFeedForward,
    FrozenLayer,
    FrozenMap,
    FrozenModel,
    FrozenNorm,
    FrozenScale,
    FrozenStack,
)
from normscope.flow.module_calls import LayerOutputs, ModuleCalls, encoder_tail_of_module_calls, log_module_calls
from normscope.inputs.encode import real_tokens
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules, linear_map, packing_at, value_map
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Attention, Stack
from normscope.step_progress import FOLLOWED
from normscope.tracing.build import RecordRequest
from normscope.tracing.call_values import value_shift_and_scale
from normscope.tracing.recorded import (
    FrozenWeights,
    closeness_rows,
    coarser,
    is_close,
    row_blocks,
    stored_weights,
    unit_rows,
)
from normscope.tracing.records import (
    AttentionRecord,
    FeedForwardRecord,
    LayerRecord,
    NormRecord,
    Record,
    ScaleRecord,
    Unit,
)
from normscope.tracing.trace import trace

FEED_FORWARD_ROWS = 512  # of a feed-forward whose constant is computed at a time


@dataclass(frozen=True)
class FrozenPass:
    """The frozen layers, and the pass that they were read from."""

    stacks: tuple[FrozenStack, ...]
    calls: ModuleCalls  # of modules after the layers; empty if neither a head nor a decoder needs them
    output: Any  # of the model


@dataclass
class _PartialStack:
    """One side of a model while it is being frozen."""

    stack: Stack
    real: Tensor  # (n,)
    states: list[Tensor] = field(default_factory=list)
    layers: list[FrozenLayer] = field(default_factory=list)
    tail: tuple[FrozenMap, ...] = ()
    end: Tensor | None = None  # (n, d): the model's own states after the tail
    added: dict[int, Tensor] = field(default_factory=dict)  # layer -> (n, d): see `FrozenStack`


def freeze_model(loaded: LoadedModel, item: Item, gate: Gate = "ig", recompute: bool = True) -> FrozenModel:
    """The model without its output head, frozen at this input."""
    return FrozenModel(freeze_layers(loaded, item, gate, recompute=recompute).stacks)


def freeze_layers(
    loaded: LoadedModel,
    item: Item,
    gate: Gate,
    head: bool = False,
    logit_rows: Tensor | None = None,
    recompute: bool = True,
) -> FrozenPass:
    """Trace one forward pass, with the model's head if asked for, and freeze and check its layers. `logit_rows`: the
    positions whose logits to compute; None: all. `recompute` attention weights when they are needed, where that is
    possible; otherwise they are kept, which maps need anyway."""
    sides = [_PartialStack(stack, item.sides[stack.side].real.to(loaded.base.device)) for stack in loaded.stacks]
    with ExitStack() as contexts:
        outputs = contexts.enter_context(log_outputs_to_freeze(loaded))
        calls: ModuleCalls = {}
        if head or loaded.two_sided:
            calls = contexts.enter_context(log_module_calls(loaded, outputs))
        requests = [_freeze_request(loaded, item, gate, sides, n, calls) for n in range(len(sides))]
        requests = [replace(one, recompute=recompute) for one in requests]
        kept = {} if logit_rows is None else {"logits_to_keep": logit_rows}
        output = trace(loaded, [item], requests, head=head, to_the_end=True, options=kept)
    for one in sides:
        if not is_close(one.states[-1][one.real], outputs.latest[one.stack.side][one.real], _coarsest_dtype(loaded)):
            _refuse_to_freeze_layer(
                loaded, one.stack, len(one.layers) - 1, "its output differs from that of its last part"
            )
    stacks = [FrozenStack(s.stack.side, tuple(s.states), tuple(s.layers), s.tail, s.real, s.added) for s in sides]
    return FrozenPass(tuple(stacks), calls, output)


def _coarsest_dtype(loaded: LoadedModel) -> torch.dtype:
    return coarser(loaded.dtype, loaded.base.dtype)


def _freeze_request(
    loaded: LoadedModel, item: Item, gate: Gate, sides: Sequence[_PartialStack], number: int, calls: ModuleCalls
) -> RecordRequest:
    """A request whose records freeze the layers of one side as they run."""
    side, encoder = sides[number], sides[0]
    stack, states = side.stack, side.states
    steps = layer_steps(stack.blocks)
    modules = loaded.calls.modules[stack.side]

    def freeze_layer(record: LayerRecord) -> None:
        if not states:
            states.append(record.input[0].clone())
            if number > 0:
                encoder.tail, encoder.end = encoder_tail_of_module_calls(calls[encoder.stack.side], encoder.states[-1])
        elif not is_close(states[-1][side.real], record.input[0][side.real], _coarsest_dtype(loaded)):
            added = record.input[0] - states[-1]
            if _is_of_pictures(added, item):
                side.added[record.index] = added
            else:
                _refuse_to_freeze_layer(
                    loaded, stack, record.index, f"its input is not the output of layer {record.index - 1}"
                )
        try:
            values = frozen_value_maps(loaded, modules[record.index], record)
        except NormscopeError as error:
            _refuse_to_freeze_layer(loaded, stack, record.index, str(error))
        parts = freeze_parts(record, values, gate)
        checked = _checkable_parts(record, parts, gate)
        seen = _real_rows(side.real), _real_rows(encoder.real)
        if mismatch := find_freeze_mismatch(record, checked, encoder.end, seen, _coarsest_dtype(loaded)):
            _refuse_to_freeze_layer(loaded, stack, record.index, mismatch)
        side.layers.append(build_frozen_layer(steps, parts))
        states.append(record.parts[-1].output[0].clone())  # type: ignore[union-attr]  # a layer ends with a sum or norm
        if followed := FOLLOWED.get():
            followed.report(f"layers of the {stack.side}", len(side.layers), len(modules))

    real = real_tokens([item], stack.side, loaded.base.device)
    return RecordRequest(stack, steps, range(len(modules)), freeze_layer, real, calls=modules)


def _is_of_pictures(added: Tensor, item: Item) -> bool:
    """Whether vectors (n, d) are added to tokens of pictures only, as features of several depths of a vision tower
    are."""
    seen = torch.zeros(len(added), dtype=torch.bool, device=added.device)
    seen[[n for one in item.pictures for n in one.positions]] = True
    return not bool(added[~seen].any())


def _real_rows(real: Tensor) -> slice | Tensor:
    """The tokens that are not masked; all of them as a slice, which copies nothing."""
    return slice(None) if bool(real.all()) else real


def _checkable_parts(
    record: LayerRecord, parts: tuple[FrozenMap | None, ...], gate: Gate
) -> tuple[FrozenMap | None, ...]:
    """The maps to compare with the model. Tangent gates do not add up to the output, so "ig" is checked instead."""
    if gate != "tangent":
        return parts
    pairs = zip(record.parts, parts, strict=True)
    return tuple(freeze_feed_forward(p, "ig") if isinstance(p, FeedForwardRecord) else one for p, one in pairs)


def _refuse_to_freeze_layer(loaded: LoadedModel, stack: Stack, index: int, reason: str) -> NoReturn:
    layer = loaded.calls.modules[stack.side][index]
    name = next((name for name, module in loaded.model.named_modules() if module is layer), "")
    label = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
    raise NormscopeError(
        f"Layer {index} (counted from 0) of the {stack.side}, {label}, does not compute what the family "
        f"{loaded.family.name} says: {reason.rstrip('.')}. Contributions would not add up to the model's own states."
    )


@contextmanager
def log_outputs_to_freeze(loaded: LoadedModel) -> Iterator[LayerOutputs]:
    """Keep the output of the latest layer of each side while the context is open, in this thread only."""
    outputs, handles = LayerOutputs(), []
    layers = {layer: n for n, stack in enumerate(loaded.stacks) for layer in layer_modules(loaded.base, stack)}

    def layer_hook(number: int) -> Any:
        side, depth = loaded.stacks[number].side, loaded.depths[number]

        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
            if get_ident() != outputs.thread or FOLLOWED.get() is not outputs.followed:
                return
            y = made[0] if isinstance(made, tuple | list) else made
            outputs.latest[side] = closeness_rows(y.detach().to(loaded.dtype)).clone()  # others may change it in place
            outputs.counts[side] = outputs.counts.get(side, 0) + 1
            if outputs.counts[side] == depth:
                outputs.finished = side

        return hook

    try:
        for layer, number in layers.items():
            handles.append(layer.register_forward_hook(layer_hook(number)))
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def freeze_parts(
    record: LayerRecord, values: Sequence[tuple[Tensor, Tensor | None]], gate: Gate
) -> tuple[FrozenMap | None, ...]:
    """The map of each part of a layer, for one item; for the sum of a residual connection what multiplies its input, or
    None.

    `values` are W_V (H, d, d_h) and b_V (H, d_h) of the layer's attentions, in order.
    """
    remaining = iter(values)
    return tuple(_freeze_part(part, remaining, gate) for part in record.parts)


def _freeze_part(part: Record, values: Iterator[tuple[Tensor, Tensor | None]], gate: Gate) -> FrozenMap | None:
    if isinstance(part, AttentionRecord):
        return freeze_attention(part, *next(values))
    if isinstance(part, NormRecord):
        return FrozenNorm(part.kind == "layer", part.inverse[0], part.gain, part.shift)
    if isinstance(part, FeedForwardRecord):
        return freeze_feed_forward(part, gate)
    if isinstance(part, ScaleRecord):
        return FrozenScale(part.gain)
    return None if part.skip is None else FrozenScale(part.skip)


def build_frozen_layer(steps: Sequence[Step], parts: Sequence[FrozenMap | None]) -> FrozenLayer:
    """Group the maps of a layer's steps into blocks and branches."""
    blocks: list[FrozenBlock] = []
    branches: list[tuple[FrozenMap, ...]] = []
    chain: list[FrozenMap] = []
    for step, part in zip(steps, parts, strict=True):
        if step.starts and chain:
            branches.append(tuple(chain))
            chain = []
        if step.role == "sum":
            skip = part.gain if isinstance(part, FrozenScale) else None
            blocks.append(FrozenBlock((*branches, tuple(chain)), None, skip=skip))
            branches, chain = [], []
            continue
        assert part is not None
        if step.role == "after":
            blocks[-1] = replace(blocks[-1], after=part)
        else:
            chain.append(part)
    return FrozenLayer(tuple(blocks))


def freeze_feed_forward(part: FeedForwardRecord, gate: Gate) -> FrozenFeedForward:
    """All units of a feed-forward; biases and g(0) form its constant."""
    blocks = row_blocks(part.output.shape[1], FEED_FORWARD_ROWS)
    constants = [_feed_forward_constant(part, gate, rows) for rows in blocks]
    known = [one for one in constants if one is not None]
    return FrozenFeedForward(part.units, gate, torch.cat(known) if known else None)


def _feed_forward_constant(part: FeedForwardRecord, gate: Gate, rows: slice) -> Tensor | None:
    """(rows, d), or None for a feed-forward without biases whose activation is zero at zero."""
    total = None
    for unit in part.units:
        biased = unit.out_bias is not None or any(projection.bias is not None for projection in projections_of(unit))
        if biased or bool(_output_at_zero(unit).any()):
            some = unit_rows(unit, rows)
            nothing = part.output.new_zeros(1, 1, part.output.shape[-1])
            constant = gated_constant(some, gated_unit(some, gate), nothing)[0]
            total = constant if total is None else total + constant
    return total


def _output_at_zero(unit: Unit) -> Tensor:
    """The hidden units of zero inputs."""
    nothing = torch.zeros_like(unit.into.hidden[:, :1, :1])
    if unit.up is None:
        return unit.activation(nothing)
    return nothing if unit.joint is None else unit.joint(nothing, nothing)


def freeze_attention(part: AttentionRecord, value: Tensor, bias: Tensor | None) -> FrozenAttention:
    """The attention as a linear map, given its W_V and b_V."""
    if part.rows is None:
        weights = stored_weights(part.weights[0].clone(memory_format=torch.contiguous_format))
        sums: Tensor | None = part.weights[0].sum(-1)
    else:
        weights = FrozenWeights(part.rows, part.values.dtype)
        sums = None if part.rows.sums is None else part.rows.sums[0].to(part.values.dtype)
    if part.row_scale is not None:
        weights = replace(weights, scale=part.row_scale[0])
        sums = part.row_scale[0].expand(len(value), -1) if sums is None else sums * part.row_scale[0]
    gate = None if part.gate is None else part.gate[0].transpose(0, 1)  # (H, i, d_h)
    constant = part.bias
    if bias is not None:  # attention rows sum to one, except with attention sinks
        through = torch.bmm(bias[:, None], part.matrix)[:, 0]
        if gate is not None:
            ones = bias.new_ones(gate.shape[:2]) if sums is None else sums
            spread = mix_values(ones.t(), bias, gate.transpose(0, 1)) @ part.matrix.flatten(0, 1)
        else:
            spread = through.sum(0) if sums is None else sums.t() @ through
        constant = spread if constant is None else spread + constant
    shared = part.values.shape[1]
    read_scale = None if part.latent is None else part.latent.inverse  # norms divide the values of token j
    if part.value_norm is not None:
        repeated = part.value_norm.inverse[0].repeat_interleave(len(value) // shared, 0)
        read_scale = repeated if read_scale is None else read_scale * repeated
    if part.filter is not None and part.filter.constant is not None:
        made = torch.zeros_like(part.output[0])
        for rows, some in weights.blocks():
            mixed = torch.bmm(some, part.filter.constant[0, :, : some.shape[2]])
            mixed = mixed if gate is None else mixed * gate[:, rows]
            made[rows] = mixed.transpose(0, 1).flatten(1) @ part.matrix.flatten(0, 1)
        constant = made if constant is None else made + constant
    filtered = None if part.filter is None else freeze_filter(part.filter)
    return FrozenAttention(weights, value, bias, part.matrix, constant, part.cross, shared, gate, read_scale, filtered)


def frozen_value_maps(loaded: LoadedModel, layer: nn.Module, record: LayerRecord) -> list[tuple[Tensor, Tensor | None]]:
    """W_V and b_V of the attentions in a layer."""
    found = []
    for step, part in zip(record.steps, record.parts, strict=True):
        if isinstance(step.part, Attention) and isinstance(part, AttentionRecord):
            heads, shared, width = part.weights.shape[1], part.values.shape[1], part.values.shape[3]
            packing = packing_at(layer, step.part, shared, width)
            weight, bias = value_map(layer.get_submodule(step.part.value), packing, heads, shared, width)
            if part.filter is not None:
                bias = None  # part of the filter's constant
            if part.latent is not None and step.part.latent is not None:
                weight, bias = latent_value_map(layer.get_submodule(step.part.latent), part.latent, weight, bias)
            weight, bias = _finish_value_map(layer, step.part, part, weight, bias)
            found.append((weight.to(loaded.dtype), None if bias is None else bias.to(loaded.dtype)))
    return found


def latent_value_map(
    module: nn.Module, norm: NormRecord, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V of values made in two steps, ``norm(x W_1) W_2 + b_2``. The statistic of the norm is left
    out: `freeze_attention` multiplies the values by it."""
    first, first_bias = linear_map(module)
    rank = len(norm.gain)
    if first_bias is not None and bool(first_bias[:rank].any()):
        raise NormscopeError("its values are made in two steps with a norm between, and a bias before that norm")
    down = first[:rank].detach().t().to(norm.gain.dtype)
    if norm.kind == "layer":
        down = down - down.mean(-1, keepdim=True)
    matrix = weight.to(norm.gain.dtype)
    if norm.shift is not None:
        through = torch.einsum("r,hrs->hs", norm.shift, matrix)
        bias = through if bias is None else through + bias
    return (down * norm.gain) @ matrix, bias


def _finish_value_map(
    layer: nn.Module, part: Attention, record: AttentionRecord, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V (H, d_h) with what happens to the outputs of `value` before they are mixed. The statistic
    of a norm is left out, as above."""
    repeated = len(weight) // record.values.shape[1]
    if part.value_shift is not None or part.value_scale is not None:
        added, factor = value_shift_and_scale(layer, part, record.values)
        if added is not None:
            shift = added[:, 0].repeat_interleave(repeated, 0)
            bias = shift if bias is None else bias + shift
        if isinstance(factor, Tensor) and len(factor) > 1:
            factor = factor.repeat_interleave(repeated, 0)
        weight = weight * factor
        bias = None if bias is None else (bias[:, None] * factor)[:, 0]
    norm = record.value_norm
    if norm is None:
        return weight, bias
    if bias is not None and bool(bias.any()):
        raise NormscopeError("its values have a bias before a norm")
    if norm.kind == "layer":
        weight = weight - weight.mean(-1, keepdim=True)
    return weight * norm.gain, None if norm.shift is None else norm.shift.expand(len(weight), -1)
