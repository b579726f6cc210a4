"""Norms and completeness of factored states, without any n x n x d tensor.

``||sum_h alpha_ijh f_jh||^2 = alpha_ij^T G_j alpha_ij`` with the H x H Gram matrix ``G_j`` of the vectors f_jh. States
that share a mixture (before and after a norm) share the vectors: after a norm with gain g, the Gram matrix is that of
``g * f``, from which the mean is removed afterwards. Gram matrices hold squares, so digits are lost where heads cancel.
The product with the weights also gives ``sum_h alpha_ijh ||f_jh||``, which shows where this happens; those columns are
recomputed from the values with a QR decomposition in float64. Completeness is tested along a fixed random direction,
which is part of the same products, so the test covers the vectors f themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from normscope.decompose.mixing import mix_values
from normscope.decompose.state import (
    EXTRA_VECTORS,
    Factored,
    Mixture,
    Scratch,
    Term,
    probe_direction,
    row_norms,
    set_own_cells,
)

RECOMPUTED_TOKENS = 64  # inaccurate columns recomputed at a time
PRODUCT_CELLS = 2**20  # cells of the product with the weights, per chunk
HEADROOM = 2.0**100  # float32 squares of cells down to 1e-30 must not underflow
GATED_HEADROOM = 2.0**60  # the same for contributions whose vectors are computed one by one
GATED_CELLS = 2**22  # numbers in the gated values of some columns
LARGEST_FACTOR = 2.0**126  # and the factor that ensures this must not overflow
# A cell is inaccurate if (sum_h alpha ||f_h||)^2 > 3 H ||sum_h alpha f_h||^2. Orthogonal vectors of equal norm give H;
# other cells have lost at most half a decimal digit more than these.
CANCELLATION_LIMIT = 3
TINY_SQUARE = 1e-30  # smaller squares are inaccurate: they have lost digits to underflow
CENTERING_LIMIT = 8  # inaccurate if removing the mean of f leaves less than 1 / this of its square
MAX_LEFT_ROWS = 15  # in a batched product; MKL is up to ten times slower with more


@dataclass(frozen=True)
class TermMap:
    """The map of one scope over the columns of one term, with padding."""

    cells: Tensor  # (g, j, R), without own cells and before scaling
    scale: Tensor | float | None  # (g, R) or a number
    cross: bool  # whether the columns are the encoder's


@dataclass(frozen=True)
class ScopeMaps:
    """The maps and row statistics of S scopes, for some items at one layer."""

    scopes: tuple[str, ...]
    maps: tuple[tuple[TermMap, ...], ...]
    statistics: Tensor  # (6, S, g, R), see `RowStatistics`


@dataclass(frozen=True)
class RowStatistics:
    """The norms that determine mixing ratio and completeness, for every row."""

    own: Tensor  # ||c_ii||
    others: Tensor  # ||sum_{j != i} c_ij||
    missing: Tensor  # ||sum_j c_ij + b_i - y_i||
    length: Tensor  # ||y_i||
    remainder: Tensor  # ||b_i||
    highest: Tensor  # max_{j != i} ||c_ij||


def reduce_states(
    scopes: Sequence[str], states: Sequence[Factored], actual: Sequence[Tensor], scratch: Scratch
) -> ScopeMaps:
    """The maps and row statistics of states. Overwrites the vectors f. `actual` (g, R, d): the model's own vectors."""
    views: list[Term] = []
    for term in (term for state in states for term in state.terms):
        if not any(_same_view(term, view) for view in views):
            views.append(term)
    norms: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for mixture in {id(view.mixture): view.mixture for view in views}.values():
        shared = [n for n, view in enumerate(views) if view.mixture is mixture]
        norms |= zip(shared, _contribution_norms([views[n] for n in shared], scratch), strict=True)

    direction = probe_direction(actual[0].shape[-1], actual[0].dtype, actual[0].device)
    lengths: dict[int, Tensor] = {}  # by id, because states share vectors

    def length(x: Tensor) -> Tensor:
        if id(x) not in lengths:
            lengths[id(x)] = torch.linalg.vector_norm(x, dim=-1)
        return lengths[id(x)]

    maps, statistics = [], []
    for state, target in zip(states, actual, strict=True):
        assert state.others is not None
        pieces, heights, along = [], [], []
        for term in state.terms:
            cells, highest, tested = norms[next(n for n, view in enumerate(views) if _same_view(term, view))]
            pieces.append(TermMap(cells, term.scale, term.mixture.cross))
            heights.append(highest if term.scale is None else highest * term.scale)
            along.append(tested if term.scale is None else tested * term.scale)
        maps.append(tuple(pieces))
        highest = heights[0] if len(heights) == 1 else torch.stack(heights).amax(0)
        missing = (along[0] if len(along) == 1 else torch.stack(along).sum(0)).flatten()
        missing = torch.addmv(missing, state.own.flatten(0, 1), direction)
        missing.addmv_(target.flatten(0, 1), direction, alpha=-1)
        missing = missing.view(highest.shape).add_(state.bias @ direction).abs_()
        remainder = length(state.bias).expand(highest.shape)
        statistics.append(
            RowStatistics(length(state.own), length(state.others), missing, length(target), remainder, highest)
        )
    found = stack_row_statistics(statistics)
    if bool((found[:2] < 1e-15).any()):  # float32 squares may have lost digits to underflow
        for n, state in enumerate(states):
            assert state.others is not None
            found[0, n], found[1, n] = row_norms(state.own), row_norms(state.others)
    return ScopeMaps(tuple(scopes), tuple(maps), found)


