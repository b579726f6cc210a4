"""The feed-forward block with Shapley values instead of integrated gradients, one output token at a time.

The players of output i are its contributions ``z_ij = c_ij W_1``, and one more for the biases: the remainder times W_1
plus b_1. Their values phi_ij (`values`) are multiplied by W_2, ``y_ij = phi_ij W_2``; g(0) W_2 and b_2 are added to the
remainder. Every pair has its own values, so no gate is shared: each row is computed separately, and all later
components are applied to its vectors. Memory is n x d_ff for one row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.decompose.activations import projections_of
from normscope.decompose.gram import ScopeMaps, TermMap
from normscope.decompose.mixing import mix_values
from normscope.decompose.shapley.gate import NO_EXPERTS, Shapley, shapley_gate_at_zero
from normscope.decompose.state import Factored, add_shift, apply_norm, row_norms
from normscope.errors import NormscopeError
from normscope.tracing.records import FeedForwardRecord, NormRecord, Unit

Columns = Sequence[slice | Tensor]  # the real columns of each term


@dataclass(frozen=True)
class ShapleyRows:
    """``c_ij = steps(phi_ij W_2)``: a recipe, evaluated by `reduce_shapley_rows` and `shapley_row_vectors`."""

    source: Factored
    unit: Unit
    gate: Shapley
    steps: tuple[NormRecord | Factored | Tensor, ...] = ()  # a norm to apply, a state to add, or a gain to multiply by

    def after_norm(self, norm: NormRecord) -> ShapleyRows:
        return replace(self, steps=(*self.steps, norm))

    def after_scale(self, gain: Tensor) -> ShapleyRows:
        return replace(self, steps=(*self.steps, gain))

    def add(self, state: Factored) -> ShapleyRows:
        return replace(self, steps=(*self.steps, state))


def shapley_feed_forward_rows(state: Factored, record: FeedForwardRecord, gate: Shapley) -> Factored | ShapleyRows:
    """The state after the feed-forward. A state without terms has two players, the own token and the biases, and stays
    factored."""
    if len(record.units) != 1 or record.units[0].routing is not None:
        raise NormscopeError(NO_EXPERTS)
    (unit,) = record.units
    if unit.inverse is not None:
        raise NormscopeError("Shapley values are not available for a feed-forward with a norm inside. Use gate='ig'.")
    if state.terms:
        return ShapleyRows(state, unit, gate)
    shape = record.output.shape[:-1]
    both = torch.stack([state.own, state.bias.expand_as(state.own)])  # (2, g, R, d)
    z = [one.flatten(1) for one in _project_shapley_row_players(unit, both)]
    values = gate.values(unit, z).to(both).unflatten(1, (*shape, -1)) @ unit.out
    return Factored((), values[0], None, values[1] + _shapley_row_constant(unit))


def reduce_shapley_rows(
    scopes: Sequence[str],
    states: Sequence[ShapleyRows],
    actual: Sequence[Tensor],
    items: Sequence[tuple[Columns, slice | Tensor]],
) -> ScopeMaps:
    """The maps and row statistics of states after one feed-forward block. `actual` (g, R, d) are the model's own
    vectors; `items` are the real columns of each term and the real rows."""
    last = max(states, key=lambda state: len(state.steps))
    points = [len(state.steps) for state in states]
    terms = last.source.terms
    like = actual[0]
    shape = (len(states), *like.shape[:2])
    weights = [term.mixture.weights for term in terms]
    cells = [like.new_zeros(len(states), len(one), one.shape[1], one.shape[3]) for one in weights]
    own, others, missing, remainder, highest = (like.new_zeros(shape) for _ in range(5))
    for n, (columns, rows) in enumerate(items):
        for row in torch.arange(like.shape[1], device=like.device)[rows].tolist():
            found = _shapley_row(last, n, row, columns, points)
            for s, point in enumerate(points):
                at, place = found[point], (s, n, row)
                own[place], remainder[place] = row_norms(at.own), row_norms(at.bias)
                total = torch.zeros_like(at.own)
                for map_, some, js in zip(cells, at.contributions, columns, strict=True):
                    norms = row_norms(some)
                    map_[s, n, :, row][js] = norms
                    highest[place] = torch.maximum(highest[place], norms.amax())
                    total = total + some.sum(0)
                others[place] = row_norms(total)
                missing[place] = row_norms(total + at.own + at.bias - actual[s][n, row])
    length = torch.stack([row_norms(one) for one in actual])
    return ScopeMaps(
        scopes=tuple(scopes),
        maps=tuple(
            tuple(TermMap(map_[s], None, term.mixture.cross) for map_, term in zip(cells, terms, strict=True))
            for s in range(len(states))
        ),
        statistics=torch.stack([own, others, missing, length, remainder, highest]),
    )


@dataclass(frozen=True)
class RowVectors:
    """The contribution vectors of one output token at one point."""

    contributions: tuple[Tensor, ...]  # (columns, d) for each term, zero at the own column
    own: Tensor  # (d,)
    bias: Tensor  # (d,)


def shapley_row_vectors(state: ShapleyRows, item: int, row: int, columns: Columns) -> RowVectors:
    """The contribution vectors of one output token."""
    point = len(state.steps)
    return _shapley_row(state, item, row, columns, [point])[point]


def _shapley_row(
    state: ShapleyRows, item: int, row: int, columns: Columns, points: Collection[int]
) -> dict[int, RowVectors]:
    """The vectors of one output token by point. A point is the number of `steps` applied."""
    players = _shapley_row_player_vectors(state.source, item, row, columns)
    values = state.gate.values(state.unit, _project_shapley_row_players(state.unit, players))
    vectors = values.to(players) @ state.unit.out
    vectors[-1] += _shapley_row_constant(state.unit)
    found = {0: vectors} if 0 in points else {}
    for number, step in enumerate(state.steps[: max(points)], 1):
        if isinstance(step, Factored):
            vectors = vectors + _shapley_row_player_vectors(step, item, row, columns)
        elif isinstance(step, Tensor):
            vectors = vectors * step
        else:
            norm = replace(step, inverse=step.inverse[item, row][None])
            vectors = apply_norm(norm, vectors)
            vectors[-1] = add_shift(norm, vectors[-1])
        if number in points:
            found[number] = vectors
    sizes = [len(term.mixture.values[item][js]) for term, js in zip(state.source.terms, columns, strict=True)]
    return {point: RowVectors(one[:-2].split(sizes), one[-2], one[-1]) for point, one in found.items()}


def _shapley_row_player_vectors(state: Factored, item: int, row: int, columns: Columns) -> Tensor:
    """(players, d): the vectors of one output token for the columns of all terms, then own and bias."""
    found = []
    for term, js in zip(state.terms, columns, strict=True):
        mixture = term.mixture
        gate = None if mixture.gate is None else mixture.gate[item, row]
        weighted = mix_values(mixture.weights[item][js][:, :, row], mixture.values[item][js], gate)  # (j, H d_h)
        vectors = term.view(weighted @ mixture.matrix.flatten(0, 1))
        found.append(vectors if term.scale is None else vectors * term.scale[item, row])
    bias = state.bias.expand_as(state.own)[item, row]
    return torch.cat([*found, state.own[item, row][None], bias[None]])


def _project_shapley_row_players(unit: Unit, players: Tensor) -> list[Tensor]:
    """(players, ..., d_ff) for each projection. The last player is the biases."""
    found = []
    for projection in projections_of(unit):
        z = players @ projection.weight
        if projection.bias is not None:
            z[-1] += projection.bias
        found.append(z)
    return found


def _shapley_row_constant(unit: Unit) -> Tensor:
    """(d,): g(0) W_2 + b_2"""
    nothing = shapley_gate_at_zero(unit) @ unit.out
    return nothing if unit.out_bias is None else nothing + unit.out_bias
