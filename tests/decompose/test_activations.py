"""Closed forms of the integrated-gradients coefficients against quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from transformers.activations import ACT2FN

from normscope.decompose import activations
from normscope.decompose.activations import (
    CLOSED_FORMS,
    MOMENTS,
    activation_quotient,
    activation_slope,
    gate_coefficient,
    gated_coefficients,
)

OTHERS = ["sigmoid", "mish", "hardswish", "leaky_relu", "gelu_fast", "relu6", "relu2", "laplace", "tanh", "gelu_10"]


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
            total += weight / 2 / panels * activation_slope(ACT2FN[name], t * a)
    return total


@pytest.mark.parametrize("name", sorted(CLOSED_FORMS))
def test_closed_form(name: str) -> None:
    a = grid()
    found = gate_coefficient("ig", name, ACT2FN[name], a)
    torch.testing.assert_close(found, integral(name, a), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", sorted(CLOSED_FORMS))
def test_float32_keeps_relative_accuracy(name: str) -> None:
    a = torch.linspace(-8, 8, 400)
    exact = gate_coefficient("ig", name, ACT2FN[name], a.double())
    found = gate_coefficient("ig", name, ACT2FN[name], a).double()
    seen = exact > 1e-30
    assert float(((found - exact).abs()[seen] / exact[seen]).max()) < 3e-5


@pytest.mark.parametrize("name", ["sigmoid", "mish", "hardswish", "leaky_relu", "gelu_fast", "relu6", "laplace"])
def test_any_other_activation(name: str) -> None:
    a = grid()
    found = activation_quotient(ACT2FN[name], a)
    assert bool(torch.isfinite(found).all())
    zero = ACT2FN[name](torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(found * a + zero, ACT2FN[name](a), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [*sorted(CLOSED_FORMS), "mish", None])
def test_a_plain_gate_frozen_is_integrated_gradients(name: str | None) -> None:
    activation = ACT2FN[name or "sigmoid"]
    assert torch.equal(
        gate_coefficient("frozen", name, activation, grid()), gate_coefficient("ig", name, activation, grid())
    )


def test_relu_at_zero_is_closed() -> None:
    assert float(gate_coefficient("ig", "relu", torch.relu, torch.zeros(1))) == 0


def wide_grid() -> torch.Tensor:
    small = torch.logspace(-8, 0, 60, dtype=torch.float64)
    edges = torch.tensor([1 / 16, 0.5, 1, 1 / 1.702, 3, 6, 8, 50], dtype=torch.float64)
    edges = torch.cat([edges, edges * (1 - 1e-12), edges * (1 + 1e-12)])
    wide = torch.linspace(-50, 50, 1003, dtype=torch.float64)
    return torch.cat([-small, small, -edges, edges, wide, torch.zeros(1, dtype=torch.float64)])


def averages(name: str, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """integral_0^1 t g'(t a) dt and integral_0^1 g(t a) dt, in panels that end at |t a| = 1/2, 1, ... (all kinks)."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    reach = a.abs().clamp_min(0.5)
    rise, mean = torch.zeros_like(a), torch.zeros_like(a)
    for panel in range(int(2 * reach.max()) + 1):
        low, high = (panel / 2 / reach).clamp_max(1), ((panel + 1) / 2 / reach).clamp_max(1)
        for node, weight in zip(nodes, weights, strict=True):
            t = low + (node + 1) / 2 * (high - low)
            share = weight / 2 * (high - low)
            rise += share * t * activation_slope(ACT2FN[name], t * a)
            mean += share * ACT2FN[name](t * a)
    return rise, mean


def some_up(a: torch.Tensor) -> torch.Tensor:
    return torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=a.dtype)