def stack_row_statistics(statistics: Sequence[RowStatistics]) -> Tensor:
    """(6, S, g, R): the fields of S row statistics in one tensor."""
    names = [field.name for field in fields(RowStatistics)]
    flat = torch.stack([getattr(one, name) for name in names for one in statistics])
    return flat.view(len(names), len(statistics), *flat.shape[1:])


def mixing_ratio(others: Tensor, own: Tensor) -> Tensor:
    """``r_i = ||sum_{j!=i} c_ij|| / (||sum_{j!=i} c_ij|| + ||c_ii||)`` from the two norms.

    It uses the norm of the sum, not the sum of norms. For a row without any contribution it is 0. Of weights that may
    be negative, `others` is the sum of sizes.
    """
    return others / (others + own.abs()).clamp_min(torch.finfo(others.dtype).tiny)


def completeness_error(statistics: RowStatistics) -> Tensor:
    """``||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)``."""
    largest = torch.maximum(torch.maximum(statistics.length, statistics.highest), statistics.own)
    return statistics.missing / largest.clamp_min(torch.finfo(largest.dtype).tiny)


def reduce_weights(scopes: Sequence[str], residual: Sequence[bool], mixture: Mixture) -> ScopeMaps:
    """ATTN-W is A, the mean of the weights over heads; ATTNRES-W, with the residual connection, is ``(A + I) / 2``
    (Abnar & Zuidema 2020).

    Weights of a recurrence may be negative: own is signed like the map, others the sum of sizes, and what is missing
    the error of the values that they mix, see `tracing.build_recurrence`.
    """
    mean, own, shares = mixture.weights.mean(2), mixture.own_weights.mean(-1), mixture.shares
    if shares is not None:
        mean = torch.einsum("gjhr,h->gjr", mixture.weights, shares)
        own = mixture.own_weights @ shares
    others = mean.sum(1)
    missing = own + others - 1
    missing = missing.clamp_min(0) if mixture.sinks else missing.abs_()
    if mixture.weight_error is not None:
        missing, others = mixture.weight_error * own.abs().clamp_min(1), mean.abs().sum(1)
    nothing, all_of_it = torch.zeros_like(own), torch.ones_like(own)
    plain = RowStatistics(own, others, missing, all_of_it, nothing, nothing)
    halved = RowStatistics(own / 2 + 0.5, others / 2, missing / 2, all_of_it, nothing, nothing)
    maps = tuple((TermMap(mean, 0.5 if one else None, mixture.cross),) for one in residual)
    return ScopeMaps(tuple(scopes), maps, stack_row_statistics([halved if one else plain for one in residual]))


def contribution_vectors(state: Factored, positions: Tensor | None) -> list[Tensor]:
    """The contribution vectors, (g, R, j, d) for each term. For a few rows only, because of their size."""
    found = []
    for term in state.terms:
        mixture = term.mixture
        if mixture.gate is None:
            mixed = torch.einsum("gjhr,gjhd->gdjr", mixture.weights, term.view(mixture.vectors()))
        else:
            given = mixture.weights.transpose(2, 3), mixture.values[:, :, None], mixture.gate[:, None]
            mixed = (mix_values(*given) @ term.view(mixture.matrix).flatten(0, 1)).permute(0, 3, 1, 2)
        if term.scale is not None:
            mixed = mixed * term.scale[:, None, None]
        if not mixture.cross:
            set_own_cells(mixed, positions, state.own.transpose(1, 2))
        found.append(mixed.permute(0, 3, 2, 1))
    return found


