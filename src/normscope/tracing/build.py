"""Build the record of a layer call, as plain tensors, from what the hooks saw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import (
    MATMUL,
    activation_at,
    activation_name,
    layer_attribute,
    layer_submodule,
    linear_map,
    norm_epsilon,
    norm_inverse,
    norm_map,
    value_constant,
    value_rows,
)
from normscope.models.scopes import Step
from normscope.models.spec import Attention, Experts, FeedForward, Multiplier, Norm, Stack
from normscope.tracing.build_experts import experts_record, projection_half
from normscope.tracing.build_recurrence import recurrence_record
from normscope.tracing.call_values import (
    check_values,
    finished_constant,
    finished_values,
    gate_factors,
    latent_constant,
    move_virtual_last,
    proof_record,
    value_head_count,
    value_norm_record,
)
from normscope.tracing.recorded import fold_norm, gather_rows
from normscope.tracing.records import (
    AttentionRecord,
    AttentionRows,
    FeedForwardRecord,
    LayerRecord,
    NormRecord,
    Projection,
    Record,
    ResidualRecord,
    ScaleRecord,
    Unit,
)
from normscope.tracing.recurrence_calls import RecurrenceCall
from normscope.tracing.sinks import attend_with_sinks


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
    positions: Tensor | None = None  # (b, R): the rows to record; None: all
    recompute: bool = False  # record what recomputes attention weights instead of the weights, where that is possible

    @property
    def in_blocks(self) -> bool:
        """Whether no attention has to keep all its probabilities: all use the attention interface of transformers."""
        attentions = (step.part for step in self.steps if isinstance(step.part, Attention))
        known = all(part.probabilities is None and part.sink_scores is None for part in attentions)
        return known and not self.virtual and (self.recompute or self.positions is not None)


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
    attention_rows: dict[int, tuple[AttentionRows, Tensor, Tensor]] = field(default_factory=dict)  # with values, output
    recurrences: list[tuple[str, RecurrenceCall]] = field(default_factory=list)  # function -> its call
    kept_rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # path -> input, output at `positions`
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
                parts.append(_attention_record(self, part, norm if isinstance(norm, Norm) else None, shift))
            elif isinstance(part, FeedForward):
                parts.append(_feed_forward_record(self, part))
            elif isinstance(part, Experts):
                shared = None if part.shared is None else _unit(self, part.shared)
                parts.append(experts_record(self, part, shared))
            elif isinstance(part, Norm):
                parts.append(self.norm_record(part))
            elif isinstance(part, str | float | tuple):
                parts.append(ScaleRecord(self._multiplier(part)))
            else:
                # The sum is the input of the next component, or the output of the layer.
                total = self.rows_of(y) if step.reader is None else self.row_input(step.reader)
                parts.append(ResidualRecord(total, None if step.skip is None else self._multiplier(step.skip)))
        proof = proof_record(self, parts) if self.request.for_proof else None
        return LayerRecord(self.index, self.cast(self.input), tuple(parts), self.steps, proof)

    def attend(
        self, eager: Callable[..., Any], given: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The output and probabilities (b, H, i, j) of an eager attention."""
        parts = [step.part for step in self.steps if isinstance(step.part, Attention)]
        if any(part.sink_scores is not None for part in parts):
            return attend_with_sinks(self, eager, given, kwargs)
        return eager(*given, **kwargs)  # type: ignore[no-any-return]

    def _multiplier(self, given: Multiplier) -> Tensor:
        """(d,): a number, this layer's among those of all layers, or the number or parameter at a path."""
        value = given[self.index] if isinstance(given, tuple) else given
        value = layer_attribute(self.layer, value) if isinstance(value, str) else value
        factor = torch.as_tensor(value, dtype=self.dtype, device=self.input.device).detach()
        return factor.expand(self.input.shape[-1])

    def norm_record(self, part: Norm, every_row: bool = False) -> NormRecord:
        """The record of a norm of the layer's width, or of another width."""
        if every_row:
            return self.norm_record_of(part, self.input_of(part.path), self.output_of(part.path))
        return self.norm_record_of(part, self.row_input(part.path), self.row_output(part.path))

    def norm_record_of(self, part: Norm, x: Tensor, output: Tensor) -> NormRecord:
        """The record of a norm that read x (..., d) and returned `output`."""
        module: Any = layer_submodule(self.layer, part.path)
        x, output = self.cast(x), self.cast(output)
        if isinstance(module, nn.Identity):
            return NormRecord("rms", torch.ones_like(x[..., 0]), x.new_ones(x.shape[-1]), None, output)
        centred = part.kind == "layer"
        epsilon, weight = norm_epsilon(module), getattr(module, "weight", None)
        unusual = part.probed or hasattr(module, "base_layer") or not isinstance(weight, Tensor | None)
        if epsilon is None or unusual:
            gain, shift = (self.cast(one) for one in norm_map(module, x.shape[-1], centred))
            inverse = norm_inverse(x, output, gain, shift, centred)
            return NormRecord(part.kind, inverse, gain, shift, output)
        gain = x.new_ones(x.shape[-1]) if weight is None else self.cast(weight)
        gain = gain + part.offset if part.offset else gain
        if centred:  # 1 / sqrt(variance + eps), as returned by the kernel that the model uses
            # The kernel is twice as fast with a gain as without.
            inverse = torch.native_layer_norm(x, [x.shape[-1]], gain, None, epsilon)[2][..., 0]
        else:
            inverse = (x.square().mean(-1) + epsilon).rsqrt()
        return NormRecord(part.kind, inverse, gain, self.cast(getattr(module, "bias", None)), output)

    def cast(self, tensor: Any) -> Any:
        if tensor is None or (tensor.dtype == self.dtype and not tensor.requires_grad):
            return tensor
        return tensor.detach().to(self.dtype)

    def rows_of(self, x: Tensor) -> Tensor:
        """(b, R, ...): the requested rows of x (b, n, ...), cast."""
        positions = self.request.positions
        return self.cast(x if positions is None else gather_rows(x, positions))  # type: ignore[no-any-return]

    def row_input(self, path: str) -> Tensor:
        """(b, R, ...): the input of a submodule at the requested rows."""
        kept = self.kept_rows.get(path)
        return self.rows_of(self.input_of(path)) if kept is None else self.cast(kept[0])

    def row_output(self, path: str) -> Tensor:
        """(b, R, ...): the output of a submodule at the requested rows."""
        kept = self.kept_rows.get(path)
        return self.rows_of(self.output_of(path)) if kept is None else self.cast(kept[1])

    def keep_rows(self, path: str) -> None:
        """Once a submodule was called on all tokens, keep only the requested rows of its input and output."""
        inputs, outputs = self.seen[path]
        if path in self.kept_rows:
            self._refuse_calls(path, 2 * self.input.shape[1])
        if sum(one.numel() // one.shape[-1] for one in outputs) >= self.input.shape[0] * self.input.shape[1]:
            rows = self.request.positions
            self.kept_rows[path] = gather_rows(self.input_of(path), rows), gather_rows(self.output_of(path), rows)
            inputs.clear()
            outputs.clear()

    def input_of(self, path: str, any_length: bool = False) -> Tensor:
        """(b, n, ...): the input of a submodule; `any_length`: it need not have the layer's tokens."""
        return self._join_tokens(path, [args[0] for args in self.seen[path][0]], any_length)

    def output_of(self, path: str, any_length: bool = False) -> Tensor:
        """(b, n, ...): the output of a submodule."""
        return self._join_tokens(path, self.seen[path][1], any_length)

    def _join_tokens(self, path: str, pieces: list[Tensor], any_length: bool) -> Tensor:
        whole = self.unflatten(_join_chunks(pieces))
        if not any_length and whole.shape[:2] != self.input.shape[:2]:
            self._refuse_calls(path, whole.shape[1])
        return whole

    def _refuse_calls(self, path: str, count: int) -> NoReturn:
        raise NormscopeError(
            f"{path} was called on {count} tokens in layer {self.index} (counted from 0), whose input has "
            f"{self.input.shape[1]}. It must be called exactly once for every token."
        )

    def unflatten(self, x: Tensor) -> Tensor:
        """(b, n, ...), even if the model has flattened items and tokens into one dimension, or has one in between."""
        if x.dim() > self.input.dim():
            return x.flatten(1, -2)
        return x.unflatten(0, (len(self.input), -1)) if x.dim() < self.input.dim() else x


def _attention_record(call: LayerCall, part: Attention, before: Norm | None, shift: Tensor | None) -> AttentionRecord:
    """`before` is the norm whose output the attention reads, and `shift` its beta."""
    if part.recurrence is not None:
        return recurrence_record(call, part, shift)
    weight, bias = linear_map(layer_submodule(call.layer, part.output))
    rows, mixed, every_row = None, None, call.request.positions is None
    found = None if part.probabilities else call.attention_rows.get(id(layer_attribute(call.layer, part.module)))
    if found is not None:
        rows, values, mixed = found
        weights = _some_weights(call, rows, values)
    else:
        weights, values = _weights_and_values(call, part, weight.shape[1])
        if not part.cross and (call.request.virtual or weights.shape[3] != call.input.shape[1]):
            weights, values = move_virtual_last(call, part, weights, values)
        if not every_row:
            weights = gather_rows(weights.transpose(1, 2), call.request.positions).transpose(1, 2)
    heads, shared = weights.shape[1], values.shape[1]
    constant = None
    if call.request.constants:
        if part.cross:  # encoder states are read without a norm
            before = shift = None
        check_values(call, part, values, None if before is None else before.path)
        if part.latent is not None:
            shift = latent_constant(call, part, shift)
        projection = layer_submodule(call.layer, part.value)
        constant = value_constant(projection, part.packing, shared, values.shape[3], shift)
        constant = finished_constant(call, part, constant, shared)
    inner = None if part.inner_norm is None else call.norm_record(part.inner_norm)
    matrix, bias = call.cast(weight).t(), call.cast(bias)
    if inner is not None:
        matrix, bias = fold_norm(inner, matrix, bias)
    output = call.row_output(part.output)
    if part.output_bias is not None:
        added = call.cast(layer_attribute(call.layer, part.output_bias))
        output, bias = output + added, added if bias is None else bias + added
    return AttentionRecord(
        weights=weights,
        values=call.cast(values),
        value_bias=None if constant is None else call.cast(constant),
        matrix=matrix.unflatten(0, (heads, -1)),
        bias=bias,
        output=output,
        cross=part.cross,
        sinks=part.sinks,
        latent=None if part.latent_norm is None else call.norm_record(part.latent_norm, every_row=True),
        value_norm=None if part.value_norm is None else value_norm_record(call, part.value_norm, values),
        gate=None if part.gate is None else gate_factors(call, part.gate, heads, len(matrix) // heads),
        inner=inner,
        row_scale=None if inner is None else inner.inverse,
        rows=rows if every_row else None,
        mixed=call.cast(mixed.flatten(2)) if every_row and mixed is not None else None,
    )


def _some_weights(call: LayerCall, rows: AttentionRows, values: Tensor) -> Tensor:
    """(b, H, R, j): the weights of the requested rows; no rows if the record recomputes them."""
    items, heads, _, columns = rows.shape
    if call.request.positions is None:
        return values.new_empty(items, heads, 0, columns, dtype=call.dtype)
    found = call.cast(rows.compute(call.request.positions))
    rows.refuse_misfit()
    return found.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # type: ignore[no-any-return]


def _weights_and_values(call: LayerCall, part: Attention, width: int) -> tuple[Tensor, Tensor]:
    """(b, H, i, j) and (b, heads of the values, j, d_h), from the interface, a product, or the modules named;
    `width` is that of all heads together."""
    if part.probabilities is None:
        module = layer_attribute(call.layer, part.module)
        if id(module) not in call.attention:
            raise NormscopeError(
                f"{type(module).__name__} at {part.module} did not use the attention interface of transformers. "
                "For such a family, set `probabilities` to the dropout module that reads the probabilities."
            )
        return call.attention[id(module)]
    if part.probabilities == MATMUL:
        if part.module not in call.products:
            raise NormscopeError(f"{part.module} multiplies no attention probabilities with values.")
        given, values = call.products[part.module]
        shared = value_head_count(call, part, given.shape[1], values.shape[3])
        values = values[:, :: given.shape[1] // shared]
    else:
        given = call.seen[part.probabilities][0][0][0]
        small = width // given.shape[1]
        shared = value_head_count(call, part, given.shape[1], small)
        made = value_rows(call.output_of(part.value, part.cross), part.packing, shared, small).transpose(1, 2)
        values = finished_values(call, part, made)
    items, heads, rows, columns = given.shape
    space = call.space.take(part.cross, (items, heads, columns, rows), given.device)
    return space.copy_(given.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), values


def _feed_forward_record(call: LayerCall, part: FeedForward) -> FeedForwardRecord:
    inner = None if part.inner_norm is None else call.norm_record(part.inner_norm)
    unit = _unit(call, part)
    if inner is not None:
        out, out_bias = fold_norm(inner, unit.out, unit.out_bias)
        unit = replace(unit, out=out, out_bias=out_bias, inverse=inner.inverse)
    return FeedForwardRecord((unit,), call.row_output(part.out), inner)


def _unit(call: LayerCall, part: FeedForward) -> Unit:
    into = _projection(call, part.into)
    up = None
    if part.up == part.into:
        first, second = (projection_half(into, n, part.packing == "interleaved") for n in range(2))
        into, up = (second, first) if part.packing == "swapped" else (first, second)
    elif part.up is not None:
        up = _projection(call, part.up)
    out, out_bias = linear_map(layer_submodule(call.layer, part.out))
    activation = activation_at(call.layer, part.activation)
    return Unit(
        into=into,
        up=up,
        # `forward` bypasses hooks; the proof finds out if they change values.
        activation=activation.forward if isinstance(activation, nn.Module) else activation,
        activation_name=activation_name(activation),
        out=call.cast(out).t(),
        out_bias=call.cast(out_bias),
    )


def _projection(call: LayerCall, path: str) -> Projection:
    weight, bias = linear_map(layer_submodule(call.layer, path))
    return Projection(call.cast(weight).t(), call.cast(bias), call.row_output(path))


def _join_chunks(pieces: list[Tensor]) -> Tensor:
    """Join the pieces of the sequence on which `chunk_size_feed_forward` runs a module."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
