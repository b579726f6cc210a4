"""Run a model once and hand out what each layer did.

The attention probabilities come from a function registered with transformers' attention interface (and a mask function
registered with it: without one the model would silently attend everywhere); everything else from forward hooks. The
model is given back exactly as it was, whatever happens. One lock per model; a plain forward pass of the same model in
another thread meanwhile is computed by the model's own attention implementation and recorded nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.closeness import coarser, equal, is_product, rows_of
from normscope.errors import NormscopeError
from normscope.interface import active, lock_of, standing_in
from normscope.layers import last_path_of, layer_modules, linear_paths_of, paths_of
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack
from normscope.parameters import (
    activation_name,
    affine,
    attribute,
    changed_on_the_way,
    half,
    hooked_everywhere,
    is_plain,
    joint,
    norm_epsilon,
    norm_inverse,
    norm_map,
    of_expert,
    submodule,
    value_constant,
    value_rows,
)
from normscope.records import (
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
from normscope.scopes import Step, steps_of

SCORES = 2**20  # attention scores computed at a time


@dataclass(frozen=True)
class Wish:
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


def trace(
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    wishes: Sequence[Wish],
    dtype: torch.dtype,
    model: nn.Module | None = None,
    to_the_end: bool = False,
) -> Any:
    """One forward pass that hands out what was wished for, layer by layer: all of it, or it is refused.

    It stops where nothing more is wished for, or goes `to_the_end` and gives what it returns itself; of `model` where
    that is the base with a head or adapters around it. Somebody else's hooks see a whole pass.
    """
    refuse_autocast(base.device)
    with lock_of(base), torch.no_grad(), eagerly(base):
        recorder = Recorder(dtype, () if to_the_end or hooked(base) else wishes)
        made = None
        with standing_in(base, recorder) as handles:
            for wish in wishes:
                for layer in layer_modules(base, wish.stack):
                    recorder.attach(layer, wish, handles)
            try:
                made = (model or base)(**inputs)
            except _EnoughError:
                pass
            except Exception as error:  # a model raises what it likes
                if isinstance(error, NormscopeError) or not recorder.running:
                    raise
                raise NormscopeError(f"The model's own forward pass failed: {error}") from error
        for wish in wishes:
            recorder.refuse_unrecorded(wish)
        return made


def refuse_autocast(device: torch.device) -> None:
    """Refuse to run under `torch.autocast`, which would round what is measured to half precision."""
    if torch.is_autocast_enabled(device.type):
        raise NormscopeError(
            "torch.autocast is on: the model would compute in half precision, whose rounding drowns small "
            "contributions. Analyse outside of it, or inside torch.autocast(..., enabled=False)."
        )


def eagerly(base: nn.Module) -> AbstractContextManager[Any]:
    """Where parts of a model are compiled: run them as they were written, so that hooks see them."""
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in base.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def changed(base: PreTrainedModel) -> bool:
    """Whether somebody has hooked, patched or wrapped a part of the model, so that an item may not be the same in a
    batch as alone."""
    own = {type(base).__module__.partition(".")[0], "torch", "transformers", "peft"}
    return hooked(base) or any(
        "forward" in module.__dict__ or type(module).__module__.partition(".")[0] not in own
        for module in base.modules()
    )


def hooked(base: PreTrainedModel) -> bool:
    """Whether somebody listens to the model, other than transformers itself for its outputs."""
    if hooked_everywhere():
        return True
    hooks = (
        hook
        for module in base.modules()
        if module._forward_hooks or module._forward_pre_hooks
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    return any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)


class _EnoughError(Exception):
    """Ends a forward pass that nobody needs the rest of."""


class Recorder:
    """Collects what the hooks see of the current layer and turns it into a LayerRecord as soon as everything wanted was
    seen: the feed-forward that nobody asked for would drive it out of the caches."""

    def __init__(self, dtype: torch.dtype, until: Sequence[Wish]) -> None:
        """`until`: the wishes after which the pass ends; none: it goes to the end."""
        self.dtype = dtype
        self.left = sum(len(wish.layers or ()) for wish in until)  # records to be made until the pass ends
        self.thread = threading.get_ident()
        self.counts: dict[str, int] = {}  # layer calls so far on each side: the index of the current layer
        self.recorded: dict[str, set[int]] = {}  # the layers of each side that were handed out
        self.wish: Wish | None = None  # that of the layer which is running
        self.layer: nn.Module | None = None
        self.encoder: Tensor | None = None  # what that layer may read beside
        self.input: Tensor | None = None  # that layer's; None as soon as its record was handed out
        self.seen: dict[str, tuple[list[Any], list[Tensor]]] = {}
        self.attention: dict[int, tuple[Tensor, Tensor]] = {}  # id(module) -> probabilities, values
        self.spaces: dict[bool, Tensor] = {}
        self.hooked: set[tuple[str, nn.Module]] = set()
        self.plain: dict[int, frozenset[str]] = {}  # id of a layer -> its plain linear submodules
        self.running = True  # the model, not what is done with its layers

    def attach(self, layer: nn.Module, wish: Wish, handles: list[Any]) -> None:
        """Hook the layer; `handles` has every hook as soon as it exists, so that none is left behind."""
        last = last_path_of(wish.steps)
        modules = {path: submodule(layer, path) for path in paths_of(wish.steps, wish.constants or wish.links)}
        if wish.links:
            self.plain[id(layer)] = frozenset(path for path, module in modules.items() if is_plain(module))
        handles.append(layer.register_forward_pre_hook(self._begin(wish), with_kwargs=True))
        for path, module in modules.items():
            if (path, module) in self.hooked:  # layers may share it
                continue
            self.hooked.add((path, module))
            handles.append(module.register_forward_hook(self._see(path)))
            if path == last:
                handles.append(module.register_forward_hook(self._see_last(len(modules))))
        handles.append(layer.register_forward_hook(self._end))

    def _mine(self) -> bool:
        return threading.get_ident() == self.thread and getattr(active, "recorder", None) is self

    @property
    def count(self) -> int:
        return self.counts.get(self.wish.stack.side, 0) if self.wish else 0

    def wanted(self) -> bool:
        if not self._mine() or self.wish is None or self.input is None:
            return False
        return self.wish.layers is None or self.count in self.wish.layers

    def refuse_unrecorded(self, wish: Wish) -> None:
        """Refuse a pass that left out a layer which was asked for."""
        side = wish.stack.side
        calls, found = self.counts.get(side, 0), self.recorded.get(side, set())
        missing = sorted(set(wish.layers or ()) - found)
        if missing or not found:
            raise NormscopeError(
                f"The forward pass called {calls} layers at {wish.stack.layers}, and not layer "
                f"{', '.join(map(str, missing)) or 0} (counted from 0), which was asked for: the model was changed "
                "after the Analyzer was made, or skips layers. Make a new Analyzer."
            )

    def _begin(self, wish: Wish) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._mine():
                return
            self.wish = wish
            if wish.calls is not None and not any(module is one for one in wish.calls[self.count : self.count + 1]):
                raise NormscopeError(
                    f"Layer call {self.count} (counted from 0) at {wish.stack.layers} is not the one that it was when "
                    "the Analyzer was made: the model was changed, or calls other layers for other inputs. Make a new "
                    "Analyzer."
                )
            x = args[0] if args else kwargs["hidden_states"]
            if x.shape[-2] != wish.real.shape[1]:
                raise NormscopeError(
                    f"Layer {self.count} (counted from 0) at {wish.stack.layers} reads {x.shape[-2]} tokens, but the "
                    f"input has {wish.real.shape[1]}: the model adds or drops some, and what they are is not known."
                )
            if self.count == 0:
                self._check_finite(x, "The embeddings before the first layer hold")
            self.layer, self.input = module, x
            encoder = kwargs.get("encoder_hidden_states")
            self.encoder = (
                next((one for one in args[1:] if self._is_encoder(one)), None) if encoder is None else encoder
            )
            self.seen = {}
            self.attention = {}

        return hook

    def _is_encoder(self, given: Any) -> bool:
        return isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3

    def _see(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.wanted():
                inputs, outputs = self.seen.setdefault(path, ([], []))
                inputs.append(args)
                outputs.append(output)

        return hook

    def _see_last(self, paths: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Where the last wanted part of a layer ends."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.wanted() and self.layer is not None and len(self.seen) == paths:
                self._hand_out(self.layer, self._shaped(output))

        return hook

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._mine():
            return
        assert self.wish is not None
        y = output[0] if isinstance(output, tuple) else output
        if self.wanted():
            self._check_end(y)
            self._hand_out(layer, y)
        else:
            self._check_finite(y, self._put_out())
        self.counts[self.wish.stack.side] = self.count + 1
        self.wish = None

    def _check_end(self, y: Tensor) -> None:
        """A layer that ends with a norm puts out what the norm did; a hook on the layer may change it after that."""
        assert self.wish is not None
        last = self.wish.steps[-1].part
        whole = len(self.wish.steps) == len(steps_of(self.wish.stack.blocks))
        if not whole or not isinstance(last, Norm) or last.path not in self.seen or self.wish.links:
            return  # a proof compares it with the model alone
        made = self._out(last.path)
        if made.data_ptr() != y.data_ptr() and not torch.allclose(made[self.wish.real], y[self.wish.real], 1e-5, 1e-6):
            raise NormscopeError(
                f"Layer {self.count} (counted from 0) does not put out what {last.path}, its last component, does: a "
                "hook or wrapper changes it. Remove that, and try again."
            )

    def _hand_out(self, layer: nn.Module, y: Tensor) -> None:
        """The layer has come to y, and all that was wanted of it was seen."""
        assert self.wish is not None
        self._check_finite(y, self._put_out())
        active.recorder, self.running = None, False  # what runs from here on is no part of the pass
        try:
            record = self._record_or_refuse(layer, y)
            self.recorded.setdefault(self.wish.stack.side, set()).add(self.count)
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

    def _record_or_refuse(self, layer: nn.Module, y: Tensor) -> LayerRecord:
        """The record of a layer; one whose parts do not fit together is not what its family says."""
        assert self.wish is not None
        try:
            return self._record(layer, y, self.wish.steps)
        except (NormscopeError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
            what = f"{error.args[0]} was not called" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise NormscopeError(
                f"Layer {self.count} (counted from 0), a {type(layer).__name__}, is not what its family says: {what}. "
                "This is a modified model, or its family is described wrongly."
            ) from error

    def _record(self, layer: nn.Module, y: Tensor, steps: Sequence[Step]) -> LayerRecord:
        assert self.input is not None
        parts: list[Record] = []
        for number, step in enumerate(steps):
            part = step.part
            if isinstance(part, Attention):
                before = number - 1 if number and steps[number - 1].role == "pre" else None
                norm = None if before is None else steps[before].part
                shift = getattr(parts[before], "shift", None) if before is not None else None
                parts.append(self._attention(layer, part, norm if isinstance(norm, Norm) else None, shift))
            elif isinstance(part, FeedForward):
                parts.append(self._feed_forward(layer, part))
            elif isinstance(part, Experts):
                parts.append(self._experts(layer, part))
            elif isinstance(part, Norm):
                parts.append(self._norm(layer, part))
            elif isinstance(part, str):
                scale = self._cast(torch.as_tensor(attribute(layer, part)))
                parts.append(ScaleRecord(scale.expand(self.input.shape[-1])))
            else:
                # The sum itself is what the next component reads, or what the layer puts out.
                parts.append(ResidualRecord(self._cast(y if step.reader is None else self._in(step.reader))))
        links = None
        if self.wish is not None and self.wish.links:
            links = self._links(layer, steps, parts)
        return LayerRecord(self.count, self._cast(self.input), tuple(parts), links)

    def _links(self, layer: nn.Module, steps: Sequence[Step], parts: Sequence[Record]) -> Links:
        plain = self.plain[id(layer)]
        read = {path: self._cast(self._in(path)) for path in linear_paths_of(steps)}
        values: dict[str, Tensor] = {}
        attentions = [step.part for step in steps if isinstance(step.part, Attention)]
        for part, record in zip(attentions, (one for one in parts if isinstance(one, AttentionRecord)), strict=True):
            # By its own code a model may make values in more steps than one; what others have changed must be proved.
            if is_plain(submodule(layer, part.value), besides=1) and not changed_on_the_way(layer, part.value):
                continue
            read[part.value] = self._cast(self._in(part.value, part.cross))
            made = self._cast(self._out(part.value, part.cross))
            self._refuse_mixed_values(submodule(layer, part.value), part.value, made)
            rows = value_rows(made, part.packing, record.values.shape[1], record.values.shape[3])
            values[part.value] = rows.transpose(1, 2)
        return Links(read, plain, values, self._cast(self.encoder))

    def _refuse_mixed_values(self, module: nn.Module, path: str, made: Tensor) -> None:
        """A token's value must come from that token: alone it must be the same."""
        alone = self._cast(self._shaped(module(self.seen[path][0][0][0][:, :1])))
        if not torch.allclose(alone, made[:, :1], rtol=1e-4, atol=1e-5 * float(made.abs().amax())):
            raise NormscopeError(
                f"{path} of layer {self.count} (counted from 0) makes a token's value of other tokens too: an adapter, "
                "hook or wrapper there mixes them, so that no value belongs to one token."
            )

    def _attention(
        self, layer: nn.Module, part: Attention, before: Norm | None, shift: Tensor | None
    ) -> AttentionRecord:
        """`before` is the norm whose output the attention reads, `shift` its beta."""
        weight, bias = affine(submodule(layer, part.output))
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
            flat, width = self._out(part.value, part.cross), weight.shape[1] // heads
            count = flat.shape[-1] // width  # of heads side by side; a packed projection has queries and keys too
            shared = {"alone": count, "tail": (count - heads) // 2, "interleaved": heads}[part.packing]
            values = value_rows(flat, part.packing, shared, width).transpose(1, 2)
        if not part.cross:
            weights, values = self._own_first(part, weights, values)
        heads, shared = weights.shape[1], values.shape[1]
        constant = None
        if self.wish is not None and self.wish.constants:
            if part.cross:  # the encoder's vectors are tokens as they are
                before = shift = None
            self._check_values(layer, part, values, None if before is None else before.path)
            constant = value_constant(submodule(layer, part.value), part.packing, shared, values.shape[3], shift)
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

    def _own_first(self, part: Attention, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that are no token's stand in front; behind the tokens' own, rows and columns agree."""
        assert self.input is not None
        assert self.wish is not None
        more = weights.shape[3] - self.input.shape[1]
        if more != self.wish.virtual:
            raise NormscopeError(
                f"{part.module} attends to {weights.shape[3]} keys, but the layer reads {self.input.shape[1]} tokens."
            )
        if values.shape[2] != weights.shape[3]:
            raise NormscopeError(
                f"Prefix tuning of a model whose attention at {part.module} does not use transformers' "
                "attention interface cannot be analysed: its values are not seen."
            )
        if more and self.wish.constants:
            raise NormscopeError("value_bias='remainder' is not for prefix tuning, whose values have no such bias.")
        if not more:
            return weights, values
        stored = weights.permute(0, 3, 1, 2).roll(-more, 1)
        return stored.permute(0, 2, 3, 1), values.roll(-more, 2)

    def _check_values(self, layer: nn.Module, part: Attention, values: Tensor, norm: str | None) -> None:
        """The constant part of the values is read from the projection and the norm before it: they must be the ones."""
        if part.value not in self.seen:
            raise NormscopeError(f"{part.value} is not called: the values of {part.module} do not come from it.")
        flat, entered = self._out(part.value, elsewhere=True), self._in(part.value, elsewhere=True)
        made = value_rows(flat, part.packing, values.shape[1], values.shape[3]).transpose(1, 2)
        given = entered if part.cross else self._out(norm) if norm is not None else self.input
        weight, bias = affine(submodule(layer, part.value))
        if (
            not _close(made, values)
            or given is None
            or not _close(given, entered)
            or not is_product(rows_of(entered), weight.t(), bias, rows_of(flat))
        ):
            raise NormscopeError(
                f"The values of {part.module} do not come from {part.value} behind {norm or 'no norm'}: a hook changes "
                "them, they are made in more than one step, or the family is described wrongly. With "
                "value_bias='remainder' the result would be wrong."
            )

    def _norm(self, layer: nn.Module, part: Norm) -> NormRecord:
        module: Any = submodule(layer, part.path)
        x, output = self._cast(self._in(part.path)), self._cast(self._out(part.path))
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

    def _feed_forward(self, layer: nn.Module, part: FeedForward) -> FeedForwardRecord:
        into = self._projection(layer, part.into)
        up = None
        if part.up == part.into:
            into, up = (half(into, n) for n in range(2))
        elif part.up is not None:
            up = self._projection(layer, part.up)
        out, out_bias = affine(submodule(layer, part.out))
        activation = attribute(layer, part.activation)
        unit = Unit(
            into=into,
            up=up,
            # A hook there may change values; whether the activation alone explains them is then found out.
            activation=activation.forward if isinstance(activation, nn.Module) else activation,
            activation_name=activation_name(activation),
            out=self._cast(out).t(),
            out_bias=self._cast(out_bias),
        )
        return FeedForwardRecord((unit,), self._cast(self._out(part.out)))

    def _projection(self, layer: nn.Module, path: str) -> Projection:
        weight, bias = affine(submodule(layer, path))
        return Projection(self._cast(weight).t(), self._cast(bias), self._cast(self._out(path)))

    def _experts(self, layer: nn.Module, part: Experts) -> FeedForwardRecord:
        """Every expert that was chosen by some token, with the hidden states it has, or would have, on all of them."""
        module: Any = submodule(layer, part.module)
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
            plain = activation.forward if isinstance(activation, nn.Module) else activation
            unit = Unit(into, up, plain, activation_name(activation), out, out_bias)
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

    def _in(self, path: str, elsewhere: bool = False) -> Tensor:
        """What a submodule read, (b, n, ...); `elsewhere`: not of the layer's own tokens."""
        return self._of_all_tokens(path, [args[0] for args in self.seen[path][0]], elsewhere)

    def _out(self, path: str, elsewhere: bool = False) -> Tensor:
        return self._of_all_tokens(path, self.seen[path][1], elsewhere)

    def _of_all_tokens(self, path: str, pieces: list[Tensor], elsewhere: bool) -> Tensor:
        assert self.input is not None
        whole = self._shaped(_joined(pieces))
        if not elsewhere and whole.shape[:2] != self.input.shape[:2]:
            raise NormscopeError(
                f"{path} was called on {whole.shape[1]} tokens in layer {self.count} (counted from 0), which reads "
                f"{self.input.shape[1]}: it is called more than once, or not for every token."
            )
        return whole

    def _shaped(self, x: Tensor) -> Tensor:
        """(b, n, ...), also where the model has made one dimension of items and tokens."""
        assert self.input is not None
        return x.unflatten(0, (len(self.input), -1)) if x.dim() < self.input.dim() else x


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and equal(rows_of(a), rows_of(b), coarser(a.dtype, b.dtype))


def _joined(pieces: list[Tensor]) -> Tensor:
    """One tensor; `chunk_size_feed_forward` runs a module over pieces of the sequence."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
