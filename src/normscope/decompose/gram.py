"""Norms and completeness of factored states, without any n x n x d tensor.

``||sum_h alpha_ijh f_jh||^2 = alpha_ij^T G_j alpha_ij`` with the H x H Gram matrix ``G_j`` of the vectors f_jh. States
that share a mixture (before and after a norm) share the vectors: behind a norm with gain g the Gram matrix is that of
``g * f``, from which the mean is taken out afterwards. A Gram matrix squares, so it loses digits where heads cancel;
the product with the weights also gives ``sum_h alpha_ijh ||f_jh||``, which tells where, and those columns are done
again from the values with a QR decomposition in float64. Completeness is tested in a fixed random direction, which goes
through the same products, so that the test covers the vectors f themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from normscope.decompose.state import (
    EXTRA_VECTORS,
    Factored,
    Mixture,
    Scratch,
    Term,
    probe_direction,
    row_norms,
    rows_with_weight,
    set_own_cells,
)

TOKENS = 64  # doubtful columns done again at a time
PRODUCT = 2**20  # cells of the product with the weights at a time
HEADROOM = 2.0**100  # float32 squares of cells down to 1e-30 must not underflow
LARGEST = 2.0**126  # and the factor for it must not overflow
# Doubtful: (sum_h alpha ||f_h||)^2 > 3 H ||sum_h alpha f_h||^2. Orthogonal vectors of equal length give H, so that a
# sound form has lost at most half a decimal digit more than they would.
CANCELLED = 3
TINY = 1e-30  # doubtful: a square so small has lost digits to underflow
OFFSET = 8  # doubtful: taking the mean out of f leaves less than its square divided by this
LEFT = 15  # rows on the left of a batched product; MKL is up to ten times slower with more


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
    figures: Tensor  # (6, S, g, R), see `Figures`


@dataclass(frozen=True)
class Figures:
    """Numbers of every row, from which mixing ratio and completeness follow."""

    own: Tensor  # ||c_ii||
    others: Tensor  # ||sum_{j != i} c_ij||
    missing: Tensor  # ||sum_j c_ij + b_i - y_i||
    length: Tensor  # ||y_i||
    remainder: Tensor  # ||b_i||
    highest: Tensor  # max_{j != i} ||c_ij||


def reduce_states(
    scopes: Sequence[str], states: Sequence[Factored], actual: Sequence[Tensor], scratch: Scratch
) -> Reduced:
    """Maps and figures of states; `actual` (g, R, d) are the model's own vectors there. Overwrites the vectors f."""
    views: list[Term] = []
    for term in (term for state in states for term in state.terms):
        if not any(_same_view(term, view) for view in views):
            views.append(term)
    norms: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for mixture in {id(view.mixture): view.mixture for view in views}.values():
        shared = [n for n, view in enumerate(views) if view.mixture is mixture]
        norms |= zip(shared, _contribution_norms([views[n] for n in shared], scratch), strict=True)

    direction = probe_direction(actual[0].shape[-1], actual[0].dtype, actual[0].device)
    lengths: dict[int, Tensor] = {}  # id -> norms: states share vectors

    def length(x: Tensor) -> Tensor:
        if id(x) not in lengths:
            lengths[id(x)] = torch.linalg.vector_norm(x, dim=-1)
        return lengths[id(x)]

    maps, figures = [], []
    for state, target in zip(states, actual, strict=True):
        assert state.others is not None
        pieces, heights, along = [], [], []
        for term in state.terms:
            cells, highest, tested = norms[next(n for n, view in enumerate(views) if _same_view(term, view))]
            pieces.append(Piece(cells, term.scale, term.mixture.cross))
            heights.append(highest if term.scale is None else highest * term.scale)
            along.append(tested if term.scale is None else tested * term.scale)
        maps.append(tuple(pieces))
        highest = heights[0] if len(heights) == 1 else torch.stack(heights).amax(0)
        missing = (along[0] if len(along) == 1 else torch.stack(along).sum(0)).flatten()
        missing = torch.addmv(missing, state.own.flatten(0, 1), direction)
        missing.addmv_(target.flatten(0, 1), direction, alpha=-1)
        missing = missing.view(highest.shape).add_(state.bias @ direction).abs_()
        remainder = length(state.bias).expand(highest.shape)
        figures.append(Figures(length(state.own), length(state.others), missing, length(target), remainder, highest))
    found = stack_figures(figures)
    if bool((found[:2] < 1e-15).any()):  # float32 squares may have lost digits to underflow
        for n, state in enumerate(states):
            assert state.others is not None
            found[0, n], found[1, n] = row_norms(state.own), row_norms(state.others)
    return Reduced(tuple(scopes), tuple(maps), found)


