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
from normscope.errors import NormscopeError
from normscope.flow.maps import (
    UPCAST,
    FrozenAttention,
    FrozenBlock,
    FrozenFeedForward,
    FrozenLayer,
    FrozenMap,
    FrozenModel,
    FrozenNorm,
    FrozenScale,
    FrozenStack,
    norm_misfit,
)
from normscope.flow.module_calls import LayerOutputs, ModuleCalls, encoder_tail_of_module_calls, log_module_calls
from normscope.inputs.encode import real_tokens
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules, linear_map, value_map
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack
from normscope.tracing.build import RecordRequest
from normscope.tracing.closeness import (
    ELEMENT,
    PRODUCT,
    closeness_misfit,
    closeness_rows,
    coarser,
    is_close,
    is_close_to_product,
)
from normscope.tracing.records import AttentionRecord, FeedForwardRecord, LayerRecord, NormRecord, Record, ScaleRecord
from normscope.tracing.trace import trace

MIXED = {torch.float32: 1e-5, torch.float64: 1e-7}  # of ||x|| ||w|| if x is rounded too, or integrated numerically


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


def freeze_model(loaded: LoadedModel, item: Item, gate: Gate = "ig") -> FrozenModel:
    """The model without its output head, frozen at this input."""
    return FrozenModel(freeze_layers(loaded, item, gate).stacks)


def freeze_layers(loaded: LoadedModel, item: Item, gate: Gate, head: bool = False) -> FrozenPass:
    """Trace one forward pass, with the model's head if asked for, and freeze and check its layers."""
    sides = [_PartialStack(stack, item.sides[stack.side].real.to(loaded.base.device)) for stack in loaded.stacks]
    with ExitStack() as contexts:
        outputs = contexts.enter_context(log_outputs_to_freeze(loaded))
        calls: ModuleCalls = {}
        if head or loaded.two_sided:
            calls = contexts.enter_context(log_module_calls(loaded, outputs))
        requests = [_freeze_request(loaded, item, gate, sides, n, calls) for n in range(len(sides))]
        output = trace(loaded, [item], requests, head=head, to_the_end=True)
    for one in sides:
        if not is_close(one.states[-1][one.real], outputs.latest[one.stack.side][one.real], _coarsest_dtype(loaded)):
            _refuse_to_freeze_layer(
                loaded, one.stack, len(one.layers) - 1, "its output differs from that of its last part"
            )
    stacks = [FrozenStack(s.stack.side, tuple(s.states), tuple(s.layers), s.tail, s.real) for s in sides]
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
            _refuse_to_freeze_layer(
                loaded, stack, record.index, f"its input is not the output of layer {record.index - 1}"
            )
        try:
            values = _frozen_value_maps(loaded, modules[record.index], record)
        except NormscopeError as error:
            _refuse_to_freeze_layer(loaded, stack, record.index, str(error))
        parts = freeze_parts(record, values, gate)
        checked = _checkable_parts(record, parts, gate)
        mismatch = find_freeze_mismatch(record, checked, encoder.end, side.real, _coarsest_dtype(loaded))
        if mismatch:
            _refuse_to_freeze_layer(loaded, stack, record.index, mismatch)
        side.layers.append(build_frozen_layer(steps, parts))
        states.append(record.parts[-1].output[0].clone())  # type: ignore[union-attr]  # a layer ends with a sum or norm

    real = real_tokens([item], stack.side, loaded.base.device)
    return RecordRequest(stack, steps, range(len(modules)), freeze_layer, real, calls=modules)


def _frozen_value_maps(
    loaded: LoadedModel, layer: nn.Module, record: LayerRecord
) -> list[tuple[Tensor, Tensor | None]]:
    """W_V and b_V of the attentions in a layer."""
    found = []
    for step, part in zip(record.steps, record.parts, strict=True):
        if isinstance(step.part, Attention) and isinstance(part, AttentionRecord):
            heads, shared, width = part.weights.shape[1], part.values.shape[1], part.values.shape[3]
            weight, bias = value_map(layer.get_submodule(step.part.value), step.part.packing, heads, shared, width)
            if part.latent is not None and step.part.latent is not None:
                weight, bias = latent_value_map(layer.get_submodule(step.part.latent), part.latent, weight, bias)
            found.append((weight.to(loaded.dtype), None if bias is None else bias.to(loaded.dtype)))
    return found


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
    outputs = LayerOutputs()
    layers = {layer: n for n, stack in enumerate(loaded.stacks) for layer in layer_modules(loaded.base, stack)}
    handles = []

    def layer_hook(number: int) -> Any:
        side, depth = loaded.stacks[number].side, loaded.depths[number]

        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
            if get_ident() != outputs.thread:
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
    """The map of each part of a layer, for one item; None for the sum of a residual connection.

    `values` are W_V (H, d, d_h) and b_V (H, d_h) of the layer's attentions, in order.
    """
    remaining = iter(values)
    return tuple(_freeze_part(part, remaining, gate) for part in record.parts)


