"""Functions of recorded tensors: some items or rows of a record, attention weights by blocks of rows, equality up to
rounding.

The tolerance of a comparison is relative to the size of the numbers from which an element was computed, not to the
largest element of the tensor. This finds one wrong logit among fifty thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

from normscope.tracing.records import (
    AttentionRecord,
    AttentionRows,
    FilterRecord,
    LayerRecord,
    NormRecord,
    Projection,
    Unit,
)

BY_ROW = {
    "output",
    "inverse",
    "hidden",
    "routing",
    "gate",
    "row_scale",
    "weight_error",
}  # whose second dimension is the row
BATCHED = BY_ROW | {"weights", "values", "slope", "constant", "entry"}  # fields with an item dimension
ELEMENT = {torch.float32: 1e-5, torch.float64: 1e-9}  # for elementwise functions, sums and means
PRODUCT = {torch.float32: 2e-6, torch.float64: 1e-12}  # relative to ||x|| ||w||, the size of a scalar product
PIECE = 2**22  # elements compared at a time
Guess = Callable[[slice], tuple[Tensor, Tensor]]  # rows -> their expected values, and the size of each element
CACHED_SCORES = 2**17  # probabilities computed at a time, which fit in cache


def row_blocks(length: int, step: int) -> Iterator[slice]:
    """Slices of `step` rows, at least one."""
    for start in range(0, length, max(1, step)):
        yield slice(start, min(start + max(1, step), length))


def select_items(layer: LayerRecord, items: slice) -> LayerRecord:
    """The record of some of the items."""
    if len(layer.input[items]) == len(layer.input):
        return layer
    parts = tuple(_map_record(part, BATCHED, lambda x: x[items]) for part in layer.parts)
    return LayerRecord(layer.index, layer.input[items], parts, layer.steps)


def select_rows(layer: LayerRecord, positions: Tensor | None) -> LayerRecord:
    """The record with outputs only at `positions` (b, R); the input and the attention's columns stay complete."""
    if positions is None:
        return layer
    parts = []
    for part in layer.parts:
        chosen = _map_record(part, BY_ROW, lambda x: gather_rows(x, positions))
        if isinstance(part, AttentionRecord):
            chosen = replace(chosen, weights=gather_rows(part.weights.transpose(1, 2), positions).transpose(1, 2))
        parts.append(chosen)
    return LayerRecord(layer.index, layer.input, tuple(parts), layer.steps)


def select_block(layer: LayerRecord, item: int, rows: slice | Tensor) -> LayerRecord:
    """The record of one item with outputs at some rows; the input and the attention's weights stay complete."""
    whole = select_items(layer, slice(item, item + 1))
    parts = tuple(_map_record(part, BY_ROW, lambda x: x[:, rows]) for part in whole.parts)
    return LayerRecord(layer.index, whole.input, parts, layer.steps)


def unit_rows(unit: Unit, rows: slice | Tensor) -> Unit:
    """A unit at some output positions, the same for all items."""
    return _map_record(unit, BY_ROW, lambda x: x[:, rows])  # type: ignore[no-any-return]


def gather_rows(x: Tensor, positions: Tensor | None) -> Tensor:
    """(b, R, ...): x (b, n, ...) at `positions` (b, R)."""
    if positions is None:
        return x
    index = positions.view(*positions.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _map_record(record: Any, names: set[str], change: Callable[[Tensor], Tensor]) -> Any:
    """The record with `change` applied to the fields in `names`, also in nested records."""
    changed: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor) and field.name in names:
            changed[field.name] = change(value)
        elif isinstance(value, Projection | FilterRecord):
            changed[field.name] = _map_record(value, names, change)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(_map_record(one, names, change) for one in value)
    return replace(record, **changed)


def convolve(taps: Tensor, values: Tensor) -> Tensor:
    """(b, H, j, d_h): ``sum_t taps_t * values_(j-t)`` of taps (K, H, d_h) and values (b, H, j, d_h)."""
    found = taps[0][:, None] * values
    for t in range(1, min(len(taps), values.shape[2])):
        found[:, :, t:] += taps[t][:, None] * values[:, :, :-t]
    return found


def correlate(taps: Tensor, values: Tensor) -> Tensor:
    """(b, H, j, d_h): ``sum_t taps_t * values_(j+t)``, the transpose of `convolve`."""
    return convolve(taps, values.flip(2)).flip(2)


def mixed_values(record: AttentionRecord) -> Tensor:
    """(b, heads of the values, j, d_h): the vectors that the weights mix."""
    made = record.filter
    if made is None:
        return record.values
    values = record.values if made.entry is None else made.entry * record.values
    found = made.slope * convolve(made.taps, values)
    return found if made.constant is None else found + made.constant