def stack_figures(figures: Sequence[Figures]) -> Tensor:
    """(6, S, g, R)"""
    names = [field.name for field in fields(Figures)]
    flat = torch.stack([getattr(one, name) for name in names for one in figures])
    return flat.view(len(names), len(figures), *flat.shape[1:])


def mixing_ratio(others: Tensor, own: Tensor) -> Tensor:
    """``r_i = ||sum_{j!=i} c_ij|| / (||sum_{j!=i} c_ij|| + ||c_ii||)`` from the two norms.

    It is the norm of the sum, not the sum of norms. A token without any contribution mixes nothing: 0.
    """
    return others / (others + own).clamp_min(torch.finfo(others.dtype).tiny)


def completeness_error(figures: Figures) -> Tensor:
    """``||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)``."""
    largest = torch.maximum(torch.maximum(figures.length, figures.highest), figures.own)
    return figures.missing / largest.clamp_min(torch.finfo(largest.dtype).tiny)


def reduce_weights(scopes: Sequence[str], residual: Sequence[bool], mixture: Mixture) -> Reduced:
    """ATTN-W: the mean of the weights over heads, A; with the residual connection ATTNRES-W: ``(A + I) / 2`` (Abnar &
    Zuidema 2020)."""
    mean = mixture.weights.mean(2)
    own, others = mixture.own_weights.mean(-1), mean.sum(1)
    missing = own + others - 1
    missing = missing.clamp_min(0) if mixture.sinks else missing.abs_()
    nothing, all_of_it = torch.zeros_like(own), torch.ones_like(own)
    plain = Figures(own, others, missing, all_of_it, nothing, nothing)
    halved = Figures(own / 2 + 0.5, others / 2, missing / 2, all_of_it, nothing, nothing)
    maps = tuple((Piece(mean, 0.5 if one else None, mixture.cross),) for one in residual)
    return Reduced(tuple(scopes), maps, stack_figures([halved if one else plain for one in residual]))


def contribution_vectors(state: Factored, positions: Tensor | None) -> list[Tensor]:
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


