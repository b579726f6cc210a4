"""Norms and completeness of factored states, without any n x n x d tensor.

``||sum_h alpha_ijh f_jh||^2 = alpha_ij^T G_j alpha_ij`` with the H x H Gram matrix ``G_j`` of the vectors f_jh. States
that share a mixture (before and after a norm) share one product with the weights. A Gram matrix squares, so it loses
digits where heads cancel; the same product gives ``sum_h alpha_ijh ||f_jh||``, which tells where, and those columns are
done again from the values with a QR decomposition in float64. Completeness is tested in a fixed random direction, which
goes through the same products, so that the test covers the vectors f themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.decompose.attention import set_own_cells
from normscope.decompose.contributions import Factored, Mixture, Term, probe, reach, row_norms
from normscope.decompose.scratch import Scratch
from normscope.measures.mixing import mixing_ratio

TOKENS = 64  # doubtful columns done again at a time
PRODUCT = 2**20  # cells of the product with the weights at a time
HEADROOM = 2.0**100  # float32 squares of cells down to 1e-30 must not underflow
# Doubtful: (sum_h alpha ||f_h||)^2 > 3 H ||sum_h alpha f_h||^2. Orthogonal vectors of equal length give H, so that a
# sound form has lost at most half a decimal digit more than they would.
CANCELLED = 3
TINY = 1e-30  # doubtful: a square so small has lost digits to underflow
OFFSET = 16  # doubtful: the mean of f over d, which a norm subtracts, is so many times its deviation


@dataclass(frozen=True)
class Piece:
    """The map of one scope over one term's columns, rows and columns still padded."""

    cells: Tensor  # (g, j, R), without the rows' own cells and without the scale
    scale: Tensor | float | None  # (g, R), or a number, or nothing
    cross: bool  # the columns are the encoder's


@dataclass(frozen=True)
class Reduced:
    """Some scopes (S of them) of some items of a layer."""

    scopes: tuple[str, ...]
    maps: tuple[tuple[Piece, ...], ...]
    own: Tensor  # (S, g, R): the rows' own cells
    mixing: Tensor  # (S, g, R)
    remainder: Tensor  # (S, g, R): norm of b_i
    error: Tensor  # (S, g, R): completeness


def reduce(scopes: Sequence[str], states: Sequence[Factored], actual: Sequence[Tensor], scratch: Scratch) -> Reduced:
    """Norms, mixing ratio and completeness of states; `actual` (g, R, d) are the model's own vectors there."""
    views: list[Term] = []
    for term in (term for state in states for term in state.terms):
        if not any(_same_view(term, view) for view in views):
            views.append(term)
    norms: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for mixture in {id(view.mixture): view.mixture for view in views}.values():
        shared = [n for n, view in enumerate(views) if view.mixture is mixture]
        norms |= zip(shared, _norms([views[n] for n in shared], scratch), strict=True)

    own, others = torch.stack([row_norms(state.split) for state in states], dim=1)
    maps, heights, missing = [], list(own), []
    for number, (state, target) in enumerate(zip(states, actual, strict=True)):
        direction = probe(target.shape[-1], target.dtype, target.device)
        missed = state.own @ direction - target @ direction + state.bias @ direction
        pieces = []
        for term in state.terms:
            cells, highest, tested = norms[next(n for n, view in enumerate(views) if _same_view(term, view))]
            pieces.append(Piece(cells, term.scale, term.mixture.cross))
            if term.scale is not None:
                highest, tested = highest * term.scale, tested * term.scale
            heights[number] = torch.maximum(heights[number], highest)
            missed = missed + tested
        maps.append(tuple(pieces))
        missing.append(missed)
    length = torch.stack([torch.linalg.vector_norm(target, dim=-1) for target in actual])
    error = completeness(torch.stack(missing).abs_(), length, torch.stack(heights))
    remainder = torch.stack([torch.linalg.vector_norm(state.bias, dim=-1).expand(own.shape[1:]) for state in states])
    return Reduced(tuple(scopes), tuple(maps), own, mixing_ratio(others, own), remainder, error)


def completeness(missing: Tensor, length: Tensor, highest: Tensor) -> Tensor:
    """``||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)``."""
    return missing / torch.maximum(length, highest).clamp_min(torch.finfo(missing.dtype).tiny)


def reduce_weights(scopes: Sequence[str], residual: Sequence[bool], mixture: Mixture) -> Reduced:
    """ATTN-W: the mean of the weights over heads, A; with the residual connection ATTNRES-W: ``(A + I) / 2`` (Abnar &
    Zuidema 2020)."""
    mean = mixture.weights.mean(2)
    single = mixture.own_weights.mean(-1)
    half = torch.tensor([0.5 if one else 1.0 for one in residual], dtype=mean.dtype, device=mean.device)[:, None, None]
    others = mean.sum(1)
    own = half * single + (1 - half)
    missing = others + single - 1
    error = half * (missing.clamp_min(0) if mixture.sinks else missing.abs())
    maps = tuple((Piece(mean, 0.5 if one else None, mixture.cross),) for one in residual)
    return Reduced(tuple(scopes), maps, own, mixing_ratio(half * others, own), torch.zeros_like(own), error)


def vectors(state: Factored, positions: Tensor | None) -> list[Tensor]:
    """The contribution vectors themselves, (g, R, j, d) for each term: for a few rows, on demand."""
    found = []
    for term in state.terms:
        mixture = term.mixture
        mixed = torch.einsum("gjhr,gjhd->gdjr", mixture.weights, term.view(mixture.vectors()))
        if term.scale is not None:
            mixed = mixed * term.scale[:, None, None]
        if not mixture.cross:
            set_own_cells(mixed, positions, state.own.transpose(1, 2))
        found.append(mixed.permute(0, 3, 2, 1))
    return found


