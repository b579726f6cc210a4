"""Norms and completeness of factored states, without any n x n x d tensor.

``||sum_h alpha_ijh f_jh||^2 = alpha_ij^T G_j alpha_ij`` with the H x H Gram matrix ``G_j`` of the vectors f_jh, so that
with a factor ``G_j = L_j L_j^T`` the norm is ``||L_j^T alpha_ij||``. States that share a mixture (before and after a
norm) share one product with the weights. Completeness is tested in a fixed random direction, which goes
through the same products, so that the test covers the vectors f themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from normscope.decompose.attention import set_own_cells
from normscope.decompose.contributions import Factored, Mixture, Term, row_norms
from normscope.decompose.scratch import Scratch
from normscope.measures.mixing import mixing_ratio

TOKENS = 64  # columns factored at a time: their vectors in float64 stay in cache
PRODUCT = 2**20  # cells of the product with the weights at a time
HEADROOM = 2.0**50  # float32 squares of cells down to 1e-30 must not underflow


@dataclass(frozen=True)
class Reduced:
    """One scope of some items of a layer, rows and columns still padded."""

    map: Tensor  # (g, j, R), without the rows' own cells and without the row scale
    scale: Tensor | None  # (g, R)
    own: Tensor  # (g, R): the rows' own cells
    mixing: Tensor  # (g, R)
    remainder: Tensor  # (g, R) or (1, 1): norm of b_i
    error: Tensor  # (g, R): completeness


def reduce(states: Sequence[Factored], actual: Sequence[Tensor], scratch: Scratch) -> list[Reduced]:
    """Norms, mixing ratio and completeness of states; `actual` (g, R, d) are the model's own vectors there."""
    views: list[Term] = []
    for state in states:
        if not any(_same_view(state.term, view) for view in views):
            views.append(state.term)
    norms: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for mixture in {id(view.mixture): view.mixture for view in views}.values():
        shared = [n for n, view in enumerate(views) if view.mixture is mixture]
        norms |= zip(shared, _norms([views[n] for n in shared], scratch), strict=True)

    reduced = []
    for state, target in zip(states, actual, strict=True):
        cells, highest, tested = norms[next(n for n, view in enumerate(views) if _same_view(state.term, view))]
        scale = state.term.scale
        if scale is not None:
            highest, tested = highest * scale, tested * scale
        own = row_norms(state.own)
        direction = _direction(target.shape[-1], target.dtype, target.device)
        missing = tested + (state.own - target) @ direction + state.bias @ direction
        length, mixed = torch.linalg.vector_norm(target, dim=-1), torch.linalg.vector_norm(state.others, dim=-1)
        error = completeness(missing.abs(), length, torch.maximum(highest, own))
        remainder = torch.linalg.vector_norm(state.bias, dim=-1)
        reduced.append(Reduced(cells, scale, own, mixing_ratio(mixed, own), remainder, error))
    return reduced


def completeness(missing: Tensor, length: Tensor, highest: Tensor) -> Tensor:
    """``||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)``."""
    return missing / torch.maximum(length, highest).clamp_min(torch.finfo(missing.dtype).tiny)


def reduce_weights(mixture: Mixture, residual: bool, mean: Tensor) -> Reduced:
    """ATTN-W: `mean`, the mean of the weights over heads, A; ATTNRES-W: ``(A + I) / 2`` (Abnar & Zuidema 2020)."""
    own = mixture.own_weights.mean(-1)
    error = (mean.sum(1) + own - 1).abs()
    mixing = 1 - own
    if residual:
        mean, own, mixing, error = mean / 2, own / 2 + 0.5, mixing / 2, error / 2
    return Reduced(mean, None, own, mixing, torch.zeros_like(own), error)


def vectors(state: Factored, positions: Tensor | None) -> Tensor:
    """The contribution vectors themselves, (g, R, j, d): for a few rows, on demand."""
    term, mixture = state.term, state.term.mixture
    mixed = torch.einsum("gjhr,gjhd->gdjr", mixture.weights, term.view(mixture.full()))
    if term.scale is not None:
        mixed = mixed * term.scale[:, None, None]
    set_own_cells(mixed, positions, state.own.transpose(1, 2))
    return mixed.permute(0, 3, 2, 1)


def _same_view(a: Term, b: Term) -> bool:
    return a.mixture is b.mixture and a.centered == b.centered and a.gain is b.gain


