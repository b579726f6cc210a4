"""Integrated gradients of an elementwise activation, in closed form (FF paper, eq. 6-7).

For ``g`` applied to ``a = sum_j a_j``, integrated gradients from zero along the straight path give summand j the share
``a_j * c(a)`` with one coefficient for all summands, ``c(a) = integral_0^1 g'(t a) dt = (g(a) - g(0)) / a``. So FF
contributions are gated by one vector per output token; ``g(0)`` is attributed to no summand.

For a gated block ``F = g(a) * u`` (SwiGLU, GeGLU) with ``u = sum_j u_j`` as well, the share of summand j is
``a_j * on_gate + u_j * on_up`` (`gated_coefficients`), again with the same two coefficients for all summands. The path
starts at ``g(0) * 0``, so these shares sum to all of F even if ``g(0) != 0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from normscope.decompose.state import GatedUnit
from normscope.errors import NormscopeError
from normscope.tracing.records import Projection, Unit

Gate = Literal["ig", "frozen", "tangent"]
Activation = Callable[[Tensor], Tensor]
CHUNK = 2**15  # elements per chunk, whose float64 copies fit in cache
Primitive = tuple[Tensor, Tensor, Tensor]  # panel edges, integrals from 0 to +edge, and from 0 to -edge


def _tanh_quotient(a: Tensor) -> Tensor:
    """tanh(a)/a, by its series near zero, where the quotient is 0/0."""
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


def gate_coefficient(gate: Gate, name: str | None, activation: Activation, a: Tensor) -> Tensor:
    """c(a) elementwise, in closed form if `name` has one, otherwise numerically from `activation`.

    `gate="frozen"` gives the same: a plain FF has no second projection, and freezing the factor c(a) in
    g(a) = a c(a) + g(0) gives the integrated-gradients quotient. `gate="tangent"` gives the slope g'(a) instead, whose
    shares do not sum to g(a).
    """
    if gate == "tangent":
        return activation_slope(activation, a)
    return CLOSED_FORMS[name](a) if name in CLOSED_FORMS else activation_quotient(activation, a)


def gated_coefficients(
    gate: Gate, name: str | None, activation: Activation, a: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """The elementwise coefficients (on_gate, on_up) of ``F = g(a) * u``: summand j gets a_j * on_gate + u_j * on_up.

    "ig": ``on_up = S = integral_0^1 g(t a) dt`` and ``on_gate = u integral_0^1 t g'(t a) dt = u (g(a) - S) / a``,
    so ``a on_gate + u on_up = g(a) u``. For g(x) = x s(x) these are ``a K`` and ``u (s(a) - K)`` with
    ``K(a) = integral_0^1 t s(t a) dt``, without a division by a; any other g uses `tabulated_averages`.
    "frozen": ``on_gate = 0``, ``on_up = g(a)``, whose shares also sum to F. "tangent": the gradient, ``u g'(a)`` and
    ``g(a)``, whose shares do not.

    "ig" computes in float64, one chunk of elements at a time, and rounds to the dtype of `a` at the end. K has a
    relative error of 1e-15 for every a: towards minus infinity it decays only like 1/a^2, so no digits are lost to
    cancellation. s(a) - K, which changes sign, has an absolute error of 1e-15.
    """
    if gate == "frozen":
        return torch.zeros_like(a), activation(a)
    if gate == "tangent":
        return u * activation_slope(activation, a), activation(a)
    sides = torch.empty((2, a.numel()), dtype=a.dtype, device=a.device)
    with torch.no_grad():
        device = to_float64(a.flatten()[:0]).device
        pair = (
            partial(_closed_form_averages, name)
            if name in MOMENTS
            else partial(tabulated_averages, activation, tabulate_integral(activation, device))
        )
        size = CHUNK if device.type == "cpu" else 64 * CHUNK
        pieces = zip(*(x.split(size) for x in (a.flatten(), u.flatten(), sides[0], sides[1])), strict=True)
        for a_piece, u_piece, on_gate, on_up in pieces:
            rise, mean = pair(to_float64(a_piece))
            on_gate.copy_((rise * to_float64(u_piece)).to(a.dtype))
            on_up.copy_(mean.to(a.dtype))
    return sides[0].view(a.shape), sides[1].view(a.shape)


def _closed_form_averages(name: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """``s(a) - K(a)`` and ``a K(a)``"""
    moment = MOMENTS[name](a)
    return CLOSED_FORMS[name](a) - moment, a * moment


def _first_moment(near: Activation, integral: Activation, a: Tensor) -> Tensor:
    """``K(a) = integral_0^1 t s(t a) dt`` where s(-x) = 1 - s(x), from ``integral(b) = integral_0^b y s(-y) dy``.

    With ``N(b) = K(-b) = integral(b) / b^2``, K(a) is N(-a) for negative a and 1/2 - N(a) for positive a. For b < 1,
    where the quotient loses digits, `near` computes N. Both are computed for all b: to select is slower.
    """
    b = a.abs()
    n = torch.where(b < 1, near(b), integral(b).div_(b.square()))
    return torch.where(a < 0, n, 0.5 - n)


def _moment_by_rule(s: Activation, b: Tensor) -> Tensor:
    """N(b) for b < 1, by a Gauss-Legendre rule."""
    total = torch.zeros_like(b)
    for t, w in _panel_rule():
        total.add_(s(-t * b), alpha=t * w)
    return total


def _moment_by_series(coefficients: Sequence[float], b: Tensor) -> Tensor:
    """N(b) for b < 1, from ``s(x) = 1/2 + sum_k c_k x^(2k+1)``: ``1/4 - sum_k c_k b^(2k+1) / (2k + 3)``."""
    square = b.square()
    total = torch.full_like(b, coefficients[-1] / (2 * len(coefficients) + 1))
    for k in reversed(range(len(coefficients) - 1)):
        total.mul_(square).add_(coefficients[k] / (2 * k + 3))
    return total.mul_(b).neg_().add_(0.25)


def _sigmoid_series(terms: int) -> list[float]:
    """The c_k of the sigmoid, which shrink by pi^2: from ``s' = 1/4 - o^2`` for its odd part o."""
    odd = [Fraction(1, 4)]
    for k in range(1, terms):
        odd.append(-sum((odd[i] * odd[k - 1 - i] for i in range(k)), Fraction(0)) / (2 * k + 1))
    return [float(c) for c in odd]