def fold_norm(norm: NormRecord, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The output ``(gain * (m - mean m) / s + shift) W + b`` of a matrix after a norm, as a matrix and a bias for
    ``m / s``."""
    through = norm.gain[:, None] * matrix
    if norm.kind == "layer":
        through = through - through.mean(0)
    if norm.shift is None:
        return through, bias
    return through, norm.shift @ matrix if bias is None else norm.shift @ matrix + bias


def gated_hidden(unit: Unit) -> Tensor:
    """(b, n, d_ff): the input of W_2."""
    hidden = unit.into.hidden
    if unit.joint is not None and unit.up is not None:
        return unit.joint(hidden, unit.up.hidden)
    gated = unit.activation(hidden)
    return gated if unit.up is None else gated * unit.up.hidden


def replay_with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x, with the bias if there is one."""
    return x if bias is None else x + bias


@dataclass(frozen=True)
class FrozenWeights:
    """``scale_i alpha^h_ij`` of one item."""

    rows: AttentionRows
    dtype: torch.dtype
    scale: Tensor | None = None  # (i,)

    @cached_property
    def all(self) -> Tensor:
        """(H, i, j), kept from the first use on."""
        _, heads, length, columns = self.rows.shape
        found = torch.zeros(heads, length, columns, dtype=self.dtype, device=self.device)
        for rows, some in self.blocks():
            found[:, rows, : some.shape[2]] = some
        return found

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def columns(self) -> int:
        return self.rows.shape[3]

    def blocks(self, within: slice = slice(None)) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the rows `within`, each with its weights (H, R, j), without the last columns if no row attends to
        them. Raises an error at the end if they are not those of the forward pass."""
        _, heads, length, columns = self.rows.shape
        first, last, _ = within.indices(length)
        for block in row_blocks(last - first, max(self.rows.together, CACHED_SCORES // (heads * columns))):
            rows = slice(first + block.start, first + block.stop)
            yield rows, self.all[:, rows] if "all" in self.__dict__ else self._some(rows)
        if self.rows.misfit is not None:
            self.rows.refuse_misfit()

    def _some(self, rows: slice | Tensor) -> Tensor:
        found = self.rows.compute(rows)[0].to(self.dtype)
        return found if self.scale is None else found * self.scale[rows if isinstance(rows, slice) else rows[0], None]

    def for_rows(self, rows: slice | Tensor) -> FrozenWeights:
        """The weights of some rows, which are kept."""
        length = self.rows.shape[2]
        positions = torch.arange(length, device=self.device)[rows]
        if "all" in self.__dict__:
            found = self.all[:, positions]
        else:
            found = self._some(positions[None])
            self.rows.refuse_misfit()
        return stored_weights(found)


def stored_weights(weights: Tensor) -> FrozenWeights:
    """Weights (H, i, j) that are kept."""
    whole = weights[None]

    def compute(rows: slice | Tensor) -> Tensor:
        return whole[:, :, rows if isinstance(rows, slice) else rows[0]]

    return FrozenWeights(AttentionRows(tuple(whole.shape), compute, weights.device), weights.dtype)  # type: ignore[arg-type]


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if all these dtypes are, float32 otherwise."""
    return torch.float64 if all(dtype == torch.float64 for dtype in dtypes) else torch.float32


def closeness_misfit(guess: Guess, actual: Tensor, tolerance: float) -> float:
    """``max |guess - actual| / (tolerance * size)`` over the elements of (rows, width); at most 1 if the two are equal.

    Compares the first row, then blocks of rows, and stops at the first difference. NaN counts as a difference.
    """
    worst = 0.0
    step = max(1, PIECE // max(1, actual.shape[-1]))
    for start in (0, *range(1, len(actual), step)):
        rows = slice(start, start + (step if start else 1))
        found, size = guess(rows)
        if found.shape != actual[rows].shape:
            return inf
        allowed = (tolerance * size).add_(torch.finfo(found.dtype).tiny)
        largest = float(((found - actual[rows]).abs_() / allowed).max()) if found.numel() else 0.0
        worst = max(worst, inf if isnan(largest) else largest)
        if worst > 1:
            break
    return worst


def is_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """True if two tensors (rows, width) are equal within the rounding error of `dtype`."""
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or closeness_misfit(lambda rows: (a[rows], b[rows].abs()), b, ELEMENT[dtype]) <= 1


def is_close_to_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, tolerance: float | None = None
) -> bool:
    """True if ``x W + b`` equals `output`, for x (rows, d) and W (d, d')."""
    if weight.shape != (x.shape[-1], output.shape[-1]) or len(x) != len(output):
        return False
    found = x @ weight if bias is None else torch.addmm(bias, x, weight)
    if torch.equal(found, output):  # the same kernel gives the same rounding
        return True
    allowed = PRODUCT[coarser(x.dtype, output.dtype)] if tolerance is None else tolerance
    columns: Tensor = torch.linalg.vector_norm(weight, dim=0)
    return (
        closeness_misfit(lambda rows: (found[rows], _product_closeness_scale(x[rows], columns, bias)), output, allowed)
        <= 1
    )


def _product_closeness_scale(x: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, d'): the size of the terms of ``x W + b``, ``||x_i|| (||w_k|| + |b_k|) + |b_k|``; `columns` are the
    ||w_k||.

    The bias occurs twice because a weight found by calling a module (`linear_map`) has the rounding error of its bias.
    """
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return lengths * columns if bias is None else lengths * (columns + bias.abs()) + bias.abs()


def closeness_rows(x: Tensor) -> Tensor:
    """(rows, width): the last dimension stays, all others become rows."""
    return x.reshape(-1, x.shape[-1])
