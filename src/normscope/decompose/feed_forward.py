"""The feed-forward block as contributions (FF paper, eq. 5-8), in blocks of pairs.

With ``p_ij = c_ij W_1`` and one gate ``g_i`` per output token (`gates`), input j's share of the block's output is
``(g_i * p_ij) W_2``. The attention values go through ``matrix W_1`` once; then a block of columns x rows at a time is
mixed, gated and multiplied by W_2, and everything that was asked for is reduced while the block is in cache.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.decompose.contributions import Factored, Rows, Term, apply_norm, row_norms
from normscope.decompose.gates import Gate, coefficient
from normscope.decompose.scratch import Scratch
from normscope.records import FeedForwardRecord, NormRecord

HIDDEN = 1024  # hidden units gated at a time
HEADROOM = 2.0**60  # float32 squares of cells down to 1e-30 must not underflow


def feed_forward(state: Factored, record: FeedForwardRecord, gate: Gate) -> Rows:
    """The state after the feed-forward component; g(0) W_2 and all biases go to the remainder."""
    c = coefficient(gate, record.activation_name, record.activation, record.hidden)
    hidden_bias = state.bias @ record.into
    if record.into_bias is not None:
        hidden_bias = hidden_bias + record.into_bias
    bias = (c * hidden_bias + record.activation(torch.zeros_like(c[..., :1]))) @ record.out
    if record.out_bias is not None:
        bias = bias + record.out_bias
    return Rows(
        state, record, c, _lifted(state.term, record), own=(c * (state.own @ record.into)) @ record.out, bias=bias
    )


def _lifted(term: Term, record: FeedForwardRecord) -> Tensor | None:
    """``matrix W_1`` by head: d products with W_1 once and one per token, instead of H for every token."""
    items, tokens, heads, _ = term.mixture.values.shape
    if items * tokens * (heads - 1) < record.into.shape[0]:
        return None
    return torch.matmul(term.view(term.mixture.matrix), record.into)


@dataclass
class Tap:
    """What is reduced at one point of the stream, for one item: after `steps[:point]`."""

    map: Tensor  # (j, R)
    others: Tensor  # (R, d): sum_{j != i} c_ij
    vectors: Tensor | None = None  # (R, j, d), when asked for


@dataclass
class _Point:
    """Running results of a point, in the stream's unit."""

    norms: Tensor | None = None
    total: Tensor | None = None
    vectors: Tensor | None = None


@dataclass(frozen=True)
class _Basis:
    """A term's contributions for one item: ``scale_i sum_h weights_jhi (values_jh matrix_h)``."""

    weights: Tensor  # (j, H, R)
    scale: Tensor | None  # (R,)
    values: Tensor  # (H, j, d_h), in the stream's unit
    matrix: Tensor  # (H, d_h, D)

    def vectors(self, columns: slice, name: str, scratch: Scratch) -> Tensor:
        """(columns, H, D)"""
        values = self.values[:, columns]
        out = scratch.like(name, (values.shape[1], values.shape[0], self.matrix.shape[2]), values)
        torch.bmm(values, self.matrix, out=out.transpose(0, 1))
        return out

    def mixing(self, columns: slice, rows: slice) -> Tensor:
        """(columns, rows, H)"""
        weights = self.weights[columns, :, rows]
        return (weights if self.scale is None else weights * self.scale[rows]).transpose(1, 2)


