"""Standing in for a model's attention: a function and a mask registered with transformers' attention interface.

A config names the implementation its modules use; while a model is traced it names ours, which hands what it sees to
the recorder of the thread that traces, and serves any other thread by the model's own implementation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normscope.errors import NormscopeError

_guard = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
active = threading.local()  # .recorder: the Recorder of the trace that this thread is running
_swapped: dict[int, list[Any]] = {}  # id of a config -> [its own attention implementation, traces that use it now]
_names: dict[str, str] = {}  # a model's own attention implementation -> the name of ours that stands in for it


def lock_of(base: PreTrainedModel) -> threading.RLock:
    """One lock per model, for whatever hooks it."""
    with _guard:
        return _locks.setdefault(base, threading.RLock())


@contextmanager
def standing_in(base: PreTrainedModel, recorder: Any) -> Iterator[list[Any]]:
    """While this lasts, attention of this thread goes to the recorder. Gives a list for the handles of hooks: they are
    removed at the end, and the model is as it was, whatever happens."""
    handles: list[Any] = []
    configs: list[Any] = []
    previous = getattr(active, "recorder", None)
    try:
        active.recorder = recorder
        for config in configs_of(base):
            _swap(config)
            configs.append(config)
        yield handles
    finally:
        for config in configs:
            _restore(config)
        for handle in handles:
            handle.remove()
        active.recorder = previous


def configs_of(base: PreTrainedModel) -> list[Any]:
    """The configs that say how a part of the model attends, each once."""
    found = {id(m.__dict__["config"]): m.__dict__["config"] for m in base.modules() if "config" in m.__dict__}
    return [config for config in found.values() if getattr(config, "_attn_implementation", None) is not None]


def own_implementation(config: Any) -> str:
    """The attention implementation that a config names, also while ours stands in for it."""
    with _guard:
        entry = _swapped.get(id(config))
        return str(config._attn_implementation if entry is None else entry[0])


def foreign_attention(base: PreTrainedModel) -> bool:
    """Whether the model attends by a function that is not transformers' own."""
    names = {own_implementation(config) for config in configs_of(base)}
    functions = (ALL_ATTENTION_FUNCTIONS.get(name) for name in names)
    return any(one is not None and not one.__module__.startswith("transformers.") for one in functions)


def refuse_maskless(base: PreTrainedModel) -> None:
    """Refuse an attention implementation for which no mask function is registered: transformers then makes no mask, and
    what the implementation attends to is known to nobody else."""
    for name in {own_implementation(config) for config in configs_of(base)}:
        if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise NormscopeError(
                f"The attention implementation {name!r} has no mask function: what it attends to cannot be seen. "
                "Register one with transformers.AttentionMaskInterface, or load the model with "
                "attn_implementation='eager'."
            )


def _swap(config: Any) -> None:
    """Put our attention in; counted, as models that share a config may be traced side by side."""
    with _guard:
        if id(config) not in _swapped:
            own = config._attn_implementation
            _swapped[id(config)] = [own, 0]
            config._attn_implementation_internal = _stand_in(own)  # the public setter would go into sub-configs
        _swapped[id(config)][1] += 1


def _restore(config: Any) -> None:
    with _guard:
        entry = _swapped[id(config)]
        entry[1] -= 1
        if entry[1] == 0:
            config._attn_implementation_internal = entry[0]
            del _swapped[id(config)]


def _stand_in(own: str) -> str:
    """The registered name of our attention for models whose own implementation is `own`.

    The name carries the original, so that a thread that is not tracing is served by it without any shared state.
    It must not contain "sdpa", "flash" or "flex": transformers makes extra checks on such names.
    """
    if own in _names:
        return _names[own]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        recorder: Any = getattr(active, "recorder", None)
        eager = _eager(module)
        if recorder is None:
            function = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
            return function(module, query, key, value, attention_mask, **kwargs)
        return recorder.attend(eager, module, query, key, value, attention_mask, kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        if getattr(active, "recorder", None) is None:
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


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the modelling file that defines the module's class (or the class it derives from)."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise NormscopeError(f"{type(module).__name__} does not follow transformers' attention interface.")