def _freeze_part(part: Record, values: Iterator[tuple[Tensor, Tensor | None]], gate: Gate) -> FrozenMap | None:
    if isinstance(part, AttentionRecord):
        return _freeze_attention(part, *next(values))
    if isinstance(part, NormRecord):
        return FrozenNorm(part.kind == "layer", part.inverse[0], part.gain, part.shift)
    if isinstance(part, FeedForwardRecord):
        return freeze_feed_forward(part, gate)
    return FrozenScale(part.gain) if isinstance(part, ScaleRecord) else None


def build_frozen_layer(steps: Sequence[Step], parts: Sequence[FrozenMap | None]) -> FrozenLayer:
    """Group the maps of a layer's steps into blocks and branches."""
    blocks: list[FrozenBlock] = []
    branches: list[tuple[FrozenMap, ...]] = []
    chain: list[FrozenMap] = []
    for step, part in zip(steps, parts, strict=True):
        if step.starts and chain:
            branches.append(tuple(chain))
            chain = []
        if part is None:
            blocks.append(FrozenBlock((*branches, tuple(chain)), None))
            branches, chain = [], []
        elif step.role == "after":
            blocks[-1] = replace(blocks[-1], after=part)
        else:
            chain.append(part)
    return FrozenLayer(tuple(blocks))


