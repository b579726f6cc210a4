"""Run a model once and hand out what each layer did.

The attention probabilities come from a function registered with transformers' attention interface (and a mask function
registered with it: without one the model would silently attend everywhere); everything else from forward hooks. The
model is given back exactly as it was, whatever happens. One lock per model; a plain forward pass of the same model in
another thread meanwhile is computed by the model's own attention implementation and recorded nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.interface import active, lock_of, standing_in
from normscope.layers import last_path_of, layer_modules, paths_of
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack
from normscope.parameters import (
    activation_name,
    affine,
    attribute,
    half,
    joint,
    no_such_part,
    of_expert,
    value_constant,
    value_rows,
)
from normscope.records import (
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
from normscope.scopes import Step

SCORES = 2**20  # attention scores computed at a time


@dataclass(frozen=True)
class Wish:
    """What is to be recorded of one side of a model."""

    stack: Stack
    steps: Sequence[Step]
    layers: Collection[int]
    on_layer: Callable[[LayerRecord], None]  # receives each wanted layer's record, which is gone when it returns
    real: Tensor  # (b, n): the tokens that are not padding
    constants: bool = False  # record what part of the values comes from no token


def trace(
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    wishes: Sequence[Wish],
    dtype: torch.dtype,
    model: PreTrainedModel | None = None,
    to_the_end: bool = False,
) -> Any:
    """One forward pass that hands out what was wished for, layer by layer. It stops where nothing more is wished for,
    or goes `to_the_end` and gives what it returns itself; of `model` where that is the base with a head. Somebody
    else's hooks see a whole pass."""
    with lock_of(base), torch.no_grad():
        recorder = Recorder(dtype, () if to_the_end or _hooked(base) else wishes)
        with standing_in(base, recorder) as handles:
            for wish in wishes:
                for layer in layer_modules(base, wish.stack):
                    recorder.attach(layer, wish, handles)
            try:
                return (model or base)(**inputs)
            except _EnoughError:
                return None
            except (ValueError, IndexError, RuntimeError) as error:
                if isinstance(error, NormscopeError) or not recorder.running:
                    raise
                raise NormscopeError(f"The model's own forward pass failed: {error}") from error


