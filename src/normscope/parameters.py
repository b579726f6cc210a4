"""Reading a model's parameters as the maps that they are: affine maps, halves of projections, experts, activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from normscope.decompose.gates import CLOSED_FORMS
from normscope.errors import NormscopeError, nearest
from normscope.records import Projection


def half(both: Projection, number: int, interleaved: bool = False) -> Projection:
    """The first or second half of a projection's hidden units, or every other one."""

    def part(x: Tensor) -> Tensor:
        return x[..., number::2] if interleaved else x.chunk(2, -1)[number]

    return Projection(part(both.weight), None if both.bias is None else part(both.bias), part(both.hidden))


def of_expert(module: Any, path: str, bias: str | None, expert: int, transposed: bool) -> tuple[Tensor, Tensor | None]:
    """Weight (in, out) and bias of one expert."""
    weight = attribute(module, path)[expert]
    return weight if transposed else weight.t(), None if bias is None else attribute(module, bias)[expert]


def joint(packed: Callable[[Tensor], Tensor], interleaved: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of gate and up from one of both as the model packs them."""

    def function(a: Tensor, u: Tensor) -> Tensor:
        return packed(torch.stack([a, u], -1).flatten(-2) if interleaved else torch.cat([a, u], -1))

    return function


def value_constant(module: nn.Module, packing: str, heads: int, width: int, shift: Tensor | None) -> Tensor | None:
    """(heads, width) the part of every value vector that comes from no token: b_V, and W_V times the shift of the norm
    before it."""
    weight, bias = affine(module)
    constant = bias
    if shift is not None:
        through = weight @ shift
        constant = through if bias is None else through + bias
    return None if constant is None else value_rows(constant, packing, heads, width)


def value_rows(x: Tensor, packing: str, heads: int, width: int) -> Tensor:
    """(..., heads, width) the values among what a projection puts out."""
    if packing == "interleaved":
        return x.view(*x.shape[:-1], heads, 3, width)[..., 2, :]
    return x[..., -heads * width :].reshape(*x.shape[:-1], heads, width)


def value_map(module: nn.Module, packing: str, heads: int, shared: int, width: int) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V (H, d_h) for row vectors; of `shared` heads, each is repeated for those that share it."""
    weight, bias = affine(module)

    def each(x: Tensor) -> Tensor:
        return value_rows(x, packing, shared, width).repeat_interleave(heads // shared, -2)

    return each(weight.detach().t()).transpose(0, 1), None if bias is None else each(bias.detach())


def affine(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a linear module, read from what it does where it is no plain nn.Linear."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.weight.t(), module.bias
    features = getattr(module, "in_features", None)
    reference = next(module.parameters(), None)
    if features is None or reference is None:
        raise NormscopeError(f"Expected a linear module, found {type(module).__name__}.")
    eye = torch.eye(features, dtype=reference.dtype, device=reference.device)
    constant = module(torch.zeros_like(eye[:1]))
    return (module(eye) - constant).t(), constant[0]


def attribute(layer: nn.Module, path: str) -> Any:
    """What a dotted path leads to, a module or not."""
    found: Any = layer
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise NormscopeError(f"{type(layer).__name__} has no {path}: {no_such_part(layer, path)}") from error
    return found


def no_such_part(layer: nn.Module, path: str) -> str:
    """What a layer does have, where a path leads nowhere."""
    near = nearest(path, [name for name, _ in layer.named_modules() if name])
    return f"this is a modified model, or its family is described wrongly.{near}"


def activation_name(activation: Any) -> str | None:
    """The activation's name where `decompose.gates` has its closed form, judged by its class, not by the config."""
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else None
    return _activation_names().get(type(activation))


@lru_cache(maxsize=1)
def _activation_names() -> dict[type, str]:
    return {type(ACT2FN[name]): name for name in CLOSED_FORMS}
