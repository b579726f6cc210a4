"""Closed forms of the integrated-gradients coefficient against quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from normscope.decompose.gates import CLOSED_FORMS, coefficient, quotient, slope


def grid() -> torch.Tensor:
    small = torch.logspace(-12, 0, 60, dtype=torch.float64)
    wide = torch.linspace(-30, 30, 601, dtype=torch.float64)
    return torch.cat([-small, small, wide, torch.zeros(1, dtype=torch.float64)])


def integral(name: str, a: torch.Tensor) -> torch.Tensor:
    """integral_0^1 g'(t a) dt by a fine composite Gauss-Legendre rule (the kinks of g are at zero, the end point)."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    panels = 40
    total = torch.zeros_like(a)
    for panel in range(panels):
        for node, weight in zip(nodes, weights, strict=True):
            t = (panel + (node + 1) / 2) / panels
            total += weight / 2 / panels * slope(ACT2FN[name], t * a)
    return total


@pytest.mark.parametrize("name", sorted(CLOSED_FORMS))
def test_closed_form(name: str) -> None:
    a = grid()
    found = coefficient("ig", name, ACT2FN[name], a)
    torch.testing.assert_close(found, integral(name, a), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", sorted(CLOSED_FORMS))
def test_float32_keeps_relative_accuracy(name: str) -> None:
    a = torch.linspace(-8, 8, 400)
    exact = coefficient("ig", name, ACT2FN[name], a.double())
    found = coefficient("ig", name, ACT2FN[name], a).double()
    seen = exact > 1e-30
    assert float(((found - exact).abs()[seen] / exact[seen]).max()) < 3e-5


@pytest.mark.parametrize("name", ["sigmoid", "mish", "hardswish", "leaky_relu", "gelu_fast", "relu6", "laplace"])
def test_any_other_activation(name: str) -> None:
    a = grid()
    found = quotient(ACT2FN[name], a)
    assert bool(torch.isfinite(found).all())
    zero = ACT2FN[name](torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(found * a + zero, ACT2FN[name](a), rtol=1e-12, atol=1e-13)


def test_relu_at_zero_is_closed() -> None:
    assert float(coefficient("ig", "relu", torch.relu, torch.zeros(1))) == 0
