"""Decompose one layer component by component, and measure the requested scopes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normscope.decompose import gram
from normscope.decompose.activations import Gate
from normscope.decompose.feed_forward import decompose_feed_forward, ff_hidden_projections, stream_contributions
from normscope.decompose.gram import (
    RowStatistics,
    ScopeMaps,
    TermMap,
    reduce_states,
    reduce_weights,
    stack_row_statistics,
)
from normscope.decompose.mixing import without_filter
from normscope.decompose.shapley.gate import Shapley
from normscope.decompose.shapley.rows import (
    ShapleyRows,
    reduce_shapley_rows,
    shapley_feed_forward_rows,
    shapley_row_vectors,
)
from normscope.decompose.state import (
    Factored,
    GatedRows,
    Mixture,
    Scratch,
    ValueBias,
    decompose_attention,
    initial_state,
    row_norms,
)
from normscope.models.scopes import Step
from normscope.models.spec import Attention
from normscope.tracing.recorded import gather_rows
from normscope.tracing.records import AttentionRecord, FeedForwardRecord, LayerRecord, NormRecord, Record, ScaleRecord

BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class LayerOptions:
    """How a layer is decomposed."""

    gate: Gate | Shapley = "ig"
    value_bias: ValueBias = "token"
    heads: tuple[int, ...] = ()
    block_bytes: int = BLOCK_BYTES

    @property
    def complete(self) -> bool:
        """Whether contributions and remainder sum to the model's own vectors with this gate."""
        return not self.gate.approximate if isinstance(self.gate, Shapley) else self.gate != "tangent"


@dataclass(frozen=True)
class ItemSpan:
    """The real (unpadded) columns and rows of one item."""

    columns: slice | Tensor
    rows: slice | Tensor
    encoder: slice | Tensor | None = None  # the encoder's columns, for a decoder with cross-attention
    lengths: tuple[int, int] = (0, 0)  # own and encoder's columns, with padding


@dataclass(frozen=True)
class HeadFactors:
    """The factors of head-level maps of some items, with padding."""

    weights: Tensor  # (g, j, heads, R), own cells zero
    own: Tensor  # (g, R, heads): the weights of the own cells
    value_norms: Tensor  # (g, j, heads): ||f^h(x_j)||
    cross: bool


@dataclass(frozen=True)
class Vectors:
    """The contribution vectors of one item at one scope and layer, with the vectors that they add up to."""

    contributions: Tensor  # (R, j, d)
    bias: Tensor  # (R, d)
    actual: Tensor  # (R, d): the model's own vectors


@dataclass(frozen=True)
class Reached:
    """The state at one scope of the layer."""

    step: Step
    state: Any  # a Factored, GatedRows or ShapleyRows by token; a SourceRows by source
    actual: Tensor  # (g, R, d)


def measure_layer(
    layer: LayerRecord,
    steps: Sequence[Step],
    scopes: Collection[str],
    items: Sequence[ItemSpan],
    positions: Tensor | None,
    options: LayerOptions,
    scratch: Scratch,
) -> tuple[list[ScopeMaps], list[HeadFactors]]:
    """Maps and head-level maps of some scopes of a layer. `positions` (g, R) are the rows' own columns; None: all."""
    last = max(n for n, step in enumerate(steps) if step.norms in scopes or step.weights in scopes)
    if not any(step.norms in scopes for step in steps):
        parts = (without_filter(one) if isinstance(one, AttentionRecord) else one for one in layer.parts)
        layer = replace(layer, parts=tuple(parts))
    reached = _walk_tokens(layer, steps[: last + 1], positions, options, scratch)
    mixtures = [_attention_mixture(at) for at in reached if isinstance(at.step.part, Attention)]
    heads = [_measure_heads(mixture, options.heads) for mixture in mixtures if options.heads]
    found = []
    for mixture in mixtures:
        # Includes the residual connection around self-attention; cross-attention has no such -W scope.
        weighted = [at.step for at in reached if at.step.weights in scopes and _is_same_attention(at.step, mixture)]
        if weighted:
            names = [str(step.weights) for step in weighted]
            found.append(reduce_weights(names, [step.role == "sum" for step in weighted], mixture))
    wanted = [at for at in reached if at.step.norms in scopes]
    linear = [(at, at.state) for at in wanted if isinstance(at.state, Factored)]
    if linear:
        names = [str(at.step.norms) for at, _ in linear]
        found.append(reduce_states(names, [state for _, state in linear], [at.actual for at, _ in linear], scratch))
    gated = [at for at in wanted if isinstance(at.state, GatedRows)]
    if gated:
        found.append(_reduce_gated_rows(gated, items, options, scratch))
    valued = [(at, at.state) for at in wanted if isinstance(at.state, ShapleyRows)]
    if valued:
        names = [str(at.step.norms) for at, _ in valued]
        states = [state for _, state in valued]
        places = [(_term_columns(states[0], item), item.rows) for item in items]
        found.append(reduce_shapley_rows(names, states, [at.actual for at, _ in valued], places))
    return found, heads