def latent_value_map(
    module: nn.Module, norm: NormRecord, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V of values made in two steps, ``norm(x W_1) W_2 + b_2``. The statistic of the norm is left
    out: `_freeze_attention` multiplies the attention weights by it."""
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


def _freeze_attention(part: AttentionRecord, value: Tensor, bias: Tensor | None) -> FrozenAttention:
    weights = part.weights[0].clone(memory_format=torch.contiguous_format)
    constant = part.bias
    if bias is not None:  # attention rows sum to one, except with attention sinks
        through = torch.bmm(bias[:, None], part.matrix)[:, 0]
        spread = weights.sum(-1).t() @ through
        constant = spread if constant is None else spread + constant
    if part.latent is not None:  # the values of token j are divided by the statistic of its latent vector
        weights = weights * part.latent.inverse[0]
    return FrozenAttention(weights, value, bias, part.matrix, constant, part.cross, part.values.shape[1])


def freeze_feed_forward(part: FeedForwardRecord, gate: Gate) -> FrozenFeedForward:
    """All units of a feed-forward; biases and g(0) form its constant."""
    units, biases, constant = [], [], torch.zeros_like(part.output)
    nothing = part.output.new_zeros(1, 1, part.output.shape[-1])
    for unit in part.units:
        made = gated_unit(unit, gate)
        units.append(made)
        biases.append(tuple(projection.bias for projection in projections_of(unit)))
        constant = constant + gated_constant(unit, made, nothing)
    return FrozenFeedForward(tuple(units), tuple(biases), constant[0])


def find_freeze_mismatch(
    record: LayerRecord,
    parts: Sequence[FrozenMap | None],
    encoder: Tensor | None,
    real: Tensor,
    dtype: torch.dtype,
) -> str:
    """How a layer, for one item, differs from its maps; "" if it does not.

    `encoder` (m, d) is the input of cross-attention, `real` (n,) is False for masked tokens.
    """
    entered = record.input[0]
    branches: list[Tensor] = []  # the current state of each
    for step, part, one in zip(record.steps, record.parts, parts, strict=True):
        if step.starts:
            branches.append(entered)
        if isinstance(one, FrozenScale):
            branches[-1] = branches[-1] * one.gain
            continue
        made: Tensor = part.output[0]  # type: ignore[union-attr]  # every part but a scale has one
        if one is None:
            if not _freeze_matches_residual_sum([entered, *branches], made, real, dtype):
                return "its residual connection does not add up its parts"
            entered, branches = made, []
            continue
        given = entered if step.role == "after" else branches[-1]
        if isinstance(one, FrozenAttention):
            assert isinstance(part, AttentionRecord)
            assert isinstance(step.part, Attention)
            mismatch = _freeze_attention_mismatch(one, part, step.part, encoder if one.cross else given, real, dtype)
        elif isinstance(one, FrozenNorm):
            assert isinstance(step.part, Norm)
            kept, tolerance = replace(one, inverse=one.inverse[real]), max(ELEMENT[dtype], UPCAST)
            off = norm_misfit(kept, step.part.offset, given[real], made[real], tolerance)
            mismatch = "" if off <= 1 else _describe_freeze_mismatch(step.part)
        else:
            assert isinstance(one, FrozenFeedForward)
            matches = _freeze_matches_feed_forward(one, given, made, real, dtype)
            mismatch = "" if matches else _describe_freeze_mismatch(step.part)
        if mismatch:
            return mismatch
        if step.role == "after":
            entered = made
        else:
            branches[-1] = made
    return ""


def _describe_freeze_mismatch(part: object) -> str:
    if isinstance(part, Norm):
        return f"{part.path} does not compute the expected norm"
    assert isinstance(part, FeedForward | Experts)
    where = part.module if isinstance(part, Experts) else f"{part.into} and {part.out}"
    return f"the feed-forward of {where} computes something else"


def _freeze_matches_residual_sum(summands: list[Tensor], made: Tensor, real: Tensor, dtype: torch.dtype) -> bool:
    total = sum(summands[1:], summands[0])[real]
    size = sum((one.abs() for one in summands[1:]), summands[0].abs())[real]
    return closeness_misfit(lambda rows: (total[rows], size[rows]), made[real], ELEMENT[dtype]) <= 1


def _freeze_attention_mismatch(
    one: FrozenAttention, part: AttentionRecord, spec: Attention, read: Tensor | None, real: Tensor, dtype: torch.dtype
) -> str:
    """Compare the values with ``x W_V + b_V`` of the states read, and the output with the attended values."""
    assert read is not None
    heads, width, small = one.value.shape
    flat = one.value.transpose(0, 1).reshape(width, heads * small)
    bias = None if one.bias is None else one.bias.flatten()
    used = part.values[0].repeat_interleave(heads // len(part.values[0]), 0)
    weights = part.weights[0]
    seen = weights[:, real].amax((0, 1)) > 0
    if part.latent is not None and len(read) == len(seen):
        read = read * part.latent.inverse[0][:, None]
    if len(read) != len(seen) or not is_close_to_product(
        read[seen], flat, bias, used.transpose(0, 1).flatten(1)[seen], PRODUCT[dtype]
    ):
        return (
            f"the values of {spec.module} are not the output of {spec.value} for the states before it: a hook changes "
            "them, or they are made in more than one step"
        )
    mixed = torch.bmm(weights[:, real], used).transpose(0, 1).flatten(1)
    matrix = part.matrix.reshape(heads * small, -1)
    fits = is_close_to_product(mixed, matrix, part.bias, part.output[0][real], MIXED[dtype])
    return "" if fits else f"{spec.output} does not output its linear map of the attended values"


def _freeze_matches_feed_forward(
    one: FrozenFeedForward, x: Tensor, made: Tensor, real: Tensor, dtype: torch.dtype
) -> bool:
    if any(len(weight) != x.shape[-1] for unit in one.units for weight in unit.weights):
        return False
    total = torch.zeros_like(made) if one.constant is None else one.constant.clone()
    size = total.abs()
    for unit, biases in zip(one.units, one.biases, strict=True):
        rows = slice(None) if unit.chosen is None else unit.chosen[0]
        hidden = largest = x.new_zeros(())
        for weight, c, bias in zip(unit.weights, unit.coefficients, biases, strict=True):
            gate, entered = c[0][rows], x[rows] @ weight
            hidden = hidden + gate * entered
            largest = largest + (gate * (entered if bias is None else entered + bias)).abs()
        total[rows] += hidden @ unit.out
        size[rows] += largest.norm(dim=-1, keepdim=True) * unit.out.norm(dim=0)
    total, size = total[real], size[real]
    return closeness_misfit(lambda rows: (total[rows], size[rows]), made[real], MIXED[dtype]) <= 1
