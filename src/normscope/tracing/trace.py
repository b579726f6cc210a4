"""Run a forward pass and record every layer.

Attention probabilities come from a stand-in registered with the attention interface of transformers, together with a
mask function (without one the model would attend to masked tokens). During a trace, the config of the model names the
stand-in as its attention implementation. The stand-in calls the recorder of the tracing thread; in other threads it
calls the implementation that it replaces. Everything else is recorded by forward hooks. A lock per model protects the
trace, and the model is always restored exactly.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    layer_blocks,
    layer_modules,
    layer_submodule,
    product_paths,
    refuse_autocast,
    watched_paths,
    without_compilation,
)
from normscope.models.scopes import Step, layer_steps
from normscope.tracing.build import (
    LayerCall,
    ProbabilitySpace,
    RecordRequest,
    check_finite,
    check_last_norm,
    is_encoder_output,
)
from normscope.tracing.products import attention_hooks, copy_tensors, product_watch

_guard = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
active_trace = threading.local()  # .recorder: the Recorder of the trace running in this thread
_swapped: dict[int, list[Any]] = {}  # id of a config -> [its attention implementation, number of running traces]
_stand_ins: dict[str, str] = {}  # attention implementation -> registered name of its stand-in


def model_lock(base: PreTrainedModel) -> threading.RLock:
    """The lock of a model; hold it while hooks are attached."""
    with _guard:
        return _locks.setdefault(base, threading.RLock())


@contextmanager
def attention_stand_in(base: PreTrainedModel, recorder: Any) -> Iterator[list[Any]]:
    """Pass the attention calls of this thread to `recorder`. Yields a list for hook handles, which are removed at the
    end; the model is restored even after an error."""
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
    """The configs inside the model that name an attention implementation, without duplicates."""
    found = {id(m.__dict__["config"]): m.__dict__["config"] for m in base.modules() if "config" in m.__dict__}
    return [config for config in found.values() if getattr(config, "_attn_implementation", None) is not None]


def attention_implementation(config: Any) -> str:
    """The original attention implementation of a config, even during a trace."""
    with _guard:
        entry = _swapped.get(id(config))
        return str(config._attn_implementation if entry is None else entry[0])


def _swap_attention(config: Any) -> None:
    """Switch a config to the stand-in; counted, because models that share a config may be traced concurrently."""
    with _guard:
        if id(config) not in _swapped:
            own = config._attn_implementation
            _swapped[id(config)] = [own, 0]
            # The public setter would change sub-configs too.
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
    """Register the stand-in for the attention implementation `own`, if necessary, and return its name.

    There is one stand-in per implementation, so that threads without a trace need no shared state to call the original.
    The name must not contain "sdpa", "flash" or "flex", for which transformers makes extra checks.
    """
    if own in _stand_ins:
        return _stand_ins[own]

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
        # Built in float32, then cast: the lowest float64 value would overflow in families with a float32 softmax.
        kwargs["dtype"] = torch.float32 if dtype == torch.float64 else dtype
        built: Tensor | None = eager_mask(*args, **kwargs)
        return None if built is None else built.to(dtype)

    name = f"normscope{len(_stand_ins)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    _stand_ins[own] = name
    return name


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the modelling file that defines the module's class (or the class it derives from)."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise NormscopeError(
        f"{type(module).__name__} does not use the attention interface of transformers: its file has no function "
        "eager_attention_forward. For such a family, set `probabilities` in its Attention."
    )


SCORES = 2**20  # attention scores computed at a time


def trace(
    loaded: LoadedModel,
    items: Sequence[Item],
    requests: Sequence[RecordRequest],
    *,
    head: bool = False,
    to_the_end: bool = False,
) -> Any:
    """One recorded forward pass over a batch; `head` includes the model's head. See `watched_pass`."""
    model = module_to_call(loaded, head)
    return watched_pass(loaded.base, forward_inputs(loaded, items), requests, loaded.dtype, model, to_the_end)