def _attention_mixture(at: Reached) -> Mixture:
    assert isinstance(at.state, Factored)
    return at.state.terms[0].mixture


def _term_columns(state: ShapleyRows, item: ItemSpan) -> list[slice | Tensor]:
    """The item's real columns, for each term."""
    found = [item.encoder if term.mixture.cross else item.columns for term in state.source.terms]
    return [columns for columns in found if columns is not None]


def _is_same_attention(step: Step, mixture: Mixture) -> bool:
    return (isinstance(step.part, Attention) and step.part.cross) == mixture.cross


def layer_vectors(
    layer: LayerRecord,
    steps: Sequence[Step],
    scope: str,
    item: ItemSpan,
    positions: Tensor | None,
    options: LayerOptions,
) -> Vectors:
    """The contribution vectors (R, columns, d) at one scope. The layer must be recorded for a single item."""
    scratch = Scratch()
    last = next(n for n, step in enumerate(steps) if step.norms == scope)
    at = _walk_tokens(layer, steps[: last + 1], positions, options, scratch)[-1]
    pieces: dict[bool, Tensor] = {}
    if isinstance(at.state, Factored):
        for term, full in zip(at.state.terms, gram.contribution_vectors(at.state, positions), strict=True):
            columns = item.encoder if term.mixture.cross else item.columns
            pieces[term.mixture.cross] = full[0][item.rows][:, columns]
        bias = at.state.bias.expand(at.actual.shape)[0][item.rows]
    elif isinstance(at.state, ShapleyRows):
        rows = torch.arange(at.actual.shape[1])[item.rows].tolist()
        by_row = [shapley_row_vectors(at.state, 0, row, _term_columns(at.state, item)) for row in rows]
        for number, term in enumerate(at.state.source.terms):
            pieces[term.mixture.cross] = torch.stack([one.contributions[number] for one in by_row])
        pieces[False][_own_cell_index(item, positions, at.actual)] = torch.stack([one.own for one in by_row])
        bias = torch.stack([one.bias for one in by_row])
    else:
        point = len(at.state.steps)
        for number, term in enumerate(at.state.source.terms):
            columns = item.encoder if term.mixture.cross else item.columns
            assert columns is not None
            projections = ff_hidden_projections(at.state, term)
            streamed = stream_contributions(
                at.state,
                projections,
                [point],
                number,
                0,
                columns,
                item.rows,
                options.block_bytes,
                scratch,
                keep_vectors=True,
            )
            found = streamed[point].vectors
            assert found is not None
            if not term.mixture.cross:
                found[_own_cell_index(item, positions, at.actual)] = at.state.own[0][item.rows]
            pieces[term.mixture.cross] = found
        bias = at.state.bias.expand(at.actual.shape)[0][item.rows]
    for cross, columns in ((False, item.columns), (True, item.encoder)):
        if cross not in pieces and columns is not None:  # no contribution from these columns
            length = len(torch.arange(item.lengths[cross])[columns])
            pieces[cross] = bias.new_zeros(len(bias), length, bias.shape[-1])
    full = torch.cat([pieces[cross] for cross in sorted(pieces)], dim=1)
    return Vectors(full, bias, at.actual[0][item.rows])


