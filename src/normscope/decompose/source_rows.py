"""Contributions of sources: one vector per source and row, ``c_iS = sum_{j in S} c_ij``.

With weights, norm statistics and gates held, a layer is linear in the contributions, so that the vectors of sources
pass through it as those of tokens would. After an attention they are ``sum_h (sum_{j in S} alpha^h_ij v_j^h) W^h``:
values are mixed for each source and head, then projected. From there on a row has S vectors instead of n, and time and
memory are linear in S. The vector of the row's own token is part of that of its source, and is also kept apart, for the
mixing ratio. Rows are computed in blocks; a source that no row of a block attends to is left out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from normscope.decompose.activations import Gate, gated_constant, gated_unit, projections_of
from normscope.decompose.gram import RowStatistics, ScopeMaps, TermMap, reduce_weights, stack_row_statistics
from normscope.decompose.layer import ItemSpan, LayerOptions, Reached, Vectors, walk_components
from normscope.decompose.mixing import sum_taps
from normscope.decompose.shapley.gate import Shapley
from normscope.decompose.state import (
    Factored,
    GatedUnit,
    Scratch,
    add_shift,
    apply_norm,
    decompose_attention,
    row_norms,
)
from normscope.models.scopes import Step
from normscope.models.spec import Attention
from normscope.tracing.recorded import select_block
from normscope.tracing.records import AttentionRecord, FeedForwardRecord, LayerRecord, NormRecord

BLOCK_BYTES = 40 * 2**20  # of the vectors and hidden units of a block of rows


@dataclass(frozen=True)
class ColumnGroups:
    """The columns of each source."""

    index: Tensor  # (columns,): the source of each; -1 for one that is masked or padding
    members: tuple[slice | Tensor, ...]  # for each source

    def total(self, cells: Tensor) -> Tensor:
        """(columns, ...) added up to (sources, ...)."""
        found = cells.new_zeros(len(self.members) + 1, *cells.shape[1:])
        return found.index_add_(0, self.index.to(cells.device) % len(found), cells)[:-1]  # -1: the last, left out


@dataclass(frozen=True)
class SourceColumns:
    """The columns of each source of one item, with padding."""

    own: ColumnGroups
    encoder: ColumnGroups | None = None  # for a decoder with cross-attention

    @property
    def count(self) -> int:
        """The number of sources, the rest included."""
        return len(self.own.members)

    def read_by(self, cross: bool) -> ColumnGroups:
        """The groups of the columns of an attention."""
        found = self.encoder if cross else self.own
        assert found is not None
        return found


def group_columns(index: Tensor, sources: int) -> ColumnGroups:
    """The columns of each source, as a slice where they are adjacent."""
    members: list[slice | Tensor] = []
    for source in range(sources):
        columns = (index == source).nonzero().flatten()
        adjacent = len(columns) > 0 and int(columns[-1]) - int(columns[0]) == len(columns) - 1
        members.append(slice(int(columns[0]), int(columns[-1]) + 1) if adjacent else columns)
    return ColumnGroups(index, tuple(members))


@dataclass(frozen=True)
class SourceRows:
    """The contributions of some sources to some rows of one item, as vectors."""

    vectors: Tensor  # (S + 1, 1, R, d): c_iS, then c_ii of the row's own token
    bias: Tensor  # (1, R, d): b_i, or (1, 1, d) if it is the same for all rows

    def after_norm(self, norm: NormRecord) -> SourceRows:
        """After applying a norm."""
        return SourceRows(apply_norm(norm, self.vectors), add_shift(norm, apply_norm(norm, self.bias)))

    def after_scale(self, gain: Tensor) -> SourceRows:
        """After multiplying by a gain (d,)."""
        return SourceRows(self.vectors * gain, self.bias * gain)

    def add(self, state: SourceRows) -> SourceRows:
        """The sum of two states."""
        return SourceRows(self.vectors + state.vectors, self.bias + state.bias)


@dataclass(frozen=True)
class _Block:
    """A block of rows of one item, and the sources that reach it."""

    item: int
    rows: slice | Tensor
    positions: Tensor  # (R,): the rows' own columns
    columns: SourceColumns
    sources: tuple[int, ...]
    own: tuple[Tensor, Tensor]  # the place of each row's own source among these, and 0 .. R-1: an index into (S, R)

    def state_of(self, own: Tensor, bias: Tensor, others: Tensor | None = None) -> SourceRows:
        """The state with the vectors (R, d) of the rows' own tokens, and those of all other tokens by source (S, R,
        d)."""
        vectors = own.new_zeros(len(self.sources) + 1, *own.shape)
        if others is not None:
            vectors[:-1] = others
        vectors[self.own] += own
        vectors[-1] = own
        return SourceRows(vectors[:, None], bias)


def measure_layer_by_source(
    layer: LayerRecord,
    steps: Sequence[Step],
    scopes: Collection[str],
    items: Sequence[ItemSpan],
    columns: Sequence[SourceColumns],
    positions: Tensor | None,
    options: LayerOptions,
    scratch: Scratch,
) -> list[ScopeMaps]:
    """The maps (g, S, R) of some scopes of a layer and their row statistics. `positions` (g, R) are the rows' own
    columns; None: all."""
    steps = steps[: 1 + max(n for n, step in enumerate(steps) if step.norms in scopes or step.weights in scopes)]
    attended = _attended_states(layer, steps, positions, options, scratch)
    rows = layer.input.shape[1] if positions is None else positions.shape[1]
    names = [name for step in steps for name in (step.weights, step.norms) if name in scopes]
    most = max(one.count for one in columns)
    cells = {name: layer.input.new_zeros(len(items), most, rows) for name in names if name}
    statistics = {name: layer.input.new_zeros(6, len(items), rows) for name in cells}
    for block in _blocks(layer, attended, items, columns, positions):
        reached = _walk_block(layer, steps, attended, block, options)
        found = _block_weights(reached, scopes, attended, block) | _block_norms(reached, scopes)
        real = torch.arange(rows, device=layer.input.device)[block.rows]
        sources = torch.tensor(block.sources, device=layer.input.device)[:, None]
        for name in cells:
            norms, measures = found[name]
            cells[name][block.item][sources, real] = norms
            statistics[name][:, block.item, real] = measures
    return [ScopeMaps((name,), ((TermMap(cells[name], None, False),),), statistics[name][:, None]) for name in cells]


def source_vectors(
    layer: LayerRecord,
    steps: Sequence[Step],
    scope: str,
    columns: SourceColumns,
    positions: Tensor,
    options: LayerOptions,
) -> Vectors:
    """The contribution vectors (R, S, d) at one scope, for the rows at `positions` (1, R) of a single item."""
    steps = steps[: 1 + next(n for n, step in enumerate(steps) if step.norms == scope)]
    attended = _attended_states(layer, steps, positions, options, Scratch())
    sources = tuple(range(columns.count))
    rows = torch.arange(positions.shape[1], device=positions.device)
    own = columns.own.index.to(positions.device)[positions[0]], rows
    block = _Block(0, slice(None), positions[0], columns, sources, own)
    at = _walk_block(layer, steps, attended, block, options)[-1]
    state: SourceRows = at.state
    bias = state.bias.expand_as(at.actual)[0]
    return Vectors(state.vectors[:-1, 0].transpose(0, 1), bias, at.actual[0])


def _attended_states(
    layer: LayerRecord, steps: Sequence[Step], positions: Tensor | None, options: LayerOptions, scratch: Scratch
) -> dict[bool, Factored]:
    """The states after the attentions of a layer, by whether it is cross-attention."""
    records = [record for _, record in zip(steps, layer.parts, strict=False) if isinstance(record, AttentionRecord)]
    return {one.cross: decompose_attention(one, positions, options.value_bias, scratch) for one in records}


def _blocks(
    layer: LayerRecord,
    attended: Mapping[bool, Factored],
    items: Sequence[ItemSpan],
    columns: Sequence[SourceColumns],
    positions: Tensor | None,
) -> Iterator[_Block]:
    """The rows of every item in blocks of limited size."""
    width = layer.input.shape[-1]
    units = [unit for part in layer.parts if isinstance(part, FeedForwardRecord) for unit in part.units]
    hidden = max((2 * len(projections_of(unit)) * unit.out.shape[0] for unit in units), default=0)
    for n, (item, of) in enumerate(zip(items, columns, strict=True)):
        step = max(1, BLOCK_BYTES // (layer.input.element_size() * (of.count + 1) * (4 * width + hidden)))
        rows = layer.input.shape[1] if positions is None else positions.shape[1]
        numbers = torch.arange(rows, device=layer.input.device)
        read = _read_sources(attended, of, n)
        owners = of.own.index if positions is None else of.own.index[positions[n]]
        for block in _split_rows(numbers[item.rows], owners, step):
            views = isinstance(item.rows, slice)  # instead of copies
            some = slice(int(block[0]), int(block[-1]) + 1) if views else block
            at = numbers[some] if positions is None else positions[n, some]
            own = of.own.index[at]
            sources = sorted({*own.tolist(), *read[:, some].any(1).nonzero().flatten().tolist()})
            place = torch.full((of.count,), -1, device=at.device)
            place[sources] = torch.arange(len(sources), device=at.device)
            yield _Block(n, some, at, of, tuple(sources), (place[own], torch.arange(len(at), device=at.device)))


def _split_rows(rows: Tensor, owners: Tensor, step: int) -> Iterator[Tensor]:
    """The rows in blocks of at most `step`, which end where a source does if sources are long: in a causal model, the
    rows before that do not read the next one."""
    runs = torch.unique_consecutive(owners[rows], return_counts=True)[1].tolist()
    if 2 * min(runs) < step:
        runs = [len(rows)]
    for run in rows.split(runs):
        yield from run.chunk(-(-len(run) // step))


def _read_sources(attended: Mapping[bool, Factored], columns: SourceColumns, item: int) -> Tensor:
    """(S, rows): whether a source has any weight in a row."""
    found = []
    for cross, state in attended.items():
        weights = state.terms[0].mixture.weights[item]  # (j, H, rows)
        largest = torch.maximum(weights.amax(1), -weights.amin(1))
        found.append(columns.read_by(cross).total(largest) > 0)
    return torch.stack(found).any(0)


def _walk_block(
    layer: LayerRecord,
    steps: Sequence[Step],
    attended: Mapping[bool, Factored],
    block: _Block,
    options: LayerOptions,
) -> list[Reached]:
    """The state at each scope, for a block of rows."""
    x = layer.input[block.item, block.positions]
    entry = block.state_of(x, x.new_zeros(1, 1, x.shape[-1]))
    assert not isinstance(options.gate, Shapley)
    return walk_components(
        select_block(layer, block.item, block.rows).parts,
        steps,
        entry,
        lambda record: _mix_by_source(attended[record.cross], block),
        partial(_feed_forward_by_source, gate=options.gate),
    )


def _mix_by_source(state: Factored, block: _Block) -> SourceRows:
    """After an attention: ``scale_i sum_h gate_i^h (sum_{j in S} alpha^h_ij v_j^h) W^h``, and the own cell."""
    (term,) = state.terms
    weights, values = term.mixture.weights[block.item][..., block.rows], term.mixture.values[block.item]
    mixed = values.new_empty(len(block.sources), weights.shape[2], *values.shape[1:])  # (S, R, H, d_h)
    members = block.columns.read_by(term.mixture.cross).members
    for source, into in zip(block.sources, mixed, strict=True):
        at = members[source]
        into.copy_(torch.bmm(weights[at].permute(1, 2, 0), values[at].transpose(0, 1)).transpose(0, 1))
    if term.mixture.gate is not None:
        mixed = sum_taps(mixed, term.mixture.gate.shape[2]) * term.mixture.gate[block.item][block.rows]
    others = mixed.flatten(2) @ term.mixture.matrix.flatten(0, 1)
    if term.scale is not None:
        others.mul_(term.scale[block.item, block.rows, None])
    bias = state.bias.expand_as(state.own)[block.item, block.rows][None]
    return block.state_of(state.own[block.item, block.rows], bias, others)


def _feed_forward_by_source(state: SourceRows, record: FeedForwardRecord, gate: Gate) -> SourceRows:
    """The state after a feed-forward; see `feed_forward.decompose_feed_forward`."""
    vectors, bias = torch.zeros_like(state.vectors), torch.zeros_like(record.output)
    for unit in record.units:
        made = gated_unit(unit, gate)
        bias = bias + gated_constant(unit, made, state.bias)
        if made.chosen is None:
            vectors = vectors.add_(_gate_vectors(made, state.vectors, slice(None)))
        else:
            rows = made.chosen[0].nonzero().flatten()
            vectors[:, :, rows] += _gate_vectors(made, state.vectors[:, :, rows], rows)
    return SourceRows(vectors, bias)


def _gate_vectors(made: GatedUnit, vectors: Tensor, rows: slice | Tensor) -> Tensor:
    """The unit applied to vectors (S + 1, 1, R, d) of some of its rows."""
    gated = None
    for weight, coefficient in zip(made.weights, made.coefficients, strict=True):
        part = (vectors @ weight).mul_(coefficient[:, rows])
        gated = part if gated is None else gated.add_(part)
    assert gated is not None
    return gated @ made.out


Found = dict[str, tuple[Tensor, Tensor]]  # scope -> norms (S, R), and measures (6, R), see `RowStatistics`


def _block_norms(reached: Sequence[Reached], scopes: Collection[str]) -> Found:
    """The norms of the vectors at the -N scopes."""
    found = {}
    for at in reached:
        if at.step.norms is None or at.step.norms not in scopes:
            continue
        state: SourceRows = at.state
        vectors, own, actual = state.vectors[:-1, 0], state.vectors[-1, 0], at.actual[0]
        total, bias = vectors.sum(0), state.bias[0].expand_as(actual)
        cells = row_norms(vectors)
        measures = RowStatistics(
            own=row_norms(own),
            others=row_norms(total - own),
            missing=row_norms(total + bias - actual),
            length=row_norms(actual),
            remainder=row_norms(bias),
            highest=cells.amax(0),
        )
        found[at.step.norms] = cells, stack_row_statistics([measures])[:, 0]
    return found


def _block_weights(
    reached: Sequence[Reached], scopes: Collection[str], attended: Mapping[bool, Factored], block: _Block
) -> Found:
    """The weights summed over the columns of each source, at the -W scopes."""
    wanted = [at.step for at in reached if at.step.weights in scopes and at.step.weights is not None]
    found = {}
    for cross in (False, True):
        steps = [step for step in wanted if (isinstance(step.part, Attention) and step.part.cross) == cross]
        if not steps:
            continue
        mixture = attended[cross].terms[0].mixture
        weights = mixture.weights[block.item, ..., block.rows][None]
        own, error = mixture.own_weights[block.item, block.rows][None], mixture.weight_error
        error = None if error is None else error[block.item, block.rows][None]
        some = replace(mixture, weights=weights, own_weights=own, weight_error=error)
        names = [step.weights for step in steps if step.weights is not None]
        reduced = reduce_weights(names, [step.role == "sum" for step in steps], some)
        total = block.columns.read_by(cross).total(reduced.maps[0][0].cells[0])[list(block.sources)]
        for n, (name, (piece,)) in enumerate(zip(names, reduced.maps, strict=True)):
            measures = reduced.statistics[:, n, 0]
            cells = total.clone() if piece.scale is None else total * piece.scale
            cells[block.own] += measures[0]  # the own cell
            found[name] = cells, measures
    return found
