"""Both ends of an attention: what makes its values of a projection, and what comes between the mixed values and W_O.

A factor or a norm is accepted only if a named formula of a named module explains every number of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.derivation.match import (
    ColumnMatch,
    is_linear,
    match_columns,
    match_scaled_columns,
    norm_of_call,
    rows,
    same,
)
from normscope.derivation.multipliers import named_multiplier
from normscope.derivation.watch import Call, LayerLog
from normscope.models.spec import AttentionGate, Norm
from normscope.tracing.sinks import sink_share

# What g must have been, given the factors that it gave.
INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.logit,
    "softplus": lambda y: y.expm1().log(),
    "tanh": torch.atanh,
}


@dataclass(frozen=True)
class Ending:
    """The projection that reads the mixed values, and what comes before it."""

    out: Call
    gate: AttentionGate | None = None
    norm: Norm | None = None
    sinks: str | None = None


@dataclass(frozen=True)
class ValueSource:
    """The projection whose outputs are the values, and what comes after it."""

    match: ColumnMatch
    shift: str | None = None
    scale: str | float | None = None
    norm: Norm | None = None


def find_ending(log: LayerLog, path: str, mixed: Tensor) -> Ending | None:
    """How the mixed values (heads, tokens, d_h) of the attention at `path` reach a linear module."""
    flat = mixed.transpose(0, 1).flatten(1)
    readers = [call for call in log.calls if is_linear(call) and rows(call.input).shape == flat.shape]
    for call in readers:
        if same(call.input, flat):
            return Ending(call)
    for call in log.calls:
        if same(call.input, flat) and (norm := norm_of_call(call)) is not None:
            out = next((one for one in readers if same(one.input, call.output)), None)
            if out is not None:
                return Ending(out, norm=norm)
    for call in readers:
        factors = _held_factors(rows(call.input), mixed)
        gate = _find_gate(log, path, factors)
        if gate is not None:
            return Ending(call, gate)
        sinks = _find_sinks(log, path, factors)
        if sinks is not None:
            return Ending(call, sinks=sinks)
    return None


def _held_factors(read: Tensor, mixed: Tensor) -> Tensor:
    """(heads, tokens, d_h or 1): what was read in place of the mixed values, divided by them."""
    heads, tokens, width = mixed.shape
    factors = read.view(tokens, heads, width).transpose(0, 1) / mixed
    by_head = same(factors, factors[..., :1].expand_as(factors))
    return factors[..., :1] if by_head else factors


def _find_sinks(log: LayerLog, path: str, factors: Tensor) -> str | None:
    """The parameter with the sinks' scores, if the factors are the share of the softmax that they leave."""
    for name, sinks in _parameters(log.layer, path, len(factors)):
        if sinks is None or factors.shape[-1] != 1:
            continue
        for scores in log.scores:
            if same(sink_share(scores.flatten(0, -4), sinks)[0][..., None].to(factors.dtype), factors):
                return name
    return None


def _find_gate(log: LayerLog, path: str, factors: Tensor) -> AttentionGate | None:
    """The formula for the factors, from the outputs of a linear module."""
    for call in log.calls:
        made = torch.nn.functional.silu(call.output)
        found = match_columns(factors, call, made) if is_linear(call) else None
        if found is not None:
            return AttentionGate(call.path, "silu", found.starts, factors.shape[-1] == 1)
    for name, inverse in INVERSES.items():
        before = inverse(factors)
        if not bool(before.isfinite().all()):
            continue
        for bias, added in _parameters(log.layer, path, len(factors)):
            wanted = before if added is None else before - added[:, None, None]
            for call in log.calls:
                found = match_columns(wanted, call) if is_linear(call) else None
                if found is not None:
                    return AttentionGate(call.path, name, found.starts, factors.shape[-1] == 1, bias)  # type: ignore[arg-type]
    return None


def find_values(log: LayerLog, path: str, values: Tensor) -> ValueSource | None:
    """Where values (heads, tokens, d_h) of the attention at `path` come from."""
    found = _project(log, values)
    if found is not None:
        return ValueSource(found)
    for name, shift in _parameters(log.layer, path, values.shape[0] * values.shape[2]):
        if shift is not None:
            found = _project(log, values - shift.view(len(values), 1, -1))
            if found is not None:
                return ValueSource(found, shift=name)
    for call in log.calls:
        scaled = match_scaled_columns(values, call) if is_linear(call) else None
        scale = None if scaled is None else _named_factors(log, path, scaled[1])
        if scaled is not None and scale is not None:
            return ValueSource(scaled[0], scale=scale)
    for call in log.calls:
        if is_linear(call) or call.output.numel() != values.numel() or call.output.shape[-1] != values.shape[2]:
            continue
        for order in (_heads_last, _heads_first):
            if same(order(call.output, values), values):
                norm = norm_of_call(call)
                found = None if norm is None else _project(log, order(call.input, values))
                if found is not None:
                    return ValueSource(found, norm=norm)
    return None


def _heads_last(x: Tensor, like: Tensor) -> Tensor:
    """(heads, tokens, width) of a tensor (..., tokens, heads, width)."""
    return x.reshape(like.shape[1], like.shape[0], like.shape[2]).transpose(0, 1)


def _heads_first(x: Tensor, like: Tensor) -> Tensor:
    """(heads, tokens, width) of a tensor (..., heads, tokens, width)."""
    return x.reshape(like.shape)


def _project(log: LayerLog, values: Tensor) -> ColumnMatch | None:
    """The linear module whose output contains the values."""
    matches = (match_columns(values, call) for call in log.calls if is_linear(call))
    return next((found for found in matches if found is not None), None)


def _parameters(layer: nn.Module, path: str, size: int) -> Iterator[tuple[str | None, Tensor | None]]:
    """No parameter, then each of the attention's own parameters of this size."""
    yield None, None
    for name, one in layer.named_parameters():
        if name.startswith(f"{path}.") and one.dim() == 1 and one.numel() == size:
            yield name, one.detach()


def _named_factors(log: LayerLog, path: str, factors: Tensor) -> str | float | None:
    """The parameter of the attention that holds one factor for each head, or the number that all of them are."""
    if same(factors[:, None], factors[:1].expand_as(factors)[:, None]):
        return named_multiplier(log.layer, float(f"{float(factors.mean()):.10g}"))
    named = _parameters(log.layer, path, len(factors))
    return next((name for name, one in named if one is not None and same(one[:, None], factors[:, None])), None)
