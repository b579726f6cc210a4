"""Contributions through the feed-forward block (FF paper, eq. 5-8), in blocks of input-output pairs.

With ``p_ij = c_ij W_1`` and one gate ``g_i`` per output token (`activations`), input j's share of the block's output is
``(g_i * p_ij) W_2``. A gated feed-forward has two such projections, whose shares are added before W_2, and a mixture of
experts has several such units. The attention values are multiplied by ``matrix W_1`` once. Then one block of
columns x rows at a time is mixed, gated and multiplied by W_2, and reduced to norms and sums while it is in cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normscope.decompose import kernels
from normscope.decompose.activations import Gate, apply_gated_unit, gated_constant, gated_unit
from normscope.decompose.gram import rows_with_weight
from normscope.decompose.state import (
    Factored,
    GatedRows,
    Mixing,
    Scratch,
    Term,
    TermFactors,
    apply_norm,
    multiply_heads,
    row_norms,
)
from normscope.tracing.records import FeedForwardRecord, NormRecord

HIDDEN = 1024  # hidden units gated at a time
HEADROOM = 2.0**60  # float32 squares of cells down to 1e-30 must not underflow


def decompose_feed_forward(state: Factored, record: FeedForwardRecord, gate: Gate) -> Factored | GatedRows:
    """The state after the feed-forward. g(0) W_2 and all biases are added to the remainder. A state without terms stays
    factored because only its diagonal changes."""
    units, own, bias = [], torch.zeros_like(record.output), torch.zeros_like(record.output)
    for unit in record.units:
        made = gated_unit(unit, gate)
        units.append(made)
        own = own + apply_gated_unit(made, state.own)
        bias = bias + gated_constant(unit, made, state.bias)
    if not state.terms:
        return Factored((), own, None, bias)
    return GatedRows(state, tuple(units), own, bias)


@dataclass
class StreamedMap:
    """The map of one item at one point, that is, after `steps[:point]`."""

    map: Tensor  # (j, R)
    others: Tensor  # (R, d): sum_{j != i} c_ij
    vectors: Tensor | None = None  # (R, j, d), if requested


@dataclass
class _PointTotals:
    """Running results at one point, multiplied by `rescale` (see `stream_contributions`)."""

    norms: Tensor | None = None
    total: Tensor | None = None
    vectors: Tensor | None = None


@dataclass(frozen=True)
class HiddenProjection:
    """How contributions are projected to the hidden units, whichever costs least: multiply the term's matrix by the
    weight once for all tokens, multiply every vector f_jh by it, or, for few rows, every contribution c_ij."""

    way: Literal["matrix", "vectors", "contributions"]
    matrices: tuple[Tensor, ...]  # one per projection: (H, d_h, d_ff) for "matrix", otherwise the weights (d, d_ff)

    def project(self, factors: TermFactors, columns: slice, scratch: Scratch) -> tuple[Tensor, ...]:
        """The vectors to be mixed: (columns, H, d_ff) for each projection, or (columns, H, d) for "contributions"."""
        if self.way == "matrix":
            values = factors.values[:, columns]
            return tuple(
                multiply_heads(values, part, f"projected {n}", scratch) for n, part in enumerate(self.matrices)
            )
        vectors = factors.vectors(columns, "source", scratch)
        if self.way == "contributions":
            return (vectors,)
        return tuple(vectors @ part for part in self.matrices)


def ff_hidden_projections(state: GatedRows, term: Term) -> list[HiddenProjection]:
    """The cheapest projection for each unit, by the number of vectors that are multiplied by W: d for the matrix and
    one per token, H per token, or R per token."""
    items, tokens, heads, _ = term.mixture.values.shape
    rows, width = term.mixture.weights.shape[3], term.mixture.matrix.shape[2]
    costs = {
        "matrix": width + items * tokens,
        "vectors": items * tokens * heads,
        "contributions": items * tokens * rows,
    }
    if term.mixture.gate is not None:  # vectors depend on the row
        return [HiddenProjection("contributions", unit.weights) for unit in state.units]
    if len(state.units) > 1:  # one matrix per expert would take too much memory
        del costs["matrix"]
    way = min(costs, key=lambda name: costs[name])
    if way == "matrix":
        matrix = term.view(term.mixture.matrix)
        return [
            HiddenProjection("matrix", tuple(torch.matmul(matrix, weight) for weight in u.weights)) for u in state.units
        ]
    return [HiddenProjection(way, unit.weights) for unit in state.units]  # type: ignore[arg-type]


def stream_contributions(
    state: GatedRows,
    projections: Sequence[HiddenProjection],
    points: Collection[int],
    term: int,
    item: int,
    columns: slice | Tensor,
    rows: slice | Tensor,
    block_bytes: int,
    scratch: Scratch,
    keep_vectors: bool = False,
) -> dict[int, StreamedMap]:
    """Off-diagonal contributions of one item over the columns of one term, by point. A point is the number of `steps`
    applied; `projections` are those of the term (`ff_hidden_projections`).

    The diagonal of the maps is left at zero because `state.own` holds it. Memory does not grow with the input: only
    one block of contributions exists at a time. Values are multiplied by `rescale` so that squares do not underflow.
    """
    steps = state.steps[: max(points)]
    hidden, width = state.units[0].out.shape
    source_term = state.source.terms[term]
    added = {n: s.terms[term] for n, s in enumerate(steps) if isinstance(s, Factored)}
    rescale = HEADROOM / _ff_norm_bound(state, source_term, list(added.values()), item)
    source = _term_factors(source_term, item, columns, rows, rescale)
    adds = {n: _term_factors(term, item, columns, rows, rescale) for n, term in added.items()}
    coefficients = [[c[item][rows] for c in made.coefficients] for made in state.units]
    chosen = [None if made.chosen is None else made.chosen[item][rows] for made in state.units]

    size = source.weights.element_size()
    heads, n_columns, n_rows = source.values.shape[0], source.values.shape[1], coefficients[0][0].shape[0]
    paths = len(state.units[0].weights)
    step_j = _even_ff_block_size(n_columns, block_bytes // (3 * size * heads * hidden * paths * len(state.units)))
    most = 2 * block_bytes // (3 * size * (paths * min(HIDDEN, hidden) + 2 * width)) // step_j

    found = [_PointTotals() for _ in range(len(steps) + 1)]
    like = source.values
    for n, point in enumerate(found):
        point.total = like.new_zeros(n_rows, width) if n == 0 or n - 1 in adds else None
        point.norms = like.new_zeros(n_columns, n_rows) if n in points else None
        point.vectors = like.new_zeros(n_rows, n_columns, width) if keep_vectors and n in points else None

    outs = _ff_output_blocks(state, n_columns * n_rows)
    for j in range(0, n_columns, step_j):
        js = slice(j, min(j + step_j, n_columns))
        hit = rows_with_weight(source.weights[js])
        if hit.stop == hit.start:
            continue
        # Projecting one expert at a time would take less memory, but repeat the work for every block of rows.
        projected = [
            projection.project(source, js, scratch if len(projections) == 1 else Scratch())
            for projection in projections
        ]
        vectors = {n: factors.vectors(js, f"added {n}", scratch) for n, factors in adds.items()}
        step_i = _even_ff_block_size(hit.stop - hit.start, most)
        for i in range(hit.start, hit.stop, step_i):
            i_s = slice(i, min(i + step_i, hit.stop))
            y = scratch.like("block", (js.stop - js.start, i_s.stop - i_s.start, width), like)
            gates = [[c[i_s] for c in some] for some in coefficients]
            rows_of = [None if mine is None else mine[i_s] for mine in chosen]
            y = _gated_ff_block(source.mixing(js, i_s), projections, projected, gates, outs, rows_of, y, scratch)
            _reduce_ff_at_points(found, y, steps, adds, vectors, item, rows, js, i_s)
    return _collect_streamed_ff_maps(found, points, steps, item, rows, 1 / rescale)


def _reduce_ff_at_points(
    found: Sequence[_PointTotals],
    y: Tensor,
    steps: Sequence[NormRecord | Factored | Tensor],
    adds: Mapping[int, TermFactors],
    vectors: Mapping[int, Tensor],
    item: int,
    rows: slice | Tensor,
    js: slice,
    i_s: slice,
) -> None:
    """Take a block of contributions through the steps and reduce it at every point. Overwrites y."""
    _reduce_ff_block(found[0], y, None, js, i_s)
    for n, step in enumerate(steps):
        factor = None
        if isinstance(step, Factored):
            mixing = adds[n].mixing(js, i_s)
            if mixing.gate is None:
                y.baddbmm_(mixing.weights, vectors[n])
            else:
                y.add_(mixing.contributions(vectors[n]))
        elif isinstance(step, Tensor):
            y.mul_(step)
        else:
            y, factor = _norm_ff_block(step, y, step.inverse[item][rows][i_s])
        _reduce_ff_block(found[n + 1], y, factor, js, i_s)
        if factor is not None and n + 1 < len(steps):
            y.mul_(factor[..., None])


def _ff_output_blocks(state: GatedRows, products: int) -> list[tuple[Tensor, ...]]:
    """W_2 of every unit, some hidden units at a time, reordered for the faster kernel if `products` repay it."""
    outs = [made.out.split(HIDDEN) for made in state.units]
    if products >= kernels.PACKED_ROWS and len(outs) == 1:  # many experts would take too much memory
        return [tuple(kernels.pack_kernel_matrix(part, products) for part in outs[0])]
    return outs


def _gated_ff_block(
    mixing: Mixing,
    projections: Sequence[HiddenProjection],
    projected: Sequence[tuple[Tensor, ...]],
    gates: Sequence[Sequence[Tensor]],
    outs: Sequence[Sequence[Tensor]],
    chosen: Sequence[Tensor | None],
    y: Tensor,
    scratch: Scratch,
) -> Tensor:
    """One block of contributions through all units. Overwrites y and may return it."""
    for n, (projection, made, out) in enumerate(zip(projections, projected, outs, strict=True)):
        mine = chosen[n]
        if mine is None:
            y = _ff_product(mixing, projection, made, gates[n], out, y, scratch)
        else:
            _add_ff_expert(mixing, projection, made, gates[n], out, mine, y, n == 0, scratch)
    return y


def _even_ff_block_size(total: int, most: int) -> int:
    """The block size, at most `most`, that splits `total` most evenly."""
    blocks = -(-total // max(1, most))
    return -(-total // blocks)


def _ff_product(
    mixing: Mixing,
    projection: HiddenProjection,
    projected: Sequence[Tensor],
    gates: Sequence[Tensor],
    outs: Sequence[Tensor],
    y: Tensor,
    scratch: Scratch,
) -> Tensor:
    """``y_ji = (sum_k gate_ki * sum_h mixing_jih projected_kjh) W_2``, one chunk of hidden units at a time.
    `outs` are the chunks of W_2. Overwrites y and may return it."""
    flat = y.flatten(0, 1)
    hidden = gates[0].shape[1]
    mixed = mixing.contributions(projected[0]).flatten(0, 1) if projection.way == "contributions" else None
    for k, out in zip(range(0, hidden, HIDDEN), outs, strict=True):
        ks = slice(k, min(k + HIDDEN, hidden))
        shape = (*y.shape[:2], ks.stop - k)
        e = scratch.like("gated", shape, y)
        for n, gate in enumerate(gates):
            into = e if n == 0 else scratch.like("gated too", shape, y)
            if mixed is None:
                torch.bmm(mixing.weights, projected[n][:, :, ks], out=into)
            else:
                torch.mm(mixed, projection.matrices[n][:, ks], out=into.flatten(0, 1))
            if n == 0:
                e.mul_(gate[:, ks])
            else:
                e.addcmul_(into, gate[:, ks])
        x = e.flatten(0, 1)
        if out.is_mkldnn:
            flat = kernels.multiply_packed_kernel(x, out, flat, add=k > 0)
        else:
            flat = flat.addmm_(x, out) if k else torch.mm(x, out, out=flat)
    return flat.view_as(y)


def _add_ff_expert(
    mixing: Mixing,
    projection: HiddenProjection,
    projected: Sequence[Tensor],
    gates: Sequence[Tensor],
    outs: Sequence[Tensor],
    chosen: Tensor,
    y: Tensor,
    first: bool,
    scratch: Scratch,
) -> None:
    """Add the output of one expert to the rows that are routed to it."""
    if first:
        y.zero_()
    where = chosen.nonzero().flatten()
    if len(where) == 0:
        return
    part = scratch.like("expert", (y.shape[0], len(where), y.shape[2]), y)
    part = _ff_product(
        mixing.select(where), projection, projected, [gate[where] for gate in gates], outs, part, scratch
    )
    y.index_add_(1, where, part)


def _norm_ff_block(norm: NormRecord, y: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """A norm applied to a block, as vectors and a factor (j, i) whose product is the result. May overwrite y."""
    if norm.kind == "rms":
        return y.mul_(norm.gain), inverse.expand(y.shape[:2])
    # A fused kernel. It also divides by each vector's own standard deviation, which the factor undoes.
    normed, _, reciprocal = torch.native_layer_norm(y, [y.shape[-1]], norm.gain, None, 1e-30)
    return normed, inverse / reciprocal[..., 0]


def _reduce_ff_block(point: _PointTotals, y: Tensor, factor: Tensor | None, js: slice, i_s: slice) -> None:
    if point.total is not None:
        point.total[i_s] += y.sum(0)
    if point.norms is not None:
        norms = torch.linalg.vector_norm(y, dim=-1)
        point.norms[js, i_s] = norms if factor is None else norms * factor
    if point.vectors is not None:
        point.vectors[i_s, js] = (y if factor is None else y * factor[..., None]).transpose(0, 1)


def _collect_streamed_ff_maps(
    found: list[_PointTotals],
    points: Collection[int],
    steps: tuple[NormRecord | Factored | Tensor, ...],
    item: int,
    rows: slice | Tensor,
    inverse_rescale: Tensor,
) -> dict[int, StreamedMap]:
    """Undo the rescaling. A norm is the same linear map for every j, so it can be applied to the sum over j."""
    streamed = {}
    others = found[0].total
    assert others is not None
    for n, point in enumerate(found):
        if n > 0:
            step = steps[n - 1]
            if isinstance(step, NormRecord):
                frozen = NormRecord(step.kind, step.inverse[item][rows], step.gain, None, step.output)
                others = apply_norm(frozen, others)
            elif isinstance(step, Tensor):
                others = others * step
            else:
                assert point.total is not None
                others = point.total
        if n in points and point.norms is not None:
            vectors = None if point.vectors is None else point.vectors * inverse_rescale
            streamed[n] = StreamedMap(point.norms * inverse_rescale, others * inverse_rescale, vectors)
    return streamed


def _term_factors(term: Term, item: int, columns: slice | Tensor, rows: slice | Tensor, rescale: Tensor) -> TermFactors:
    mixture = term.mixture
    return TermFactors(
        mixture.weights[item][columns][:, :, rows],
        None if term.scale is None else term.scale[item][rows],
        mixture.values[item][columns].transpose(0, 1) * rescale,
        term.view(mixture.matrix),
        None if mixture.gate is None else mixture.gate[item][rows],
    )


def _ff_norm_bound(state: GatedRows, source: Term, added: list[Term], item: int) -> Tensor:
    """An upper bound on the norm of any contribution with attention weight 1, or the largest."""
    longest = row_norms(source.mixture.values[item]).amax()
    if source.mixture.gate is not None:
        longest = longest * source.mixture.gate[item].abs().amax()
    longest = longest * source.mixture.largest
    through = [_ff_weight_bound(unit.out) * _ff_weight_bound(weight) for unit in state.units for weight in unit.weights]
    sizes = [_ff_weight_bound(source.view(source.mixture.matrix)) * torch.stack(through).sum()]
    sizes += [_ff_weight_bound(term.view(term.mixture.matrix)) for term in added]
    return (longest * torch.stack(sizes).amax()).clamp_min(1e-30)


def _ff_weight_bound(matrix: Tensor) -> Tensor:
    """The Frobenius norm, an upper bound on the spectral norm."""
    size: Tensor = torch.linalg.vector_norm(matrix)
    return size
