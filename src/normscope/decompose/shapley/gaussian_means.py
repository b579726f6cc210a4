"""The mean of an activation over a normal distribution, needed by Gaussian Shapley values (`values`).

Plain: ``E[g(A)]`` for A ~ N(m, v). Gated: ``E[g(A) U]`` for jointly normal A and U, where U has mean u and
``c = Cov(A, U)``; by Stein's lemma this is ``u E[g(A)] + c E[g'(A)]``. There are closed forms for ReLU and for
``x Phi(x / l)``. The erf GELU is the latter with l = 1; SiLU is a mixture of four of these to within 2e-5 (a logistic
distribution is a mixture of normal ones); the tanh GELU is so close to the erf GELU that a Gauss-Hermite rule is enough
for the difference. Any other g uses the rule alone, which is coarse for a wide distribution. Elementwise, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from normscope.decompose.activations import Activation

Mean = Callable[..., Tensor]  # of (m, v), or of (m, u, v, c)

POINTS = 16  # of the Gauss-Hermite rule
TINY = 1e-300
DENSITY = 1 / math.sqrt(2 * math.pi)
# g(x) = sum of share * x Phi(x / l), as (share, l). The mixture for SiLU was fitted by least squares to x times the
# difference, reweighted towards its largest values.
LOGISTIC = (
    (0.15597308381303676, 1.0309905144272515),
    (0.4881427659360341, 1.5202301996259822),
    (0.3141379454378456, 2.225320411876223),
    (0.04174620481308347, 3.246924273232876),
)
Mixture = tuple[tuple[float, float], ...]
MIXTURES: dict[str, Mixture] = {
    "gelu": ((1.0, 1.0),),
    "quick_gelu": tuple((share, width / 1.702) for share, width in LOGISTIC),
    "silu": LOGISTIC,
    "swish": LOGISTIC,
}
NEAR_GELU = ("gelu_new", "gelu_pytorch_tanh")


def gaussian_mean(name: str | None, activation: Activation) -> Mean:
    """The function (m, v) -> ``E[g(A)]``. `name` selects a closed form if g has one."""
    if name == "relu":
        return _gaussian_mean_of_relu
    if name in MIXTURES:
        return partial(_gaussian_mean_of_mixture, MIXTURES[name])
    if name in NEAR_GELU:
        rest = partial(_gaussian_mean_by_quadrature, partial(_gaussian_mean_gelu_difference, activation))
        return lambda m, v: _gaussian_mean_of_mixture(MIXTURES["gelu"], m, v) + rest(m, v)
    return partial(_gaussian_mean_by_quadrature, activation)


def gated_gaussian_mean(name: str | None, activation: Activation) -> Mean:
    """The function (m, u, v, c) -> ``E[g(A) U]``."""
    if name == "relu":
        return _gated_gaussian_mean_of_relu
    if name in MIXTURES:
        return partial(_gated_gaussian_mean_of_mixture, MIXTURES[name])
    if name in NEAR_GELU:
        rest = partial(_gated_gaussian_mean_by_quadrature, partial(_gaussian_mean_gelu_difference, activation))
        return lambda m, u, v, c: _gated_gaussian_mean_of_mixture(MIXTURES["gelu"], m, u, v, c) + rest(m, u, v, c)
    return partial(_gated_gaussian_mean_by_quadrature, activation)


def _gaussian_mean_of_mixture(mixture: Mixture, m: Tensor, v: Tensor) -> Tensor:
    """``E[A Phi(A / l)] = m Phi(q) + v phi(q) / w``, where ``w = sqrt(l^2 + v)`` and ``q = m / w``"""
    total = torch.zeros_like(m)
    for share, width in mixture:
        w = (v + width**2).sqrt_()
        q = m / w
        total.addcmul_(m, _gaussian_cdf(q), value=share).addcmul_(_gaussian_pdf(q), v / w, value=share * DENSITY)
    return total


def _gated_gaussian_mean_of_mixture(mixture: Mixture, m: Tensor, u: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """``u E[g(A)] + c E[g'(A)]``, where ``E[g'(A)] = Phi(q) + m l^2 phi(q) / w^3``, by terms in Phi and phi"""
    total, straight = torch.zeros_like(m), torch.addcmul(c, u, m)
    for share, width in mixture:
        w = (v + width**2).sqrt_()
        q = m / w
        total.addcmul_(straight, _gaussian_cdf(q), value=share)
        bent = (u * (v / w)).addcmul_(m, c * width**2 / w.pow(3))
        total.addcmul_(_gaussian_pdf(q), bent, value=share * DENSITY)
    return total


def _gaussian_mean_gelu_difference(activation: Activation, x: Tensor) -> Tensor:
    """``g(x) - x Phi(x)``"""
    return activation(x).sub_(_gaussian_cdf(x).mul_(x))


def _gaussian_mean_of_relu(m: Tensor, v: Tensor) -> Tensor:
    """``m Phi(m / s) + s phi(m / s)``, where ``s = sqrt(v)``"""
    s = v.sqrt().clamp_min_(TINY)
    q = m / s
    return m * _gaussian_cdf(q) + s * DENSITY * _gaussian_pdf(q)


def _gated_gaussian_mean_of_relu(m: Tensor, u: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """``u E[g(A)] + c Phi(m / s)``"""
    s = v.sqrt().clamp_min_(TINY)
    q = m / s
    below = _gaussian_cdf(q)
    return u * (m * below + s * DENSITY * _gaussian_pdf(q)) + c * below


def _gaussian_mean_by_quadrature(activation: Activation, m: Tensor, v: Tensor) -> Tensor:
    s = v.sqrt()
    total = torch.zeros_like(m)
    for x, weight in _gaussian_hermite_rule():
        total.add_(activation(torch.add(m, s, alpha=x)), alpha=weight)
    return total


def _gated_gaussian_mean_by_quadrature(activation: Activation, m: Tensor, u: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """Given A, the mean of U is ``u + c / v (A - m)``, so one rule over A is enough and g' is not needed."""
    s = v.sqrt()
    along = torch.where(s > 0, c / s.clamp_min(TINY), 0.0)  # at most the standard deviation of U
    total = torch.zeros_like(m)
    for x, weight in _gaussian_hermite_rule():
        total.add_(activation(torch.add(m, s, alpha=x)).mul_(torch.add(u, along, alpha=x)), alpha=weight)
    return total


def _gaussian_cdf(x: Tensor) -> Tensor:
    """Phi(x)"""
    found: Tensor = torch.special.ndtr(x)
    return found


def _gaussian_pdf(x: Tensor) -> Tensor:
    """``exp(-x^2 / 2)``, which times DENSITY is phi(x)"""
    return x.square().mul_(-0.5).exp_()


@cache
def _gaussian_hermite_rule() -> tuple[tuple[float, float], ...]:
    """Points and weights for ``E[f(X)]``, X standard normal."""
    x, weight = np.polynomial.hermite_e.hermegauss(POINTS)
    return tuple(zip(x.tolist(), (weight / weight.sum()).tolist(), strict=True))