def _same_view(a: Term, b: Term) -> bool:
    return a.mixture is b.mixture and a.centered == b.centered and a.gain is b.gain


def _norms(terms: Sequence[Term], scratch: Scratch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each view of one mixture, without the row scale: norms (g, j, R), the highest of each row (g, R), and the sum
    over j of the off-diagonal contributions along the probe (g, R)."""
    mixture = terms[0].mixture
    items, columns, heads, rows = mixture.weights.shape
    cells = mixture.weights.new_zeros(len(terms), items, columns, rows)
    sums = cells.new_zeros(items, len(terms), rows)
    doubtful = torch.zeros(items, columns, len(terms), dtype=torch.bool, device=cells.device)
    for block, vectors in mixture.blocks(scratch):
        width = block.stop - block.start
        forms, unit, doubtful[:, block] = (x.unflatten(0, (items, width)) for x in _forms(vectors.flatten(1, 2), terms))
        step = width if items > 1 else max(1, PRODUCT // (len(terms) * (heads + 2) * rows))
        for start in range(0, width, step):
            some = slice(start, min(start + step, width))
            js = slice(block.start + some.start, block.start + some.stop)
            hit = slice(0, rows) if mixture.whole is not None else reach(mixture.weights[:, js].flatten(0, 1))
            weights = mixture.weights[:, js, :, hit].flatten(0, 1)  # (tokens, H, rows)
            if weights.shape[2] == 0:
                continue
            product = scratch.like("product", (len(weights), len(terms) * (heads + 2), weights.shape[2]), cells)
            torch.bmm(forms[:, some].flatten(0, 1).flatten(1, 2), weights, out=product)
            product = product.unflatten(1, (len(terms), heads + 2))
            squares = product[:, :, :heads].mul_(weights[:, None]).sum(2)  # (tokens, views, R)
            lost = (product[:, :, heads].square_() > squares).any(-1)
            doubtful[:, js] |= lost.unflatten(0, (items, -1))
            sums[..., hit] += product[:, :, heads + 1].unflatten(0, (items, -1)).sum(1)
            torch.mul(squares.sqrt_().transpose(0, 1).unflatten(1, (items, -1)), unit[0, 0], out=cells[:, :, js, hit])
    if bool(doubtful.any()):
        for n, term in enumerate(terms):
            _again(term, doubtful[:, :, n].nonzero(as_tuple=True), cells[n])
    highest = cells.amax(2)
    return [(cells[n], highest[n], sums[:, n]) for n in range(len(terms))]


def _forms(probed: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor, Tensor]:
    """What the weights are multiplied with, (tokens, views, H + 2, H): the Gram matrix, ``||f_h||`` ready to be
    compared (CANCELLED), and f_h along the probe; the unit of the norms (tokens,); which (tokens, views) are doubtful
    already.
    """
    heads, tokens, width = probed.shape[0] - 1, probed.shape[1], probed.shape[2]
    grams = probed.new_empty(len(terms), tokens, heads + 1, heads + 1)
    doubtful = torch.zeros(tokens, len(terms), dtype=torch.bool, device=probed.device)
    for n, (term, gram) in enumerate(zip(terms, grams, strict=True)):
        if term.centered:
            # One fused pass: layer_norm also divides by each vector's own deviation, which is taken back.
            viewed, mean, inverse = torch.native_layer_norm(probed, [width], term.gain, None, 1e-30)
            deviation = inverse.reciprocal_()
            doubtful[:, n] = (mean[:heads].abs_() > OFFSET * deviation[:heads]).any(0)[:, 0]
            viewed[heads], deviation[heads] = probed[heads], 1
            deviation = deviation.transpose(0, 1)  # (tokens, H + 1, 1)
            torch.bmm(viewed.transpose(0, 1), viewed.permute(1, 2, 0), out=gram)
            gram.mul_(deviation).mul_(deviation.transpose(1, 2))
        else:
            viewed = term.view(probed)
            if viewed is not probed:
                viewed[heads] = probed[heads]
            torch.bmm(viewed.transpose(0, 1), viewed.permute(1, 2, 0), out=gram)
    squares = grams.diagonal(dim1=2, dim2=3)[..., :heads].transpose(0, 1)  # (tokens, views, H)
    doubtful |= (squares < TINY).any(-1)
    scale = HEADROOM / squares.amax().clamp_min(TINY)
    forms = probed.new_empty(tokens, len(terms), heads + 2, heads)
    torch.mul(grams[:, :, :heads, :heads].transpose(0, 1), scale, out=forms[:, :, :heads])
    torch.mul(squares, scale / (CANCELLED * heads), out=forms[:, :, heads]).sqrt_()
    forms[:, :, heads + 1] = grams[:, :, heads, :heads].transpose(0, 1)
    return forms, scale.rsqrt().expand(tokens), doubtful


def _again(term: Term, columns: tuple[Tensor, ...], cells: Tensor) -> None:
    """Norms of some (items, columns) from the values, in float64: ``||R alpha||``, R of a QR decomposition."""
    mixture = term.mixture
    # Not every device has float64.
    matrix = term.view(mixture.matrix.to("cpu", torch.float64))
    for start in range(0, len(columns[0]), TOKENS):
        some = tuple(index[start : start + TOKENS] for index in columns)
        values, weights = (x[some].to("cpu", torch.float64) for x in (mixture.values, mixture.weights))
        vectors = torch.einsum("thk,hkd->tdh", values, matrix)
        mixed = torch.linalg.qr(vectors, mode="r").R @ weights
        cells[some] = torch.linalg.vector_norm(mixed, dim=1).to(cells)
