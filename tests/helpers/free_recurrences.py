"""Recurrences under the rules of `free_rules`: queries, keys, decays and write strengths are held at what the forward
pass made of them, and every piece of the values goes through the recurrence one token at a time, in float64.

The functions have the names and arguments of those in transformers' modelling files, which they replace for a while.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.free_parts import Linear
from tests.helpers.free_rules import Traced, linear, plain


def delta_rule(given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """``S <- e^g S; S <- S + beta k (v - S^T k)^T; o = S^T q``, for values (b, n, H, d)."""
    query, key, decay, write = (given[name].double() for name in ("query", "key", "g", "beta"))
    if given["use_qk_l2norm_in_kernel"]:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query / query.shape[-1] ** 0.5

    def run(values: Tensor) -> Tensor:
        state = values.new_zeros(*values.shape[:1], *values.shape[2:3], key.shape[-1], values.shape[-1])
        outputs = []
        for t in range(values.shape[1]):
            state = state * decay[:, t, :, None, None].exp()
            seen = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
            change = write[:, t, :, None] * (values[:, t] - seen)
            state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        return torch.stack(outputs, 1)

    return run


def state_space(given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """``S <- e^(A dt) S + dt B v^T; o = S^T C + D v``, for values (b, n, H, d)."""
    step, rate, skip = given["dt"].double(), given["A"].double(), given["D"].double()
    step = nn.functional.softplus(step + given["dt_bias"].double()).clamp(*given["dt_limit"])
    shared = step.shape[2] // given["B"].shape[2]
    key, query = (given[name].double().repeat_interleave(shared, 2) for name in ("B", "C"))

    def run(values: Tensor) -> Tensor:
        state = values.new_zeros(*values.shape[:1], *values.shape[2:3], key.shape[-1], values.shape[-1])
        outputs = []
        for t in range(values.shape[1]):
            written = torch.einsum("bh,bhk,bhv->bhkv", step[:, t], key[:, t], values[:, t])
            state = state * (rate * step[:, t]).exp()[..., None, None] + written
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) + skip[:, None] * values[:, t])
        return torch.stack(outputs, 1)

    return run


RECURRENCES = {  # function of a modelling file -> its values, and the recurrence that it computes
    "torch_chunk_gated_delta_rule": ("value", delta_rule),
    "mamba2_chunk_scan": ("hidden_states", state_space),
}


@contextmanager
def held_recurrences(layer: nn.Module) -> Iterator[None]:
    """Replace the recurrences in the files of a layer's modules."""
    files = {sys.modules[type(module).__module__] for module in layer.modules()}
    places = [(file, name, getattr(file, name)) for file in files for name in RECURRENCES if hasattr(file, name)]
    for file, name, function in places:
        setattr(file, name, traced_recurrence(name, function))
    try:
        yield
    finally:
        for file, name, function in places:
            setattr(file, name, function)


def traced_recurrence(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    values, recurrence = RECURRENCES[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        value = bound.arguments[values]
        assert isinstance(value, Traced)
        made = function(*plain(args), **plain(kwargs))
        run, parts = recurrence(plain(dict(bound.arguments))), linear(value)
        state = Linear([run(piece) for piece in parts.pieces], parts.depth + 1)
        value.run.recurrent = True  # transformers computes recurrences in float32
        first = Traced(made[0] if isinstance(made, tuple) else made, state, value.run)
        return (first, *made[1:]) if isinstance(made, tuple) else first

    return call
