"""Build the record of a layer call, as plain tensors, from what the hooks saw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import (
    MATMUL,
    activation_at,
    activation_name,
    expert_parameters,
    layer_attribute,
    layer_submodule,
    linear_map,
    norm_epsilon,
    norm_inverse,
    norm_map,
    unpack_joint_activation,
    value_constant,
    value_rows,
)
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack
from normscope.tracing.call_values import latent_constant, latent_fits, nearly_equal, proof_record, value_head_count
from normscope.tracing.closeness import closeness_rows, is_close_to_product
from normscope.tracing.records import (
    AttentionRecord,
    FeedForwardRecord,
    LayerRecord,
    NormRecord,
    Projection,
    Record,
    ResidualRecord,
    ScaleRecord,
    Unit,
)


class ProbabilitySpace:
    """Buffers for attention probabilities, reused in every layer; the decomposition may overwrite them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._spaces: dict[bool, Tensor] = {}

    def take(self, second: bool, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        """(b, j, H, i) for `shape` (b, H, j, i). `second`: for the second attention of a decoder layer."""
        items, heads, columns, rows = shape
        space = self._spaces.get(second)
        if space is None or space.shape != (items, columns, heads, rows):
            if items == 1:  # close to the memory order of the model, which makes the copy cheaper
                space = torch.empty(shape, dtype=self.dtype, device=device).transpose(1, 2)
            else:  # contiguous: one stride covers the columns of all items
                space = torch.empty(items, columns, heads, rows, dtype=self.dtype, device=device)
            self._spaces[second] = space
        return space


@dataclass(frozen=True)
class RecordRequest:
    """The steps and layers of one stack to record."""

    stack: Stack
    steps: Sequence[Step]
    layers: Collection[int] | None  # None: all
    on_layer: Callable[[LayerRecord], None]  # receives each record, which is valid only during the call
    real: Tensor  # (b, n): True for tokens that are not padding
    constants: bool = False  # record the part of the values that depends on no token
    calls: Sequence[nn.Module] | None = None  # the expected layer module of each call, if known
    for_proof: bool = False  # also record what a proof needs
    virtual: int = 0  # number of virtual keys and values before those of the tokens


@dataclass(eq=False)
class LayerCall:
    """A layer call in progress: its inputs, and the inputs and outputs of its submodules so far."""

    index: int
    layer: nn.Module
    input: Tensor
    encoder: Tensor | None  # encoder states passed to the layer
    request: RecordRequest
    dtype: torch.dtype
    plain: frozenset[str]  # paths of its unmodified linear submodules
    space: ProbabilitySpace
    steps: tuple[Step, ...]  # those of the request, as the layer itself has them
    seen: dict[str, tuple[list[Any], list[Tensor]]] = field(default_factory=dict)  # path -> inputs, outputs
    attention: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # id(module) -> probabilities, values
    products: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the same by path, seen as products
    recorded: bool = False

    def record(self, y: Tensor) -> LayerRecord:
        """The record of the layer, whose output so far is y; raises an error if the layer does not fit its family."""
        try:
            return self._build_record(y, self.steps)
        except (NormscopeError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
            reason = f"{error.args[0]} was not called" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise NormscopeError(
                f"Layer {self.index} (counted from 0), a {type(self.layer).__name__}, does not match its family: "
                f"{reason}. The model was modified, or its family is described incorrectly."
            ) from error

    def _build_record(self, y: Tensor, steps: Sequence[Step]) -> LayerRecord:
        parts: list[Record] = []
        for number, step in enumerate(steps):
            part = step.part
            if isinstance(part, Attention):
                before = number - 1 if number and steps[number - 1].role == "pre" else None
                norm = None if before is None else steps[before].part
                shift = getattr(parts[before], "shift", None) if before is not None else None
                parts.append(self._attention_record(part, norm if isinstance(norm, Norm) else None, shift))
            elif isinstance(part, FeedForward):
                parts.append(self._feed_forward_record(part))
            elif isinstance(part, Experts):
                parts.append(self._experts_record(part))
            elif isinstance(part, Norm):
                parts.append(self.norm_record(part))
            elif isinstance(part, str | float):
                given = layer_attribute(self.layer, part) if isinstance(part, str) else part
                scale = torch.as_tensor(given, dtype=self.dtype, device=self.input.device).detach()
                parts.append(ScaleRecord(scale.expand(self.input.shape[-1])))
            else:
                # The sum is the input of the next component, or the output of the layer.
                parts.append(ResidualRecord(self.cast(y if step.reader is None else self.input_of(step.reader))))
        proof = proof_record(self, parts) if self.request.for_proof else None
        return LayerRecord(self.index, self.cast(self.input), tuple(parts), self.steps, proof)

    def _attention_record(self, part: Attention, before: Norm | None, shift: Tensor | None) -> AttentionRecord:
        """`before` is the norm whose output the attention reads, and `shift` its beta."""
        weight, bias = linear_map(layer_submodule(self.layer, part.output))
        weights, values = self._weights_and_values(part, weight.shape[1])
        if not part.cross:
            weights, values = self._move_virtual_last(part, weights, values)
        heads, shared = weights.shape[1], values.shape[1]
        constant = None
        if self.request.constants:
            if part.cross:  # encoder states are read without a norm
                before = shift = None
            self._check_values(part, values, None if before is None else before.path)
            if part.latent is not None:
                shift = latent_constant(self, part, shift)
            constant = value_constant(
                layer_submodule(self.layer, part.value), part.packing, shared, values.shape[3], shift
            )
        return AttentionRecord(
            weights=weights,
            values=self.cast(values),
            value_bias=None if constant is None else self.cast(constant),
            matrix=self.cast(weight).t().unflatten(0, (heads, -1)),
            bias=self.cast(bias),
            output=self.cast(self.output_of(part.output)),
            cross=part.cross,
            sinks=part.sinks,
            latent=None if part.latent_norm is None else self.norm_record(part.latent_norm),
        )

    def _weights_and_values(self, part: Attention, width: int) -> tuple[Tensor, Tensor]:
        """(b, H, i, j) and (b, heads of the values, j, d_h), from the interface, a product, or the modules named;
        `width` is that of all heads together."""
        if part.probabilities is None:
            module = layer_attribute(self.layer, part.module)
            if id(module) not in self.attention:
                raise NormscopeError(
                    f"{type(module).__name__} at {part.module} did not use the attention interface of transformers. "
                    "For such a family, set `probabilities` to the dropout module that reads the probabilities."
                )
            return self.attention[id(module)]
        if part.probabilities == MATMUL:
            if part.module not in self.products:
                raise NormscopeError(f"{part.module} multiplies no attention probabilities with values.")
            given, values = self.products[part.module]
            shared = value_head_count(self, part, given.shape[1], values.shape[3])
            values = values[:, :: given.shape[1] // shared]
        else:
            given = self.seen[part.probabilities][0][0][0]
            small = width // given.shape[1]
            shared = value_head_count(self, part, given.shape[1], small)
            values = value_rows(self.output_of(part.value, part.cross), part.packing, shared, small).transpose(1, 2)
        items, heads, rows, columns = given.shape
        space = self.space.take(part.cross, (items, heads, columns, rows), given.device)
        return space.copy_(given.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), values

    def _move_virtual_last(self, part: Attention, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Move virtual keys and values from the front to the end, so that rows and columns of tokens agree."""
        extra = weights.shape[3] - self.input.shape[1]
        if extra != self.request.virtual:
            raise NormscopeError(
                f"{part.module} attends to {weights.shape[3]} keys, but the layer reads {self.input.shape[1]} tokens. "
                "Extra keys are supported only if they come from prefix tuning with peft."
            )
        if values.shape[2] != weights.shape[3]:
            raise NormscopeError(
                f"Prefix tuning cannot be analysed in this model: the attention at {part.module} does not use the "
                "attention interface of transformers, so the values of the prefix are unknown."
            )
        if extra and self.request.constants:
            raise NormscopeError(
                "value_bias='remainder' is not supported with prefix tuning, whose values have no bias. Leave it out."
            )
        if not extra:
            return weights, values
        stored = weights.permute(0, 3, 1, 2).roll(-extra, 1)
        return stored.permute(0, 2, 3, 1), values.roll(-extra, 2)

    def _check_values(self, part: Attention, values: Tensor, norm: str | None) -> None:
        """Raise an error unless the values come from the projection and norm that give their constant part."""
        if part.value not in self.seen:
            raise NormscopeError(
                f"{part.value} was not called, so the values of {part.module} do not come from it. Correct the family."
            )
        flat, entered = self.output_of(part.value, any_length=True), self.input_of(part.entry, any_length=True)
        projected = value_rows(flat, part.packing, values.shape[1], values.shape[3]).transpose(1, 2)
        given = entered if part.cross else self.output_of(norm) if norm is not None else self.input
        weight, bias = linear_map(layer_submodule(self.layer, part.value))
        read = entered if part.latent is None else self.input_of(part.value, any_length=True)
        if (
            not nearly_equal(projected, values)
            or not nearly_equal(given, entered)
            or not is_close_to_product(closeness_rows(read), weight.t(), bias, closeness_rows(flat))
            or not latent_fits(self, part, read)
        ):
            raise NormscopeError(
                f"The values of {part.module} do not come from {part.value} after {norm or 'no norm'}: a hook changes "
                "them, they are computed in more than one step, or the family is described incorrectly. The result "
                "with value_bias='remainder' would be wrong; use value_bias='token'."
            )

    def norm_record(self, part: Norm) -> NormRecord:
        module: Any = layer_submodule(self.layer, part.path)
        x, output = self.cast(self.input_of(part.path)), self.cast(self.output_of(part.path))
        if isinstance(module, nn.Identity):
            return NormRecord("rms", torch.ones_like(x[..., 0]), torch.ones_like(x[0, 0]), None, output)
        centred = part.kind == "layer"
        epsilon, weight = norm_epsilon(module), getattr(module, "weight", None)
        unusual = part.probed or hasattr(module, "base_layer") or not isinstance(weight, Tensor | None)
        if epsilon is None or unusual:
            gain, shift = (self.cast(one) for one in norm_map(module, x.shape[-1], centred))
            inverse = norm_inverse(x, output, gain, shift, centred)
            return NormRecord(part.kind, inverse, gain, shift, output)
        gain = torch.ones_like(x[0, 0]) if weight is None else self.cast(weight)
        gain = gain + part.offset if part.offset else gain
        if centred:  # 1 / sqrt(variance + eps), as returned by the kernel that the model uses
            # The kernel is twice as fast with a gain as without.
            inverse = torch.native_layer_norm(x, [x.shape[-1]], gain, None, epsilon)[2][..., 0]
        else:
            inverse = (x.square().mean(-1) + epsilon).rsqrt()
        return NormRecord(part.kind, inverse, gain, self.cast(getattr(module, "bias", None)), output)

    def _feed_forward_record(self, part: FeedForward) -> FeedForwardRecord:
        return FeedForwardRecord((self._unit(part),), self.cast(self.output_of(part.out)))

    def _unit(self, part: FeedForward) -> Unit:
        into = self._projection(part.into)
        up = None
        if part.up == part.into:
            first, second = (_projection_half(into, n, part.packing == "interleaved") for n in range(2))
            into, up = (second, first) if part.packing == "swapped" else (first, second)
        elif part.up is not None:
            up = self._projection(part.up)
        out, out_bias = linear_map(layer_submodule(self.layer, part.out))
        activation = activation_at(self.layer, part.activation)
        return Unit(
            into=into,
            up=up,
            # `forward` bypasses hooks; the proof finds out if they change values.
            activation=activation.forward if isinstance(activation, nn.Module) else activation,
            activation_name=activation_name(activation),
            out=self.cast(out).t(),
            out_bias=self.cast(out_bias),
        )

    def _projection(self, path: str) -> Projection:
        weight, bias = linear_map(layer_submodule(self.layer, path))
        return Projection(self.cast(weight).t(), self.cast(bias), self.cast(self.output_of(path)))

    def _experts_record(self, part: Experts) -> FeedForwardRecord:
        """One unit for each expert that some token chose, with its hidden states on all tokens."""
        module: Any = layer_submodule(self.layer, part.module)
        x, chosen, routing = (self.unflatten(given) for given in self.seen[part.module][0][0][:3])
        x, routing = self.cast(x), self.cast(routing)
        activation = layer_attribute(self.layer, part.activation)
        units = []
        for expert in chosen.unique().tolist():
            weight, bias = expert_parameters(module, part.into, part.into_bias, expert, part.transposed)
            out, out_bias = expert_parameters(module, part.out, part.out_bias, expert, part.transposed)
            weight, bias, out, out_bias = (self.cast(one) for one in (weight, bias, out, out_bias))
            both = Projection(weight, bias, x @ weight if bias is None else x @ weight + bias)
            into, up = (_projection_half(both, n, part.interleaved) for n in range(2))
            plain = activation.forward if isinstance(activation, nn.Module) else activation
            unit = Unit(into, up, plain, activation_name(activation), out, out_bias)
            if part.bend is not None:
                unit = replace(
                    unit,
                    joint=unpack_joint_activation(activation, part.interleaved),
                    bend=float(layer_attribute(module, part.bend)),
                )
            units.append(replace(unit, routing=(routing * (chosen == expert)).sum(-1)))
        output = self.cast(self.output_of(part.module))
        if part.shared is not None:
            made = self.cast(self.output_of(part.shared.out))
            gate = torch.ones_like(made[..., 0])
            if part.shared_gate is not None:
                gate = self.cast(self.output_of(part.shared_gate)).sigmoid()[..., 0]
            units.append(replace(self._unit(part.shared), routing=gate))
            output = output + gate[..., None] * made
        return FeedForwardRecord(tuple(units), output)

    def cast(self, tensor: Any) -> Any:
        if tensor is None or (tensor.dtype == self.dtype and not tensor.requires_grad):
            return tensor
        return tensor.detach().to(self.dtype)

    def input_of(self, path: str, any_length: bool = False) -> Tensor:
        """(b, n, ...): the input of a submodule; `any_length`: it need not have the layer's tokens."""
        return self._join_tokens(path, [args[0] for args in self.seen[path][0]], any_length)

    def output_of(self, path: str, any_length: bool = False) -> Tensor:
        """(b, n, ...): the output of a submodule."""
        return self._join_tokens(path, self.seen[path][1], any_length)

    def _join_tokens(self, path: str, pieces: list[Tensor], any_length: bool) -> Tensor:
        whole = self.unflatten(_join_chunks(pieces))
        if not any_length and whole.shape[:2] != self.input.shape[:2]:
            raise NormscopeError(
                f"{path} was called on {whole.shape[1]} tokens in layer {self.index} (counted from 0), whose input has "
                f"{self.input.shape[1]}. It must be called exactly once for every token."
            )
        return whole

    def unflatten(self, x: Tensor) -> Tensor:
        """(b, n, ...), even if the model has flattened items and tokens into one dimension, or has one in between."""
        if x.dim() > self.input.dim():
            return x.flatten(1, -2)
        return x.unflatten(0, (len(self.input), -1)) if x.dim() < self.input.dim() else x


def _projection_half(both: Projection, number: int, interleaved: bool = False) -> Projection:
    """The first or second half of a projection's hidden units, or every other unit if `interleaved`."""

    def part(x: Tensor) -> Tensor:
        return x[..., number::2] if interleaved else x.chunk(2, -1)[number]

    return Projection(part(both.weight), None if both.bias is None else part(both.bias), part(both.hidden))


def _join_chunks(pieces: list[Tensor]) -> Tensor:
    """Join the pieces of the sequence on which `chunk_size_feed_forward` runs a module."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def check_last_norm(call: LayerCall, y: Tensor) -> None:
    """Raise an error if the output of a layer differs from that of its final norm, because a hook changes it."""
    request = call.request
    last = call.steps[-1].part
    whole = len(call.steps) == len(layer_steps(request.stack.blocks))
    if not whole or not isinstance(last, Norm) or last.path not in call.seen or request.for_proof:
        return  # a proof compares the output with that of a plain pass
    norm_output = call.output_of(last.path)
    if norm_output.data_ptr() != y.data_ptr() and not torch.allclose(
        norm_output[request.real], y[request.real], 1e-5, 1e-6
    ):
        raise NormscopeError(
            f"Layer {call.index} (counted from 0) does not output what {last.path}, its last component, outputs: a "
            "hook or wrapper changes it. Remove the hook or wrapper."
        )


def check_finite(x: Tensor, real: Tensor, subject: str) -> None:
    """Raise an error if a token that is not padding has NaN or infinite values; `subject` starts its message."""
    # If the sum is finite, all elements are. Padding may make it infinite, so then each token is checked.
    if not isfinite(x.sum().item()) and not bool(torch.isfinite(x[real]).all()):
        raise NormscopeError(f"{subject} NaN or infinite values. Check the weights and dtype of the model.")


def is_encoder_output(value: Any) -> bool:
    """True for a float tensor of 3 dimensions: among the later arguments of a layer, only encoder states are one."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
