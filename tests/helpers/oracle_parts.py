"""Parts shared by both naive references: a decomposed layer, its maps, the frozen norm, integrals by quadrature.

Row vectors; i = output token (row), j = input token (column), h = head. Everything is written as plain loops in
float64; nothing here is shared with the library that it judges.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass
class OracleLayer:
    """All contributions of one layer: sum_j vectors[scope][i, j] + bias[scope][i] = actual[scope][i].

    The columns are the stack's own tokens, followed by the encoder's tokens in a layer with cross-attention.
    """

    weights: Tensor  # (H, n, n) self-attention probabilities alpha^h_ij
    value_norms: Tensor  # (H, n) ||f^h(x_j)||
    vectors: dict[str, Tensor]  # scope -> (n, columns, d) contribution vectors c_ij
    bias: dict[str, Tensor]  # scope -> (n, d) remainder b_i, attributed to no token
    actual: dict[str, Tensor]  # scope -> (n, d) the model's own vector
    cross_weights: Tensor | None = None  # (H, n, n_src) cross-attention probabilities
    cross_value_norms: Tensor | None = None  # (H, n_src)


# Components.


class Norm(NamedTuple):
    """gamma * (x - mean x) / sqrt(var x + eps) + beta, or without the mean: gamma * x / sqrt(mean x^2 + eps)."""

    gamma: Tensor
    beta: Tensor
    eps: float
    centred: bool = True


def deviation(vector: Tensor, norm: Norm) -> Tensor:
    """s_i = sqrt(population variance, or mean square, over d of the real vector before the norm + eps)."""
    centre = vector.mean() if norm.centred else 0
    return (((vector - centre) ** 2).mean() + norm.eps).sqrt()


def normalise(vector: Tensor, norm: Norm, s: Tensor) -> Tensor:
    """gamma * (c - mean c) / s_i, without beta."""
    return norm.gamma * (vector - vector.mean() if norm.centred else vector) / s


@torch.enable_grad()
def integrated_gradients(function: Callable[..., Tensor], *z: Tensor) -> list[Tensor]:
    """integral_0^1 dF/dz_p(t z_1, t z_2, ...) dt for each argument p, elementwise, by quadrature.

    24-point Gauss-Legendre rules on panels that end wherever some t z_p crosses an integer. The rules have no node at
    a panel's end, so the kinks of ReLU (0), hard-swish (+-3), ReLU6 (6), clipped GELU (10) and clamps do no harm.
    """
    steps = torch.arange(1, int(max(float(argument.abs().max()) for argument in z)) + 1, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    crossings = [(steps / argument.abs().clamp_min(tiny)[..., None]).clamp_max(1) for argument in z]
    start = torch.zeros_like(z[0])[..., None]
    ends = torch.cat((start, *crossings, start + 1), dim=-1).sort(dim=-1).values
    low, width = ends[..., :-1, None], ends.diff(dim=-1)[..., None]
    nodes, node_weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(24))
    t = low + width * (1 + nodes) / 2
    arguments = [(t * argument[..., None, None]).detach().requires_grad_() for argument in z]
    gradients = torch.autograd.grad(function(*arguments).sum(), arguments)
    return [(gradient * width * node_weights / 2).sum(dim=(-2, -1)) for gradient in gradients]


# Maps of a layer. Columns as in `vectors`: a layer with cross-attention has the encoder's tokens last.


def widen(own: Tensor | None, cross: Tensor | None, columns: int) -> Tensor:
    """(..., n, keys) to (..., n, columns): own tokens first or encoder tokens last, zero elsewhere."""
    part = own if own is not None else cross
    assert part is not None
    gap = torch.zeros(*part.shape[:-1], columns - part.shape[-1], dtype=torch.float64)
    return torch.cat((part, gap) if own is not None else (gap, part), dim=-1)


def first_residual(layer: OracleLayer) -> str | None:
    """The scope right after the first residual connection, unless a feed-forward comes before it."""
    return next((scope for scope in layer.vectors if re.fullmatch(r"(LN)?ATTN(LN)?RES-N", scope)), None)


def maps(layer: OracleLayer) -> dict[str, Tensor]:
    """(n, columns) for every scope: mean over heads of alpha, 0.5 A + 0.5 I (Abnar & Zuidema 2020), and ||c_ij||."""
    n, columns, _ = next(iter(layer.vectors.values())).shape
    average = widen(layer.weights.mean(dim=0), None, columns)
    result = {"ATTN-W": average}
    for scope, vectors in layer.vectors.items():
        if scope == first_residual(layer):
            result[f"{scope[:-2]}-W"] = 0.5 * average + 0.5 * torch.eye(n, columns, dtype=torch.float64)
        if scope == "XATTN-N":
            assert layer.cross_weights is not None
            result["XATTN-W"] = widen(None, layer.cross_weights.mean(dim=0), columns)
        result[scope] = vectors.norm(dim=-1)
    return result


def head_maps(layer: OracleLayer) -> dict[str, Tensor]:
    """(H, n, columns): alpha^h_ij and alpha^h_ij ||f^h_j||, for self-attention and cross-attention."""
    columns = next(iter(layer.vectors.values())).shape[1]
    attention = next(iter(layer.vectors))
    result = {
        "ATTN-W": widen(layer.weights, None, columns),
        attention: widen(layer.weights * layer.value_norms[:, None], None, columns),
    }
    if layer.cross_weights is not None and layer.cross_value_norms is not None:
        result["XATTN-W"] = widen(None, layer.cross_weights, columns)
        result["XATTN-N"] = widen(None, layer.cross_weights * layer.cross_value_norms[:, None], columns)
    return result


def mixing(layer: OracleLayer) -> dict[str, Tensor]:
    """(n,) mixing ratios: ||sum_{j != i} c_ij|| / (||sum_{j != i} c_ij|| + ||c_ii||)."""
    result = {}
    for scope, values in maps(layer).items():
        ratios = []
        for i, row in enumerate(layer.vectors.get(scope, values[:, :, None])):  # weights are vectors of one dimension
            others = torch.cat((row[:i], row[i + 1 :])).sum(dim=0).norm()
            ratios.append(others / (others + row[i].norm()))
        result[scope] = torch.stack(ratios)
    return result
