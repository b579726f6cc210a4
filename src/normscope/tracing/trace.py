"""Run a model once and hand out what each layer did.

The attention probabilities come from a function registered with transformers' attention interface, together with a mask
function (without one the model would silently attend everywhere). A config names the implementation that its modules
use; during a trace it names ours, which passes what it sees to the recorder of the tracing thread and serves any other
thread with the model's own implementation. Everything else comes from forward hooks.

One lock per model. The model is always restored exactly.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normscope.errors import NormscopeError
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import (
    has_foreign_hooks,
    is_plain_linear,
    last_path,
    layer_modules,
    layer_submodule,
    watched_paths,
    without_compilation,
)
from normscope.tracing.build import (
    LayerCall,
    ProbabilitySpace,
    RecordRequest,
    check_finite,
    check_last_norm,
    is_encoder_output,
)

_guard = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
active_trace = threading.local()  # .recorder: the Recorder of the trace that this thread is running
_swapped: dict[int, list[Any]] = {}  # id of a config -> [its own attention implementation, traces that use it now]
_names: dict[str, str] = {}  # a model's own attention implementation -> the name of ours that stands in for it


def model_lock(base: PreTrainedModel) -> threading.RLock:
    """One lock per model, for whatever hooks it."""
    with _guard:
        return _locks.setdefault(base, threading.RLock())


@contextmanager
def attention_stand_in(base: PreTrainedModel, recorder: Any) -> Iterator[list[Any]]:
    """While this lasts, attention of this thread goes to the recorder. Gives a list for the handles of hooks: they are
    removed at the end, and the model is as it was, whatever happens."""
    handles: list[Any] = []
    configs: list[Any] = []
    previous = getattr(active_trace, "recorder", None)
    try:
        active_trace.recorder = recorder
        for config in attention_configs(base):
            _swap_attention(config)
            configs.append(config)
        yield handles
    finally:
        for config in configs:
            _restore_attention(config)
        for handle in handles:
            handle.remove()
        active_trace.recorder = previous


def attention_configs(base: PreTrainedModel) -> list[Any]:
    """The configs that say how a part of the model attends, each once."""
    found = {id(m.__dict__["config"]): m.__dict__["config"] for m in base.modules() if "config" in m.__dict__}
    return [config for config in found.values() if getattr(config, "_attn_implementation", None) is not None]


def attention_implementation(config: Any) -> str:
    """The attention implementation that a config names, also while ours stands in for it."""
    with _guard:
        entry = _swapped.get(id(config))
        return str(config._attn_implementation if entry is None else entry[0])


def _swap_attention(config: Any) -> None:
    """Put our attention in; counted, as models that share a config may be traced side by side."""
    with _guard:
        if id(config) not in _swapped:
            own = config._attn_implementation
            _swapped[id(config)] = [own, 0]
            # The public setter would go into sub-configs.
            config._attn_implementation_internal = _register_stand_in(own)
        _swapped[id(config)][1] += 1


def _restore_attention(config: Any) -> None:
    with _guard:
        entry = _swapped[id(config)]
        entry[1] -= 1
        if entry[1] == 0:
            config._attn_implementation_internal = entry[0]
            del _swapped[id(config)]


def _register_stand_in(own: str) -> str:
    """The registered name of our attention for models whose own implementation is `own`.

    The name carries the original, so that a thread that is not tracing is served by it without any shared state.
    It must not contain "sdpa", "flash" or "flex": transformers makes extra checks on such names.
    """
    if own in _names:
        return _names[own]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        recorder: Any = getattr(active_trace, "recorder", None)
        eager = _eager_attention(module)
        if recorder is None:
            function = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
            return function(module, query, key, value, attention_mask, **kwargs)
        return recorder.attend(eager, module, query, key, value, attention_mask, kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        if getattr(active_trace, "recorder", None) is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)
        dtype = kwargs.get("dtype", torch.float32)
        # Made in float32 and cast up: float64's lowest value overflows where a family's softmax is in float32.
        kwargs["dtype"] = torch.float32 if dtype == torch.float64 else dtype
        made: Tensor | None = eager_mask(*args, **kwargs)
        return None if made is None else made.to(dtype)

    name = f"normscope{len(_names)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    _names[own] = name
    return name


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the modelling file that defines the module's class (or the class it derives from)."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise NormscopeError(f"{type(module).__name__} does not follow transformers' attention interface.")


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
    model = module_to_call(loaded, head)
    return watched_pass(loaded.base, forward_inputs(loaded, items), requests, loaded.dtype, model, to_the_end)


def module_to_call(loaded: LoadedModel, head: bool) -> nn.Module:
    """The module to call for a pass. A hook before the base model sees how it is called, so that it is called as its
    user does; so is a model with a soft prompt."""
    if loaded.prompt is not None or loaded.base._forward_pre_hooks:
        return loaded.given
    return loaded.model if head else loaded.base


def watched_pass(
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
    with model_lock(base), torch.no_grad(), without_compilation(base):
        recorder = Recorder(dtype, () if to_the_end or has_foreign_hooks(base) else requests)
        made = None
        with attention_stand_in(base, recorder) as handles:
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
        self.space = ProbabilitySpace(dtype)
        self.hooked: set[tuple[str, nn.Module]] = set()
        self.plain: dict[int, frozenset[str]] = {}  # id of a layer -> its plain linear submodules
        self.running = True  # the model, not what is done with its layers

    def attach(self, layer: nn.Module, request: RecordRequest, handles: list[Any]) -> None:
        """Hook the layer; `handles` has every hook as soon as it exists, so that none is left behind."""
        last = last_path(request.steps)
        modules = {
            path: layer_submodule(layer, path)
            for path in watched_paths(request.steps, request.constants or request.links)
        }
        if request.links:
            self.plain[id(layer)] = frozenset(path for path, module in modules.items() if is_plain_linear(module))
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
        return threading.get_ident() == self.thread and getattr(active_trace, "recorder", None) is self

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
                check_finite(x, request.real, "The embeddings before the first layer hold")
            encoder = kwargs.get("encoder_hidden_states")
            if encoder is None:
                encoder = next((one for one in args[1:] if is_encoder_output(one)), None)
            plain = self.plain.get(id(module), frozenset())
            self.call = LayerCall(index, module, x, encoder, request, self.dtype, plain, self.space)

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
            check_last_norm(call, y)
            self._hand_out(call, y)
        else:
            check_finite(y, call.wanted.real, f"Layer {call.index} (counted from 0) output")
        self.counts[call.wanted.stack.side] = call.index + 1
        self.call = None

    def _hand_out(self, call: LayerCall, y: Tensor) -> None:
        """The layer has come to y, and all that was wanted of it was seen."""
        check_finite(y, call.wanted.real, f"Layer {call.index} (counted from 0) output")
        active_trace.recorder, self.running = None, False  # what runs from here on is no part of the pass
        try:
            record = call.record(y)
            self.recorded.setdefault(call.wanted.stack.side, set()).add(call.index)
            call.recorded = True
            call.seen.clear()
            call.attention.clear()
            call.wanted.on_layer(record)
            self.running = True
        finally:
            active_trace.recorder = self
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
        kept = self.space.take(bool(call.attention), (items, heads, columns, rows), query.device)
        outputs = []
        for head in range(0, heads, step):
            some, few = slice(head, head + step), slice(head // shared, (head + step) // shared)
            output, weights = eager(module, query[:, some], key[:, few], value[:, few], mask, **kwargs)
            kept[:, :, some].copy_(weights.permute(0, 3, 1, 2))
            outputs.append(output)
        probabilities = kept.permute(0, 2, 3, 1)
        call.attention[id(module)] = (probabilities, value)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), probabilities