def _own_cell_index(item: ItemSpan, positions: Tensor | None, actual: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the rows' own cells in (rows, columns)."""
    device = actual.device
    own = (torch.arange(actual.shape[1], device=device) if positions is None else positions[0])[item.rows]
    columns = torch.arange(item.lengths[0], device=device)[item.columns]
    return torch.arange(len(own), device=device), torch.searchsorted(columns, own)


def _walk_tokens(
    layer: LayerRecord, steps: Sequence[Step], positions: Tensor | None, options: LayerOptions, scratch: Scratch
) -> list[Reached]:
    """The state at each scope, by token."""

    def feed_forward(state: Factored, record: FeedForwardRecord) -> Factored | GatedRows | ShapleyRows:
        if isinstance(options.gate, Shapley):
            return shapley_feed_forward_rows(state, record, options.gate)
        return decompose_feed_forward(state, record, options.gate)

    return walk_components(
        layer.parts,
        steps,
        initial_state(layer.input if positions is None else gather_rows(layer.input, positions)),
        lambda record: decompose_attention(record, positions, options.value_bias, scratch),
        feed_forward,
    )


def walk_components(
    parts: Sequence[Record],
    steps: Sequence[Step],
    entry: Any,
    attend: Callable[[AttentionRecord], Any],
    feed_forward: Callable[[Any, FeedForwardRecord], Any],
) -> list[Reached]:
    """The state at each scope, from the state `entry` at the start of the layer. A state has `after_norm`,
    `after_scale` and `add`. Every branch of a block starts from the block's input; the sum at its end adds all branches
    to that input."""
    reached: list[Reached] = []
    state = entry
    done: list[Any] = []  # the block's finished branches
    for number, (step, record) in enumerate(zip(steps, parts, strict=False)):
        if step.starts:
            if state is not entry:
                done.append(state)
            state = entry
        if isinstance(record, AttentionRecord):
            state = attend(record)
        elif isinstance(record, FeedForwardRecord):
            state = feed_forward(state, record)
        elif isinstance(record, NormRecord):
            # The values of an attention include the norm before it, so the state after that norm is needed only if it
            # is a scope.
            if step.norms is not None or step.role != "pre" or not isinstance(steps[number + 1].part, Attention):
                state = state.after_norm(record)
        elif isinstance(record, ScaleRecord):
            state = state.after_scale(record.gain)
        else:
            kept = entry if record.skip is None else entry.after_scale(record.skip)
            for other in (*done, kept):
                state = state.add(other)
            done, entry = [], state
        if step.role == "after":
            entry = state
        if step.norms is not None or step.weights is not None:
            assert not isinstance(record, ScaleRecord)
            reached.append(Reached(step, state, record.output))
    return reached


def _reduce_gated_rows(
    wanted: Sequence[Reached], items: Sequence[ItemSpan], options: LayerOptions, scratch: Scratch
) -> ScopeMaps:
    """The scopes after the feed-forward gate. Computed item by item, because computing padding would be costly."""
    states = [at.state for at in wanted if isinstance(at.state, GatedRows)]
    actual = [at.actual for at in wanted]
    points = [len(state.steps) for state in states]
    last = max(states, key=lambda state: len(state.steps))
    mixed = {point: torch.zeros_like(actual[0]) for point in points}
    maps: dict[int, list[TermMap]] = {point: [] for point in points}
    for number, term in enumerate(last.source.terms):
        weights, cross = term.mixture.weights, term.mixture.cross
        cells = {point: weights.new_zeros(weights.shape[0], weights.shape[1], weights.shape[3]) for point in points}
        projections = ff_hidden_projections(last, term)
        for n, item in enumerate(items):
            columns = item.encoder if cross else item.columns
            assert columns is not None
            streamed = stream_contributions(
                last, projections, points, number, n, columns, item.rows, options.block_bytes, scratch
            )
            for point, one in streamed.items():
                if isinstance(columns, slice):
                    cells[point][n, columns, item.rows] = one.map
                else:
                    real_rows = torch.arange(weights.shape[3], device=weights.device)[item.rows]
                    cells[point][n, columns[:, None], real_rows] = one.map
                mixed[point][n, item.rows] += one.others
        for point in points:
            maps[point].append(TermMap(cells[point], None, cross))
    statistics = []
    for point, state, y in zip(points, states, actual, strict=True):
        missing = mixed[point] + state.own + state.bias - y
        own, others, missed, length, remainder = (
            row_norms(one) for one in (state.own, mixed[point], missing, y, state.bias.expand_as(y))
        )
        peak = torch.stack([piece.cells.amax(1) for piece in maps[point]]).amax(0)
        statistics.append(RowStatistics(own, others, missed, length, remainder, peak))
    names = tuple(str(at.step.norms) for at in wanted)
    return ScopeMaps(names, tuple(tuple(maps[point]) for point in points), stack_row_statistics(statistics))


def _measure_heads(mixture: Mixture, heads: tuple[int, ...]) -> HeadFactors:
    """``alpha^h_ij`` and ``||f^h(x_j)||`` (EMNLP 2020), whose product is the norm for one head."""
    chosen = torch.tensor(heads, device=mixture.weights.device)
    norms = row_norms(mixture.vectors()[:, :, chosen])
    return HeadFactors(mixture.weights[:, :, chosen], mixture.own_weights[:, :, chosen], norms, mixture.cross)
