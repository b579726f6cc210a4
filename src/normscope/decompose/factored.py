"""Norms and completeness of factored states, without any n x n x d tensor.

``||sum_h alpha_ijh f_jh||^2 = alpha_ij^T G_j alpha_ij`` with the H x H Gram matrix ``G_j`` of the vectors f_jh, so that
with a factor ``G_j = L_j L_j^T`` the norm is ``||L_j^T alpha_ij||``. States that share a mixture (before and after a
norm) share one product with the weights. Completeness is tested on a few fixed random directions that go through the
same product, so that the test covers the vectors f themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from normscope.decompose.attention import own_index
from normscope.decompose.contributions import Factored, Mixture, Term, row_norms

DIRECTIONS = 4  # random directions of the completeness test
TOKENS = 128  # columns factored at a time: their vectors in float64 stay in cache
HEADROOM = 2.0**50  # float32 squares of cells down to 1e-30 must not underflow


@dataclass(frozen=True)
class Reduced:
    """What is kept of a state: the map, transposed, and the completeness error of each row."""

    map: Tensor  # (g, j, R)
    error: Tensor  # (g, R): ||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)
    own: Tensor  # (g, R, d)
    others: Tensor  # (g, R, d)
    bias: Tensor  # (g, R, d)


def reduce(states: Sequence[Factored], actual: Sequence[Tensor], positions: Tensor | None) -> list[Reduced]:
    """Maps and completeness of states of one layer; `actual` (g, R, d) are the model's own vectors there."""
    mixture_terms: dict[int, list[Term]] = {}
    for state in states:
        terms = mixture_terms.setdefault(id(state.term.mixture), [])
        if not any(_same_view(state.term, term) for term in terms):
            terms.append(state.term)
    norms: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for key, terms in mixture_terms.items():
        norms |= {(key, n): found for n, found in enumerate(_norms(terms))}

    reduced = []
    for state, target in zip(states, actual, strict=True):
        terms = mixture_terms[id(state.term.mixture)]
        number = next(n for n, term in enumerate(terms) if _same_view(state.term, term))
        unscaled, projected = norms[id(state.term.mixture), number]
        scale = state.term.scale
        cells = unscaled * scale[:, None]
        items, _, rows = cells.shape
        cells[own_index(positions, items, rows, cells.device)] = row_norms(state.own)
        rest = (state.own + state.bias - target) @ _directions(target.shape[-1], target.dtype, target.device)
        missing = row_norms(projected.transpose(1, 2) * scale[..., None] + rest)
        error = missing / torch.maximum(row_norms(target), cells.amax(1)).clamp_min(torch.finfo(cells.dtype).tiny)
        reduced.append(Reduced(cells, error, state.own, state.others, state.bias))
    return reduced


def vectors(state: Factored, positions: Tensor | None) -> Tensor:
    """The contribution vectors themselves, (g, R, j, d): for a few rows, on demand."""
    term, mixture = state.term, state.term.mixture
    mixed = torch.einsum("gjhr,gjhd->grjd", mixture.weights, term.view(mixture.vectors)) * term.scale[..., None, None]
    item, column, row = own_index(positions, *mixed.shape[:2], mixed.device)
    mixed[item, row, column] = state.own
    return mixed


def weight_map(mixture: Mixture, positions: Tensor | None, residual: bool) -> Tensor:
    """(g, j, R). ATTN-W: the mean of the weights over heads, A; ATTNRES-W: ``(A + I) / 2`` (Abnar & Zuidema 2020)."""
    cells = mixture.weights.mean(2)
    items, _, rows = cells.shape
    index = own_index(positions, items, rows, cells.device)
    cells[index] = mixture.own_weights.mean(-1)
    if residual:
        cells = cells / 2
        cells[index] += 0.5
    return cells


def _same_view(a: Term, b: Term) -> bool:
    return a.mixture is b.mixture and a.centered == b.centered and a.gain is b.gain


