"""The modules that run after the last layer, outside the layers: their calls in a pass, and their maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.flow.freeze_check import norm_misfit
from normscope.flow.maps import UPCAST, FrozenLinear, FrozenMap, FrozenNorm
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules, linear_map
from normscope.step_progress import FOLLOWED, FollowedSteps
from normscope.tracing.recorded import ELEMENT, PRODUCT, closeness_rows, coarser, is_close, is_close_to_product


@dataclass
class LayerOutputs:
    """The layers that have run in one forward pass."""

    latest: dict[str, Tensor] = field(default_factory=dict)  # side -> (rows, d), the output of its latest layer
    counts: dict[str, int] = field(default_factory=dict)  # side -> number of layers that have run
    finished: str = ""  # the side whose last layer has run most recently
    thread: int = field(default_factory=get_ident)  # passes of other threads are ignored
    followed: FollowedSteps | None = field(default_factory=FOLLOWED.get)  # and those of a progress callback


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module outside the layers."""

    module: nn.Module
    name: str  # its dotted name in the model
    input: Tensor  # (rows, width)
    output: Tensor
    dtype: torch.dtype  # the least precise dtype involved

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"


ModuleCalls = Mapping[str, list[ModuleCall]]  # side -> the calls after its last layer, in order


@contextmanager
def log_module_calls(loaded: LoadedModel, outputs: LayerOutputs) -> Iterator[ModuleCalls]:
    """Log the module calls after the last layer of each side while the context is open, in this thread only."""
    calls: dict[str, list[ModuleCall]] = {stack.side: [] for stack in loaded.stacks}
    layers = {layer for stack in loaded.stacks for layer in layer_modules(loaded.base, stack)}
    inside = {module for layer in layers for module in layer.modules()}
    handles = []

    def call_hook(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
            given: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            mine = get_ident() == outputs.thread and FOLLOWED.get() is outputs.followed
            if mine and outputs.finished and _module_call_holds_vectors(given) and _module_call_holds_vectors(made):
                dtype = coarser(given.dtype, made.dtype, loaded.dtype)
                x, y = (closeness_rows(one.detach().to(loaded.dtype)) for one in (given, made))
                if module_call_is_linear_or_norm(module):
                    x, y = x.clone(), y.clone()
                calls[outputs.finished].append(ModuleCall(module, name, x, y, dtype))

        return hook

    try:
        for name, module in loaded.model.named_modules():
            if module not in inside and not any(one in layers for one in module.modules()):
                handles.append(module.register_forward_hook(call_hook(name), with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _module_call_holds_vectors(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0


def module_call_is_linear(module: nn.Module) -> bool:
    """Whether the module computes ``x W + b``, judged by its class."""
    return hasattr(module, "weight") and (hasattr(module, "in_features") or type(module).__name__ == "Conv1D")


def module_call_is_linear_or_norm(module: nn.Module) -> bool:
    """Whether the module is linear or a norm, judged by its class."""
    return module_call_is_linear(module) or _module_call_is_norm(module)


def _module_call_is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and (weight is None or weight.dim() == 1)


def module_call_map(call: ModuleCall) -> FrozenMap | None:
    """The map of a linear module or norm; None if its output differs from ``x W + b`` or the norm of its input."""
    return _linear_module_call_map(call) if module_call_is_linear(call.module) else _norm_module_call_map(call)


def _linear_module_call_map(call: ModuleCall) -> FrozenLinear | None:
    x = call.input
    try:
        weight, bias = linear_map(call.module)
    except (NormscopeError, RuntimeError):  # not linear, or cannot be run by itself
        return None
    matrix = weight.detach().to(x.dtype).t()
    constant = None if bias is None else bias.detach().to(x.dtype)
    fits = is_close_to_product(x, matrix, constant, call.output, PRODUCT[call.dtype])
    return FrozenLinear(matrix, constant) if fits else None


def _norm_module_call_map(call: ModuleCall) -> FrozenNorm | None:
    module, x = call.module, call.input
    epsilon = next((e for e in (getattr(module, n, None) for n in ("eps", "variance_epsilon")) if e is not None), 0.0)
    weight, shift = getattr(module, "weight", None), getattr(module, "bias", None)
    gain = weight.detach().to(x.dtype) if isinstance(weight, Tensor) else torch.ones_like(x[0])
    constant = shift.detach().to(x.dtype) if isinstance(shift, Tensor) else None
    if x.shape != call.output.shape or len(gain) != x.shape[-1]:
        return None
    plain = isinstance(module, nn.LayerNorm)
    tolerance = ELEMENT[call.dtype] if plain else max(ELEMENT[call.dtype], UPCAST)
    for centered in (True,) if plain else (False, True):
        spread = x.var(-1, correction=0) if centered else x.square().mean(-1)
        for offset in (0.0, 1.0):  # Gemma's gain is 1 + weight
            one = FrozenNorm(centered, (spread + epsilon).rsqrt(), gain + offset, constant)
            if norm_misfit(one, offset, x, call.output, tolerance) <= 1:
                return one
    return None


def describe_broken_module_call(call: ModuleCall) -> str:
    """Why a linear module or norm has no map."""
    expected = "x W + b" if module_call_is_linear(call.module) else "the LayerNorm or RMSNorm"
    return f"{call} does not output {expected} of its input; a hook, a wrapper or its class does something else"


def encoder_tail_of_module_calls(calls: Sequence[ModuleCall], state: Tensor) -> tuple[tuple[FrozenMap, ...], Tensor]:
    """The norms after the last layer of an encoder, and the model's own states after them."""
    chain: list[FrozenMap] = []
    for call in calls:
        if _module_call_is_norm(call.module) and is_close(state, call.input, call.dtype):
            one = module_call_map(call)
            if one is None:
                raise NormscopeError(f"The encoder's states cannot be followed: {describe_broken_module_call(call)}.")
            chain.append(one)
            state = call.output
    return tuple(chain), state
