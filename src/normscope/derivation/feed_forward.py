"""Describe feed-forwards: which hidden state is g(a) or g(a) u of which projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from normscope.derivation.attention import Operation
from normscope.derivation.match import is_linear, norm_of_call, rows, same
from normscope.derivation.watch import Call, LayerLog
from normscope.models.spec import Experts, FeedForward

NAMED = ("gelu", "gelu_new", "silu", "relu", "quick_gelu", "relu2", "tanh", "gelu_pytorch_tanh", "sigmoid", "mish")
Function = Callable[[Tensor], Tensor]


def find_feed_forwards(log: LayerLog, used: frozenset[str]) -> Iterator[Operation]:
    """Every linear module that reads an activation of other linear modules, and every module of experts."""
    linear = [call for call in log.calls if is_linear(call) and call.path not in used]
    mixtures = [found for call in log.calls if (found := _experts(log, call)) is not None]
    units = list(_units(log, linear))
    for one in mixtures:
        beside = [unit for unit in units if same(unit.reads, one.reads)]
        combined = next((found for unit in beside if (found := _with_shared(log, one, unit)) is not None), None)
        if combined is not None:
            units = [unit for unit in units if not unit.calls <= combined.calls]
        yield _scaled_experts(log, one) if combined is None else combined
    yield from units


def _units(log: LayerLog, linear: list[Call]) -> Iterator[Operation]:
    for out in linear:
        found = _unit(log, out, [call for call in linear if call.order < out.order])
        if found is not None:
            op, into = found
            paths = frozenset({op.into, op.out, *([op.up] if op.up else [])})
            yield Operation(op, rows(into.input), rows(out.output), out.order, paths)


def _experts(log: LayerLog, call: Call) -> Operation | None:
    """A module of gated experts, called with tokens, the chosen experts and their weights, or with every token for
    every expert, multiplied by its score."""
    stacked = {name: one.detach() for name, one in call.module.named_parameters(recurse=False) if one.dim() == 3}
    if len(stacked) != 2:
        return None
    routed = len(call.inputs) == 3 and not call.inputs[1].is_floating_point()
    router = None if routed or len(call.inputs) != 1 else _router(log, call, len(next(iter(stacked.values()))))
    if not routed and router is None:
        return None
    (into, packed), (out, down) = stacked.items()
    x = rows(call.inputs[0] if router is None else router.input)
    y = rows(call.output) if router is None else rows(call.output).view(-1, *x.shape).sum(0)
    act = next((name for name, one in call.module.named_children() if not list(one.parameters())), None)
    if act is None or x.shape[1] not in packed.shape[1:]:
        return None
    path = None if router is None else router.path
    for transposed in (False, True):
        weights = [one if transposed else one.transpose(1, 2) for one in (packed, down)]
        if weights[0].shape[1] != x.shape[1] or weights[1].shape[2] != y.shape[1]:
            continue
        for interleaved in (False, True):
            made = _expert_outputs(call, weights[0], weights[1], interleaved, getattr(call.module, act))
            if made is not None and same(made, y):
                op = Experts(
                    call.path,
                    f"{call.path}.{act}",
                    into,
                    out=out,
                    transposed=transposed,
                    interleaved=interleaved,
                    router=path,
                )
                return Operation(op, x, y, call.order, frozenset({call.path, *([path] if path else [])}))
    return None


def _router(log: LayerLog, experts: Call, count: int) -> Call | None:
    """The module whose outputs are the scores with which every expert's copy of the tokens is multiplied."""
    given = rows(experts.input)
    for call in log.calls:
        scores, x = rows(call.output), rows(call.input)
        if scores.shape == (len(x), count) and same((scores.t()[..., None] * x).flatten(0, 1), given):
            return call
    return None


def _expert_outputs(call: Call, packed: Tensor, down: Tensor, interleaved: bool, act: Function) -> Tensor | None:
    """``sum_e r_e (g(x W_e) * (x U_e)) D_e`` over the chosen experts e, or over all, each of its own copy of x."""
    x = rows(call.inputs[0])
    own = len(call.inputs) == 1
    given = x.view(len(packed), -1, x.shape[1]) if own else x.expand(len(packed), *x.shape)
    made = torch.einsum("etd,edf->etf", given, packed)
    if made.shape[2] % 2 or made.shape[2] // 2 != down.shape[1]:
        return None
    a, u = (made[..., 0::2], made[..., 1::2]) if interleaved else made.chunk(2, -1)
    outputs = torch.einsum("etf,efd->etd", act(a) * u, down)
    if own:
        return outputs.sum(0)
    chosen, weights = (one.reshape(len(x), -1) for one in call.inputs[1:])
    routing = x.new_zeros(len(x), len(packed)).scatter_add_(1, chosen, weights.to(x.dtype))
    return torch.einsum("te,etd->td", routing, outputs)