def _hooked(base: PreTrainedModel) -> bool:
    """Whether somebody listens to the model."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in base.modules())


class _EnoughError(Exception):
    """Ends a forward pass that nobody needs the rest of."""


class Recorder:
    """Collects what the hooks see of the current layer and turns it into a LayerRecord as soon as everything wanted was
    seen: the feed-forward that nobody asked for would drive it out of the caches."""

    def __init__(self, dtype: torch.dtype, until: Sequence[Wish]) -> None:
        """`until`: the wishes after which the pass ends; none: it goes to the end."""
        self.dtype = dtype
        self.left = sum(len(wish.layers) for wish in until)  # records to be made until the pass ends
        self.thread = threading.get_ident()
        self.counts: dict[str, int] = {}  # layer calls so far on each side: the index of the current layer
        self.wish: Wish | None = None  # that of the layer which is running
        self.input: Tensor | None = None  # that layer's; None as soon as its record was handed out
        self.seen: dict[str, tuple[list[Any], list[Tensor]]] = {}
        self.attention: dict[int, tuple[Tensor, Tensor]] = {}  # id(module) -> probabilities, values
        self.spaces: dict[bool, Tensor] = {}
        self.running = True  # the model, not what is done with its layers

    def attach(self, layer: nn.Module, wish: Wish, handles: list[Any]) -> None:
        """Hook the layer; `handles` has every hook as soon as it exists, so that none is left behind."""
        handles.append(layer.register_forward_pre_hook(self._begin(wish), with_kwargs=True))
        paths, last = paths_of(wish.steps, wish.constants), last_path_of(wish.steps)
        for path in paths:
            try:
                module = layer.get_submodule(path)
            except AttributeError as error:
                raise NormscopeError(f"{type(layer).__name__} has no {path}: {no_such_part(layer, path)}") from error
            handles.append(module.register_forward_hook(self._see(path)))
            if path == last:
                handles.append(module.register_forward_hook(self._see_last(layer, len(paths))))
        handles.append(layer.register_forward_hook(self._end))

    def _mine(self) -> bool:
        return threading.get_ident() == self.thread and getattr(active, "recorder", None) is self

    @property
    def count(self) -> int:
        return self.counts.get(self.wish.stack.side, 0) if self.wish else 0

    def wanted(self) -> bool:
        return self._mine() and self.wish is not None and self.count in self.wish.layers and self.input is not None

    def _begin(self, wish: Wish) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._mine():
                return
            self.wish = wish
            x = args[0] if args else kwargs["hidden_states"]
            if self.count == 0:
                self._check_finite(x, "The embeddings before the first layer hold")
            self.input = x
            self.seen = {}
            self.attention = {}

        return hook

    def _see(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.wanted():
                inputs, outputs = self.seen.setdefault(path, ([], []))
                inputs.append(args)
                outputs.append(output)

        return hook

    def _see_last(self, layer: nn.Module, paths: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Where the last wanted part of a layer ends."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.wanted() and len(self.seen) == paths:
                self._hand_out(layer, self._shaped(output))

        return hook

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._mine():
            return
        assert self.wish is not None
        y = output[0] if isinstance(output, tuple) else output
        if self.wanted():
            self._hand_out(layer, y)
        else:
            self._check_finite(y, self._put_out())
        self.counts[self.wish.stack.side] = self.count + 1
        self.wish = None

    def _hand_out(self, layer: nn.Module, y: Tensor) -> None:
        """The layer has come to y, and all that was wanted of it was seen."""
        assert self.wish is not None
        self._check_finite(y, self._put_out())
        active.recorder, self.running = None, False  # what runs from here on is no part of the pass
        try:
            record = self._record(layer, y, self.wish.steps)
            self.seen, self.attention, self.input = {}, {}, None
            self.wish.on_layer(record)
            self.running = True
        finally:
            active.recorder = self
        self.left -= 1
        if self.left == 0:
            raise _EnoughError

    def _put_out(self) -> str:
        return f"Layer {self.count} (counted from 0) put out"

    def attend(
        self,
        eager: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The family's own eager attention, some heads at a time: its scores stay in cache, whatever the length. Its
        every digit is kept, since a softmax that rounds otherwise moves the cells of later layers by millionths."""
        if not self.wanted():
            return eager(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
        items, heads, rows = query.shape[:3]
        columns, shared = key.shape[2], heads // key.shape[1]  # query heads that share one of the keys and values
        step = heads
        by_head = any(isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == heads for x in (mask, *kwargs.values()))
        if not by_head and not hasattr(module, "sinks"):
            step = shared * max(1, SCORES // (items * rows * columns * shared))
        kept = self._space(items, heads, columns, rows, query.device)
        outputs = []
        for head in range(0, heads, step):
            some, few = slice(head, head + step), slice(head // shared, (head + step) // shared)
            output, weights = eager(module, query[:, some], key[:, few], value[:, few], mask, **kwargs)
            kept[:, :, some].copy_(weights.permute(0, 3, 1, 2))
            outputs.append(output)
        probabilities = kept.permute(0, 2, 3, 1)
        self.attention[id(module)] = (probabilities, value)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), probabilities

    def _space(self, items: int, heads: int, columns: int, rows: int, device: torch.device) -> Tensor:
        """A place for the probabilities (b, j, H, i), the same in every layer; the decomposition may overwrite it. The
        second attention of a decoder's layer has one of its own."""
        second = bool(self.attention)
        space = self.spaces.get(second)
        if space is None or space.shape != (items, columns, heads, rows):
            if items == 1:  # as near to the model's own order as the products allow: the copy is the cheaper
                space = torch.empty(items, heads, columns, rows, dtype=self.dtype, device=device).transpose(1, 2)
            else:  # one stride for the columns of all items
                space = torch.empty(items, columns, heads, rows, dtype=self.dtype, device=device)
            self.spaces[second] = space
        return space

    def _check_finite(self, x: Tensor, where: str) -> None:
        # A finite sum has finite summands; the look at each of them is for the rest.
        assert self.wish is not None
        if not isfinite(x.sum().item()) and not bool(torch.isfinite(x[self.wish.real]).all()):
            raise NormscopeError(f"{where} NaN or infinite values. Check the weights there, and the model's dtype.")

    def _record(self, layer: nn.Module, y: Tensor, steps: Sequence[Step]) -> LayerRecord:
        assert self.input is not None
        parts: list[Record] = []
        for number, step in enumerate(steps):
            part = step.part
            if isinstance(part, Attention):
                before = steps[number - 1].part if number and steps[number - 1].role == "pre" else None
                parts.append(self._attention(layer, part, before))
            elif isinstance(part, FeedForward):
                parts.append(self._feed_forward(layer, part))
            elif isinstance(part, Experts):
                parts.append(self._experts(layer, part))
            elif isinstance(part, Norm):
                parts.append(self._norm(layer, part))
            elif isinstance(part, str):
                scale = self._cast(torch.as_tensor(attribute(layer, part)))
                parts.append(ScaleRecord(scale.expand(y.shape[-1])))
            else:
                # The sum itself is what the next norm reads, or what the layer puts out.
                following = steps[number + 1].part if number + 1 < len(steps) else None
                total = self._in(following.path) if isinstance(following, Norm) else y
                parts.append(ResidualRecord(self._cast(total)))
        return LayerRecord(self.count, self._cast(self.input), tuple(parts))

    def _attention(self, layer: nn.Module, part: Attention, before: Any) -> AttentionRecord:
        weight, bias = affine(layer.get_submodule(part.output))
        if part.probabilities is None:
            module = attribute(layer, part.module)
            if id(module) not in self.attention:
                raise NormscopeError(
                    f"{type(module).__name__} at {part.module} did not use transformers' attention interface. A family "
                    "whose attention does not, names its dropout module in `probabilities`."
                )
            weights, values = self.attention[id(module)]
        else:
            given = self.seen[part.probabilities][0][0][0]
            items, heads, rows, columns = given.shape
            kept = self._space(items, heads, columns, rows, given.device).copy_(given.permute(0, 3, 1, 2))
            weights = kept.permute(0, 2, 3, 1)
            flat = self._out(part.value)
            values = flat.unflatten(-1, (weights.shape[1], -1)).transpose(1, 2)
        heads, shared = weights.shape[1], values.shape[1]
        constant = None
        if self.wish is not None and self.wish.constants:
            read = isinstance(before, Norm) and not part.cross  # the encoder's vectors are tokens as they are
            shift = getattr(layer.get_submodule(before.path), "bias", None) if read else None
            self._check_values(part, values, before.path if read else None)
            constant = value_constant(layer.get_submodule(part.value), part.packing, shared, values.shape[3], shift)
        return AttentionRecord(
            weights=weights,
            values=self._cast(values),
            value_bias=None if constant is None else self._cast(constant),
            matrix=self._cast(weight).t().unflatten(0, (heads, -1)),
            bias=self._cast(bias),
            output=self._cast(self._out(part.output)),
            cross=part.cross,
            sinks=part.sinks,
        )

    def _check_values(self, part: Attention, values: Tensor, norm: str | None) -> None:
        """The constant part of the values is read from the projection and the norm before it: they must be the ones."""
        made = value_rows(self._out(part.value), part.packing, values.shape[1], values.shape[3])
        given = self._out(norm) if norm is not None else self.input
        entered = self._in(part.value)
        if not torch.allclose(made.transpose(1, 2), values, rtol=1e-3, atol=1e-5) or (
            not part.cross and given is not None and not torch.allclose(given, entered, rtol=1e-3, atol=1e-5)
        ):
            raise NormscopeError(
                f"The values of {part.module} do not come from {part.value} behind {norm or 'no norm'}: the family is "
                "described wrongly, so value_bias='remainder' would be wrong."
            )

    def _norm(self, layer: nn.Module, part: Norm) -> NormRecord:
        module: Any = layer.get_submodule(part.path)
        x, output = self._cast(self._in(part.path)), self._cast(self._out(part.path))
        if isinstance(module, nn.Identity):
            return NormRecord("rms", torch.ones_like(x[..., 0]), torch.ones_like(x[0, 0]), None, output)
        gain = getattr(module, "weight", None)
        if not isinstance(gain, Tensor) and not isinstance(module, nn.LayerNorm):
            raise NormscopeError(f"Expected a norm at {part.path}, found {type(module).__name__}.")
        gain = torch.ones_like(x[0, 0]) if gain is None else self._cast(gain)
        if part.kind == "layer":  # 1 / sqrt(variance + eps), the statistic that the model's own kernel returns
            # Without a gain the kernel would be half as fast.
            inverse = torch.native_layer_norm(x, [x.shape[-1]], gain, None, module.eps)[2][..., 0]
        else:
            epsilon = getattr(module, "variance_epsilon", None) or module.eps
            inverse = (x.square().mean(-1) + epsilon).rsqrt()
        return NormRecord(
            kind=part.kind,
            inverse=inverse,
            gain=gain + part.offset if part.offset else gain,
            shift=self._cast(getattr(module, "bias", None)),
            output=output,
        )

    def _feed_forward(self, layer: nn.Module, part: FeedForward) -> FeedForwardRecord:
        into = self._projection(layer, part.into)
        up = None
        if part.up == part.into:
            into, up = (half(into, n) for n in range(2))
        elif part.up is not None:
            up = self._projection(layer, part.up)
        out, out_bias = affine(layer.get_submodule(part.out))
        activation = attribute(layer, part.activation)
        unit = Unit(
            into=into,
            up=up,
            activation=activation,
            activation_name=activation_name(activation),
            out=self._cast(out).t(),
            out_bias=self._cast(out_bias),
        )
        return FeedForwardRecord((unit,), self._cast(self._out(part.out)))

    def _projection(self, layer: nn.Module, path: str) -> Projection:
        weight, bias = affine(layer.get_submodule(path))
        return Projection(self._cast(weight).t(), self._cast(bias), self._cast(self._out(path)))

    def _experts(self, layer: nn.Module, part: Experts) -> FeedForwardRecord:
        """Every expert that was chosen by some token, with the hidden states it has, or would have, on all of them."""
        module: Any = layer.get_submodule(part.module)
        x, chosen, routing = (self._shaped(given) for given in self.seen[part.module][0][0][:3])
        x, routing = self._cast(x), self._cast(routing)
        activation = attribute(layer, part.activation)
        units = []
        for expert in chosen.unique().tolist():
            weight, bias = of_expert(module, part.into, part.into_bias, expert, part.transposed)
            out, out_bias = of_expert(module, part.out, part.out_bias, expert, part.transposed)
            weight, bias, out, out_bias = (self._cast(one) for one in (weight, bias, out, out_bias))
            both = Projection(weight, bias, x @ weight if bias is None else x @ weight + bias)
            into, up = (half(both, n, part.interleaved) for n in range(2))
            unit = Unit(into, up, activation, activation_name(activation), out, out_bias)
            if part.bend is not None:
                unit = replace(
                    unit, joint=joint(activation, part.interleaved), bend=float(attribute(module, part.bend))
                )
            units.append(replace(unit, routing=(routing * (chosen == expert)).sum(-1)))
        return FeedForwardRecord(tuple(units), self._cast(self._out(part.module)))

    def _cast(self, tensor: Any) -> Any:
        if tensor is None or (tensor.dtype == self.dtype and not tensor.requires_grad):
            return tensor
        return tensor.detach().to(self.dtype)

    def _in(self, path: str) -> Tensor:
        return self._shaped(_joined([args[0] for args in self.seen[path][0]]))

    def _out(self, path: str) -> Tensor:
        return self._shaped(_joined(self.seen[path][1]))

    def _shaped(self, x: Tensor) -> Tensor:
        """(b, n, ...), also where the model has made one dimension of items and tokens."""
        assert self.input is not None
        return x.unflatten(0, (len(self.input), -1)) if x.dim() < self.input.dim() else x


def _joined(pieces: list[Tensor]) -> Tensor:
    """One tensor; `chunk_size_feed_forward` runs a module over pieces of the sequence."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