def _normal_series(terms: int) -> list[float]:
    """The c_k of Phi, the distribution function of the normal distribution."""
    return [(-0.5) ** k / (math.factorial(k) * (2 * k + 1) * math.sqrt(2 * math.pi)) for k in range(terms)]


SIGMOID_SERIES, NORMAL_SERIES = _sigmoid_series(17), _normal_series(16)  # to 1e-17 for b < 1


def _gelu_integral(b: Tensor) -> Tensor:
    """``integral_0^b y Phi(-y) dy = 1/4 + (b^2 - 1)/2 Phi(-b) - b phi(b) / 2``"""
    upper: Tensor = torch.special.erfc(b / math.sqrt(2)) / 2
    density = torch.exp(-b.square() / 2) / math.sqrt(2 * math.pi)
    return 0.25 + (b.square() - 1) / 2 * upper - b * density / 2


def _silu_integral(b: Tensor) -> Tensor:
    """``integral_0^b y sigmoid(-y) dy = pi^2/12 + Li2(-e^-b) - b l``, where l = log(1 + e^-b).

    The dilogarithm is ``-Li2(-e^-b) = l + l^2/4 + sum_k B_2k l^(2k+1) / (2k+1)!``, whose terms shrink by
    (l / 2 pi)^2, a factor below 1/400 for b >= 1, so five terms are enough.
    """
    l = torch.log1p(torch.exp(-b))  # noqa: E741
    square = l.square()
    series = torch.full_like(l, _DEBYE[-1])
    for c in reversed(_DEBYE[:-1]):
        series.mul_(square).add_(c)
    return math.pi**2 / 12 - l * (1 + b + l / 4 + square * series)


