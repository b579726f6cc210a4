"""What one input does inside a model, beyond its maps: the model's own vectors, maps over some dimensions only, the
model with uniform attention, and the parameters that the papers look at. Pure functions of an Analyzer and an item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope import inputs
from normscope.analyzer import Analyzer
from normscope.decompose import walk
from normscope.decompose.scratch import Scratch
from normscope.errors import NormscopeError
from normscope.inputs import Item
from normscope.interface import active, configs_of, restore, swap
from normscope.models.spec import Attention, Norm, Stack
from normscope.parameters import affine as linear_map
from normscope.parameters import attribute, value_map
from normscope.records import FeedForwardRecord, LayerRecord, ScaleRecord
from normscope.request import reach, requests_of
from normscope.scopes import aliases_of, resolve, steps_of
from normscope.trace import Wish, layer_modules, lock_of, trace


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
        full.diagonal().copy_(reduced.own[0, 0])
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
    for layer in _calls(lens, stack):
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
    module = _calls(lens, stack)[layer]
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


def uniform(lens: Analyzer, item: Item, layers: Sequence[int], *, logits: bool = False) -> Tensor:
    """(n, d): the final hidden states, or with `logits` the head's output, where the attention of these layers is
    uniform over the tokens it may see. No layers: the plain forward pass."""
    stack = lens.stacks[0]
    model = lens.model if logits else lens.base
    with lock_of(lens.base), torch.no_grad(), _uniform(lens, stack, frozenset(layers)):
        made = model(**lens.batch([item]))
    if logits:
        found = made.logits
    elif lens.two_sided:
        found = made.encoder_last_hidden_state
    else:
        found = made.last_hidden_state
    real = item.sides[stack.side].real
    return found[0][real.to(found.device)].to(lens.dtype).cpu()  # type: ignore[no-any-return]


def _trace(
    lens: Analyzer, item: Item, stack: Stack, steps: Sequence[Any], on_layer: Callable[[LayerRecord], None]
) -> None:
    depth = lens.depths[lens.stacks.index(stack)]
    real = inputs.real([item], stack.side, lens.base.device)
    trace(lens.base, lens.batch([item]), [Wish(stack, steps, range(depth), on_layer, real)], lens.dtype)


def _calls(lens: Analyzer, stack: Stack) -> list[nn.Module]:
    """The layer module of every call: a shared layer stands there several times."""
    modules = layer_modules(lens.base, stack)
    depth = lens.depths[lens.stacks.index(stack)]
    return [modules[n * len(modules) // depth] for n in range(depth)]


class _Uniform:
    """Stands where a Recorder does, and lets the attention of some layers see all keys alike."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.count = -1  # the layer that is running
        self.inside = False

    def wanted(self) -> bool:
        return self.inside and self.count in self.layers

    def attend(
        self,
        eager: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """A query of zeros has the same score with every key; a mask keeps what it forbids and loses its biases."""
        return eager(module, torch.zeros_like(query), key, value, _only_forbids(mask), **_without_bias(kwargs))


def _only_forbids(mask: Tensor | None) -> Tensor | None:
    if mask is None or not mask.is_floating_point():
        return mask
    forbidden = mask <= torch.finfo(torch.float32).min / 2
    return torch.zeros_like(mask).masked_fill(forbidden, torch.finfo(torch.float32).min)


def _without_bias(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key == "position_bias" else value for key, value in kwargs.items()}


@contextmanager
def _uniform(lens: Analyzer, stack: Stack, layers: frozenset[int]) -> Iterator[None]:
    if not layers:
        yield
        return
    replaced = _Uniform(layers)
    handles: list[Any] = []
    configs: list[Any] = []
    previous = getattr(active, "recorder", None)
    probabilities = next(
        (s.part.probabilities for s in steps_of(stack.blocks) if isinstance(s.part, Attention) and not s.part.cross),
        None,
    )

    def mine() -> bool:  # and not a pass of the same model in another thread
        return getattr(active, "recorder", None) is replaced

    def begin(module: nn.Module, args: Any) -> None:
        if mine():
            replaced.count += 1
            replaced.inside = True

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if mine():
            replaced.inside = False

    def even(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (_even(args[0]), *args[1:]) if mine() and replaced.wanted() else None

    try:
        active.recorder = replaced
        for layer in layer_modules(lens.base, stack):
            handles.append(layer.register_forward_pre_hook(begin))
            handles.append(layer.register_forward_hook(end))
            if probabilities is not None:
                handles.append(attribute(layer, probabilities).register_forward_pre_hook(even))
        for config in configs_of(lens.base):
            swap(config)
            configs.append(config)
        yield
    finally:
        for config in configs:
            restore(config)
        for handle in handles:
            handle.remove()
        active.recorder = previous


def _even(probabilities: Tensor) -> Tensor:
    """Equal weights for all keys that have any: of one unpadded item, those that a mask does not forbid."""
    seen = (probabilities > 0).to(probabilities.dtype)
    return seen / seen.sum(-1, keepdim=True)
