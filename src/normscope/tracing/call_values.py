"""The values of an attention inside a layer call: their heads, the two steps that may make them, and what a proof of
them needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import (
    is_plain_linear,
    is_wrapped_on_path,
    layer_submodule,
    linear_map,
    linear_paths,
    value_rows,
)
from normscope.models.spec import Attention
from normscope.tracing.closeness import closeness_rows, coarser, is_close
from normscope.tracing.records import AttentionRecord, ProofRecord, Record

if TYPE_CHECKING:
    from normscope.tracing.build import LayerCall


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
    return call.norm_record(part.latent_norm).shift


def latent_fits(call: LayerCall, part: Attention, read: Tensor) -> bool:
    """Whether `value` reads the norm of the first outputs of `latent`."""
    if part.latent is None or part.latent_norm is None:
        return True
    normed, entered = call.output_of(part.latent_norm.path, True), call.input_of(part.latent_norm.path, True)
    made = call.output_of(part.latent, True)[..., : entered.shape[-1]]
    return nearly_equal(read, normed) and nearly_equal(made, entered)


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
        rows = value_rows(output, part.packing, record.values.shape[1], record.values.shape[3])
        values[part.value] = rows.transpose(1, 2)
    return ProofRecord(read, call.plain, values, call.cast(call.encoder))


def _refuse_mixed_values(call: LayerCall, module: nn.Module, path: str, output: Tensor) -> None:
    """Raise an error if the value of a token changes when the token is alone, so depends on other tokens."""
    alone = call.cast(call.unflatten(module(call.seen[path][0][0][0][:, :1])))
    if not torch.allclose(alone, output[:, :1], rtol=1e-4, atol=1e-5 * float(output.abs().amax())):
        raise NormscopeError(
            f"{path} of layer {call.index} (counted from 0) computes the value of a token from other tokens too, "
            "so that values cannot be attributed to tokens. Remove the adapter, hook or wrapper that mixes them."
        )