def _with_shared(log: LayerLog, experts: Operation, unit: Operation) -> Operation | None:
    """Experts and the feed-forward beside them, if their sum was seen, with or without a gate on the latter."""
    assert isinstance(experts.op, Experts)
    assert isinstance(unit.op, FeedForward)
    tensors = (rows(one) for call in log.calls for one in (call.output, call.input))
    seen = [one for one in tensors if one.shape == unit.output.shape]
    gates = [call for call in log.calls if is_linear(call) and rows(call.output).shape[1] == 1]
    factors: list[tuple[str | None, Tensor]] = [(None, torch.ones_like(unit.output[:, :1]))]
    factors += [(call.path, rows(call.output).sigmoid()) for call in gates]
    for scale, number in _expert_scales(log, experts.op):
        for gate, factor in factors:
            total = number * experts.output + factor * unit.output
            if any(same(total, one) for one in seen):
                op = replace(experts.op, shared=unit.op, shared_gate=gate, scale=scale)
                return Operation(op, experts.reads, total, max(experts.order, unit.order), experts.calls | unit.calls)
    return None


def _scaled_experts(log: LayerLog, one: Operation) -> Operation:
    """Experts with the factor on their sum, if the product was seen and the sum is not used itself."""
    assert isinstance(one.op, Experts)
    for scale, number in _expert_scales(log, one.op):
        scaled = number * one.output
        if scale is not None and any(same(scaled, rows(call.output)) for call in log.calls):
            return replace(one, op=replace(one.op, scale=scale), output=scaled)
    return one


def _expert_scales(log: LayerLog, op: Experts) -> Iterator[tuple[str | None, float]]:
    """No factor, then every number that is an attribute of the module around the experts."""
    yield None, 1.0
    path = op.module.rpartition(".")[0]
    for name, one in vars(log.layer.get_submodule(path)).items():
        if isinstance(one, float) and one not in (0.0, 1.0):
            yield f"{path}.{name}" if path else name, one


def _unit(log: LayerLog, out: Call, before: list[Call]) -> tuple[FeedForward, Call] | None:
    found = _unit_before(log, out, rows(out.input), before)
    if found is not None:
        return found
    for call in log.calls:
        norm = norm_of_call(call) if call.order < out.order and same(call.output, out.input) else None
        found = None if norm is None else _unit_before(log, out, rows(call.input), before)
        if found is not None:
            return replace(found[0], inner_norm=norm), found[1]
    return None


def _unit_before(log: LayerLog, out: Call, hidden: Tensor, before: list[Call]) -> tuple[FeedForward, Call] | None:
    """The feed-forward whose hidden units are those given."""
    width = hidden.shape[1]
    plain = [call for call in before if rows(call.output).shape == hidden.shape]
    for into in plain:
        name = _activation(log, rows(into.output), hidden)
        if name is not None:
            return FeedForward(into.path, name, out.path), into
    for into in plain:
        for up in plain:
            if up is into or not same(up.input, into.input):
                continue
            name = _activation(log, rows(into.output), hidden, rows(up.output))
            if name is not None:
                return FeedForward(into.path, name, out.path, up=up.path), into
    for both in before:
        made = rows(both.output)
        if made.shape != (len(hidden), 2 * width):
            continue
        for packing, a, u in _halves(made):
            name = _activation(log, a, hidden, u)
            if name is not None:
                return FeedForward(both.path, name, out.path, up=both.path, packing=packing), both
    return None


def _halves(made: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    first, second = made.chunk(2, -1)
    yield "halves", first, second
    yield "swapped", second, first
    yield "interleaved", made[:, 0::2], made[:, 1::2]


def _activation(log: LayerLog, a: Tensor, hidden: Tensor, up: Tensor | None = None) -> str | None:
    """The path or name of g with hidden = g(a), or g(a) u."""
    for call in log.calls:
        if not is_linear(call) and same(call.input, a) and rows(call.output).shape == a.shape:
            made = rows(call.output)
            if same(made if up is None else made * up, hidden) and _is_elementwise(call, a):
                return call.path
    for name, function in _named_activations().items():
        made = function(a)
        if same(made if up is None else made * up, hidden):
            return f"ACT2FN.{name}"
    return None


def _is_elementwise(call: Call, a: Tensor) -> bool:
    """Whether a module acts on each number by itself: rearranged numbers give the rearranged result."""
    order = torch.randperm(a.numel(), generator=torch.Generator().manual_seed(0))
    try:
        made = call.module(a.flatten()[order].view_as(a))
    except Exception:  # modules may raise anything
        return False
    return isinstance(made, Tensor) and same(made.flatten(), rows(call.output).flatten()[order])


@lru_cache(maxsize=1)
def _named_activations() -> dict[str, Function]:
    return {name: ACT2FN[name] for name in NAMED}