def stream(
    state: Rows,
    points: Collection[int],
    item: int,
    columns: slice | Tensor,
    rows: slice | Tensor,
    block_bytes: int,
    scratch: Scratch,
    keep_vectors: bool = False,
) -> dict[int, Tap]:
    """Off-diagonal contributions of one item at the wanted points, each a number of `steps` passed.

    The diagonal of the maps is left at zero: `state.own` has it. Memory is one block, whatever the length.
    """
    record, steps = state.record, state.steps[: max(points)]
    gate = state.gate[item][rows]
    out = record.out.contiguous()
    hidden, width = out.shape
    added_states = {n: s.term for n, s in enumerate(steps) if isinstance(s, Factored)}
    unit = HEADROOM / _bound(state, list(added_states.values()), item)
    source = _basis(state.source.term, item, columns, rows, unit)
    adds = {n: _basis(term, item, columns, rows, unit) for n, term in added_states.items()}

    size = source.weights.element_size()
    heads, n_columns, n_rows = source.values.shape[0], source.values.shape[1], gate.shape[0]
    step_j = _even(n_columns, block_bytes // (3 * size * heads * hidden))
    step_i = _even(n_rows, 2 * block_bytes // (3 * size * (min(HIDDEN, hidden) + 2 * width)) // step_j)

    found = [_Point() for _ in range(len(steps) + 1)]
    for n, point in enumerate(found):
        summed = n == 0 or n - 1 in adds
        point.total = out.new_zeros(n_rows, width) if summed else None
        point.norms = out.new_zeros(n_columns, n_rows) if n in points else None
        point.vectors = out.new_zeros(n_rows, n_columns, width) if keep_vectors and n in points else None

    for j in range(0, n_columns, step_j):
        js = slice(j, min(j + step_j, n_columns))
        if state.lifted is None:
            projected = source.vectors(js, "source", scratch) @ record.into
        else:
            projected = replace(source, matrix=state.lifted).vectors(js, "projected", scratch)
        added = {n: basis.vectors(js, f"added {n}", scratch) for n, basis in adds.items()}
        for i in range(0, n_rows, step_i):
            i_s = slice(i, min(i + step_i, n_rows))
            shape = (js.stop - js.start, i_s.stop - i_s.start)
            y = scratch.like("block", (*shape, width), out)
            _gated_product(source.mixing(js, i_s), projected, gate[i_s], out, y, scratch)
            _reduce(found[0], y, None, js, i_s)
            for n, step in enumerate(steps):
                factor = None
                if isinstance(step, Factored):
                    y.baddbmm_(adds[n].mixing(js, i_s), added[n])
                else:
                    y, factor = _norm_block(step, y, step.inverse[item][rows][i_s])
                _reduce(found[n + 1], y, factor, js, i_s)
                if factor is not None and n + 1 < len(steps):
                    y = y * factor[..., None]
    return _taps(found, points, steps, item, rows, 1 / unit)


def _even(total: int, most: int) -> int:
    """The size of blocks of at most `most`, as equal as they can be."""
    blocks = -(-total // max(1, most))
    return -(-total // blocks)


def _gated_product(mixing: Tensor, projected: Tensor, gate: Tensor, out: Tensor, y: Tensor, scratch: Scratch) -> None:
    """``y_ji = (gate_i * sum_h mixing_jih projected_jh) W_2``, some hidden units at a time."""
    flat = y.flatten(0, 1)
    hidden = out.shape[0]
    for k in range(0, hidden, HIDDEN):
        ks = slice(k, min(k + HIDDEN, hidden))
        e = scratch.like("gated", (*y.shape[:2], ks.stop - k), y)
        torch.bmm(mixing, projected[:, :, ks], out=e)
        e.mul_(gate[:, ks])
        if k == 0:
            torch.mm(e.flatten(0, 1), out[ks], out=flat)
        else:
            flat.addmm_(e.flatten(0, 1), out[ks])


def _norm_block(norm: NormRecord, y: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """A norm of a block as (vectors, factor (j, i)) whose product is the result."""
    if norm.kind == "rms":
        return y * norm.gain, inverse.expand(y.shape[:2])
    # One fused pass: layer_norm also divides by each vector's own deviation, which the factor takes back.
    centered, _, reciprocal = torch.native_layer_norm(y, [y.shape[-1]], norm.gain, None, 1e-30)
    return centered, inverse / reciprocal[..., 0]


def _reduce(point: _Point, y: Tensor, factor: Tensor | None, js: slice, i_s: slice) -> None:
    if point.total is not None:
        point.total[i_s] += y.sum(0)
    if point.norms is not None:
        norms = torch.linalg.vector_norm(y, dim=-1)
        point.norms[js, i_s] = norms if factor is None else norms * factor
    if point.vectors is not None:
        point.vectors[i_s, js] = (y if factor is None else y * factor[..., None]).transpose(0, 1)


def _taps(
    found: list[_Point],
    points: Collection[int],
    steps: tuple[NormRecord | Factored, ...],
    item: int,
    rows: slice | Tensor,
    unit: Tensor,
) -> dict[int, Tap]:
    """Back to the model's unit. A norm is the same linear map for every j, so its sum is the norm of the sum."""
    taps = {}
    others = found[0].total
    for n, point in enumerate(found):
        if n > 0:
            step = steps[n - 1]
            if isinstance(step, NormRecord):
                frozen = NormRecord(step.kind, step.inverse[item][rows], step.gain, None, step.output)
                assert others is not None
                others = apply_norm(frozen, others)
            else:
                others = point.total
        if n in points and others is not None and point.norms is not None:
            vectors = None if point.vectors is None else point.vectors * unit
            taps[n] = Tap(point.norms * unit, others * unit, vectors)
    return taps


def _basis(term: Term, item: int, columns: slice | Tensor, rows: slice | Tensor, unit: Tensor) -> _Basis:
    mixture = term.mixture
    return _Basis(
        mixture.weights[item][columns][:, :, rows],
        None if term.scale is None else term.scale[item][rows],
        mixture.values[item][columns].transpose(0, 1) * unit,
        term.view(mixture.matrix),
    )


def _bound(state: Rows, added: list[Term], item: int) -> Tensor:
    """An upper bound of the norm of any contribution with unit weights."""
    source = state.source.term
    longest = row_norms(source.mixture.values[item]).amax()
    through = _size(source.view(source.mixture.matrix)) * _size(state.record.into) * _size(state.record.out)
    direct = [_size(term.view(term.mixture.matrix)) for term in added]
    return (longest * torch.stack([through, *direct]).amax()).clamp_min(1e-30)


def _size(matrix: Tensor) -> Tensor:
    """The Frobenius norm, which no gain of the matrix exceeds."""
    size: Tensor = torch.linalg.vector_norm(matrix)
    return size
