"""Linear modules and norms as maps, where that is what they computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.flow.frozen import FrozenLinear, FrozenNorm
from normscope.models.modules import linear_map
from normscope.tracing.closeness import ELEMENT, PRODUCT, is_product, misfit

UPCAST = 1e-6  # rounding of a norm that computes in float32 whatever the model's type


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes ``x W + b``, as far as its class tells."""
    return hasattr(module, "weight") and (hasattr(module, "in_features") or type(module).__name__ == "Conv1D")


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm, as far as its class tells."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and (weight is None or weight.dim() == 1)


def linear(module: nn.Module, x: Tensor, made: Tensor, dtype: torch.dtype) -> FrozenLinear | None:
    """The map of a linear module that made this of x (rows, d) in `dtype`; None: it computed something else."""
    try:
        weight, bias = linear_map(module)
    except (NormscopeError, RuntimeError):  # it is not linear, or cannot be run by itself
        return None
    matrix = weight.detach().to(x.dtype).t()
    constant = None if bias is None else bias.detach().to(x.dtype)
    return FrozenLinear(matrix, constant) if is_product(x, matrix, constant, made, PRODUCT[dtype]) else None


def norm(module: Any, x: Tensor, made: Tensor, dtype: torch.dtype) -> FrozenNorm | None:
    """The map of a LayerNorm or RMSNorm that made this of x (rows, d) in `dtype`; None: it computed something else."""
    epsilon = next((e for e in (getattr(module, n, None) for n in ("eps", "variance_epsilon")) if e is not None), 0.0)
    weight, shift = getattr(module, "weight", None), getattr(module, "bias", None)
    gain = weight.detach().to(x.dtype) if isinstance(weight, Tensor) else torch.ones_like(x[0])
    constant = shift.detach().to(x.dtype) if isinstance(shift, Tensor) else None
    if x.shape != made.shape or len(gain) != x.shape[-1]:
        return None
    plain = isinstance(module, nn.LayerNorm)
    tolerance = ELEMENT[dtype] if plain else max(ELEMENT[dtype], UPCAST)
    for centered in (True,) if plain else (False, True):
        spread = x.var(-1, correction=0) if centered else x.square().mean(-1)
        for offset in (0.0, 1.0):  # Gemma's gain is 1 + weight
            one = FrozenNorm(centered, (spread + epsilon).rsqrt(), gain + offset, constant)
            if norm_misfit(one, offset, x, made, tolerance) <= 1:
                return one
    return None


def norm_misfit(one: FrozenNorm, offset: float, x: Tensor, made: Tensor, tolerance: float) -> float:
    """How far a norm of x (rows, d) is from what was made. Its gain is the sum of a weight and an offset."""

    def guess(rows: slice) -> tuple[Tensor, Tensor]:
        found = one.at(rows).forward(x[rows, None], None)[:, 0]
        inverse = one.inverse[rows, None]
        size = x[rows].abs() * inverse
        if one.centered:  # the mean is rounded too, by a share of the deviation
            size += x[rows].mean(-1, keepdim=True).abs() * inverse + 1
        size *= one.gain.abs() + offset
        return (found, size) if one.constant is None else (found + one.constant, size + one.constant.abs())

    return misfit(guess, made, tolerance)
