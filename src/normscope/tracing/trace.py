"""Run a model once and hand out what each layer did.

The attention probabilities come from a function registered with transformers' attention interface (and a mask function
registered with it: without one the model would silently attend everywhere); everything else from forward hooks. The
model is given back exactly as it was, whatever happens. One lock per model; a plain forward pass of the same model in
another thread meanwhile is computed by the model's own attention implementation and recorded nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.inputs.item import Item, forward_inputs
from normscope.models.loaded import LoadedModel
from normscope.models.modules import hooked_everywhere, is_plain, last_path, layer_modules, paths, submodule
from normscope.models.scopes import steps_of
from normscope.models.spec import Norm
from normscope.tracing.attention_interface import active, lock_of, standing_in
from normscope.tracing.build import LayerCall, RecordRequest

SCORES = 2**20  # attention scores computed at a time


def trace(
    loaded: LoadedModel,
    items: Sequence[Item],
    requests: Sequence[RecordRequest],
    *,
    head: bool = False,
    to_the_end: bool = False,
) -> Any:
    """One watched forward pass over a batch, of the model with its head if that is wanted; see `watch`."""
    model = caller(loaded, head)
    return watch(loaded.base, forward_inputs(loaded, items), requests, loaded.dtype, model, to_the_end)


def caller(loaded: LoadedModel, head: bool) -> nn.Module:
    """The module to call for a pass. A hook before the base model sees how it is called, so that it is called as its
    user does; so is a model with a soft prompt."""
    if loaded.prompt is not None or loaded.base._forward_pre_hooks:
        return loaded.given
    return loaded.model if head else loaded.base


def watch(
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    requests: Sequence[RecordRequest],
    dtype: torch.dtype,
    model: nn.Module | None = None,
    to_the_end: bool = False,
) -> Any:
    """One forward pass that hands out the records asked for, layer by layer: all of them, or it is refused.

    Stops after the last requested record. With `to_the_end` the pass completes and the output of `model` (the model
    with its head or with adapters around it; default: `base`) is returned. If others have hooked the model, the pass
    always completes.
    """
    refuse_autocast(base.device)
    with lock_of(base), torch.no_grad(), eagerly(base):
        recorder = Recorder(dtype, () if to_the_end or hooked(base) else requests)
        made = None
        with standing_in(base, recorder) as handles:
            for request in requests:
                for layer in layer_modules(base, request.stack):
                    recorder.attach(layer, request, handles)
            try:
                made = (model or base)(**inputs)
            except _StopPassError:
                pass
            except Exception as error:  # a model raises what it likes
                if isinstance(error, NormscopeError) or not recorder.running:
                    raise
                raise NormscopeError(f"The model's own forward pass failed: {error}") from error
        for request in requests:
            recorder.refuse_unrecorded(request)
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


class _StopPassError(Exception):
    """Ends a forward pass whose remaining layers nobody needs."""


class Recorder:
    """Collects what the hooks see of the current layer call and hands out its record as soon as everything wanted was
    seen: the feed-forward that nobody asked for would drive it out of the caches."""

    def __init__(self, dtype: torch.dtype, until: Sequence[RecordRequest]) -> None:
        """`until`: the requests after which the pass ends; none: it goes to the end."""
        self.dtype = dtype
        self.left = sum(len(request.layers or ()) for request in until)  # records to be made until the pass ends
        self.thread = threading.get_ident()
        self.counts: dict[str, int] = {}  # layer calls so far on each side
        self.recorded: dict[str, set[int]] = {}  # the layers of each side that were handed out
        self.call: LayerCall | None = None  # the layer that is running
        self.spaces: dict[bool, Tensor] = {}
        self.hooked: set[tuple[str, nn.Module]] = set()
        self.plain: dict[int, frozenset[str]] = {}  # id of a layer -> its plain linear submodules
        self.running = True  # the model, not what is done with its layers

    def attach(self, layer: nn.Module, request: RecordRequest, handles: list[Any]) -> None:
        """Hook the layer; `handles` has every hook as soon as it exists, so that none is left behind."""
        last = last_path(request.steps)
        modules = {path: submodule(layer, path) for path in paths(request.steps, request.constants or request.links)}
        if request.links:
            self.plain[id(layer)] = frozenset(path for path, module in modules.items() if is_plain(module))
        handles.append(layer.register_forward_pre_hook(self._begin(request), with_kwargs=True))
        for path, module in modules.items():
            if (path, module) in self.hooked:  # layers may share it
                continue
            self.hooked.add((path, module))
            handles.append(module.register_forward_hook(self._see(path)))
            if path == last:
                handles.append(module.register_forward_hook(self._see_last(len(modules))))
        handles.append(layer.register_forward_hook(self._end))

    def refuse_unrecorded(self, request: RecordRequest) -> None:
        """Refuse a pass that left out a layer which was asked for."""
        side = request.stack.side
        calls, found = self.counts.get(side, 0), self.recorded.get(side, set())
        missing = sorted(set(request.layers or ()) - found)
        if missing or not found:
            raise NormscopeError(
                f"The forward pass called {calls} layers at {request.stack.layers}, and not layer "
                f"{', '.join(map(str, missing)) or 0} (counted from 0), which was asked for: the model was changed "
                "after the Analyzer was made, or skips layers. Make a new Analyzer."
            )

    def _mine(self) -> bool:
        return threading.get_ident() == self.thread and getattr(active, "recorder", None) is self

    def _wanted_call(self) -> LayerCall | None:
        """The layer call that is running, where more is wanted of it."""
        call = self.call
        if not self._mine() or call is None or call.recorded:
            return None
        return call if call.wanted.layers is None or call.index in call.wanted.layers else None

    def _begin(self, request: RecordRequest) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._mine():
                return
            stack, index = request.stack, self.counts.get(request.stack.side, 0)
            if request.calls is not None and not any(module is one for one in request.calls[index : index + 1]):
                raise NormscopeError(
                    f"Layer call {index} (counted from 0) at {stack.layers} is not the one that it was when the "
                    "Analyzer was made: the model was changed, or calls other layers for other inputs. Make a new "
                    "Analyzer."
                )
            x = args[0] if args else kwargs["hidden_states"]
            if x.shape[-2] != request.real.shape[1]:
                raise NormscopeError(
                    f"Layer {index} (counted from 0) at {stack.layers} reads {x.shape[-2]} tokens, but the input has "
                    f"{request.real.shape[1]}: the model adds or drops some, and what they are is not known."
                )
            if index == 0:
                _check_finite(x, request.real, "The embeddings before the first layer hold")
            encoder = kwargs.get("encoder_hidden_states")
            if encoder is None:
                encoder = next((one for one in args[1:] if _is_encoder_output(one)), None)
            plain = self.plain.get(id(module), frozenset())
            self.call = LayerCall(index, module, x, encoder, request, self.dtype, plain, self._space)

        return hook

    def _see(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self._wanted_call()
            if call is not None:
                inputs, outputs = call.seen.setdefault(path, ([], []))
                inputs.append(args)
                outputs.append(output)

        return hook

    def _see_last(self, count: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Where the last wanted part of a layer ends; `count` submodules are seen by then."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self._wanted_call()
            if call is not None and len(call.seen) == count:
                self._hand_out(call, call.shape(output))

        return hook

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._mine():
            return
        assert self.call is not None
        call, wanted = self.call, self._wanted_call() is not None
        y = output[0] if isinstance(output, tuple) else output
        if wanted:
            _check_end(call, y)
            self._hand_out(call, y)
        else:
            _check_finite(y, call.wanted.real, f"Layer {call.index} (counted from 0) output")
        self.counts[call.wanted.stack.side] = call.index + 1
        self.call = None

    def _hand_out(self, call: LayerCall, y: Tensor) -> None:
        """The layer has come to y, and all that was wanted of it was seen."""
        _check_finite(y, call.wanted.real, f"Layer {call.index} (counted from 0) output")
        active.recorder, self.running = None, False  # what runs from here on is no part of the pass
        try:
            record = call.record(y)
            self.recorded.setdefault(call.wanted.stack.side, set()).add(call.index)
            call.recorded = True
            call.seen.clear()
            call.attention.clear()
            call.wanted.on_layer(record)
            self.running = True
        finally:
            active.recorder = self
        self.left -= 1
        if self.left == 0:
            raise _StopPassError

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
        call = self._wanted_call()
        if call is None:
            return eager(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
        items, heads, rows = query.shape[:3]
        columns, shared = key.shape[2], heads // key.shape[1]  # query heads that share one of the keys and values
        step = heads
        by_head = any(isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == heads for x in (mask, *kwargs.values()))
        if not by_head and not hasattr(module, "sinks"):
            step = shared * max(1, SCORES // (items * rows * columns * shared))
        kept = self._space(bool(call.attention), (items, heads, columns, rows), query.device)
        outputs = []
        for head in range(0, heads, step):
            some, few = slice(head, head + step), slice(head // shared, (head + step) // shared)
            output, weights = eager(module, query[:, some], key[:, few], value[:, few], mask, **kwargs)
            kept[:, :, some].copy_(weights.permute(0, 3, 1, 2))
            outputs.append(output)
        probabilities = kept.permute(0, 2, 3, 1)
        call.attention[id(module)] = (probabilities, value)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), probabilities

    def _space(self, second: bool, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        """A place for the probabilities (b, j, H, i), the same in every layer; the decomposition may overwrite it. The
        second attention of a decoder's layer has one of its own. `shape` is (b, H, j, i)."""
        items, heads, columns, rows = shape
        space = self.spaces.get(second)
        if space is None or space.shape != (items, columns, heads, rows):
            if items == 1:  # as near to the model's own order as the products allow: the copy is the cheaper
                space = torch.empty(shape, dtype=self.dtype, device=device).transpose(1, 2)
            else:  # one stride for the columns of all items
                space = torch.empty(items, columns, heads, rows, dtype=self.dtype, device=device)
            self.spaces[second] = space
        return space


def _check_end(call: LayerCall, y: Tensor) -> None:
    """A layer that ends with a norm outputs what the norm did; a hook on the layer may change it after that."""
    wanted = call.wanted
    last = wanted.steps[-1].part
    whole = len(wanted.steps) == len(steps_of(wanted.stack.blocks))
    if not whole or not isinstance(last, Norm) or last.path not in call.seen or wanted.links:
        return  # a proof compares it with the model alone
    made = call.output_of(last.path)
    if made.data_ptr() != y.data_ptr() and not torch.allclose(made[wanted.real], y[wanted.real], 1e-5, 1e-6):
        raise NormscopeError(
            f"Layer {call.index} (counted from 0) does not output what {last.path}, its last component, does: a hook "
            "or wrapper changes it. Remove that, and try again."
        )


def _check_finite(x: Tensor, real: Tensor, where: str) -> None:
    # A finite sum has finite summands; the look at each of them is for the rest.
    if not isfinite(x.sum().item()) and not bool(torch.isfinite(x[real]).all()):
        raise NormscopeError(f"{where} NaN or infinite values. Check the weights there, and the model's dtype.")


def _is_encoder_output(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3
