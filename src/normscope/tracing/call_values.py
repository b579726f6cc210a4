"""The values of an attention inside a layer call: their heads, the steps that may make them, gates on what is mixed of
them, and what a proof of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import (
    is_plain_linear,
    is_wrapped_on_path,
    layer_attribute,
    layer_submodule,
    linear_map,
    linear_paths,
    packing_at,
    value_rows,
)
from normscope.models.spec import Attention, AttentionGate, Norm
from normscope.tracing.recorded import closeness_rows, coarser, is_close, is_close_to_product
from normscope.tracing.records import AttentionRecord, NormRecord, ProofRecord, Record

if TYPE_CHECKING:
    from normscope.tracing.build import LayerCall


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
}


def nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal within rounding."""
    return a.shape == b.shape and is_close(closeness_rows(a), closeness_rows(b), coarser(a.dtype, b.dtype))


def value_head_count(call: LayerCall, part: Attention, heads: int, width: int) -> int:
    """The number of value heads in the output of the value projection, which may have queries and keys too."""
    if isinstance(part.packing, tuple):
        return len(part.packing)
    count = linear_map(layer_submodule(call.layer, part.value))[0].shape[0] // width
    return {"alone": count, "tail": (count - heads) // 2, "interleaved": heads}[part.packing]


def latent_constant(call: LayerCall, part: Attention, shift: Tensor | None) -> Tensor | None:
    """The part of the latent vector that depends on no token: none, unless a bias or shift precedes its norm, which
    divides it by a statistic of each token."""
    assert part.latent is not None
    assert part.latent_norm is not None
    if shift is not None or linear_map(layer_submodule(call.layer, part.latent))[1] is not None:
        raise NormscopeError(
            "value_bias='remainder' is not supported here: values are made in two steps with a norm between, and a "
            "bias comes before that norm. Leave it out."
        )
    return call.norm_record(part.latent_norm, every_row=True).shift


def latent_fits(call: LayerCall, part: Attention, read: Tensor) -> bool:
    """Whether `value` reads the norm of the first outputs of `latent`."""
    if part.latent is None or part.latent_norm is None:
        return True
    normed, entered = call.output_of(part.latent_norm.path, True), call.input_of(part.latent_norm.path, True)
    made = call.output_of(part.latent, True)[..., : entered.shape[-1]]
    return nearly_equal(read, normed) and nearly_equal(made, entered)


def value_shift_and_scale(layer: nn.Module, part: Attention, like: Tensor) -> tuple[Tensor | None, Tensor | float]:
    """(heads, 1, d_h): what is added to the outputs (..., heads, j, d_h) of `value`, and what then multiplies them: a
    number, or (heads, 1, 1)."""
    shift, scale = part.value_shift, part.value_scale
    added = None if shift is None else layer_attribute(layer, shift).detach().to(like.dtype)
    factor = layer_attribute(layer, scale) if isinstance(scale, str) else scale
    if isinstance(factor, Tensor):
        factor = factor.detach().to(like.dtype).view(-1, 1, 1)
    return None if added is None else added.view(like.shape[-3], 1, -1), 1.0 if factor is None else factor


def finished_values(call: LayerCall, part: Attention, projected: Tensor) -> Tensor:
    """(b, heads of the values, j, d_h): the values that the model makes of the outputs of `value`."""
    added, factor = value_shift_and_scale(call.layer, part, projected)
    made = projected if added is None else projected + added
    made = made if part.value_scale is None else made * factor
    if part.value_norm is None:
        return made
    read, normed = (_by_head(raw, made) for raw in _only_call(call, part.value_norm))
    if not any(nearly_equal(one, made) for one in read):
        raise NormscopeError(f"{part.value_norm.path} does not read the outputs of {part.value}. Correct the family.")
    return normed[next(n for n, one in enumerate(read) if nearly_equal(one, made))]


def finished_constant(call: LayerCall, part: Attention, constant: Tensor | None, heads: int) -> Tensor | None:
    """(heads, d_h): the part of a value that depends on no token, given that of the outputs of `value`."""
    if constant is None and part.value_shift is not None:
        constant = torch.zeros_like(layer_attribute(call.layer, part.value_shift)).view(heads, -1)
    if constant is not None:
        added, factor = value_shift_and_scale(call.layer, part, constant[:, None])
        constant = ((constant[:, None] if added is None else constant[:, None] + added) * factor)[:, 0]
    if part.value_norm is None:
        return constant
    if constant is not None:
        raise NormscopeError(
            "value_bias='remainder' is not supported here: values have a bias before a norm. Leave it out."
        )
    shift = getattr(layer_submodule(call.layer, part.value_norm.path), "bias", None)
    return None if shift is None else shift.expand(heads, -1)


def value_norm_record(call: LayerCall, part: Norm, values: Tensor) -> NormRecord:
    """The record of a norm of each head's values (b, heads, j, d_h)."""
    read, normed = (_by_head(raw, values) for raw in _only_call(call, part))
    order = next((n for n, one in enumerate(normed) if nearly_equal(one, values)), None)
    if order is None:
        raise NormscopeError(f"The values are not the output of {part.path}. Correct the family.")
    return call.norm_record_of(part, read[order], normed[order])


def _only_call(call: LayerCall, part: Norm) -> tuple[Tensor, Tensor]:
    """The input and output of a norm, which must be called once."""
    ((inputs, *_),), (output,) = call.seen[part.path]
    return inputs, output


def _by_head(raw: Tensor, like: Tensor) -> list[Tensor]:
    """(b, heads, j, d_h): a tensor whose heads come after or before its tokens."""
    items, heads, tokens, width = like.shape
    return [raw.reshape(items, tokens, heads, width).transpose(1, 2), raw.reshape(items, heads, tokens, width)]


def gate_factors(call: LayerCall, gate: AttentionGate, heads: int, width: int) -> Tensor:
    """(b, i, H, d_h)"""
    interleaved = tuple(range(width, 2 * heads * width, 2 * width))
    starts = interleaved if gate.starts == "interleaved" else gate.starts
    if len(starts) != heads:
        raise NormscopeError(f"The gate {gate.path} has factors for {len(starts)} heads, not {heads}.")
    made = call.row_output(gate.path)
    own = torch.arange(1 if gate.by_head else width, device=made.device)
    columns = torch.tensor(starts, device=made.device)[:, None] + own
    factors = made[..., columns]
    if gate.bias is not None:
        factors = factors + call.cast(layer_attribute(call.layer, gate.bias))[:, None]
    return GATES[gate.function](factors).expand(*factors.shape[:-1], width)


def check_values(call: LayerCall, part: Attention, values: Tensor, norm: str | None) -> None:
    """Raise an error unless the values come from the projection and norm that give their constant part."""
    if part.value not in call.seen:
        raise NormscopeError(
            f"{part.value} was not called, so the values of {part.module} do not come from it. Correct the family."
        )
    flat, entered = call.output_of(part.value, any_length=True), call.input_of(part.entry, any_length=True)
    projected = value_rows(flat, part.packing, values.shape[1], values.shape[3]).transpose(1, 2)
    given = entered if part.cross else call.output_of(norm) if norm is not None else call.input
    weight, bias = linear_map(layer_submodule(call.layer, part.value))
    read = entered if part.latent is None else call.input_of(part.value, any_length=True)
    if (
        not nearly_equal(finished_values(call, part, projected), values)
        or not nearly_equal(given, entered)
        or not is_close_to_product(closeness_rows(read), weight.t(), bias, closeness_rows(flat))
        or not latent_fits(call, part, read)
    ):
        raise NormscopeError(
            f"The values of {part.module} do not come from {part.value} after {norm or 'no norm'}: a hook changes "
            "them, they are computed in more than one step, or the family is described incorrectly. The result "
            "with value_bias='remainder' would be wrong; use value_bias='token'."
        )


def proof_record(call: LayerCall, parts: Sequence[Record]) -> ProofRecord:
    steps = call.steps
    read = {path: call.cast(call.input_of(path)) for path in linear_paths(steps)}
    values: dict[str, Tensor] = {}
    attentions = [step.part for step in steps if isinstance(step.part, Attention)]
    for part, record in zip(attentions, (one for one in parts if isinstance(one, AttentionRecord)), strict=True):
        # A model's own code may compute values in several steps; only modifications need a proof.
        if is_plain_linear(layer_submodule(call.layer, part.value), own_hooks=1) and not is_wrapped_on_path(
            call.layer, part.value
        ):
            continue
        read[part.value] = call.cast(call.input_of(part.value, part.cross))
        output = call.cast(call.output_of(part.value, part.cross))
        _refuse_mixed_values(call, layer_submodule(call.layer, part.value), part.value, output)
        heads, width = record.values.shape[1], record.values.shape[3]
        rows = value_rows(output, packing_at(call.layer, part, heads, width), heads, width)
        values[part.value] = call.cast(finished_values(call, part, rows.transpose(1, 2)))
    return ProofRecord(read, call.plain, values, call.cast(call.encoder))


def _refuse_mixed_values(call: LayerCall, module: nn.Module, path: str, output: Tensor) -> None:
    """Raise an error if the value of a token changes when the token is alone, so depends on other tokens."""
    alone = call.cast(call.unflatten(module(call.seen[path][0][0][0][:, :1])))
    if not torch.allclose(alone, output[:, :1], rtol=1e-4, atol=1e-5 * float(output.abs().amax())):
        raise NormscopeError(
            f"{path} of layer {call.index} (counted from 0) computes the value of a token from other tokens too, "
            "so that values cannot be attributed to tokens. Remove the adapter, hook or wrapper that mixes them."
        )


def move_virtual_last(call: LayerCall, part: Attention, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Move virtual keys and values from the front to the end, so that rows and columns of tokens agree."""
    extra = weights.shape[3] - call.input.shape[1]
    if extra != call.request.virtual:
        raise NormscopeError(
            f"{part.module} attends to {weights.shape[3]} keys, but the layer reads {call.input.shape[1]} tokens. "
            "Extra keys are supported only if they come from prefix tuning with peft."
        )
    if values.shape[2] != weights.shape[3]:
        raise NormscopeError(
            f"Prefix tuning cannot be analysed in this model: the attention at {part.module} does not use the "
            "attention interface of transformers, so the values of the prefix are unknown."
        )
    if extra and call.request.constants:
        raise NormscopeError(
            "value_bias='remainder' is not supported with prefix tuning, whose values have no bias. Leave it out."
        )
    if not extra:
        return weights, values
    stored = weights.permute(0, 3, 1, 2).roll(-extra, 1)
    return stored.permute(0, 2, 3, 1), values.roll(-extra, 2)