def _norms(terms: Sequence[Term], scratch: Scratch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each view of one mixture, without the row scale: norms (g, j, R), the highest of each row (g, R), and the sum
    over j of the off-diagonal contributions in the view's test direction (g, R)."""
    mixture = terms[0].mixture
    items, columns, heads, rows = mixture.weights.shape
    flat, means = mixture.vectors.flatten(0, 1), mixture.means.flatten(0, 1)
    factors, unit = _factors(flat, means, terms, scratch)
    stacked = torch.cat([*factors, _tested(flat, means, terms)], dim=1).unflatten(0, (items, columns))
    sizes = [heads] * len(terms) + [len(terms)]

    cells = [flat.new_empty(items, columns, rows) for _ in terms]
    sums = flat.new_zeros(items, len(terms), rows)
    step = columns if items > 1 else max(1, PRODUCT // (sum(sizes) * rows))
    for start in range(0, columns, step):
        js = slice(start, min(start + step, columns))
        shape = (items * (js.stop - start), sum(sizes), rows)
        product = scratch.like("product", shape, flat)
        torch.bmm(stacked[:, js].flatten(0, 1), mixture.weights[:, js].flatten(0, 1), out=product)
        *parts, tested = product.unflatten(0, (items, -1)).split(sizes, dim=2)
        sums += tested.sum(1)
        for cell, part in zip(cells, parts, strict=True):
            torch.mul(part.square_().sum(2).sqrt_(), unit, out=cell[:, js])
    return [(cell, cell.amax(1), sums[:, n]) for n, cell in enumerate(cells)]


def _factors(vectors: Tensor, means: Tensor, terms: Sequence[Term], scratch: Scratch) -> tuple[list[Tensor], Tensor]:
    """For each view, (tokens, H, H) matrices whose product with the weights has the norm of the contribution, in a
    common unit that keeps float32 squares in range; and that unit."""
    if vectors.dtype == torch.float64 or vectors.device.type == "mps":
        factors = [_triangle(vectors, means, term) for term in terms]
    else:
        grams = _grams(vectors, means, terms, scratch)
        factors = [_cholesky(gram, vectors, means, term) for gram, term in zip(grams, terms, strict=True)]
    peak = torch.stack([factor.abs().amax() for factor in factors]).amax().clamp_min(1e-30)
    unit = (peak / HEADROOM).to(vectors.dtype)
    return [(factor * (HEADROOM / peak)).to(vectors.dtype) for factor in factors], unit


def _tested(vectors: Tensor, means: Tensor, terms: Sequence[Term]) -> Tensor:
    """view(f) in the test direction of each view, (tokens, views, H)."""
    random = _direction(vectors.shape[-1], vectors.dtype, vectors.device)
    # view(f) r = f (gain * r), f without its mean where the view is centred
    directions = torch.stack([random if term.gain is None else random * term.gain for term in terms])
    # So few columns are multiplied fastest with the roles of the vectors and them swapped.
    found: Tensor = (directions @ vectors.flatten(0, 1).t()).unflatten(1, vectors.shape[:2]).transpose(0, 1)
    kept = torch.tensor([not term.centered for term in terms], device=vectors.device)
    return found + means[:, None] * (directions.sum(-1) * kept)[:, None]


def _grams(vectors: Tensor, means: Tensor, terms: Sequence[Term], scratch: Scratch) -> list[Tensor]:
    """Float64 Gram matrices (tokens, H, H) of each view.

    With ``x`` the mean-free vectors, ``m`` the means and ``w`` the squared gain, that of a centred view is ``x w x^T``;
    one that keeps the mean adds ``m s^T + s m^T + (sum w) m m^T``, ``s = sum_d w x``. One cast of x serves all views.
    """
    tokens, heads, width = vectors.shape
    device, double = vectors.device, torch.float64
    # Spread over the heads: without strides of zero the product runs twice as fast.
    weights = [None if t.gain is None else t.gain.to(double).square()[:, None].repeat(1, heads) for t in terms]
    grams = [torch.empty(tokens, heads, heads, dtype=double, device=device) for _ in terms]
    for start in range(0, tokens, TOKENS):
        some = slice(start, start + TOKENS)
        chunk = vectors[some].transpose(1, 2)
        # (tokens, d, H): float64 products run three times faster in this layout
        x = scratch.take("x", tuple(chunk.shape), double, device).copy_(chunk)
        for term, w, gram in zip(terms, weights, grams, strict=True):
            y = x if w is None else torch.mul(x, w, out=scratch.take("y", tuple(chunk.shape), double, device))
            torch.bmm(x.transpose(1, 2), y, out=gram[some])
            if w is not None and not term.centered:
                cross = means[some, :, None].to(double) * y.sum(1)[:, None]
                gram[some] += cross + cross.transpose(1, 2)
    m = means.to(double)[:, :, None]
    for term, w, gram in zip(terms, weights, grams, strict=True):
        if not term.centered:
            gram += (m * (width if w is None else w[:, 0].sum())) * m.transpose(1, 2)
    return grams


def _cholesky(gram: Tensor, vectors: Tensor, means: Tensor, term: Term) -> Tensor:
    """The transposed factor of each Gram matrix, with a jitter below which a singular one would give garbage."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += (1e-15 * diagonal.sum(-1, keepdim=True)) + 1e-300
    lower, info = torch.linalg.cholesky_ex(gram)
    factor: Tensor = lower.transpose(1, 2)
    failed = info != 0
    if bool(failed.any()):  # singular beyond the jitter
        factor[failed] = _triangle(vectors[failed].to(torch.float64), means[failed].to(torch.float64), term)
    return factor


def _triangle(vectors: Tensor, means: Tensor, term: Term) -> Tensor:
    """R of a QR decomposition of a view, (tokens, H, H): what a Cholesky factor of its Gram matrix would be, without
    squaring."""
    triangle = torch.linalg.qr(_viewed(vectors, means, term).transpose(1, 2), mode="r").R
    return torch.nn.functional.pad(triangle, (0, 0, 0, vectors.shape[1] - triangle.shape[1]))


def _viewed(vectors: Tensor, means: Tensor, term: Term) -> Tensor:
    viewed = vectors if term.centered else vectors + means[..., None]
    return viewed if term.gain is None else viewed * term.gain


@lru_cache(maxsize=8)
def _direction(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(d,) a fixed Gaussian direction: the size of an error e in it estimates ``||e||``."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
