"""What one input does inside a model, beyond its maps: the model's own vectors, maps over some dimensions only, and the
parameters that the papers look at. Pure functions of an Analyzer and an item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope import inputs
from normscope.analyzer import Analyzer
from normscope.decompose import walk
from normscope.decompose.factored import Figures
from normscope.decompose.scratch import Scratch
from normscope.errors import NormscopeError
from normscope.inputs import Item
from normscope.models.spec import Attention, Norm, Stack
from normscope.parameters import affine as linear_map
from normscope.parameters import value_map
from normscope.records import FeedForwardRecord, LayerRecord, ScaleRecord
from normscope.request import reach, requests_of
from normscope.scopes import aliases_of, resolve, steps_of
from normscope.trace import Wish


def outputs(lens: Analyzer, item: Item, scopes: Sequence[str]) -> dict[str, Tensor]:
    """scope -> (layers, n, d): the model's own vectors at each scope, by the names or aliases they were asked for.

    At "attention-block" of a post-LN layer that is the feed-forward's input, at "ff" its output, biases included.
    """
    stack = lens.stacks[0]
    names = {scope: resolve([scope], stack.blocks)[0][0] for scope in scopes}
    steps = reach(steps_of(stack.blocks), names.values())
    found: dict[str, list[Tensor]] = {scope: [] for scope in scopes}

    def on_layer(record: LayerRecord) -> None:
        for step, part in zip(steps, record.parts, strict=True):
            for scope, name in names.items():
                if name in (step.norms, step.weights) and not isinstance(part, ScaleRecord):
                    found[scope].append(part.output[0][item.sides[stack.side].real].clone())

    _trace(lens, item, stack, steps, on_layer)
    return {scope: torch.stack(layers) for scope, layers in found.items()}


def map_within(lens: Analyzer, item: Item, dims: Mapping[int, Tensor]) -> Tensor:
    """(layers, n, n): the map at "ff" with ``||y_ij||`` over these dimensions of the model only, for each layer.

    W_2 keeps only its columns of those dimensions, so that every number is exact (FF paper, section 6.2).
    """
    stack = lens.stacks[0]
    scope = aliases_of(stack.blocks)["ff"]
    (request,) = requests_of(
        [stack],
        lens.depths[:1],
        lens.head_counts[:1],
        scopes=[scope],
        layers=None,
        heads=False,
        rows=None,
        gate="ig",
        value_bias="token",
    )
    real = item.sides[stack.side].real.nonzero().flatten()
    whole = len(real) == len(item.sides[stack.side])
    place = walk.Item(slice(None), slice(None)) if whole else walk.Item(real, real)
    scratch = Scratch()  # one for all layers: fresh memory costs as much as the work
    found: list[Tensor] = []

    def on_layer(record: LayerRecord) -> None:
        kept = dims[record.index].to(lens.base.device)
        parts = tuple(_within(part, kept) if isinstance(part, FeedForwardRecord) else part for part in record.parts)
        ((reduced,), _) = walk.measure(
            replace(record, parts=parts), request.steps, [scope], [place], None, request.options, scratch
        )
        ((piece,),) = reduced.maps
        full = piece.cells[0].t().clone()  # (i, j)
        full.diagonal().copy_(Figures(*reduced.figures).own[0, 0])
        found.append(full[real][:, real].cpu())

    _trace(lens, item, stack, request.steps, on_layer)
    return torch.stack(found)


def _within(record: FeedForwardRecord, dims: Tensor) -> FeedForwardRecord:
    units = tuple(
        replace(unit, out=unit.out[:, dims], out_bias=None if unit.out_bias is None else unit.out_bias[dims])
        for unit in record.units
    )
    return FeedForwardRecord(units, record.output[..., dims])


def gains(lens: Analyzer, scope: str) -> Tensor:
    """(layers, d): gamma of the norm that ends at a scope, by name or alias; "layer" is LN2 of a post-LN layer."""
    stack = lens.stacks[0]
    name = resolve([scope], stack.blocks)[0][0]
    part = next(step.part for step in steps_of(stack.blocks) if step.norms == name)
    if not isinstance(part, Norm):
        raise NormscopeError(f"{name} does not end with a norm in {lens.family.name}: there is no gain to look at.")
    found = []
    for layer in lens.calls[0]:
        module: Any = layer.get_submodule(part.path)
        found.append(module.weight.detach().to(lens.dtype).cpu() + part.offset)
    return torch.stack(found)


def affine(lens: Analyzer, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_V (d, H d_h), b_V, W_O (H d_h, d), b_O of the self-attention of a layer, for row vectors ``x W_V + b_V``.

    Values that several heads share are repeated for each; a bias that is not there is zero. Float64.
    """
    stack = lens.stacks[0]
    part = next(
        step.part for step in steps_of(stack.blocks) if isinstance(step.part, Attention) and not step.part.cross
    )
    module = lens.calls[0][layer]
    out, out_bias = linear_map(module.get_submodule(part.output))
    heads = lens.head_counts[0]
    shared = heads if part.packing == "interleaved" else getattr(lens.base.config, "num_key_value_heads", None) or heads
    value, bias = value_map(module.get_submodule(part.value), part.packing, heads, shared, out.shape[1] // heads)
    zeros = torch.zeros(out.shape[0], dtype=torch.float64)
    flat = value.transpose(0, 1).flatten(1).double().cpu()
    return (
        flat,
        torch.zeros(flat.shape[1], dtype=torch.float64) if bias is None else bias.flatten().double().cpu(),
        out.detach().double().t().cpu(),
        zeros if out_bias is None else out_bias.detach().double().cpu(),
    )


def _trace(
    lens: Analyzer, item: Item, stack: Stack, steps: Sequence[Any], on_layer: Callable[[LayerRecord], None]
) -> None:
    depth = lens.depths[lens.stacks.index(stack)]
    real = inputs.real([item], stack.side, lens.base.device)
    lens.trace([item], [Wish(stack, steps, range(depth), on_layer, real, calls=lens.calls_of(stack))])