def rows_with_weight(weights: Tensor) -> slice:
    """The range of rows of (tokens, H, R) with any weight. Causal and local attention exclude many."""
    touched = torch.maximum(weights.amax((0, 1)), -weights.amin((0, 1))).nonzero()
    return slice(int(touched[0]), int(touched[-1]) + 1) if len(touched) else slice(0, 0)


def _same_view(a: Term, b: Term) -> bool:
    return a.mixture is b.mixture and a.centered == b.centered and a.gain is b.gain


def _contribution_norms(terms: Sequence[Term], scratch: Scratch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each view of one mixture, before row scaling: norms (g, j, R), the largest of each row (g, R), and the
    component of the summed off-diagonal contributions along the probe (g, R)."""
    mixture, views = terms[0].mixture, len(terms)
    if mixture.gate is not None:
        return _gated_contribution_norms(terms)
    items, columns, heads, rows = mixture.weights.shape
    cells = mixture.weights.new_zeros(views, items, columns, rows)
    sums = cells.new_zeros(views, items, rows)
    inaccurate = torch.zeros(views, items, columns, dtype=torch.bool, device=cells.device)
    for block, vectors in mixture.blocks(scratch):
        width = block.stop - block.start
        grams, centering_loss = _gram_matrices(vectors.flatten(1, 2), terms, scratch)
        squares = grams.diagonal(dim1=2, dim2=3)  # (views, tokens, H)
        lowest, largest = (float(one) for one in squares.aminmax())
        if lowest < TINY_SQUARE:
            inaccurate[:, :, block] |= (squares < TINY_SQUARE).any(-1).unflatten(1, (items, width))
        if centering_loss is not None:
            inaccurate[-1, :, block] |= centering_loss.unflatten(0, (items, width))
        factor = min(HEADROOM / max(largest, TINY_SQUARE), LARGEST_FACTOR)
        torch.sqrt(squares, out=grams[..., heads + 1]).mul_((CANCELLATION_LIMIT * heads * factor) ** -0.5)
        # Rows: the Gram matrices, the probe, and ||f_h||.
        forms = grams[..., : heads + 2].mT.unflatten(1, (items, width))
        for who, some in _column_chunks(items, width, PRODUCT_CELLS // (views * (heads + 2) * rows)):
            js = slice(block.start + some.start, block.start + some.stop)
            hit = (
                slice(0, rows)
                if mixture.all_vectors is not None
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
                inaccurate[:, who, js] |= (margin < 0).any(-1).unflatten(1, shape)
            sums[:, who, hit] += product[:, :, heads].unflatten(1, shape).sum(2).mul_(1 / factor)
            torch.mul(squares.sqrt_().unflatten(1, shape), factor**-0.5, out=cells[:, who, js, hit])
    if bool(inaccurate.any()):
        for term, columns_of, into in zip(terms, inaccurate, cells, strict=True):
            _recompute_in_float64(term, columns_of.nonzero(as_tuple=True), into)
    return list(zip(cells, cells.amax(2), sums, strict=True))


def _gated_contribution_norms(terms: Sequence[Term]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`_contribution_norms` for an attention with a gate, whose contributions are computed some columns at a time."""
    mixture = terms[0].mixture
    weights, values, gate = mixture.weights, mixture.values, mixture.gate
    assert gate is not None
    items, columns, _, rows = weights.shape
    matrices = [term.view(mixture.matrix).flatten(0, 1) for term in terms]
    longest = torch.linalg.vector_norm(values.flatten(2), dim=-1).amax() * gate.abs().amax() * mixture.largest
    bound = longest * torch.stack([torch.linalg.vector_norm(matrix) for matrix in matrices]).amax()
    factor = GATED_HEADROOM / bound.clamp_min(TINY_SQUARE)
    direction = probe_direction(matrices[0].shape[1], values.dtype, values.device)
    cells = weights.new_zeros(len(terms), items, columns, rows)
    sums = cells.new_zeros(len(terms), items, rows)
    for item in range(items):
        for _, js in _column_chunks(1, columns, max(1, GATED_CELLS // (rows * len(matrices[0])))):
            hit = rows_with_weight(weights[item, js])
            given = weights[item, js, :, hit].transpose(1, 2) * factor  # (columns, rows, H)
            mixed = mix_values(given, values[item, js, None], gate[item, hit])
            for n, matrix in enumerate(matrices):
                vectors = mixed @ matrix
                cells[n, item, js, hit] = torch.linalg.vector_norm(vectors, dim=-1) / factor
                sums[n, item, hit] += (vectors @ direction).sum(0) / factor
    return list(zip(cells, cells.amax(2), sums, strict=True))


def _column_chunks(items: int, columns: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Slices of items and columns of about `tokens` tokens: several whole items, or a part of one."""
    group, step = max(1, tokens // columns), max(1, min(tokens, columns))
    for item in range(0, items, group):
        for column in range(0, columns, step):
            yield slice(item, min(item + group, items)), slice(column, min(column + step, columns))


def _gram_matrices(probed: Tensor, terms: Sequence[Term], scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    """Products of the vectors f_h with `probed` for each view, (views, tokens, H, H + 4): the Gram matrix, f_h along
    the probe, and three columns that the caller may overwrite. Also returns which tokens lose digits by centering in
    the last view, for which `probed` is overwritten.
    """
    heads, tokens = probed.shape[0] - EXTRA_VECTORS, probed.shape[1]
    vectors, last = probed[:heads], terms[-1]
    grams = scratch.like("grams", (len(terms), tokens, heads, heads + EXTRA_VECTORS), probed)
    raw = centering_loss = None
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
                centering_loss = _center_gram(gram, raw, term.gain)
    return grams, centering_loss


def _gram_products(probed: Tensor, out: Tensor) -> None:
    """Products of each token's f_h with all its vectors: (H + 4, tokens, d) -> (tokens, H, H + 4)."""
    left, right = probed[:-EXTRA_VECTORS].transpose(0, 1), probed.permute(1, 2, 0)
    if left.shape[1] <= MAX_LEFT_ROWS:
        torch.bmm(left, right, out=out)
    else:
        some = left.chunk(-(-left.shape[1] // MAX_LEFT_ROWS), dim=1)
        torch.cat([torch.bmm(rows, right) for rows in some], dim=1, out=out)


def _center_gram(gram: Tensor, raw: Tensor, gain: Tensor) -> Tensor:
    """Remove the means m of f from the products of ``g f``, in place. `raw` are the products without the gain. With
    ``a = <g^2 - sum g^2 / 2d, f>``

        ``<g (f - m), g (f' - m')> = <g f, g f'> - m a' - a m'``,  ``<g (f - m), p> = <g f, p> - m <g, p>``.

    Returns which tokens lose digits.
    """
    heads = gram.shape[1]
    m, a = raw[..., heads + 1], raw[..., heads + 2]
    squares = gram.diagonal(dim1=1, dim2=2)
    before = squares.clone()
    gram[..., :heads].addcmul_(m[:, :, None], a[:, None], value=-1).addcmul_(a[:, :, None], m[:, None], value=-1)
    gram[..., heads].sub_(m, alpha=float(probe_direction(len(gain), gain.dtype, gain.device) @ gain))
    return (squares * CENTERING_LIMIT < before).any(-1)


def _recompute_in_float64(term: Term, columns: tuple[Tensor, ...], cells: Tensor) -> None:
    """Recompute the norms at some (items, columns) in float64: ``||R alpha||`` with R from a QR decomposition."""
    mixture = term.mixture
    # On the CPU, because not every device supports float64.
    matrix = term.view(mixture.matrix.to("cpu", torch.float64))
    for start in range(0, len(columns[0]), RECOMPUTED_TOKENS):
        some = tuple(index[start : start + RECOMPUTED_TOKENS] for index in columns)
        values, weights = (x[some].to("cpu", torch.float64) for x in (mixture.values, mixture.weights))
        vectors = torch.einsum("thk,hkd->tdh", values, matrix)
        mixed = torch.linalg.qr(vectors, mode="r").R @ weights
        cells[some] = torch.linalg.vector_norm(mixed, dim=1).to(cells)