@pytest.mark.parametrize("name", [*sorted(MOMENTS), *OTHERS])
def test_two_sided_against_quadrature(name: str) -> None:
    a = wide_grid()
    u = some_up(a)
    on_gate, on_up = gated_coefficients("ig", name, ACT2FN[name], a, u)
    rise, mean = averages(name, a)
    # The reference itself loses digits where a hundred panels add up, so also absolutely, in units of g's range.
    torch.testing.assert_close(on_gate, u * rise, rtol=1e-13, atol=2e-14)
    torch.testing.assert_close(on_up, mean, rtol=1e-13, atol=1e-14)
    tiny = a.abs() < 1e-3
    torch.testing.assert_close(on_gate[tiny], u[tiny] * rise[tiny], rtol=1e-13, atol=0)
    torch.testing.assert_close(on_up[tiny], mean[tiny], rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", [*sorted(MOMENTS), *OTHERS])
def test_two_sided_is_complete(name: str) -> None:
    """Also if g(0) != 0: the path starts at g(0) * 0."""
    a = wide_grid()
    u = some_up(a)
    on_gate, on_up = gated_coefficients("ig", name, ACT2FN[name], a, u)
    torch.testing.assert_close(a * on_gate + u * on_up, ACT2FN[name](a) * u, rtol=1e-14, atol=2e-14)


@pytest.mark.parametrize(("name", "scale"), [("silu", 1.0), ("quick_gelu", 1.702)])
def test_sigmoid_moments_against_the_dilogarithm(name: str, scale: float) -> None:
    """S = (a softplus(a) + Li2(-e^a) + pi^2/12) / a, Li2(x) = spence(1 - x), if that form is accurate there."""
    x = -torch.linspace(1, 50, 500, dtype=torch.float64)
    li2 = torch.from_numpy(scipy.special.spence(1 + np.exp(x.numpy())))
    mean = (x * torch.log1p(torch.exp(x)) + li2 + np.pi**2 / 12) / x
    torch.testing.assert_close(MOMENTS[name](x / scale), mean / x, rtol=4e-15, atol=0)


@pytest.mark.parametrize("name", sorted(set(MOMENTS) - {"relu"}))
def test_moments_keep_their_digits_for_large_negative_inputs(name: str) -> None:
    """K(-b) b^2 tends to integral_0^inf y s(-y) dy, from one end of float32 to beyond the panels."""
    b = torch.tensor([60.0, 1e3, 1e6, 1e12, 1e38], dtype=torch.float64)
    limit = MOMENTS[name](-b) * b.square()
    torch.testing.assert_close(limit, limit[:1].expand_as(limit), rtol=1e-15, atol=0)
    torch.testing.assert_close(MOMENTS[name](b), 0.5 - limit / b.square(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", [*sorted(MOMENTS), *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_sided_is_rounded_only_at_the_end(name: str, dtype: torch.dtype) -> None:
    a = wide_grid().to(dtype)
    u = some_up(a)
    found = gated_coefficients("ig", name, ACT2FN[name], a, u)
    exact = gated_coefficients("ig", name, ACT2FN[name], a.double(), u.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))


@pytest.mark.parametrize("name", ["silu", "gelu_new", "mish"])
def test_two_sided_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = 4 * torch.randn(2, 5, 14, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    u = some_up(a)
    whole = gated_coefficients("ig", name, ACT2FN[name], a, u)
    monkeypatch.setattr(activations, "CHUNK", 16)
    for one, other in zip(gated_coefficients("ig", name, ACT2FN[name], a, u), whole, strict=True):
        assert one.shape == a.shape
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    empty = gated_coefficients("ig", name, ACT2FN[name], a[:0], u[:0])
    assert [x.shape for x in empty] == [a[:0].shape] * 2


def test_two_sided_of_an_unnamed_activation() -> None:
    a = wide_grid()
    u = some_up(a)
    for one, other in zip(
        gated_coefficients("ig", None, ACT2FN["silu"], a, u),
        gated_coefficients("ig", "silu", ACT2FN["silu"], a, u),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "relu", "mish", "sigmoid"])
def test_two_sided_frozen_and_tangent(name: str) -> None:
    a = wide_grid()
    u = some_up(a)
    on_gate, on_up = gated_coefficients("frozen", name, ACT2FN[name], a, u)
    assert not on_gate.any()
    assert torch.equal(on_up, ACT2FN[name](a))
    on_gate, on_up = gated_coefficients("tangent", name, ACT2FN[name], a, u)
    assert torch.equal(on_up, ACT2FN[name](a))
    x, y = a.clone().requires_grad_(True), u.clone().requires_grad_(True)
    by_a, by_u = torch.autograd.grad((ACT2FN[name](x) * y).sum(), (x, y))
    torch.testing.assert_close(on_gate, by_a, rtol=1e-14, atol=1e-300)
    torch.testing.assert_close(on_up, by_u)
