"""Watch one layer at work: the calls of its modules, and the products in which attention mixes tokens.

A layer is watched in a copy whose parameters are random, in float64, so that no two tensors coincide by chance: at
their initial values norms are identities and biases vanish. Matrix products are seen below PyTorch's functions, where
`matmul`, `@`, `einsum`, `baddbmm` and fused attention all become one of a few operators.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from normscope.errors import NormscopeError
from normscope.tracing.hooks import Arguments, watch_calls
from normscope.tracing.products import ProductWatch
from normscope.tracing.sinks import SoftmaxWatch


@dataclass(frozen=True)
class Call:
    """One call of a module inside a layer."""

    path: str
    module: nn.Module
    inputs: tuple[Tensor, ...]  # all tensors that it was given
    output: Tensor
    order: int  # in which calls ended

    @property
    def input(self) -> Tensor:
        """The first floating-point tensor that it was given."""
        return next(one for one in self.inputs if one.is_floating_point())


@dataclass(frozen=True)
class Product:
    """``mixed = weights @ values``, the weights being probabilities: where attention mixes tokens."""

    path: str  # the innermost module running at that moment
    weights: Tensor  # (H, i, j)
    values: Tensor  # (H, j, d_h)
    mixed: Tensor  # (H, i, d_h)


@dataclass
class LayerLog:
    """What was seen in one call of a layer, for a single input."""

    layer: nn.Module
    input: Tensor
    output: Tensor
    encoder: Tensor | None
    calls: list[Call] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    in_place: bool = False  # a module's output was changed after its call
    scores: list[Tensor] = field(default_factory=list)  # that softmaxes read


@dataclass(frozen=True)
class LayerCallArguments:
    """The arguments of a layer's call in a pass of the model."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor

    @property
    def states(self) -> Tensor:
        """The hidden states that the layer reads."""
        return hidden_states(self.args, self.kwargs)


def hidden_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The first floating-point tensor of at least two dimensions among the arguments of a layer."""
    for one in (*args[:1], kwargs.get("hidden_states"), *args[1:], *kwargs.values()):
        if isinstance(one, Tensor) and one.is_floating_point() and one.dim() >= 2:
            return one
    raise NormscopeError("A layer is called without hidden states.")


def first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor of a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, tuple | list):
        return next((found for one in output if (found := first_tensor(one)) is not None), None)
    return None


def watch_layer(call: LayerCallArguments, seed: int = 0) -> LayerLog:
    """Call a randomised copy of the layer on random states, on the layer's device, and log what happens inside. In
    float64, or in float32 if the layer's code or its device does not allow that."""
    try:
        return _watch_copy(call, seed, torch.float64)
    except (RuntimeError, TypeError):  # such as masks that overflow; MPS has no float64
        return _watch_copy(call, seed, torch.float32)


def _watch_copy(call: LayerCallArguments, seed: int, dtype: torch.dtype) -> LayerLog:
    layer = copy.deepcopy(call.layer).to(dtype).eval()
    for module in layer.modules():  # grouped matrix products do not exist in float64
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "eager"
    generator = torch.Generator().manual_seed(seed)
    randomise_parameters(layer, generator)
    given = call.states

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device, dtype)

    fresh = draw(given)
    encoder = encoder_states(call.args, call.kwargs)
    replaced = {id(given): fresh}
    if encoder is not None:
        replaced[id(encoder)] = draw(encoder)
    args, kwargs = (_converted(one, replaced, dtype) for one in (call.args, dict(call.kwargs)))
    log = LayerLog(layer, fresh, fresh, None if encoder is None else replaced[id(encoder)])
    lengths = {len(one.flatten(0, -2)) for one in (log.input, log.encoder) if one is not None}
    returned: list[tuple[Tensor, int]] = []
    with torch.no_grad(), _log_calls(layer, log, returned) as running:

        def keep(weights: Tensor, values: Tensor, mixed: Tensor) -> None:
            path = running[-1] if running else ""
            log.products.append(Product(path, weights.clone(), values.clone(), mixed.clone()))

        with ProductWatch(lambda: lengths, keep), SoftmaxWatch(log.scores):
            output = first_tensor(layer(*args, **kwargs))
    if output is None:
        raise NormscopeError(f"{type(layer).__name__} returns no hidden states.")
    log.in_place = any(made._version != version for made, version in returned)
    log.output = output
    return log


def randomise_parameters(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices with order-one columns, and vectors moved by noise; buffers that hold a single number, such as the scale
    of a layer, too."""
    for buffer in module.buffers():
        if buffer.numel() == 1 and buffer.is_floating_point():
            buffer.add_((0.1 + torch.rand(buffer.shape, generator=generator, dtype=torch.float64)).to(buffer))
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if parameter.dim() >= 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_((0.3 * noise).to(parameter))


def encoder_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The encoder's states among the arguments of a layer, if there are any."""
    own = hidden_states(args, kwargs)
    for one in (kwargs.get("encoder_hidden_states"), *args[1:]):
        if isinstance(one, Tensor) and one.is_floating_point() and one.dim() == 3 and one is not own:
            return one
    return None


def _converted(value: Any, replaced: Mapping[int, Tensor], dtype: torch.dtype) -> Any:
    """Arguments in another dtype, some of them replaced; caches hold the keys of an earlier pass and are left out."""
    if isinstance(value, Cache):
        return None
    if isinstance(value, Tensor):
        if id(value) in replaced:
            return replaced[id(value)]
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_converted(one, replaced, dtype) for one in value)
    if type(value) is dict:
        return {key: _converted(one, replaced, dtype) for key, one in value.items()}
    return value


@contextmanager
def _log_calls(layer: nn.Module, log: LayerLog, returned: list[tuple[Tensor, int]]) -> Iterator[list[str]]:
    """Log the call of every submodule, and its output with its version; yields the paths of the modules that are
    running, innermost last."""
    running: list[str] = []

    def enter(path: str, module: nn.Module, given: Arguments) -> None:
        running.append(path)

    def leave(path: str, module: nn.Module, given: Arguments, output: Any) -> None:
        running.pop()
        made = first_tensor(output)
        args, kwargs = given
        tensors = tuple(one.clone() for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        if made is not None and any(one.is_floating_point() for one in tensors):
            log.calls.append(Call(path, module, tensors, made.clone(), len(log.calls)))
            returned.append((made, made._version))

    with watch_calls([one for one in layer.named_modules() if one[0]], enter, leave):
        yield running
