"""Calls of the functions that compute a recurrence, watched while a model is traced.

transformers computes recurrences in functions of the modelling file. During a trace, a stand-in of the same name calls
the function and passes its arguments and result to the recorder of the tracing thread; in other threads it only calls
the function. The file is restored when the last trace ends.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.tracing.model_state import active_trace
from normscope.tracing.recurrences import RecurrenceInputs

_guard = threading.Lock()
_swapped: dict[tuple[str, str], list[Any]] = {}  # (file, function) -> [the function, number of running traces]


@dataclass(frozen=True)
class RecurrenceCall:
    """One call of a recurrence."""

    inputs: RecurrenceInputs
    values: Tensor  # (b, H, n, d_v)
    output: Tensor  # (b, H, n, d_v)


def read_recurrence(name: str, given: Mapping[str, Any], made: Any, dtype: torch.dtype) -> RecurrenceCall:
    """What the function called `name` was given and returned."""
    states = given.get("initial_state", given.get("initial_states"))
    if states is not None and bool(states.any()):
        raise NormscopeError("The model continues from a cache, whose tokens are not analysed. Pass the whole text.")
    return _READERS[name](given, made[0] if isinstance(made, tuple) else made, dtype)


def _read_delta_rule(given: Mapping[str, Any], made: Tensor, dtype: torch.dtype) -> RecurrenceCall:
    query, key, values, decay, write, output = (
        one.to(dtype).transpose(1, 2)
        for one in (*(given[name] for name in ("query", "key", "value", "g", "beta")), made)
    )
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    query = query * query.shape[-1] ** -0.5
    return RecurrenceCall(RecurrenceInputs(query, key, decay, write, None, delta=True), values, output)


def _read_state_space(given: Mapping[str, Any], made: Tensor, dtype: torch.dtype) -> RecurrenceCall:
    step, rate = given["dt"].to(dtype), given["A"].to(dtype)
    step = step if given.get("dt_bias") is None else step + given["dt_bias"]
    step = torch.nn.functional.softplus(step) if given.get("dt_softplus") else step
    step = step.clamp(*given["dt_limit"])  # (b, n, H)
    values, output = (one.to(dtype).transpose(1, 2) for one in (given["hidden_states"], made))
    shared = values.shape[1] // given["B"].shape[2]
    key, query = (given[name].to(dtype).repeat_interleave(shared, 2).transpose(1, 2) for name in ("B", "C"))
    skip = None if given.get("D") is None else given["D"].detach().to(dtype)
    decay, write = ((step * rate).transpose(1, 2), step.transpose(1, 2))
    return RecurrenceCall(RecurrenceInputs(query, key, decay, write, skip, delta=False), values, output)


_READERS: dict[str, Callable[[Mapping[str, Any], Tensor, torch.dtype], RecurrenceCall]] = {
    "torch_chunk_gated_delta_rule": _read_delta_rule,
    "mamba2_chunk_scan": _read_state_space,
}


@contextmanager
def recurrence_stand_ins(base: nn.Module) -> Iterator[None]:
    """Watch the recurrences of a model."""
    files = {cls.__module__ for module in base.modules() for cls in type(module).__mro__}
    places = [(file, name) for file in sorted(files) for name in _READERS if hasattr(sys.modules.get(file), name)]
    swapped = []
    try:
        for place in places:
            _swap_function(*place)
            swapped.append(place)
        yield
    finally:
        for place in swapped:
            _restore_function(*place)


def _swap_function(file: str, name: str) -> None:
    """Counted, because models of one file may be traced concurrently."""
    with _guard:
        entry = _swapped.setdefault((file, name), [getattr(sys.modules[file], name), 0])
        if entry[1] == 0:
            setattr(sys.modules[file], name, _stand_in(name, entry[0]))
        entry[1] += 1


def _restore_function(file: str, name: str) -> None:
    with _guard:
        entry = _swapped[file, name]
        entry[1] -= 1
        if entry[1] == 0:
            setattr(sys.modules[file], name, entry[0])
            del _swapped[file, name]


def _stand_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        keep = getattr(getattr(active_trace, "recorder", None), "keep_recurrence", None)
        if keep is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            keep(name, bound.arguments, made)
        return made

    return compute
