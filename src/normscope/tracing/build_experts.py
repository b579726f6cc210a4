"""Build the record of a mixture of experts inside a layer call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normscope.models.modules import (
    activation_name,
    layer_attribute,
    layer_submodule,
)
from normscope.models.spec import Experts
from normscope.tracing.recorded import gather_rows
from normscope.tracing.records import FeedForwardRecord, Projection, Unit

if TYPE_CHECKING:
    from normscope.tracing.build import LayerCall


def experts_record(call: LayerCall, part: Experts, shared: Unit | None) -> FeedForwardRecord:
    """One unit for each expert that some token chose, with its hidden states on all tokens, and `shared`, the
    feed-forward beside them."""
    given = call.seen[part.module][0][0]
    if part.router is None:
        x, chosen, routing = (gather_rows(call.unflatten(one), call.request.positions) for one in given[:3])
        shares = {e: (call.cast(routing) * (chosen == e)).sum(-1) for e in chosen.unique().tolist()}
    else:
        x = call.row_input(part.router)
        scores = gather_rows(call.unflatten(call.seen[part.router][1][0][0]), call.request.positions)
        shares = {e: one for e, one in enumerate(call.cast(scores).unbind(-1)) if bool(one.any())}
    x = call.cast(x)
    units = [_expert_unit(call, part, expert, share, x) for expert, share in shares.items()]
    if part.router is None:
        output = call.row_output(part.module)
    else:
        by_expert = call.cast(call.seen[part.module][1][0]).view(-1, *call.input.shape)
        output = gather_rows(by_expert.sum(0), call.request.positions)
    if part.scale is not None:
        factor = layer_attribute(call.layer, part.scale) if isinstance(part.scale, str) else part.scale
        units, output = [replace(one, routing=_scaled(one.routing, factor)) for one in units], output * factor
    if part.shared is not None and shared is not None:
        made = call.row_output(part.shared.out)
        gate = torch.ones_like(made[..., 0])
        if part.shared_gate is not None:
            gate = call.row_output(part.shared_gate).sigmoid()[..., 0]
        units.append(replace(shared, routing=gate))
        output = output + gate[..., None] * made
    return FeedForwardRecord(tuple(units), output)


def expert_parameters(
    module: Any, path: str, bias: str | None, expert: int, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """Weight (in, out) and bias of one expert."""
    weight = layer_attribute(module, path)[expert]
    return weight if transposed else weight.t(), None if bias is None else layer_attribute(module, bias)[expert]


def unpack_joint_activation(
    packed: Callable[[Tensor], Tensor], interleaved: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Turn an activation of the packed (gate, up) tensor into a function of gate and up."""

    def function(a: Tensor, u: Tensor) -> Tensor:
        return packed(torch.stack([a, u], -1).flatten(-2) if interleaved else torch.cat([a, u], -1))

    return function


def _expert_unit(call: LayerCall, part: Experts, expert: int, share: Tensor, x: Tensor) -> Unit:
    """One expert, which receives `share` (b, i) of the tokens x."""
    module: Any = layer_submodule(call.layer, part.module)
    activation = layer_attribute(call.layer, part.activation)
    weight, bias = expert_parameters(module, part.into, part.into_bias, expert, part.transposed)
    out, out_bias = expert_parameters(module, part.out, part.out_bias, expert, part.transposed)
    weight, bias, out, out_bias = (call.cast(one) for one in (weight, bias, out, out_bias))
    read = x if part.router is None else x * share[..., None]
    both = Projection(weight, bias, read @ weight if bias is None else read @ weight + bias)
    into, up = (projection_half(both, n, part.interleaved) for n in range(2))
    plain = activation.forward if isinstance(activation, nn.Module) else activation
    unit = Unit(into, up, plain, activation_name(activation), out, out_bias)
    if part.bend is not None:
        joint, bend = unpack_joint_activation(activation, part.interleaved), layer_attribute(module, part.bend)
        unit = replace(unit, joint=joint, bend=float(bend))
    return replace(unit, routing=share, scaled_input=part.router is not None)


def _scaled(share: Tensor | None, factor: float) -> Tensor | None:
    return None if share is None else share * factor


def projection_half(both: Projection, number: int, interleaved: bool = False) -> Projection:
    """The first or second half of a projection's hidden units, or every other unit if `interleaved`."""

    def part(x: Tensor) -> Tensor:
        return x[..., number::2] if interleaved else x.chunk(2, -1)[number]

    return Projection(part(both.weight), None if both.bias is None else part(both.bias), part(both.hidden))
