"""Build the record of a recurrence inside a layer call: the weights with which it mixes values, the convolution that
makes these, and the gated norm of what is mixed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.models.modules import (
    layer_submodule,
    linear_map,
    norm_epsilon,
    packing_at,
    value_constant,
    value_rows,
)
from normscope.models.spec import Attention, GatedNorm, Recurrence, ShortConvolution
from normscope.tracing.call_values import GATES
from normscope.tracing.recorded import (
    ELEMENT,
    closeness_misfit,
    closeness_rows,
    coarser,
    convolve,
    gather_rows,
    mixed_values,
)
from normscope.tracing.records import AttentionRecord, AttentionRows, FilterRecord, Rows
from normscope.tracing.recurrences import CHUNK

if TYPE_CHECKING:
    from normscope.tracing.build import LayerCall
    from normscope.tracing.recurrence_calls import RecurrenceCall


def recurrence_record(call: LayerCall, part: Attention, shift: Tensor | None) -> AttentionRecord:
    """`shift` is the beta of the norm before the values."""
    if shift is not None:
        raise NormscopeError(f"The values of {part.module} are read after a norm with a shift, which is not supported.")
    if call.request.virtual:
        raise NormscopeError("Prefix tuning is not supported for layers that mix tokens by a recurrence.")
    if isinstance(part.recurrence, ShortConvolution):
        return _convolution_record(call, part, part.recurrence)
    assert part.recurrence is not None
    if len(call.recurrences) != 1:
        raise NormscopeError(
            f"{part.module} called {part.recurrence.function} {len(call.recurrences)} times, not once: its layer is "
            "described incorrectly, or this version of transformers computes it elsewhere. Upgrade transformers."
        )
    ((name, made),) = call.recurrences
    if name != part.recurrence.function:
        raise NormscopeError(f"{part.module} called {name}, not {part.recurrence.function}. Correct the family.")
    heads, width = made.values.shape[1], made.values.shape[3]
    values, filtered = _values_and_filter(call, part, made)
    rows = checked_rows(made)
    weights, error = _weights(call, made, rows)
    weight, bias = linear_map(layer_submodule(call.layer, part.output))
    recompute = call.request.positions is None and call.request.recompute
    return AttentionRecord(
        weights=weights,
        values=values,
        value_bias=None,
        matrix=call.cast(weight).t().reshape(heads, width, -1),
        bias=call.cast(bias),
        output=call.row_output(part.output),
        gate=gather_rows(_gated_norm_factors(call, part.recurrence.norm, heads, width), call.request.positions),
        rows=rows if recompute else None,
        mixed=made.output.transpose(1, 2).flatten(2) if recompute else None,
        filter=filtered,
        weight_error=error,
    )


def _values_and_filter(call: LayerCall, part: Attention, made: RecurrenceCall) -> tuple[Tensor, FilterRecord]:
    """The values (b, H, j, d_h) before the convolution, without their bias, and the convolution, with that bias."""
    assert isinstance(part.recurrence, Recurrence)
    _, heads, length, width = made.values.shape
    projection = layer_submodule(call.layer, part.value)
    packing = packing_at(call.layer, part, heads, width)
    values = value_rows(call.cast(call.output_of(part.value)), packing, heads, width).transpose(1, 2)
    constant = call.cast(value_constant(projection, packing, heads, width, None))
    first = part.recurrence.channels == "first"
    taps, bias = _filter_parameters(call, part.recurrence.filter, heads, width, first)
    hidden, size = convolve(taps, values), convolve(taps.abs(), values.abs())
    if bias is not None:
        hidden, size = hidden + bias[:, None], size + bias.abs()[:, None]
    # A token whose values the model has set to zero, because it is padding, has slope zero.
    slope = hidden.sigmoid() * made.values.any(-1, keepdim=True).any(1, keepdim=True)
    found, sizes, actual = (closeness_rows(one) for one in (slope * hidden, size, made.values))
    tolerance = ELEMENT[coarser(call.dtype, call.input.dtype)]
    if closeness_misfit(lambda rows: (found[rows], sizes[rows]), actual, tolerance) > 1:
        raise NormscopeError(
            f"The values of {part.module} are not the output of {part.value} after {part.recurrence.filter} and a "
            "SiLU: a hook changes them, or the family is described incorrectly."
        )
    rest = None if bias is None else bias[:, None].expand(heads, length, width)
    if constant is not None:
        spread = constant[:, None].expand(heads, length, width)
        values, through = values - constant[:, None], convolve(taps, spread[None])[0]
        rest = through if rest is None else rest + through
    return values, FilterRecord(taps, slope, None if rest is None else slope * rest)


def _filter_parameters(call: LayerCall, path: str, heads: int, width: int, first: bool) -> tuple[Tensor, Tensor | None]:
    """Taps (K, H, d_h), the first for a token's own value, and the bias (H, d_h) of the channels that are values, the
    first or the last."""
    module: Any = layer_submodule(call.layer, path)
    kernel, bias = call.cast(module.weight).flatten(1), call.cast(module.bias)
    start = 0 if first else len(kernel) - heads * width
    some = slice(start, start + heads * width)
    taps = kernel[some].flip(1).t().reshape(-1, heads, width)
    return taps, None if bias is None else bias[some].view(heads, width)


def _convolution_record(call: LayerCall, part: Attention, convolution: ShortConvolution) -> AttentionRecord:
    """One head, whose weights are those of the taps: a value that only its own token has, at each tap's distance."""
    entry, gate, values = (x[:, None] for x in call.cast(call.output_of(part.value)).chunk(3, dim=-1))  # (b, 1, n, d)
    items, _, length, width = values.shape
    positions = call.request.positions
    matrix, output_bias = linear_map(layer_submodule(call.layer, part.output))
    projection = layer_submodule(call.layer, part.value)
    constant = call.cast(value_constant(projection, part.packing, 1, width, None))
    taps, bias = _filter_parameters(call, convolution.filter, 1, width, first=True)
    rest = None if bias is None else bias[:, None].expand_as(values)
    if constant is not None:
        values, through = values - constant[:, None], convolve(taps, entry * constant[:, None])
        rest = through if rest is None else rest + through
    made = FilterRecord(taps, torch.ones_like(values), rest, entry, taps.mean(-1).flatten())
    kept = call.space.take(False, (items, 1, length, length), values.device).zero_()
    weights = kept.permute(0, 2, 3, 1)
    weights.diagonal(dim1=2, dim2=3).fill_(1)
    if positions is not None:
        weights = gather_rows(weights.transpose(1, 2), positions).transpose(1, 2)
    record = AttentionRecord(
        weights=weights,
        values=values,
        value_bias=None,
        matrix=call.cast(matrix).t()[None],
        bias=call.cast(output_bias),
        output=call.row_output(part.output),
        gate=gather_rows(gate.transpose(1, 2), positions),
        filter=made,
    )
    found, read = gather_rows(gate[:, 0] * mixed_values(record)[:, 0], positions), call.row_input(part.output)
    size = torch.linalg.vector_norm(read, dim=-1).clamp_min(torch.finfo(read.dtype).tiny)
    return replace(record, weight_error=torch.linalg.vector_norm(found - read, dim=-1) / size)


