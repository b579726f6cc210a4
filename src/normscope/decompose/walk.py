"""Walk one layer component by component and measure the scopes that were asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.decompose import factored
from normscope.decompose.attention import ValueBias, attend
from normscope.decompose.contributions import Factored, Mixture, Rows, row_norms
from normscope.decompose.factored import Reduced, completeness, reduce, reduce_weights
from normscope.decompose.feed_forward import feed_forward, stream
from normscope.decompose.gates import Gate
from normscope.decompose.scratch import Scratch
from normscope.measures.mixing import mixing_ratio
from normscope.records import AttentionRecord, FeedForwardRecord, LayerRecord, NormRecord, at_rows
from normscope.scopes import Step

BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Options:
    gate: Gate = "ig"
    value_bias: ValueBias = "token"
    heads: tuple[int, ...] = ()
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True)
class Item:
    """Which columns and rows of one padded item are real."""

    columns: slice | Tensor
    rows: slice | Tensor


@dataclass(frozen=True)
class HeadMaps:
    """Head-level maps of some items, rows and columns still padded."""

    weights: Tensor  # (g, j, heads, R), own cells zero
    own: Tensor  # (g, R, heads): the own cells
    value_norms: Tensor  # (g, j, heads): ||f^h(x_j)||


@dataclass(frozen=True)
class Vectors:
    """The contribution vectors of one scope, one layer and one item, with what they must add up to."""

    contributions: Tensor  # (R, j, d)
    bias: Tensor  # (R, d)
    actual: Tensor  # (R, d) the model's own


@dataclass(frozen=True)
class _Reached:
    """A state on the way through the layer."""

    step: Step
    state: Factored | Rows
    actual: Tensor  # (g, R, d)


def measure(
    layer: LayerRecord,
    steps: Sequence[Step],
    scopes: Collection[str],
    items: Sequence[Item],
    positions: Tensor | None,
    options: Options,
    scratch: Scratch,
) -> tuple[list[Reduced], HeadMaps | None]:
    """The wanted scopes (and head-level maps) of a layer. `positions` (g, R): the rows' own columns; None: all rows."""
    reached = _walk(layer, steps, positions, options, scratch)
    mixture = _mixture(reached)
    found = []
    weighted = [at.step for at in reached if at.step.weights in scopes]
    if weighted:
        names = [str(step.weights) for step in weighted]
        found.append(reduce_weights(names, [step.part is None for step in weighted], mixture))
    wanted = [at for at in reached if at.step.norms in scopes]
    linear = [(at, at.state) for at in wanted if isinstance(at.state, Factored)]
    if linear:
        names = [str(at.step.norms) for at, _ in linear]
        found.append(reduce(names, [state for _, state in linear], [at.actual for at, _ in linear], scratch))
    gated = [at for at in wanted if isinstance(at.state, Rows)]
    if gated:
        found.append(_reduce_rows(gated, items, options, scratch))
    return found, _head_maps(mixture, options.heads)


def vectors(
    layer: LayerRecord, steps: Sequence[Step], scope: str, item: Item, positions: Tensor | None, options: Options
) -> Vectors:
    """The contribution vectors at one scope of the only item of a layer."""
    scratch = Scratch()
    at = next(at for at in _walk(layer, steps, positions, options, scratch) if at.step.norms == scope)
    if isinstance(at.state, Factored):
        full = factored.vectors(at.state, positions)[0][item.rows][:, item.columns]
    else:
        point = len(at.state.steps)
        tap = stream(at.state, [point], 0, item.columns, item.rows, options.block_bytes, scratch, keep_vectors=True)[
            point
        ]
        assert tap.vectors is not None
        columns = torch.arange(layer.input.shape[1], device=tap.vectors.device)
        own = (columns if positions is None else positions[0])[item.rows]
        full = tap.vectors
        full[torch.arange(len(own)), torch.searchsorted(columns[item.columns], own)] = at.state.own[0][item.rows]
    return Vectors(full, at.state.bias.expand(at.actual.shape)[0][item.rows], at.actual[0][item.rows])


