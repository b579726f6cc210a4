"""Run a model once and freeze it: its layers, the norm behind them, and its head down to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope import inputs
from normscope.analyzer import Analyzer
from normscope.decompose.gates import Gate
from normscope.errors import NormscopeError
from normscope.flow.frozen import (
    FrozenBlock,
    FrozenLayer,
    FrozenLinear,
    FrozenNorm,
    FrozenPool,
    FrozenScale,
    Map,
    frozen_layer,
)
from normscope.flow.hooks import mine
from normscope.inputs import Item
from normscope.layers import called_modules, layer_modules
from normscope.models.spec import Attention, Stack
from normscope.parameters import affine, value_map
from normscope.records import AttentionRecord, LayerRecord
from normscope.scopes import steps_of
from normscope.trace import Wish, trace

CLOSE = 1e-4  # relative difference from which on two tensors are not the same


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


@dataclass
class _Call:
    """A module outside the layers that was called, or the last layer of a side that ended."""

    module: nn.Module | None
    given: Tensor
    made: Tensor
    side: str = ""


def freeze(lens: Analyzer, item: Item, gate: Gate = "ig", head: bool = True) -> FrozenModel:
    """One traced forward pass of the model, with its head if it has one and that is wanted."""
    calls: list[_Call] = []
    kept: dict[str, tuple[list[Tensor], list[FrozenLayer]]] = {}
    wishes = [_wish(lens, stack, item, gate, kept, calls) for stack in lens.stacks]
    with _watching(lens, calls):
        made = trace(lens.base, lens.batch([item]), wishes, lens.dtype, lens.model if head else None, to_the_end=True)
    logits = getattr(made, "logits", None)
    if isinstance(logits, Tensor):
        logits = rows_of(logits[0].to(lens.dtype))
    stacks: list[FrozenStack] = []
    maps: tuple[Map, ...] = ()
    for stack in lens.stacks:
        states, layers = kept[stack.side]
        real = item.sides[stack.side].real.to(lens.base.device)
        tail, rest, at = _tail(_following(calls, stack.side), states[-1], lens.dtype)
        if stack is lens.stacks[-1] and logits is not None:
            maps = _head(rest, at, real, logits, lens)
        stacks.append(FrozenStack(stack.side, tuple(states), tuple(layers), tail, real))
    return FrozenModel(tuple(stacks), maps, logits)


def _wish(
    lens: Analyzer,
    stack: Stack,
    item: Item,
    gate: Gate,
    kept: dict[str, tuple[list[Tensor], list[FrozenLayer]]],
    calls: list[_Call],
) -> Wish:
    steps = steps_of(stack.blocks)
    depth = lens.depths[lens.stacks.index(stack)]
    modules = called_modules(lens.base, stack)
    states, layers = kept.setdefault(stack.side, ([], []))

    def on_layer(record: LayerRecord) -> None:
        module = modules[record.index]
        values = []
        for step, part in zip(steps, record.parts, strict=True):
            if isinstance(step.part, Attention) and isinstance(part, AttentionRecord):
                heads, shared, width = part.weights.shape[1], part.values.shape[1], part.values.shape[3]
                weight, bias = value_map(module.get_submodule(step.part.value), step.part.packing, heads, shared, width)
                values.append((weight.to(lens.dtype), None if bias is None else bias.to(lens.dtype)))
        if record.index == 0:
            states.append(record.input[0].clone())
        layers.append(frozen_layer(record, steps, values, gate))
        states.append(record.parts[-1].output[0].clone())  # type: ignore[union-attr]  # a layer ends with a sum or norm
        if record.index == depth - 1:
            calls.append(_Call(None, states[-1], states[-1], stack.side))

    real = inputs.real([item], stack.side, lens.base.device)
    return Wish(stack, steps, range(depth), on_layer, real)


@contextmanager
def _watching(lens: Analyzer, calls: list[_Call]) -> Iterator[None]:
    """Note what every linear module and every norm outside the layers reads and puts out."""
    inside = {id(m) for stack in lens.stacks for layer in layer_modules(lens.base, stack) for m in layer.modules()}
    handles = []

    def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(made, Tensor):
            calls.append(_Call(module, rows_of(args[0][0].to(lens.dtype)), rows_of(made[0].to(lens.dtype))))

    try:
        for module in lens.model.modules():
            if id(module) not in inside and (_is_linear(module) or _is_norm(module)):
                handles.append(module.register_forward_hook(mine(hook)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "weight") and (hasattr(module, "in_features") or type(module).__name__ == "Conv1D")


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and (weight is None or weight.dim() == 1)


def _following(calls: list[_Call], side: str) -> list[_Call]:
    """The calls behind the last layer of a side, up to the end of the next side's layers."""
    begin = next(n for n, call in enumerate(calls) if call.side == side)
    end = next((n for n in range(begin + 1, len(calls)) if calls[n].side), len(calls))
    return calls[begin + 1 : end]


