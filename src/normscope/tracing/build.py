"""From what was seen of a layer call to its record: plain tensors, and no trace of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import (
    activation_name,
    expert_parameters,
    is_plain_linear,
    is_wrapped_on_path,
    layer_attribute,
    layer_submodule,
    linear_map,
    linear_paths,
    norm_epsilon,
    norm_inverse,
    norm_map,
    unpack_joint_activation,
    value_constant,
    value_rows,
)
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack
from normscope.tracing.closeness import coarser, equal, is_product, rows_of
from normscope.tracing.records import (
    AttentionRecord,
    FeedForwardRecord,
    LayerRecord,
    Links,
    NormRecord,
    Projection,
    Record,
    ResidualRecord,
    ScaleRecord,
    Unit,
)


class ProbabilitySpace:
    """Memory for attention probabilities, reused in every layer; the decomposition may overwrite it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._spaces: dict[bool, Tensor] = {}

    def take(self, second: bool, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        """(b, j, H, i) for `shape` (b, H, j, i). `second`: for the second attention of a decoder's layer."""
        items, heads, columns, rows = shape
        space = self._spaces.get(second)
        if space is None or space.shape != (items, columns, heads, rows):
            if items == 1:  # as close to the model's own order as the products allow: the copy is cheaper
                space = torch.empty(shape, dtype=self.dtype, device=device).transpose(1, 2)
            else:  # one stride for the columns of all items
                space = torch.empty(items, columns, heads, rows, dtype=self.dtype, device=device)
            self._spaces[second] = space
        return space


@dataclass(frozen=True)
class RecordRequest:
    """What is to be recorded of one side of a model."""

    stack: Stack
    steps: Sequence[Step]
    layers: Collection[int] | None  # None: all that there are
    on_layer: Callable[[LayerRecord], None]  # receives each wanted layer's record, which is gone when it returns
    real: Tensor  # (b, n): the tokens that are not padding
    constants: bool = False  # record what part of the values comes from no token
    calls: Sequence[nn.Module] | None = None  # the layer module of every call, where that is known
    links: bool = False  # record what the linear submodules read
    virtual: int = 0  # keys and values in front of the tokens' own that come from no token


@dataclass(eq=False)
class LayerCall:
    """One call of a layer while it runs: what it was given, and what its submodules have read and made so far."""

    index: int
    layer: nn.Module
    input: Tensor
    encoder: Tensor | None  # what it may read beside its input
    wanted: RecordRequest
    dtype: torch.dtype
    plain: frozenset[str]  # the paths of its plain linear submodules
    space: ProbabilitySpace
    seen: dict[str, tuple[list[Any], list[Tensor]]] = field(default_factory=dict)  # path -> inputs, outputs
    attention: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # id(module) -> probabilities, values
    recorded: bool = False

    def record(self, y: Tensor) -> LayerRecord:
        """The record of the layer, which has come to y; one whose parts do not fit together is refused."""
        try:
            return self._record(y, self.wanted.steps)
        except (NormscopeError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
            what = f"{error.args[0]} was not called" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise NormscopeError(
                f"Layer {self.index} (counted from 0), a {type(self.layer).__name__}, is not what its family says: "
                f"{what}. This is a modified model, or its family is described wrongly."
            ) from error

    def _record(self, y: Tensor, steps: Sequence[Step]) -> LayerRecord:
        parts: list[Record] = []
        for number, step in enumerate(steps):
            part = step.part
            if isinstance(part, Attention):
                before = number - 1 if number and steps[number - 1].role == "pre" else None
                norm = None if before is None else steps[before].part
                shift = getattr(parts[before], "shift", None) if before is not None else None
                parts.append(self._attention(part, norm if isinstance(norm, Norm) else None, shift))
            elif isinstance(part, FeedForward):
                parts.append(self._feed_forward(part))
            elif isinstance(part, Experts):
                parts.append(self._experts(part))
            elif isinstance(part, Norm):
                parts.append(self._norm(part))
            elif isinstance(part, str):
                scale = self._cast(torch.as_tensor(layer_attribute(self.layer, part)))
                parts.append(ScaleRecord(scale.expand(self.input.shape[-1])))
            else:
                # The sum itself is what the next component reads, or what the layer outputs.
                parts.append(ResidualRecord(self._cast(y if step.reader is None else self.input_of(step.reader))))
        links = None
        if self.wanted.links:
            links = self._links(steps, parts)
        return LayerRecord(self.index, self._cast(self.input), tuple(parts), links)

    def _links(self, steps: Sequence[Step], parts: Sequence[Record]) -> Links:
        read = {path: self._cast(self.input_of(path)) for path in linear_paths(steps)}
        values: dict[str, Tensor] = {}
        attentions = [step.part for step in steps if isinstance(step.part, Attention)]
        for part, record in zip(attentions, (one for one in parts if isinstance(one, AttentionRecord)), strict=True):
            # By its own code a model may make values in more steps than one; what others have changed must be proved.
            if is_plain_linear(layer_submodule(self.layer, part.value), besides=1) and not is_wrapped_on_path(
                self.layer, part.value
            ):
                continue
            read[part.value] = self._cast(self.input_of(part.value, part.cross))
            made = self._cast(self.output_of(part.value, part.cross))
            self._refuse_mixed_values(layer_submodule(self.layer, part.value), part.value, made)
            rows = value_rows(made, part.packing, record.values.shape[1], record.values.shape[3])
            values[part.value] = rows.transpose(1, 2)
        return Links(read, self.plain, values, self._cast(self.encoder))

    def _refuse_mixed_values(self, module: nn.Module, path: str, made: Tensor) -> None:
        """A token's value must come from that token: alone it must be the same."""
        alone = self._cast(self.shape(module(self.seen[path][0][0][0][:, :1])))
        if not torch.allclose(alone, made[:, :1], rtol=1e-4, atol=1e-5 * float(made.abs().amax())):
            raise NormscopeError(
                f"{path} of layer {self.index} (counted from 0) makes a token's value of other tokens too: an adapter, "
                "hook or wrapper there mixes them, so that no value belongs to one token."
            )

    def _attention(self, part: Attention, before: Norm | None, shift: Tensor | None) -> AttentionRecord:
        """`before` is the norm whose output the attention reads, `shift` its beta."""
        weight, bias = linear_map(layer_submodule(self.layer, part.output))
        if part.probabilities is None:
            module = layer_attribute(self.layer, part.module)
            if id(module) not in self.attention:
                raise NormscopeError(
                    f"{type(module).__name__} at {part.module} did not use transformers' attention interface. A family "
                    "whose attention does not, names its dropout module in `probabilities`."
                )
            weights, values = self.attention[id(module)]
        else:
            given = self.seen[part.probabilities][0][0][0]
            items, heads, rows, columns = given.shape
            kept = self.space.take(bool(self.attention), (items, heads, columns, rows), given.device).copy_(
                given.permute(0, 3, 1, 2)
            )
            weights = kept.permute(0, 2, 3, 1)
            flat, width = self.output_of(part.value, part.cross), weight.shape[1] // heads
            count = flat.shape[-1] // width  # of heads side by side; a packed projection has queries and keys too
            shared = {"alone": count, "tail": (count - heads) // 2, "interleaved": heads}[part.packing]
            values = value_rows(flat, part.packing, shared, width).transpose(1, 2)
        if not part.cross:
            weights, values = self._own_first(part, weights, values)
        heads, shared = weights.shape[1], values.shape[1]
        constant = None
        if self.wanted.constants:
            if part.cross:  # the encoder's vectors are tokens as they are
                before = shift = None
            self._check_values(part, values, None if before is None else before.path)
            constant = value_constant(
                layer_submodule(self.layer, part.value), part.packing, shared, values.shape[3], shift
            )
        return AttentionRecord(
            weights=weights,
            values=self._cast(values),
            value_bias=None if constant is None else self._cast(constant),
            matrix=self._cast(weight).t().unflatten(0, (heads, -1)),
            bias=self._cast(bias),
            output=self._cast(self.output_of(part.output)),
            cross=part.cross,
            sinks=part.sinks,
        )

    def _own_first(self, part: Attention, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that are no token's stand in front; behind the tokens' own, rows and columns agree."""
        more = weights.shape[3] - self.input.shape[1]
        if more != self.wanted.virtual:
            raise NormscopeError(
                f"{part.module} attends to {weights.shape[3]} keys, but the layer reads {self.input.shape[1]} tokens."
            )
        if values.shape[2] != weights.shape[3]:
            raise NormscopeError(
                f"Prefix tuning of a model whose attention at {part.module} does not use transformers' "
                "attention interface cannot be analysed: its values are not seen."
            )
        if more and self.wanted.constants:
            raise NormscopeError("value_bias='remainder' is not for prefix tuning, whose values have no such bias.")
        if not more:
            return weights, values
        stored = weights.permute(0, 3, 1, 2).roll(-more, 1)
        return stored.permute(0, 2, 3, 1), values.roll(-more, 2)

    def _check_values(self, part: Attention, values: Tensor, norm: str | None) -> None:
        """The constant part of the values is read from the projection and the norm before it: they must be the ones."""
        if part.value not in self.seen:
            raise NormscopeError(f"{part.value} is not called: the values of {part.module} do not come from it.")
        flat, entered = self.output_of(part.value, elsewhere=True), self.input_of(part.value, elsewhere=True)
        made = value_rows(flat, part.packing, values.shape[1], values.shape[3]).transpose(1, 2)
        given = entered if part.cross else self.output_of(norm) if norm is not None else self.input
        weight, bias = linear_map(layer_submodule(self.layer, part.value))
        if (
            not _close(made, values)
            or not _close(given, entered)
            or not is_product(rows_of(entered), weight.t(), bias, rows_of(flat))
        ):
            raise NormscopeError(
                f"The values of {part.module} do not come from {part.value} behind {norm or 'no norm'}: a hook changes "
                "them, they are made in more than one step, or the family is described wrongly. With "
                "value_bias='remainder' the result would be wrong."
            )

    def _norm(self, part: Norm) -> NormRecord:
        module: Any = layer_submodule(self.layer, part.path)
        x, output = self._cast(self.input_of(part.path)), self._cast(self.output_of(part.path))
        if isinstance(module, nn.Identity):
            return NormRecord("rms", torch.ones_like(x[..., 0]), torch.ones_like(x[0, 0]), None, output)
        centred = part.kind == "layer"
        epsilon, weight = norm_epsilon(module), getattr(module, "weight", None)
        if epsilon is None or not isinstance(weight, Tensor | None) or hasattr(module, "base_layer"):
            gain, shift = (self._cast(one) for one in norm_map(module, x.shape[-1], centred))
            inverse = norm_inverse(x, output, gain, shift, centred)
            return NormRecord(part.kind, inverse, gain, shift, output)
        gain = torch.ones_like(x[0, 0]) if weight is None else self._cast(weight)
        gain = gain + part.offset if part.offset else gain
        if centred:  # 1 / sqrt(variance + eps), the statistic that the model's own kernel returns
            # Without a gain the kernel would be half as fast.
            inverse = torch.native_layer_norm(x, [x.shape[-1]], gain, None, epsilon)[2][..., 0]
        else:
            inverse = (x.square().mean(-1) + epsilon).rsqrt()
        return NormRecord(part.kind, inverse, gain, self._cast(getattr(module, "bias", None)), output)

    def _feed_forward(self, part: FeedForward) -> FeedForwardRecord:
        into = self._projection(part.into)
        up = None
        if part.up == part.into:
            into, up = (_half(into, n) for n in range(2))
        elif part.up is not None:
            up = self._projection(part.up)
        out, out_bias = linear_map(layer_submodule(self.layer, part.out))
        activation = layer_attribute(self.layer, part.activation)
        unit = Unit(
            into=into,
            up=up,
            # A hook there may change values; whether the activation alone explains them is then found out.
            activation=activation.forward if isinstance(activation, nn.Module) else activation,
            activation_name=activation_name(activation),
            out=self._cast(out).t(),
            out_bias=self._cast(out_bias),
        )
        return FeedForwardRecord((unit,), self._cast(self.output_of(part.out)))

    def _projection(self, path: str) -> Projection:
        weight, bias = linear_map(layer_submodule(self.layer, path))
        return Projection(self._cast(weight).t(), self._cast(bias), self._cast(self.output_of(path)))

    def _experts(self, part: Experts) -> FeedForwardRecord:
        """Every expert that was chosen by some token, with the hidden states it has, or would have, on all of them."""
        module: Any = layer_submodule(self.layer, part.module)
        x, chosen, routing = (self.shape(given) for given in self.seen[part.module][0][0][:3])
        x, routing = self._cast(x), self._cast(routing)
        activation = layer_attribute(self.layer, part.activation)
        units = []
        for expert in chosen.unique().tolist():
            weight, bias = expert_parameters(module, part.into, part.into_bias, expert, part.transposed)
            out, out_bias = expert_parameters(module, part.out, part.out_bias, expert, part.transposed)
            weight, bias, out, out_bias = (self._cast(one) for one in (weight, bias, out, out_bias))
            both = Projection(weight, bias, x @ weight if bias is None else x @ weight + bias)
            into, up = (_half(both, n, part.interleaved) for n in range(2))
            plain = activation.forward if isinstance(activation, nn.Module) else activation
            unit = Unit(into, up, plain, activation_name(activation), out, out_bias)
            if part.bend is not None:
                unit = replace(
                    unit,
                    joint=unpack_joint_activation(activation, part.interleaved),
                    bend=float(layer_attribute(module, part.bend)),
                )
            units.append(replace(unit, routing=(routing * (chosen == expert)).sum(-1)))
        return FeedForwardRecord(tuple(units), self._cast(self.output_of(part.module)))

    def _cast(self, tensor: Any) -> Any:
        if tensor is None or (tensor.dtype == self.dtype and not tensor.requires_grad):
            return tensor
        return tensor.detach().to(self.dtype)

    def input_of(self, path: str, elsewhere: bool = False) -> Tensor:
        """What a submodule read, (b, n, ...); `elsewhere`: not of the layer's own tokens."""
        return self._of_all_tokens(path, [args[0] for args in self.seen[path][0]], elsewhere)

    def output_of(self, path: str, elsewhere: bool = False) -> Tensor:
        return self._of_all_tokens(path, self.seen[path][1], elsewhere)

    def _of_all_tokens(self, path: str, pieces: list[Tensor], elsewhere: bool) -> Tensor:
        whole = self.shape(_join(pieces))
        if not elsewhere and whole.shape[:2] != self.input.shape[:2]:
            raise NormscopeError(
                f"{path} was called on {whole.shape[1]} tokens in layer {self.index} (counted from 0), which reads "
                f"{self.input.shape[1]}: it is called more than once, or not for every token."
            )
        return whole

    def shape(self, x: Tensor) -> Tensor:
        """(b, n, ...), also where the model has made one dimension of items and tokens."""
        return x.unflatten(0, (len(self.input), -1)) if x.dim() < self.input.dim() else x


def _half(both: Projection, number: int, interleaved: bool = False) -> Projection:
    """The first or second half of a projection's hidden units, or every other one."""

    def part(x: Tensor) -> Tensor:
        return x[..., number::2] if interleaved else x.chunk(2, -1)[number]

    return Projection(part(both.weight), None if both.bias is None else part(both.bias), part(both.hidden))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and equal(rows_of(a), rows_of(b), coarser(a.dtype, b.dtype))


def _join(pieces: list[Tensor]) -> Tensor:
    """One tensor; `chunk_size_feed_forward` runs a module over pieces of the sequence."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def check_last_norm(call: LayerCall, y: Tensor) -> None:
    """A layer that ends with a norm outputs what the norm did; a hook on the layer may change it after that."""
    wanted = call.wanted
    last = wanted.steps[-1].part
    whole = len(wanted.steps) == len(layer_steps(wanted.stack.blocks))
    if not whole or not isinstance(last, Norm) or last.path not in call.seen or wanted.links:
        return  # a proof compares it with the model alone
    made = call.output_of(last.path)
    if made.data_ptr() != y.data_ptr() and not torch.allclose(made[wanted.real], y[wanted.real], 1e-5, 1e-6):
        raise NormscopeError(
            f"Layer {call.index} (counted from 0) does not output what {last.path}, its last component, does: a hook "
            "or wrapper changes it. Remove that, and try again."
        )


def check_finite(x: Tensor, real: Tensor, where: str) -> None:
    # A finite sum has finite summands; the look at each of them is for the rest.
    if not isfinite(x.sum().item()) and not bool(torch.isfinite(x[real]).all()):
        raise NormscopeError(f"{where} NaN or infinite values. Check the weights there, and the model's dtype.")


def is_encoder_output(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3