def _walk(
    layer: LayerRecord, steps: Sequence[Step], positions: Tensor | None, options: Options, scratch: Scratch
) -> list[_Reached]:
    """Every state on the way; a residual connection adds the state from before its block's first component."""
    reached: list[_Reached] = []
    state: Factored | Rows | None = None  # None: nothing has mixed yet, the contributions are x itself
    entry: Factored | Rows | None = None
    for step, record in zip(steps, layer.parts, strict=False):
        entry = state if step.opens else entry
        if isinstance(record, AttentionRecord):
            state = attend(record, positions, options.value_bias, scratch)
        elif state is None:
            continue  # a norm before the attention is inside the values
        elif isinstance(record, FeedForwardRecord):
            assert isinstance(state, Factored)
            state = feed_forward(state, record, options.gate)
        elif isinstance(record, NormRecord):
            state = state.normed(record)
        elif entry is None:
            assert isinstance(state, Factored)
            state = state.plus_input(at_rows(layer.input, positions))
        else:
            assert isinstance(state, Rows)
            assert isinstance(entry, Factored)
            state = state.plus(entry)
        reached.append(_Reached(step, state, record.output))
    return reached


def _mixture(reached: Sequence[_Reached]) -> Mixture:
    state = reached[0].state
    assert isinstance(state, Factored)
    return state.term.mixture


def _reduce_rows(wanted: Sequence[_Reached], items: Sequence[Item], options: Options, scratch: Scratch) -> Reduced:
    """The scopes after the feed-forward gate, item by item: only real tokens are worth their cost."""
    points = {len(at.state.steps): at for at in wanted if isinstance(at.state, Rows)}
    last = points[max(points)].state
    assert isinstance(last, Rows)
    weights = last.source.term.mixture.weights
    maps = {point: weights.new_zeros(weights.shape[0], weights.shape[1], weights.shape[3]) for point in points}
    others = {point: torch.zeros_like(at.actual) for point, at in points.items()}
    for n, item in enumerate(items):
        for point, tap in stream(last, points, n, item.columns, item.rows, options.block_bytes, scratch).items():
            if isinstance(item.columns, slice):
                maps[point][n, item.columns, item.rows] = tap.map
            else:
                real_rows = torch.arange(weights.shape[3], device=weights.device)[item.rows]
                maps[point][n, item.columns[:, None], real_rows] = tap.map
            others[point][n, item.rows] = tap.others
    states, actual = [at.state for at in wanted], [at.actual for at in wanted]
    cells, mixed = [maps[point] for point in points], [others[point] for point in points]
    own = torch.stack([row_norms(state.own) for state in states])
    missed = [m + state.own + state.bias - y for m, state, y in zip(mixed, states, actual, strict=True)]
    highest = torch.maximum(torch.stack([one.amax(1) for one in cells]), own)
    error = completeness(_norms(missed), _norms(actual), highest)
    return Reduced(
        scopes=tuple(str(at.step.norms) for at in wanted),
        maps=tuple(cells),
        scales=(None,) * len(wanted),
        own=own,
        mixing=mixing_ratio(_norms(mixed), own),
        remainder=_norms([state.bias.expand_as(y) for state, y in zip(states, actual, strict=True)]),
        error=error,
    )


def _norms(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([row_norms(one) for one in vectors])


def _head_maps(mixture: Mixture, heads: tuple[int, ...]) -> HeadMaps | None:
    """``alpha^h_ij`` and ``||f^h(x_j)||`` (EMNLP 2020): of one head alone the norm is their product."""
    if not heads:
        return None
    chosen = torch.tensor(heads, device=mixture.weights.device)
    norms = row_norms(mixture.vectors[:, :, chosen])
    return HeadMaps(mixture.weights[:, :, chosen], mixture.own_weights[:, :, chosen], norms)