def module_to_call(loaded: LoadedModel, head: bool) -> nn.Module:
    """The module to call for a pass: the model as the user passed it if it has a soft prompt, or if hooks before the
    base model may depend on how it is called."""
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
    """One forward pass that passes each requested record to its `on_layer`; raises an error if any is missing.

    Stops after the last requested record. With `to_the_end` the pass completes and the output of `model` (the model
    with its head or adapters; default: `base`) is returned. If the model has foreign hooks, the pass always completes.
    """
    refuse_autocast(base.device)
    with model_lock(base), torch.no_grad(), without_compilation(base):
        recorder = Recorder(dtype, () if to_the_end or has_foreign_hooks(base) else requests)
        output, products = None, any(product_paths(request.steps) for request in requests)
        with attention_stand_in(base, recorder) as handles, product_watch(recorder) if products else nullcontext():
            for request in requests:
                for layer in layer_modules(base, request.stack):
                    recorder.attach(layer, request, handles)
            try:
                output = (model or base)(**inputs)
            except _StopPassError:
                pass
            except Exception as error:  # models may raise anything
                if isinstance(error, NormscopeError) or not recorder.in_model:
                    raise
                raise NormscopeError(f"The model's own forward pass failed: {error}") from error
        for request in requests:
            recorder.refuse_unrecorded(request)
        return output


class _StopPassError(Exception):
    """Stops a forward pass after the last requested record."""


