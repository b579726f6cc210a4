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
from normscope.decompose.scratch import Scratch

DIRECTIONS = 4  # random directions of the completeness test
TOKENS = 64  # columns factored at a time: their vectors in float64 stay in cache
PRODUCT = 2**20  # cells of the product with the weights at a time
HEADROOM = 2.0**50  # float32 squares of cells down to 1e-30 must not underflow


@dataclass(frozen=True)
class Reduced:
    """What is kept of a state: the map, transposed, and the completeness error of each row."""

    map: Tensor  # (g, j, R)
    error: Tensor  # (g, R): ||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)
    own: Tensor  # (g, R, d)
    others: Tensor  # (g, R, d)
    bias: Tensor  # (g, R, d)


def reduce(
    states: Sequence[Factored], actual: Sequence[Tensor], positions: Tensor | None, scratch: Scratch
) -> list[Reduced]:
    """Maps and completeness of states of one layer; `actual` (g, R, d) are the model's own vectors there."""
    mixture_terms: dict[int, list[Term]] = {}
    for state in states:
        terms = mixture_terms.setdefault(id(state.term.mixture), [])
        if not any(_same_view(state.term, term) for term in terms):
            terms.append(state.term)
    norms: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for key, terms in mixture_terms.items():
        norms |= {(key, n): found for n, found in enumerate(_norms(terms, scratch))}

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


def weight_map(mixture: Mixture, positions: Tensor | None) -> Tensor:
    """ATTN-W: the mean of the weights over heads, (g, j, R)."""
    cells = mixture.weights.mean(2)
    items, _, rows = cells.shape
    cells[own_index(positions, items, rows, cells.device)] = mixture.own_weights.mean(-1)
    return cells


def with_residual(weights: Tensor, positions: Tensor | None) -> Tensor:
    """ATTNRES-W: ``(A + I) / 2`` (Abnar & Zuidema 2020)."""
    cells = weights / 2
    items, _, rows = cells.shape
    cells[own_index(positions, items, rows, cells.device)] += 0.5
    return cells


def _same_view(a: Term, b: Term) -> bool:
    return a.mixture is b.mixture and a.centered == b.centered and a.gain is b.gain


def _norms(terms: Sequence[Term], scratch: Scratch) -> list[tuple[Tensor, Tensor]]:
    """For each view of one mixture: norms without the row scale (g, j, R), and the sum over j of the off-diagonal
    contributions in the test directions (g, DIRECTIONS, R)."""
    mixture = terms[0].mixture
    items, columns, heads, rows = mixture.weights.shape
    flat = mixture.vectors.flatten(0, 1)
    factors, unit = _factors(flat, terms, scratch)
    directions = _directions(flat.shape[-1], flat.dtype, flat.device)
    # view(f) R = f view^T(R), and the transpose of "subtract the mean, multiply by the gain" is their reverse order.
    tests = torch.cat([_transposed_view(term, directions) for term in terms], dim=1)
    stacked = torch.cat([*factors, (flat @ tests).transpose(1, 2)], dim=1).unflatten(0, (items, columns))
    sizes = [factor.shape[1] for factor in factors] + [DIRECTIONS] * len(terms)

    cells = [flat.new_empty(items, columns, rows) for _ in terms]
    sums = [flat.new_zeros(items, DIRECTIONS, rows) for _ in terms]
    step = columns if items > 1 else max(1, PRODUCT // (sum(sizes) * rows))
    for start in range(0, columns, step):
        js = slice(start, min(start + step, columns))
        shape = (items * (js.stop - start), sum(sizes), rows)
        product = scratch.like("product", shape, flat)
        torch.bmm(stacked[:, js].flatten(0, 1), mixture.weights[:, js].flatten(0, 1), out=product)
        parts = product.unflatten(0, (items, -1)).split(sizes, dim=2)
        for n, (factored, tested) in enumerate(zip(parts[: len(terms)], parts[len(terms) :], strict=True)):
            sums[n] += tested.sum(1)
            torch.mul(factored.square_().sum(2).sqrt_(), unit, out=cells[n][:, js])
    return list(zip(cells, sums, strict=True))


def _factors(vectors: Tensor, terms: Sequence[Term], scratch: Scratch) -> tuple[list[Tensor], Tensor]:
    """For each view, (tokens, <=H, H) matrices whose product with the weights has the norm of the contribution, in a
    common unit that keeps float32 squares in range; and that unit."""
    if vectors.dtype == torch.float64 or vectors.device.type == "mps":
        factors = [_triangle(term.view(vectors)) for term in terms]
    else:
        factors = [_cholesky(_gram(vectors, term, scratch), vectors, term) for term in terms]
    peak = torch.stack([factor.abs().amax() for factor in factors]).amax().clamp_min(1e-30)
    return [(factor * (HEADROOM / peak)).to(vectors.dtype) for factor in factors], (peak / HEADROOM).to(vectors.dtype)


def _gram(vectors: Tensor, term: Term, scratch: Scratch) -> Tensor:
    """Float64 Gram matrices (tokens, H, H) of a view."""
    tokens, heads, width = vectors.shape
    gram = torch.empty(tokens, heads, heads, dtype=torch.float64, device=vectors.device)
    for start in range(0, tokens, TOKENS):
        chunk = vectors[start : start + TOKENS]
        if term.centered:
            chunk = torch.sub(chunk, chunk.mean(-1, keepdim=True), out=scratch.like("view", tuple(chunk.shape), chunk))
        if term.gain is not None:
            chunk = torch.mul(chunk, term.gain, out=scratch.like("view", tuple(chunk.shape), chunk))
        # (tokens, d, H): float64 products run three times faster in this layout
        x = scratch.take("gram", (len(chunk), width, heads), torch.float64, vectors.device)
        x.copy_(chunk.transpose(1, 2))
        torch.bmm(x.transpose(1, 2), x, out=gram[start : start + TOKENS])
    return gram


def _cholesky(gram: Tensor, vectors: Tensor, term: Term) -> Tensor:
    """The transposed factor of each Gram matrix, with a jitter below which a singular one would give garbage."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += (1e-15 * diagonal.sum(-1, keepdim=True)) + 1e-300
    lower, info = torch.linalg.cholesky_ex(gram)
    factor = lower.transpose(1, 2)
    failed = info != 0
    if bool(failed.any()):  # singular beyond the jitter
        factor[failed] = _triangle(term.view(vectors[failed].to(torch.float64)))
    return factor


def _triangle(vectors: Tensor) -> Tensor:
    """R of a QR decomposition, (tokens, H, H): what a Cholesky factor of the Gram matrix would be, without squaring."""
    triangle = torch.linalg.qr(vectors.transpose(1, 2), mode="r").R
    return torch.nn.functional.pad(triangle, (0, 0, 0, vectors.shape[1] - triangle.shape[1]))


def _transposed_view(term: Term, directions: Tensor) -> Tensor:
    scaled = directions if term.gain is None else directions * term.gain[:, None]
    return scaled - scaled.mean(0, keepdim=True) if term.centered else scaled


@lru_cache(maxsize=8)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(d, DIRECTIONS) Gaussian, scaled so that ``||e R||`` estimates ``||e||``."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(width, DIRECTIONS, generator=generator, dtype=torch.float64)
    return (random / DIRECTIONS**0.5).to(dtype=dtype, device=device)
