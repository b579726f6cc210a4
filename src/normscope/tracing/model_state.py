"""The state of a model around a pass: its lock, whether it has changed since it was proved, and the stand-in for its
attention function.

The stand-in is registered with the attention interface of transformers, together with a mask function (without one the
model would attend to masked tokens). During a trace, the config of the model names it as its attention implementation.
It calls the recorder of the tracing thread; in other threads it calls the implementation that it replaces. A lock per
model protects the trace, and the model is always restored exactly.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normscope.errors import NormscopeError
from normscope.models.loaded import LayerCalls, LoadedModel, update_prompt
from normscope.tracing.selected_keys import fold_selected_keys, refuse_ignored_tensors

_guard = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
proved_models: WeakKeyDictionary[nn.Module, tuple[Any, LayerCalls]] = WeakKeyDictionary()  # with fingerprints
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
    except KeyError as error:
        if is_stand_in_missing(error):
            raise NormscopeError(
                f"{type(base).__name__} looks its attention up in a table of its own, where normscope cannot record "
                "it. Later versions of transformers may use the common interface: upgrade transformers."
            ) from error
        raise
    finally:
        for config in configs:
            _restore_attention(config)
        for handle in handles:
            handle.remove()
        active_trace.recorder = previous


def is_stand_in_missing(error: Exception) -> bool:
    """Whether a table of attention functions lacks a stand-in."""
    return isinstance(error, KeyError) and any(name in _stand_ins.values() for name in error.args)


def keeps_own_attention(recorder: Any) -> bool:
    """Whether the recorder lets the model's own attention function run, with the masks made for it."""
    return bool(getattr(recorder, "in_blocks", False))


def attention_configs(base: PreTrainedModel) -> list[Any]:
    """The configs inside the model that name an attention implementation, without duplicates."""
    found = {id(m.__dict__["config"]): m.__dict__["config"] for m in base.modules() if "config" in m.__dict__}
    return [config for config in found.values() if getattr(config, "_attn_implementation", None) is not None]


def uses_known_attention(base: PreTrainedModel) -> bool:
    """Whether every attention implementation of the model is the eager one or PyTorch's fused one."""
    names = {attention_implementation(config) for config in attention_configs(base)}
    return names <= {"eager", "sdpa"} and (
        "sdpa" not in names or ALL_ATTENTION_FUNCTIONS.get("sdpa") is sdpa_attention_forward
    )


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
        function = ALL_ATTENTION_FUNCTIONS.get(own, eager)
        more = any(isinstance(one, Tensor) for one in kwargs.values())
        if more and (own in ("eager", "sdpa") or (recorder is not None and not keeps_own_attention(recorder))):
            attention_mask, kwargs = fold_selected_keys(query, key, attention_mask, kwargs)
        if recorder is None:
            return function(module, query, key, value, attention_mask, **kwargs)
        if more:
            refuse_ignored_tensors(module, eager, kwargs)
        if keeps_own_attention(recorder):
            return recorder.attend_in_blocks(function, eager, module, query, key, value, attention_mask, kwargs)
        return recorder.attend(eager, module, query, key, value, attention_mask, kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        recorder = getattr(active_trace, "recorder", None)
        if recorder is None or (own != "eager" and keeps_own_attention(recorder)):
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


def is_proved(loaded: LoadedModel) -> bool:
    """Whether the model has been proved and not changed since; if so, its layer calls are stored in `loaded`."""
    # Slicing a ModuleList creates a new one in training mode, which has no effect.
    lists = nn.ModuleList | nn.ModuleDict
    if any(module.training for module in loaded.given.modules() if not isinstance(module, lists)):
        raise NormscopeError("The model is in training mode, so dropout would change the results. Call model.eval().")
    if loaded.given is not loaded.model:  # another peft adapter may be active now
        update_prompt(loaded)
    with model_lock(loaded.base):
        found = proved_models.get(loaded.base)
        if found is None or found[0] != (loaded.stacks, model_fingerprint(loaded)):
            return False
        store_calls(loaded, found[1])
        return True


def store_calls(loaded: LoadedModel, calls: LayerCalls) -> None:
    """Store the layer calls of a proof in `loaded`."""
    loaded.calls = calls
    loaded.depths = [len(calls.modules[stack.side]) for stack in loaded.stacks]
    loaded.head_counts = [max(calls.heads[stack.side]) for stack in loaded.stacks]


def model_fingerprint(loaded: LoadedModel) -> Any:
    """Everything except the weights that determines a forward pass: modules, their code, hooks, dtypes, attention.
    Equal fingerprints mean that none of it has changed."""
    modules = []
    for module in loaded.given.modules():
        own = module.__dict__
        modules.append(
            (
                weakref.ref(module),
                type(module).forward,
                own.get("forward"),
                own.get("is_causal"),
                module.training,
                tuple(module._forward_hooks),
                tuple(module._forward_pre_hooks),
                tuple((p.dtype, p.shape) for p in module._parameters.values() if p is not None),
            )
        )
    names = [attention_implementation(config) for config in attention_configs(loaded.base)]
    files = {type(module).__module__ for module in loaded.base.modules()}
    eager = {name: getattr(sys.modules.get(name), "eager_attention_forward", None) for name in files}
    everywhere = torch.nn.modules.module
    hooks = tuple(everywhere._global_forward_hooks), tuple(everywhere._global_forward_pre_hooks)
    return modules, hooks, names, [ALL_ATTENTION_FUNCTIONS.get(name) for name in names], eager