def _contribution_norms(terms: Sequence[Term], scratch: Scratch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each view of one mixture, without the row scale: norms (g, j, R), the highest of each row (g, R), and the sum
    over j of the off-diagonal contributions along the probe (g, R)."""
    mixture, views = terms[0].mixture, len(terms)
    items, columns, heads, rows = mixture.weights.shape
    cells = mixture.weights.new_zeros(views, items, columns, rows)
    sums = cells.new_zeros(views, items, rows)
    doubtful = torch.zeros(views, items, columns, dtype=torch.bool, device=cells.device)
    for block, vectors in mixture.blocks(scratch):
        width = block.stop - block.start
        grams, offset = _gram_matrices(vectors.flatten(1, 2), terms, scratch)
        squares = grams.diagonal(dim1=2, dim2=3)  # (views, tokens, H)
        lowest, largest = (float(one) for one in squares.aminmax())
        if lowest < TINY:
            doubtful[:, :, block] |= (squares < TINY).any(-1).unflatten(1, (items, width))
        if offset is not None:
            doubtful[-1, :, block] |= offset.unflatten(0, (items, width))
        factor = min(HEADROOM / max(largest, TINY), LARGEST)
        torch.sqrt(squares, out=grams[..., heads + 1]).mul_((CANCELLED * heads * factor) ** -0.5)
        # Gram matrices, the probe's row, and that of ||f_h||
        forms = grams[..., : heads + 2].mT.unflatten(1, (items, width))
        for who, some in _column_chunks(items, width, PRODUCT // (views * (heads + 2) * rows)):
            js = slice(block.start + some.start, block.start + some.stop)
            hit = (
                slice(0, rows)
                if mixture.whole is not None
                else rows_with_weight(mixture.weights[who, js].flatten(0, 1))
            )
            weights = mixture.weights[who, js, :, hit].flatten(0, 1)  # (tokens, H, rows)
            if weights.shape[2] == 0:
                continue
            product = scratch.like("product", (views, len(weights), heads + 2, weights.shape[2]), cells)
            for form, into in zip(forms[:, who, some].flatten(1, 2), product, strict=True):
                torch.baddbmm(into, form, weights, beta=0, alpha=factor, out=into)
            shape = (who.stop - who.start, some.stop - some.start)
            squares = product[:, :, :heads].mul_(weights).sum(2)  # (views, tokens, R)
            apart = product[:, :, heads + 1]
            margin = torch.addcmul(squares, apart, apart, value=-1)
            if float(margin.amin()) < 0:
                doubtful[:, who, js] |= (margin < 0).any(-1).unflatten(1, shape)
            sums[:, who, hit] += product[:, :, heads].unflatten(1, shape).sum(2).mul_(1 / factor)
            torch.mul(squares.sqrt_().unflatten(1, shape), factor**-0.5, out=cells[:, who, js, hit])
    if bool(doubtful.any()):
        for term, columns_of, into in zip(terms, doubtful, cells, strict=True):
            _recompute_in_float64(term, columns_of.nonzero(as_tuple=True), into)
    return list(zip(cells, cells.amax(2), sums, strict=True))


def _column_chunks(items: int, columns: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Items and columns, about so many tokens at a time: some whole items, or a part of one."""
    group, step = max(1, tokens // columns), max(1, min(tokens, columns))
    for item in range(0, items, group):
        for column in range(0, columns, step):
            yield slice(item, min(item + group, items)), slice(column, min(column + step, columns))


def _gram_matrices(probed: Tensor, terms: Sequence[Term], scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    """For each view the products of the vectors f_h with those of `probed`, (views, tokens, H, H + 4): the Gram matrix,
    f_h along the probe, and three columns that are free afterwards; and the tokens that are doubtful in the last view,
    which is taken in place.
    """
    heads, tokens = probed.shape[0] - EXTRA_VECTORS, probed.shape[1]
    vectors, last = probed[:heads], terms[-1]
    grams = scratch.like("grams", (len(terms), tokens, heads, heads + EXTRA_VECTORS), probed)
    raw = offset = None
    if last.centered and last.gain is not None:
        square = last.gain.square()
        probed[heads + 2] = torch.sub(square, square.mean(), alpha=0.5)
    for term, gram in zip(terms, grams, strict=True):
        if term.gain is None:
            raw = gram
            _gram_products(probed, gram)
        elif term is not last:
            viewed = scratch.like("viewed", tuple(probed.shape), probed).copy_(probed)
            viewed[:heads] = term.view(vectors)
            _gram_products(viewed, gram)
        else:
            if term.centered and raw is None:
                raw = scratch.like("raw", tuple(gram.shape), gram)
                _gram_products(probed, raw)
            vectors.mul_(term.gain)
            _gram_products(probed, gram)
            if term.centered and raw is not None:
                offset = _center_gram(gram, raw, term.gain)
    return grams, offset


def _gram_products(probed: Tensor, out: Tensor) -> None:
    """``<f_h, .>`` of each token with all its vectors: (H + 4, tokens, d) -> (tokens, H, H + 4)."""
    left, right = probed[:-EXTRA_VECTORS].transpose(0, 1), probed.permute(1, 2, 0)
    if left.shape[1] <= LEFT:
        torch.bmm(left, right, out=out)
    else:
        some = left.chunk(-(-left.shape[1] // LEFT), dim=1)
        torch.cat([torch.bmm(rows, right) for rows in some], dim=1, out=out)


def _center_gram(gram: Tensor, raw: Tensor, gain: Tensor) -> Tensor:
    """Take the means m of f out of the products of ``g f``, whose products without the gain are `raw`: with
    ``a = <g^2 - sum g^2 / 2d, f>``

        ``<g (f - m), g (f' - m')> = <g f, g f'> - m a' - a m'``,  ``<g (f - m), p> = <g f, p> - m <g, p>``.

    Returns which tokens lose digits by it.
    """
    heads = gram.shape[1]
    m, a = raw[..., heads + 1], raw[..., heads + 2]
    squares = gram.diagonal(dim1=1, dim2=2)
    before = squares.clone()
    gram[..., :heads].addcmul_(m[:, :, None], a[:, None], value=-1).addcmul_(a[:, :, None], m[:, None], value=-1)
    gram[..., heads].sub_(m, alpha=float(probe_direction(len(gain), gain.dtype, gain.device) @ gain))
    return (squares * OFFSET < before).any(-1)


def _recompute_in_float64(term: Term, columns: tuple[Tensor, ...], cells: Tensor) -> None:
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
