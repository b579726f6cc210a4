"""Quantities that the papers need besides maps: the model's own vectors, maps over a subset of dimensions, and
parameters. Pure functions of a loaded model and an item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.decompose.gram import RowStatistics
from normscope.decompose.layer import ItemSpan, measure_layer
from normscope.decompose.state import Scratch
from normscope.engine.request import Options, side_requests, steps_until
from normscope.errors import NormscopeError
from normscope.inputs.encode import real_tokens
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import has_recurrence, linear_map, value_map
from normscope.models.scopes import layer_steps, resolve_scopes, scope_aliases
from normscope.models.spec import Attention, Norm, Stack
from normscope.tracing.build import RecordRequest
from normscope.tracing.records import FeedForwardRecord, LayerRecord, NormRecord, ScaleRecord
from normscope.tracing.trace import trace


def probe_scope_outputs(loaded: LoadedModel, item: Item, scopes: Sequence[str]) -> dict[str, Tensor]:
    """scope -> (layers, n, d): the model's own vectors at each scope, keyed by the given names or aliases.

    In a post-LN layer, "attention-block" is the feed-forward's input and "ff" its output, including biases.
    """
    stack = loaded.stacks[0]
    names = {scope: resolve_scopes([scope], stack.blocks)[0][0] for scope in scopes}
    steps = steps_until(layer_steps(stack.blocks), names.values())
    found: dict[str, list[Tensor]] = {scope: [] for scope in scopes}

    def on_layer(record: LayerRecord) -> None:
        for step, part in zip(steps, record.parts, strict=True):
            for scope, name in names.items():
                if name in (step.norms, step.weights) and not isinstance(part, ScaleRecord):
                    found[scope].append(part.output[0][item.sides[stack.side].real].clone())

    _trace_probed_stack(loaded, item, stack, steps, on_layer)
    return {scope: torch.stack(layers) for scope, layers in found.items()}


def probe_attention_inputs(loaded: LoadedModel, item: Item) -> Tensor:
    """(layers, n, d): the vectors that the self-attention reads: the layer's input, in pre-LN layers after the norm."""
    stack = loaded.stacks[0]
    steps = steps_until(layer_steps(stack.blocks), [scope_aliases(stack.blocks)["attention"]])
    found: list[Tensor] = []

    def on_layer(record: LayerRecord) -> None:
        first = record.parts[0]
        vectors = first.output if isinstance(first, NormRecord) else record.input
        found.append(vectors[0][item.sides[stack.side].real].clone())

    _trace_probed_stack(loaded, item, stack, steps, on_layer)
    return torch.stack(found)


def probe_map_within(loaded: LoadedModel, item: Item, dims: Mapping[int, Tensor]) -> Tensor:
    """(layers, n, n): the map at "ff" with ``||y_ij||`` restricted to the dimensions `dims` of each layer.

    Only the columns of W_2 for these dimensions are used, so every number is exact (FF paper, section 6.2).
    """
    stack = loaded.stacks[0]
    scope = scope_aliases(stack.blocks)["ff"]
    (request,) = side_requests(loaded, [stack], Options(scopes=[scope]))
    real = item.sides[stack.side].real.nonzero().flatten()
    whole = len(real) == len(item.sides[stack.side].names)
    place = ItemSpan(slice(None), slice(None)) if whole else ItemSpan(real, real)
    scratch = Scratch()  # shared by all layers: fresh memory would cost as much as the work
    found: list[Tensor] = []

    def on_layer(record: LayerRecord) -> None:
        kept = dims[record.index].to(loaded.base.device)
        parts = tuple(
            _restrict_probed_hidden(part, kept) if isinstance(part, FeedForwardRecord) else part
            for part in record.parts
        )
        ((reduced,), _) = measure_layer(
            replace(record, parts=parts), request.steps, [scope], [place], None, request.options, scratch
        )
        ((piece,),) = reduced.maps
        full = piece.cells[0].t().clone()  # (i, j)
        full.diagonal().copy_(RowStatistics(*reduced.statistics).own[0, 0])
        found.append(full[real][:, real].cpu())

    _trace_probed_stack(loaded, item, stack, request.steps, on_layer)
    return torch.stack(found)


def _restrict_probed_hidden(record: FeedForwardRecord, dims: Tensor) -> FeedForwardRecord:
    units = tuple(
        replace(unit, out=unit.out[:, dims], out_bias=None if unit.out_bias is None else unit.out_bias[dims])
        for unit in record.units
    )
    return FeedForwardRecord(units, record.output[..., dims])


def probe_norm_gains(loaded: LoadedModel, scope: str) -> Tensor:
    """(layers, d): gamma of the norm whose output is a scope (name or alias). In a post-LN layer, "layer" is LN2."""
    stack = loaded.stacks[0]
    name = resolve_scopes([scope], stack.blocks)[0][0]
    part = next(step.part for step in layer_steps(stack.blocks) if step.norms == name)
    if not isinstance(part, Norm):
        raise NormscopeError(f"{name} is not the output of a norm in {loaded.family.name}, so it has no gain.")
    found = []
    for layer in loaded.calls.modules[loaded.stacks[0].side]:
        module: Any = layer.get_submodule(part.path)
        found.append(module.weight.detach().to(loaded.dtype).cpu() + part.offset)
    return torch.stack(found)


def probe_attention_maps(loaded: LoadedModel, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_V (d, H d_h), b_V, W_O (H d_h, d), b_O of the self-attention of a layer, for row vectors ``x W_V + b_V``.

    Values shared by several heads are repeated for each head; a missing bias is zero. In float64.
    """
    stack = loaded.stacks[0]
    if has_recurrence(stack):
        raise NormscopeError(
            "The values of some layers of this model pass a convolution over tokens, so W_V is not a matrix."
        )
    part = next(
        step.part for step in layer_steps(stack.blocks) if isinstance(step.part, Attention) and not step.part.cross
    )
    module = loaded.calls.modules[loaded.stacks[0].side][layer]
    out, out_bias = linear_map(module.get_submodule(part.output))
    heads = loaded.head_counts[0]
    shared = (
        heads if part.packing == "interleaved" else getattr(loaded.base.config, "num_key_value_heads", None) or heads
    )
    value, bias = value_map(module.get_submodule(part.value), part.packing, heads, shared, out.shape[1] // heads)
    zeros = torch.zeros(out.shape[0], dtype=torch.float64)
    flat = value.transpose(0, 1).flatten(1).double().cpu()
    return (
        flat,
        torch.zeros(flat.shape[1], dtype=torch.float64) if bias is None else bias.flatten().double().cpu(),
        out.detach().double().t().cpu(),
        zeros if out_bias is None else out_bias.detach().double().cpu(),
    )


def _trace_probed_stack(
    loaded: LoadedModel, item: Item, stack: Stack, steps: Sequence[Any], on_layer: Callable[[LayerRecord], None]
) -> None:
    depth = loaded.depths[loaded.stacks.index(stack)]
    real = real_tokens([item], stack.side, loaded.base.device)
    trace(
        loaded,
        [item],
        [RecordRequest(stack, steps, range(depth), on_layer, real, calls=loaded.calls.modules[stack.side])],
    )