class Recorder:
    """Collects the inputs and outputs of the current layer call, and delivers its record once the requested steps are
    complete, while the tensors are still in the CPU caches."""

    def __init__(self, dtype: torch.dtype, until: Sequence[RecordRequest]) -> None:
        """The pass stops when the requests in `until` are complete; if empty, it runs to the end."""
        self.dtype = dtype
        self.records_left = sum(len(request.layers or ()) for request in until)
        self.thread = threading.get_ident()
        self.call_counts: dict[str, int] = {}  # side -> layer calls so far
        self.recorded: dict[str, set[int]] = {}  # side -> layers whose records were delivered
        self.current_call: LayerCall | None = None  # the layer call in progress
        self.space = ProbabilitySpace(dtype)
        self.hooked: set[tuple[str, nn.Module]] = set()
        self.plain_linear: dict[int, frozenset[str]] = {}  # id of a layer -> paths of its unmodified linear submodules
        self.attending: str | None = None  # path of the running attention, if its products are watched
        self.in_model = True  # False while a record is processed, so that its errors are not taken for the model's

    def attach(self, layer: nn.Module, request: RecordRequest, handles: list[Any]) -> None:
        """Hook a layer. Each handle is appended to `handles` immediately, so that it is removed even after an error."""
        steps = layer_steps(layer_blocks(layer, request.stack))[: len(request.steps)]
        last = last_path(steps)
        modules = {
            path: layer_submodule(layer, path) for path in watched_paths(steps, request.constants or request.for_proof)
        }
        if request.for_proof:
            self.plain_linear[id(layer)] = frozenset(path for path in modules if is_plain_linear(modules[path]))
        handles.append(layer.register_forward_pre_hook(self._layer_start_hook(request, steps), with_kwargs=True))
        for path in product_paths(steps):
            handles += attention_hooks(self, layer_submodule(layer, path), path)
        for path, module in modules.items():
            if (path, module) in self.hooked:  # layers may share a module
                continue
            self.hooked.add((path, module))
            handles.append(module.register_forward_hook(self._submodule_hook(path, request.stack.in_place)))
            if path == last:
                handles.append(module.register_forward_hook(self._last_submodule_hook(len(modules))))
        handles.append(layer.register_forward_hook(self._on_layer_end))

    def refuse_unrecorded(self, request: RecordRequest) -> None:
        """Raise an error if a requested layer was not called."""
        side = request.stack.side
        calls, found = self.call_counts.get(side, 0), self.recorded.get(side, set())
        missing = sorted(set(request.layers or ()) - found)
        if missing or not found:
            raise NormscopeError(
                f"The forward pass called {calls} layers at {request.stack.layers}, but not the requested layer "
                f"{', '.join(map(str, missing)) or 0} (counted from 0). The model skips layers, or was changed after "
                "the Analyzer was created. Create a new Analyzer."
            )

    def is_active(self) -> bool:
        """True in the thread of the trace, while the model runs."""
        return threading.get_ident() == self.thread and getattr(active_trace, "recorder", None) is self

    def call_to_record(self) -> LayerCall | None:
        """The layer call in progress if its record is requested and not yet delivered."""
        call = self.current_call
        if not self.is_active() or call is None or call.recorded:
            return None
        return call if call.request.layers is None or call.index in call.request.layers else None

    def _layer_start_hook(
        self, request: RecordRequest, steps: tuple[Step, ...]
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.is_active():
                return
            stack, index = request.stack, self.call_counts.get(request.stack.side, 0)
            if request.calls is not None and not any(module is one for one in request.calls[index : index + 1]):
                raise NormscopeError(
                    f"Layer call {index} (counted from 0) at {stack.layers} is another module than when the Analyzer "
                    "was created: the model was changed, or its calls depend on the input. Create a new Analyzer."
                )
            x = args[0] if args else kwargs["hidden_states"]
            if x.shape[-2] != request.real.shape[1]:
                raise NormscopeError(
                    f"Layer {index} (counted from 0) at {stack.layers} reads {x.shape[-2]} tokens, but the input has "
                    f"{request.real.shape[1]}. The model adds or drops tokens, which its family does not support."
                )
            if index == 0:
                check_finite(x, request.real, "The embeddings before the first layer contain")
            encoder = kwargs.get("encoder_hidden_states")
            if encoder is None:
                encoder = next((one for one in args[1:] if is_encoder_output(one)), None)
            plain = self.plain_linear.get(id(module), frozenset())
            self.current_call = LayerCall(index, module, x, encoder, request, self.dtype, plain, self.space, steps)

        return hook

    def _submodule_hook(self, path: str, copy: bool) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self.call_to_record()
            if call is not None:
                inputs, outputs = call.seen.setdefault(path, ([], []))
                inputs.append(copy_tensors(args) if copy else args)
                outputs.append(copy_tensors(output) if copy else output)

        return hook

    def _last_submodule_hook(self, count: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Hook that delivers the record after the last requested submodule, once all `count` submodules were called."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self.call_to_record()
            if call is not None and len(call.seen) == count:
                self._deliver_record(call, call.unflatten(output))

        return hook

    def _on_layer_end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.is_active():
            return
        assert self.current_call is not None
        call, requested = self.current_call, self.call_to_record() is not None
        y = output[0] if isinstance(output, tuple | list) else output
        if requested:
            check_last_norm(call, y)
            self._deliver_record(call, y)
        else:
            check_finite(y, call.request.real, f"Layer {call.index} (counted from 0) outputs")
        self.call_counts[call.request.stack.side] = call.index + 1
        self.current_call = None

    def _deliver_record(self, call: LayerCall, y: Tensor) -> None:
        """Build the record of a layer whose output so far is y, and pass it to `on_layer`."""
        check_finite(y, call.request.real, f"Layer {call.index} (counted from 0) outputs")
        active_trace.recorder, self.in_model = None, False  # `on_layer` may call modules
        try:
            record = call.record(y)
            self.recorded.setdefault(call.request.stack.side, set()).add(call.index)
            call.recorded = True
            for kept in (call.seen, call.attention, call.products):
                kept.clear()
            call.request.on_layer(record)
            self.in_model = True
        finally:
            active_trace.recorder = self
        self.records_left -= 1
        if self.records_left == 0:
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
        """Eager attention of the model's family, some heads at a time so that the scores stay in cache. A
        different softmax would round differently and change later layers by about 1e-6."""
        call = self.call_to_record()
        if call is None:
            return eager(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
        items, heads, rows = query.shape[:3]
        columns, shared = key.shape[2], heads // key.shape[1]  # query heads per key and value head
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
