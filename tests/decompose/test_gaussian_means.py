"""Means of activations over normal distributions, against numerical integration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor
from transformers.activations import ACT2FN

from normscope.decompose.shapley import gaussian_means

MEANS = (-6.0, -1.3, -0.2, 0.0, 0.4, 2.1, 7.0)
VARIANCES = (0.0, 1e-12, 0.01, 0.3, 1.0, 4.0)


def table() -> tuple[Tensor, Tensor]:
    m, v = torch.meshgrid(
        torch.tensor(MEANS, dtype=torch.float64), torch.tensor(VARIANCES, dtype=torch.float64), indexing="ij"
    )
    return m, v


def by_quadrature(activation: Any, m: float, v: float, slope: float = 0.0, u: float = 1.0) -> float:
    """``E[g(m + s X) (u + slope X)]``, X standard normal; the kink of ReLU is a point to break at."""
    s = math.sqrt(v)

    def integrand(x: float) -> float:
        g = float(activation(torch.tensor(m + s * x, dtype=torch.float64)))
        return g * (u + slope * x) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    breaks = [0.0] if s == 0 else sorted({0.0, float(np.clip(-m / s, -12, 12))})
    found: float = integrate.quad(integrand, -12, 12, points=breaks, epsabs=1e-13, epsrel=1e-12, limit=200)[0]
    return found


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_closed_forms(name: str) -> None:
    m, v = table()
    found = gaussian_means.gaussian_mean(name, ACT2FN[name])(m, v)
    expected = [[by_quadrature(ACT2FN[name], a, b) for b in VARIANCES] for a in MEANS]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["gelu", "relu"])
@pytest.mark.parametrize("share", [-0.9, 0.0, 0.6])
def test_closed_forms_of_a_gate(name: str, share: float) -> None:
    """U of mean 0.7 and variance 2.25, whose correlation with A is `share`."""
    m, v = table()
    c = share * 1.5 * v.sqrt()
    found = gaussian_means.gated_gaussian_mean(name, ACT2FN[name])(m, torch.full_like(m, 0.7), v, c)
    expected = [
        [by_quadrature(ACT2FN[name], a, b, share * 1.5 if b > 0 else 0.0, 0.7) for b in VARIANCES] for a in MEANS
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("silu", 3e-5),
        ("quick_gelu", 3e-5),
        ("gelu_new", 3e-4),
        ("gelu_pytorch_tanh", 3e-4),
        ("tanh", 1e-2),
        ("mish", 1e-2),
    ],
)
def test_other_activations(name: str, limit: float) -> None:
    """Also for a wide distribution, for which a single rule is coarse."""
    m, v = table()
    plain = gaussian_means.gaussian_mean(name, ACT2FN[name])(m, v)
    gated = gaussian_means.gated_gaussian_mean(name, ACT2FN[name])(m, torch.full_like(m, 0.7), v, 0.9 * v.sqrt())
    for i, a in enumerate(MEANS):
        for j, b in enumerate(VARIANCES):
            finer = min(limit, 3e-5) if b <= 0.3 else limit
            assert abs(float(plain[i, j]) - by_quadrature(ACT2FN[name], a, b)) < finer, (a, b)
            product = by_quadrature(ACT2FN[name], a, b, 0.9 if b > 0 else 0.0, 0.7)
            assert abs(float(gated[i, j]) - product) < 2 * finer, (a, b)


def test_silu_is_a_mixture() -> None:
    x = torch.linspace(-60, 60, 24001, dtype=torch.float64)
    assert sum(share for share, _ in gaussian_means.LOGISTIC) == pytest.approx(1, abs=1e-12)
    for name in ("silu", "quick_gelu"):
        found = gaussian_means.gaussian_mean(name, ACT2FN[name])(x, torch.zeros_like(x))
        assert float((found - ACT2FN[name](x)).abs().max()) < 2.2e-5


@pytest.mark.parametrize("name", ["gelu", "relu", "gelu_new", "tanh"])
def test_without_variance_it_is_the_activation(name: str) -> None:
    m = torch.linspace(-8, 8, 161, dtype=torch.float64)
    zero = torch.zeros_like(m)
    torch.testing.assert_close(
        gaussian_means.gaussian_mean(name, ACT2FN[name])(m, zero), ACT2FN[name](m), rtol=1e-12, atol=1e-14
    )
    u = torch.linspace(-1, 2, 161, dtype=torch.float64)
    torch.testing.assert_close(
        gaussian_means.gated_gaussian_mean(name, ACT2FN[name])(m, u, zero, zero),
        ACT2FN[name](m) * u,
        rtol=1e-12,
        atol=1e-14,
    )