def _tail(calls: list[_Call], state: Tensor, dtype: torch.dtype) -> tuple[tuple[Map, ...], list[_Call], Tensor]:
    """The norms that the last states go through first, the calls behind them, and the states then."""
    chain: list[Map] = []
    while calls and calls[0].module is not None and _is_norm(calls[0].module) and _same(calls[0].given, state):
        chain.append(_norm(calls[0], dtype))
        state = calls[0].made
        calls = calls[1:]
    return tuple(chain), calls, state


def _head(calls: list[_Call], state: Tensor, real: Tensor, logits: Tensor, lens: Analyzer) -> tuple[Map, ...]:
    """The head as maps one after the other. An activation between two of them is held at ``g(a) / a``, which is its
    integrated gradient; a row that is taken out, a factor and a constant are told from the numbers."""
    chain: list[Map] = []
    for call in calls:
        assert call.module is not None
        link = _link(state, call.given, real)
        if link is None:
            continue  # it reads something else
        chain += link
        if _is_norm(call.module):
            chain.append(_norm(call, lens.dtype))
        else:
            weight, bias = affine(call.module)
            constant = None if bias is None else bias.detach().to(lens.dtype)
            chain.append(FrozenLinear(weight.detach().to(lens.dtype).t(), constant))
        state = call.made
    added = getattr(lens.model, "final_logits_bias", None)  # the translation models' own
    if isinstance(added, Tensor) and bool(added.any()):
        eye = torch.ones(logits.shape[-1], dtype=lens.dtype, device=logits.device)
        chain.append(FrozenScale(eye, added[0].to(lens.dtype)))
        state = state + added[0].to(lens.dtype)
    link = _link(state, logits, real)
    if link is None:
        raise NormscopeError(
            f"The head of {type(lens.model).__name__} is no chain of linear maps, norms and activations: its logits "
            "cannot be decomposed. Leave the target out to get the flow to the hidden states."
        )
    return (*chain, *link)


def _link(state: Tensor, given: Tensor, real: Tensor) -> list[Map] | None:
    """What lies between two tensors: nothing, one row taken out, an activation or a factor; None: nothing known."""
    found: list[Map] = []
    if len(given) == 1 and len(state) > 1:
        made = [(pool, pool.forward(state[:, None], None)[:, 0]) for pool in _pools(state, real)]
        fitting = [(float((x - given).abs().max()), pool) for pool, x in made if _same(x, given)]
        if not fitting:
            return None
        found.append(min(fitting, key=lambda one: one[0])[1])
        state = given
    if state.shape != given.shape:
        return None
    if not _same(state, given):
        zero = state == 0
        found.append(FrozenScale(torch.where(zero, 0, given / torch.where(zero, 1, state))))
    return found


def _pools(state: Tensor, real: Tensor) -> Iterator[FrozenPool]:
    """How one vector may be made of all tokens': one of them, their mean, that of the tokens which are not masked, or
    the first and the mean of the rest."""
    eye = torch.eye(len(state), dtype=state.dtype, device=state.device)
    for n in range(len(state)):
        yield FrozenPool(eye[n : n + 1])
    yield FrozenPool(eye.mean(0, keepdim=True))
    yield FrozenPool(eye[real].mean(0, keepdim=True))
    if len(state) > 1:
        yield FrozenPool(torch.stack([eye[0], eye[1:].mean(0)]))


def _norm(call: _Call, dtype: torch.dtype) -> FrozenNorm:
    module: Any = call.module
    x, made = call.given, call.made
    epsilon = next((e for e in (getattr(module, n, None) for n in ("eps", "variance_epsilon")) if e is not None), 0.0)
    weight = module.weight
    shift = getattr(module, "bias", None)
    ones = torch.ones_like(x[0])
    gain = ones if weight is None else weight.detach().to(dtype)
    constant = None if shift is None else shift.detach().to(dtype)
    centered = isinstance(module, nn.LayerNorm)
    spread = x.var(-1, correction=0) if centered else x.square().mean(-1)
    inverse = (spread + epsilon).rsqrt()
    for offset in (0.0, 1.0):  # Gemma's gain is 1 + weight
        norm = FrozenNorm(centered, inverse, gain + offset, constant)
        found = norm.forward(x[:, None], None)[:, 0]
        if _same(found if constant is None else found + constant, made):
            return norm
    raise NormscopeError(f"{type(module).__name__} behind the last layer is no LayerNorm or RMSNorm that is known.")


def rows_of(x: Tensor) -> Tensor:
    """(rows, width), one row where there is only one vector."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= CLOSE * max(float(b.abs().max()), 1e-30))
