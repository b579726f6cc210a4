"""Walk one layer component by component and measure the scopes that were asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.decompose import factored
from normscope.decompose.attention import ValueBias, attend
from normscope.decompose.contributions import Factored, Mixture, Rows, row_norms
from normscope.decompose.feed_forward import feed_forward, stream
from normscope.decompose.gates import Gate
from normscope.decompose.scratch import Scratch
from normscope.measures.mixing import mixing_ratio, weight_mixing_ratio
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
class Cells:
    """One scope of one layer of one item, real tokens only."""

    map: Tensor  # (R, j)
    mixing: Tensor  # (R,)
    remainder: Tensor  # (R,)
    completeness: float


@dataclass(frozen=True)
class HeadCells:
    weights: Tensor  # (heads, R, j)
    norms: Tensor  # (heads, R, j)
    value_norms: Tensor  # (heads, j)


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
) -> list[tuple[dict[str, Cells], HeadCells | None]]:
    """The wanted scopes (and head-level maps) of each item of a layer. `positions` (g, R): the rows' own columns."""
    reached = _walk(layer, steps, positions, options, scratch)
    results: list[dict[str, Cells]] = [{} for _ in items]
    mixture = _mixture(reached)
    _measure_weights(mixture, [at.step for at in reached if at.step.weights in scopes], items, positions, results)
    wanted = [at for at in reached if at.step.norms in scopes]
    _measure_factored([at for at in wanted if isinstance(at.state, Factored)], items, positions, results, scratch)
    _measure_rows([at for at in wanted if isinstance(at.state, Rows)], items, positions, options, results, scratch)
    heads = [_head_cells(mixture, item, n, positions, options.heads) for n, item in enumerate(items)]
    return list(zip(results, heads, strict=True))


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
        tap = stream(at.state, [point], 0, item.columns, item.rows, options.block_bytes, scratch, keep_vectors=True)[point]
        assert tap.vectors is not None
        full = tap.vectors
        row, column = _own_cells(item, positions, 0, layer.input.shape[1], full.device)
        full[row, column] = at.state.own[0][item.rows]
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


def _measure_weights(
    mixture: Mixture,
    steps: Sequence[Step],
    items: Sequence[Item],
    positions: Tensor | None,
    results: list[dict[str, Cells]],
) -> None:
    if not steps:
        return
    plain = factored.weight_map(mixture, positions)
    own = mixture.own_weights.mean(-1)
    for step in steps:
        residual = step.part is None
        cells = factored.with_residual(plain, positions) if residual else plain
        mixing = weight_mixing_ratio(own, residual)
        error = (cells.sum(1) - 1).abs()
        for n, item in enumerate(items):
            rate = mixing[n][item.rows]
            results[n][str(step.weights)] = Cells(
                cells[n][item.columns][:, item.rows].t(),
                rate,
                torch.zeros_like(rate),
                float(error[n][item.rows].amax()),
            )


def _measure_factored(
    wanted: Sequence[_Reached],
    items: Sequence[Item],
    positions: Tensor | None,
    results: list[dict[str, Cells]],
    scratch: Scratch,
) -> None:
    if not wanted:
        return
    states = [at.state for at in wanted if isinstance(at.state, Factored)]
    found = factored.reduce(states, [at.actual for at in wanted], positions, scratch)
    for at, reduced in zip(wanted, found, strict=True):
        mixing = mixing_ratio(reduced.others, reduced.own)
        remainder = row_norms(reduced.bias).expand(mixing.shape)
        for n, item in enumerate(items):
            results[n][str(at.step.norms)] = Cells(
                reduced.map[n][item.columns][:, item.rows].t(),
                mixing[n][item.rows],
                remainder[n][item.rows],
                float(reduced.error[n][item.rows].amax()),
            )


def _measure_rows(
    wanted: Sequence[_Reached],
    items: Sequence[Item],
    positions: Tensor | None,
    options: Options,
    results: list[dict[str, Cells]],
    scratch: Scratch,
) -> None:
    if not wanted:
        return
    last = wanted[-1].state
    assert isinstance(last, Rows)
    points = {len(at.state.steps): at for at in wanted if isinstance(at.state, Rows)}
    for n, item in enumerate(items):
        taps = stream(last, list(points), n, item.columns, item.rows, options.block_bytes, scratch)
        for point, at in points.items():
            tap = taps[point]
            own, bias, actual = (x[n][item.rows] for x in (at.state.own, at.state.bias, at.actual))
            cells = tap.map.t()
            row, column = _own_cells(item, positions, n, last.source.term.mixture.weights.shape[1], cells.device)
            cells[row, column] = row_norms(own)
            missing = row_norms(tap.others + own + bias - actual)
            error = missing / torch.maximum(row_norms(actual), cells.amax(-1)).clamp_min(torch.finfo(cells.dtype).tiny)
            results[n][str(at.step.norms)] = Cells(
                cells, mixing_ratio(tap.others, own), row_norms(bias), float(error.amax())
            )


def _own_cells(
    item: Item, positions: Tensor | None, number: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column, among the real ones, of each row's own cell."""
    places = torch.arange(columns, device=device)
    real = places[item.columns]
    wanted = (places if positions is None else positions[number])[item.rows]
    return torch.arange(len(wanted), device=device), torch.searchsorted(real, wanted)


def _head_cells(
    mixture: Mixture, item: Item, number: int, positions: Tensor | None, heads: tuple[int, ...]
) -> HeadCells | None:
    """``alpha^h_ij`` and ``alpha^h_ij ||f^h(x_j)||`` (EMNLP 2020): one head alone, so the norm splits."""
    if not heads:
        return None
    chosen = torch.tensor(heads, device=mixture.weights.device)
    weights = mixture.weights[number][item.columns][:, chosen][:, :, item.rows].permute(1, 2, 0).contiguous()
    row, column = _own_cells(item, positions, number, mixture.weights.shape[1], weights.device)
    weights[:, row, column] = mixture.own_weights[number][item.rows][:, chosen].t()
    value_norms = row_norms(mixture.vectors[number][item.columns][:, chosen]).t()
    return HeadCells(weights, weights * value_norms[:, None], value_norms)