def _norms(terms: Sequence[Term]) -> list[tuple[Tensor, Tensor]]:
    """For each view of one mixture: norms without the row scale (g, j, R), and the sum over j of the off-diagonal
    contributions in the test directions (g, DIRECTIONS, R)."""
    mixture = terms[0].mixture
    items, columns, heads, rows = mixture.weights.shape
    flat = mixture.vectors.flatten(0, 1)
    weights = mixture.weights.flatten(0, 1)
    directions = _directions(flat.shape[-1], flat.dtype, flat.device)
    # view(f) R = f view^T(R), and the transpose of "subtract the mean, multiply by the gain" is their reverse order.
    tests = torch.cat([_transposed_view(term, directions) for term in terms], dim=1)
    cells = [flat.new_empty(items * columns, rows) for _ in terms]
    sums = [flat.new_zeros(items, DIRECTIONS, rows) for _ in terms]
    owner = torch.arange(items, device=flat.device).repeat_interleave(columns)
    for start in range(0, items * columns, TOKENS):
        chunk = slice(start, start + TOKENS)
        factors, unit = _factors(flat[chunk], terms)
        projected = (flat[chunk] @ tests).transpose(1, 2)  # (tokens, views * DIRECTIONS, H)
        product = torch.bmm(torch.cat([*factors, projected], dim=1), weights[chunk])
        for n in range(len(terms)):
            begin = sum(f.shape[1] for f in factors[:n])
            part = product[:, begin : begin + factors[n].shape[1]]
            torch.mul(part.square().sum(1).sqrt_(), unit, out=cells[n][chunk])
            tail = sum(f.shape[1] for f in factors) + n * DIRECTIONS
            sums[n].index_add_(0, owner[chunk], product[:, tail : tail + DIRECTIONS])
    return [(cell.unflatten(0, (items, columns)), total) for cell, total in zip(cells, sums, strict=True)]


def _factors(vectors: Tensor, terms: Sequence[Term]) -> tuple[list[Tensor], Tensor]:
    """For each view, (tokens, <=H, H) matrices whose product with the weights has the norm of the contribution, times
    a common unit that keeps float32 squares in range; and 1 / unit."""
    if vectors.dtype == torch.float64 or vectors.device.type == "mps":
        factors = [torch.linalg.qr(term.view(vectors).transpose(1, 2), mode="r").R for term in terms]
    else:
        factors = _gram_factors(vectors, terms)
    peak = torch.stack([factor.abs().amax() for factor in factors]).amax().clamp_min(1e-30)
    unit = HEADROOM / peak
    return [(factor * unit).to(vectors.dtype) for factor in factors], (1 / unit).to(vectors.dtype)


def _gram_factors(vectors: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """Transposed Cholesky factors of float64 Gram matrices.

    With ``x`` the vectors, ``w`` the squared gain, ``m`` the means of x and ``s = sum w x``, the centred Gram matrix is
    ``x w x^T - m s^T - s m^T + (sum w) m m^T``: one cast of x serves every view.
    """
    x = torch.empty(vectors.transpose(1, 2).shape, dtype=torch.float64, device=vectors.device)
    x.copy_(vectors.transpose(1, 2))  # (tokens, d, H): float64 products run three times faster in this layout
    factors = []
    for term in terms:
        if term.gain is None and not term.centered:
            gram = torch.bmm(x.transpose(1, 2), x)
        else:
            w = x.new_ones(x.shape[1]) if term.gain is None else term.gain.to(torch.float64).square()
            y = x * w[:, None]
            gram = torch.bmm(x.transpose(1, 2), y)
            if term.centered:
                m, s = x.mean(1)[:, :, None], y.sum(1)[:, :, None]
                cross = m * s.transpose(1, 2)
                gram += w.sum() * (m * m.transpose(1, 2)) - cross - cross.transpose(1, 2)
        trace = gram.diagonal(dim1=1, dim2=2).sum(-1)
        gram.diagonal(dim1=1, dim2=2).add_((1e-15 * trace + 1e-300)[:, None])
        lower, info = torch.linalg.cholesky_ex(gram)
        factor = lower.transpose(1, 2)
        if bool(info.any()):  # numerically singular beyond the jitter: those tokens by QR
            failed = info != 0
            exact = term.view(vectors[failed].to(torch.float64)).transpose(1, 2)
            triangle = torch.linalg.qr(exact, mode="r").R
            factor[failed] = torch.nn.functional.pad(triangle, (0, 0, 0, factor.shape[1] - triangle.shape[1]))
        factors.append(factor)
    return factors


def _transposed_view(term: Term, directions: Tensor) -> Tensor:
    scaled = directions if term.gain is None else directions * term.gain[:, None]
    return scaled - scaled.mean(0, keepdim=True) if term.centered else scaled


@lru_cache(maxsize=8)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(d, DIRECTIONS) Gaussian, scaled so that ``||e R||`` estimates ``||e||``."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(width, DIRECTIONS, generator=generator, dtype=torch.float64)
    return (random / DIRECTIONS**0.5).to(dtype=dtype, device=device)