_DEBYE = (1 / 36, -1 / 3600, 1 / 211680, -1 / 10886400, 1 / 526901760)  # B_2k / (2k + 1)!


def _tanh_gelu_integral(b: Tensor) -> Tensor:
    """``integral_0^b y s(-y) dy`` for the tanh GELU, by panels because it has no closed form."""
    return _integrate_from_table(_tanh_gelu_tail, _tanh_gelu_table(b.device), b)


def _tanh_gelu_tail(y: Tensor) -> Tensor:
    return y * _tanh_gelu(-y)


@cache
def _tanh_gelu_table(device: torch.device) -> Primitive:
    return tabulate_integral(_tanh_gelu_tail, device)


def _silu_moment(a: Tensor) -> Tensor:
    return _first_moment(partial(_moment_by_series, SIGMOID_SERIES), _silu_integral, a)


def _tanh_gelu_moment(a: Tensor) -> Tensor:
    return _first_moment(partial(_moment_by_rule, _tanh_gelu), _tanh_gelu_integral, a)


MOMENTS: dict[str, Activation] = {  # K(a), float64
    "gelu": lambda a: _first_moment(partial(_moment_by_series, NORMAL_SERIES), _gelu_integral, a),
    "gelu_new": _tanh_gelu_moment,
    "gelu_pytorch_tanh": _tanh_gelu_moment,
    "quick_gelu": lambda a: _silu_moment(1.702 * a),
    "relu": lambda a: (a > 0).to(a.dtype) / 2,
    "silu": _silu_moment,
    "swish": _silu_moment,
}


def joint_coefficients(
    gate: Gate, function: Callable[[Tensor, Tensor], Tensor], a: Tensor, u: Tensor, bend: float
) -> tuple[Tensor, Tensor]:
    """The coefficients (on_gate, on_up) for any elementwise F(a, u): ``integral_0^1 dF/da(ta, tu) dt``, and dF/du.

    Computed by Gauss-Legendre rules in float64 on pieces of the path. The pieces end where |ta| or |tu| equals `bend`,
    where F may have kinks. `gate="tangent"` uses the slopes at t = 1 instead; "frozen" needs a factor to freeze.
    """
    if gate == "frozen":
        raise NormscopeError(
            "gate='frozen' needs a gate of the form g(a) * u, which this model does not have. Use 'ig'."
        )
    x, y = to_float64(a), to_float64(u)
    if gate == "tangent":
        on_gate, on_up = _joint_slopes(function, x, y)
    else:
        turns = [(bend / z.abs().clamp_min(1e-300)).clamp_max(1) for z in (x, y)] if bend else []
        ends = [torch.zeros_like(x), *torch.stack([*turns, torch.ones_like(x)]).sort(0).values]
        on_gate, on_up = torch.zeros_like(x), torch.zeros_like(x)
        for low, high in pairwise(ends):
            for node, weight in _panel_rule():
                t = low + (high - low) * node
                for total, part in zip((on_gate, on_up), _joint_slopes(function, t * x, t * y), strict=True):
                    total += weight * (high - low) * part
    return on_gate.to(a.dtype).to(a.device), on_up.to(a.dtype).to(a.device)