def _gated_norm_factors(call: LayerCall, part: GatedNorm, heads: int, width: int) -> Tensor:
    """(b, i, H, d_h): what multiplies the mixed values, held."""
    module: Any = layer_submodule(call.layer, part.path)
    ((mixed, gate, *_),) = call.seen[part.path][0]
    mixed, factor = call.cast(mixed), GATES[part.function](call.cast(gate))
    epsilon = norm_epsilon(module)
    if epsilon is None:
        raise NormscopeError(f"{type(module).__name__} at {part.path} has no epsilon. Correct the family.")
    normed = mixed * factor if part.gate_first else mixed
    inverse = (normed.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    found: Tensor = call.cast(module.weight) * inverse * factor
    return found.reshape(len(call.input), -1, heads, width)


def checked_rows(made: RecurrenceCall) -> AttentionRows:
    """The weights of some rows at a time, compared with the output of the recurrence along a fixed direction."""
    misfit = made.values.new_zeros(())

    def compute(rows: Rows) -> Tensor:
        weights = made.inputs.weights(rows)
        off = mixing_error(weights, made, rows).amax() / WEIGHT_ERROR
        torch.maximum(misfit, off, out=misfit)  # NaN stays
        return weights

    return AttentionRows(made.inputs.shape, compute, made.values.device, misfit=misfit, together=CHUNK)


WEIGHT_ERROR = 1e-4  # relative to the sizes of what is summed; transformers computes recurrences in float32


def mixing_error(weights: Tensor, made: RecurrenceCall, rows: Rows) -> Tensor:
    """(b, H, R): how far ``sum_j A_ij v_j`` is from the output of the recurrence, along a fixed direction, relative to
    ``sum_j |A_ij| ||v_j||``."""
    width = made.values.shape[3]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(made.values)
    direction = direction / direction.norm()
    values = made.values[:, :, : weights.shape[3]]
    output = (made.output @ direction).transpose(1, 2)  # (b, n, H)
    output = output[:, rows] if isinstance(rows, slice) else gather_rows(output, rows)
    missing = (weights @ (values @ direction)[..., None])[..., 0] - output.transpose(1, 2)
    size = (weights.abs() @ torch.linalg.vector_norm(values, dim=-1)[..., None])[..., 0]
    error: Tensor = missing.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    return error


def _weights(call: LayerCall, made: RecurrenceCall, rows: AttentionRows) -> tuple[Tensor, Tensor | None]:
    """(b, H, R, j) of the requested rows, stored as (b, j, H, R), and the largest error of each row (b, R); no rows if
    the record recomputes them."""
    items, heads, length, columns = rows.shape
    positions = call.request.positions
    if positions is None and call.request.recompute:
        return made.values.new_empty(items, heads, 0, columns), None
    wanted: Rows = slice(0, length) if positions is None else positions
    count = length if positions is None else positions.shape[1]
    kept = call.space.take(False, (items, heads, columns, count), made.values.device)
    error = made.values.new_zeros(items, count)
    for some, inputs in made.inputs.head_blocks():
        found = inputs.weights(wanted)
        kept[:, :, some].copy_(found.permute(0, 3, 1, 2))
        one = type(made)(inputs, made.values[:, some], made.output[:, some])
        error = torch.maximum(error, mixing_error(found, one, wanted).amax(1))
    return kept.permute(0, 2, 3, 1), error
