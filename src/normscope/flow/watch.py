"""What a model calls after its last layer: every module outside the layers, with what it read and what it made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.flow.modules import is_linear, is_norm
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules
from normscope.tracing.closeness import coarser, rows_of
from normscope.tracing.hooks import mine


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    module: nn.Module
    name: str  # where the module is in the model
    given: Tensor  # (rows, width)
    made: Tensor
    dtype: torch.dtype  # the one that rounded the most

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"


@dataclass
class Watch:
    """Notes of one forward pass."""

    calls: dict[str, list[Call]] = field(default_factory=dict)  # side -> the calls after its last layer, in order
    outputs: dict[str, Tensor] = field(default_factory=dict)  # side -> (rows, d), what the last layer that ran made
    layers: dict[str, int] = field(default_factory=dict)  # side -> how many layers have run
    ended: str = ""  # the side whose last layer was the last to end


@contextmanager
def watching(loaded: LoadedModel) -> Iterator[Watch]:
    """While this lasts, the notes of a pass of this thread are taken."""
    watch = Watch({stack.side: [] for stack in loaded.stacks})
    layers = {id(layer): n for n, stack in enumerate(loaded.stacks) for layer in layer_modules(loaded.base, stack)}
    inside = {id(m) for stack in loaded.stacks for layer in layer_modules(loaded.base, stack) for m in layer.modules()}
    handles = []

    def ended(number: int) -> Any:
        side, depth = loaded.stacks[number].side, loaded.depths[number]

        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
            y = made[0] if isinstance(made, tuple) else made
            watch.outputs[side] = rows_of(y.detach().to(loaded.dtype)).clone()  # others may change it in place
            watch.layers[side] = watch.layers.get(side, 0) + 1
            if watch.layers[side] == depth:
                watch.ended = side

        return hook

    def called(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
            given: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if watch.ended and _is_vectors(given) and _is_vectors(made):
                dtype = coarser(given.dtype, made.dtype, loaded.dtype)
                x, y = (rows_of(one.detach().to(loaded.dtype)) for one in (given, made))
                if is_linear(module) or is_norm(module):
                    x, y = x.clone(), y.clone()
                watch.calls[watch.ended].append(Call(module, name, x, y, dtype))

        return hook

    try:
        for name, module in loaded.model.named_modules():
            if id(module) in layers:
                handles.append(module.register_forward_hook(mine(ended(layers[id(module)]))))
            elif id(module) not in inside and not any(id(one) in layers for one in module.modules()):
                handles.append(module.register_forward_hook(mine(called(name)), with_kwargs=True))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _is_vectors(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0


def named(model: nn.Module, module: nn.Module) -> str:
    """A module as people find it in their model: its dotted name, and its class."""
    name = next((name for name, one in model.named_modules() if one is module), "")
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
