"""Integrated gradients of an elementwise activation, in closed form (FF paper, eq. 6-7).

For ``g`` applied to ``a = sum_j a_j``, integrated gradients from zero along the straight path give summand j the share
``a_j * c(a)`` with one coefficient for all summands, ``c(a) = integral_0^1 g'(t a) dt = (g(a) - g(0)) / a``. So FF
contributions are gated by one vector per output token; ``g(0)`` belongs to no summand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Gate = Literal["ig", "tangent"]
Activation = Callable[[Tensor], Tensor]


def _tanh_quotient(a: Tensor) -> Tensor:
    """tanh(a)/a, by its series where the quotient would be 0/0."""
    near = a.abs() < 1e-4
    return torch.where(near, 1 - a.square() / 3, torch.tanh(a) / torch.where(near, torch.ones_like(a), a))


def _tanh_gelu(a: Tensor) -> Tensor:
    # 0.5 (1 + tanh u) = sigmoid(2u), which keeps its relative accuracy for negative u.
    return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a.pow(3)))


CLOSED_FORMS: dict[str, Activation] = {
    "gelu": lambda a: 0.5 * torch.special.erfc(-a / math.sqrt(2)),  # Phi(a)
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": lambda a: torch.sigmoid(1.702 * a),
    "relu": lambda a: (a > 0).to(a.dtype),
    "silu": torch.sigmoid,
    "swish": torch.sigmoid,
    "tanh": _tanh_quotient,
}


def coefficient(gate: Gate, name: str | None, activation: Activation, a: Tensor) -> Tensor:
    """c(a) elementwise: closed form where there is one for `name`, else numerically from `activation`.

    `gate="tangent"` gives the slope g'(a) instead, whose shares do not sum to g(a).
    """
    if gate == "tangent":
        return slope(activation, a)
    return CLOSED_FORMS[name](a) if name in CLOSED_FORMS else quotient(activation, a)


def quotient(activation: Activation, a: Tensor) -> Tensor:
    """``integral_0^1 g'(t a) dt`` for any elementwise g, in float64.

    Away from zero it is ``(g(a) - g(0)) / a``, exact whatever kinks g has; near zero, where that loses digits, a
    Gauss-Legendre rule over the slope.
    """
    x = a.to(torch.float64)
    near = x.abs() < 1e-3
    safe = torch.where(near, torch.ones_like(x), x)
    far = (activation(safe) - activation(torch.zeros_like(safe))) / safe
    if not bool(near.any()):
        return far.to(a.dtype)
    close = x[near]
    nodes, weights = _gauss_legendre(8, x.device)
    integral = torch.zeros_like(close)
    for t, w in zip(nodes, weights, strict=True):
        integral += w * slope(activation, t * close)
    far[near] = integral
    return far.to(a.dtype)


def slope(activation: Activation, a: Tensor) -> Tensor:
    """g'(a) elementwise, by automatic differentiation."""
    with torch.enable_grad():
        x = a.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(activation(x).sum(), x)
    return gradient.detach()


def _gauss_legendre(points: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = (torch.as_tensor(x, device=device) for x in np.polynomial.legendre.leggauss(points))
    return (nodes + 1) / 2, weights / 2