def _joint_slopes(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """dF/da and dF/du elementwise, by automatic differentiation."""
    with torch.inference_mode(False), torch.enable_grad():
        x, y = (z.detach().clone().requires_grad_(True) for z in (a, u))
        on_gate, on_up = torch.autograd.grad(function(x, y).sum(), (x, y))
    return on_gate, on_up


def tabulated_averages(activation: Activation, table: Primitive, a: Tensor) -> tuple[Tensor, Tensor]:
    """``integral_0^1 t g'(t a) dt`` and ``S = integral_0^1 g(t a) dt`` for any elementwise g. `table` is that
    of g from `tabulate_integral`.

    Away from zero, S = (integral_0^a g) / a and (g(a) - S) / a, which are exact if all kinks are at panel edges. Near
    zero, where the latter loses digits if g(0) != 0, Gauss-Legendre rules over the slope and over g.
    """
    near = a.abs() < 1 / 16
    safe = torch.where(near, torch.ones_like(a), a)
    mean = _integrate_from_table(activation, table, safe) / safe
    rise = (activation(safe) - mean) / safe
    close = a[near]
    if close.numel() > 0:
        rise_rule, mean_rule = torch.zeros_like(close), torch.zeros_like(close)
        for t, w in _panel_rule():
            rise_rule.add_(activation_slope(activation, t * close), alpha=t * w)
            mean_rule.add_(activation(t * close), alpha=w)
        rise[near], mean[near] = rise_rule, mean_rule
    return rise, mean


def tabulate_integral(f: Activation, device: torch.device) -> Primitive:
    """``integral_0^x f`` at panel edges: steps of 1/2 up to |x| = 64, then powers of two. Kinks at edges are harmless.

    f must be smooth inside each panel, and beyond 64 close to a polynomial or vary on the scale of x itself.
    """
    edges = torch.cat([torch.arange(0, 64, 0.5, dtype=torch.float64), 2.0 ** torch.arange(6, 31, dtype=torch.float64)])
    edges = edges.to(device)
    sides = [torch.zeros_like(edges), torch.zeros_like(edges)]
    for side, sign in zip(sides, (1, -1), strict=True):
        side[1:] = _integrate_panel(f, sign * edges[:-1], sign * edges.diff()).cumsum(0)
    return edges, sides[0], sides[1]


def _integrate_from_table(f: Activation, table: Primitive, x: Tensor) -> Tensor:
    """``integral_0^x f``: complete panels from the table, and a Gauss-Legendre rule over the last, partial one."""
    edges, above, below = table
    passed = torch.bucketize(x.abs(), edges, right=True) - 1
    start = edges[passed].copysign(x)
    return torch.where(x < 0, below[passed], above[passed]) + _integrate_panel(f, start, x - start)


def _integrate_panel(f: Activation, start: Tensor, width: Tensor) -> Tensor:
    """``integral of f from start to start + width``, signed."""
    total = torch.zeros_like(start)
    for t, w in _panel_rule():
        total.add_(f(torch.add(start, width, alpha=t)), alpha=w)
    return total.mul_(width)


@cache
def _panel_rule() -> list[tuple[float, float]]:
    """The 16-point Gauss-Legendre rule on [0, 1], as (node, weight)."""
    nodes, weights = _gauss_legendre(16, torch.device("cpu"))
    return list(zip(nodes.tolist(), weights.tolist(), strict=True))


def to_float64(a: Tensor) -> Tensor:
    """`a` in float64, on the CPU if its device (mps) does not support float64."""
    return a.cpu().to(torch.float64) if a.device.type == "mps" else a.to(torch.float64)


def activation_quotient(activation: Activation, a: Tensor) -> Tensor:
    """``integral_0^1 g'(t a) dt`` for any elementwise g, in float64.

    Away from zero ``(g(a) - g(0)) / a``, which is exact even if g has kinks; near zero, where this loses digits, a
    Gauss-Legendre rule over the slope.
    """
    x = to_float64(a)
    near = x.abs() < 1e-3
    safe = torch.where(near, torch.ones_like(x), x)
    far = (activation(safe) - activation(torch.zeros_like(safe))) / safe
    if not bool(near.any()):
        return far.to(a.dtype).to(a.device)
    close = x[near]
    nodes, weights = _gauss_legendre(8, x.device)
    integral = torch.zeros_like(close)
    for t, w in zip(nodes, weights, strict=True):
        integral += w * activation_slope(activation, t * close)
    far[near] = integral
    return far.to(a.dtype).to(a.device)


def activation_slope(activation: Activation, a: Tensor) -> Tensor:
    """g'(a) elementwise, by automatic differentiation."""
    with torch.inference_mode(False), torch.enable_grad():
        x = a.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(activation(x).sum(), x)
    return gradient.detach()


def _gauss_legendre(points: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1]."""
    nodes, weights = (torch.as_tensor(x, device=device) for x in np.polynomial.legendre.leggauss(points))
    return (nodes + 1) / 2, weights / 2


def gated_unit(unit: Unit, gate: Gate) -> GatedUnit:
    """The unit with its activation replaced by one coefficient per projection, output token and hidden unit."""
    projections = projections_of(unit)
    weights = tuple(projection.weight for projection in projections)
    if unit.routing is None:
        found = _gate_coefficients(unit, gate, *(p.hidden for p in projections))
        if unit.inverse is not None:
            found = tuple(c * unit.inverse[..., None] for c in found)
        return GatedUnit(weights, found, unit.out)
    chosen = unit.routing != 0
    found = _gate_coefficients(unit, gate, *(p.hidden[chosen] for p in projections))
    coefficients = tuple(torch.zeros_like(p.hidden) for p in projections)
    for c, some in zip(coefficients, found, strict=True):
        c[chosen] = some * unit.routing[chosen][:, None]
    return GatedUnit(weights, coefficients, unit.out, chosen)


def projections_of(unit: Unit) -> tuple[Projection, ...]:
    """The projections into the hidden units: one, or two if gated."""
    return (unit.into,) if unit.up is None else (unit.into, unit.up)


def _gate_coefficients(unit: Unit, gate: Gate, a: Tensor, u: Tensor | None = None) -> tuple[Tensor, ...]:
    if u is None:
        return (gate_coefficient(gate, unit.activation_name, unit.activation, a),)
    if unit.joint is not None:
        return joint_coefficients(gate, unit.joint, a, u, unit.bend or 0.0)
    return gated_coefficients(gate, unit.activation_name, unit.activation, a, u)


def apply_gated_unit(made: GatedUnit, x: Tensor) -> Tensor:
    """The unit applied to the vectors (g, R, d) of the rows' own tokens."""
    gated = [c * (x @ weight) for weight, c in zip(made.weights, made.coefficients, strict=True)]
    return sum(gated[1:], gated[0]) @ made.out


def gated_constant(unit: Unit, made: GatedUnit, bias: Tensor) -> Tensor:
    """The part of the unit's output that is attributed to no token: from the remainder, its biases and g(0)."""
    hidden = torch.zeros_like(made.coefficients[0])
    entering = bool(bias.any())
    for projection, c in zip(projections_of(unit), made.coefficients, strict=True):
        if entering or projection.bias is not None:
            entered = bias @ projection.weight
            hidden = hidden + c * (entered if projection.bias is None else entered + projection.bias)
    held = unit.inverse if unit.routing is None else unit.routing
    share = 1 if held is None else held[..., None]
    if unit.up is None:  # in a gated product, g(0) is multiplied by zero
        hidden = hidden + share * unit.activation(torch.zeros_like(hidden[..., :1]))
    elif unit.joint is not None:
        nothing = torch.zeros_like(hidden[..., :1])
        hidden = hidden + share * unit.joint(nothing, nothing)
    output = hidden @ made.out if bool(hidden.any()) else hidden.new_zeros(*hidden.shape[:-1], made.out.shape[1])
    if unit.out_bias is None:
        return output
    return output + (unit.out_bias if unit.routing is None else share * unit.out_bias)
