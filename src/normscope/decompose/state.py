"""The state of a decomposition inside a layer: contributions c_ij of input j to output i, and the remainder b_i.

At every point ``sum_j c_ij + b_i`` is the vector that the model itself computes. The diagonal ``c_ii`` and the sum of
the others are stored as vectors. The off-diagonal contributions are stored in one of two forms:

- `Factored`: ``c_ij = scale_i * view(sum_h weights_ijh f_jh)`` for j != i, where ``f_jh = values_jh matrix_h`` and
  `view` is the linear map of the norms since then (subtract the mean, multiply by a gain). This is a term. A decoder
  with cross-attention has two, over its own and over the encoder's tokens; a layer starts with none. No tensor of size
  n x n x d is needed. If the attention has a gate, ``f_ijh = (gate_ih * values_jh) matrix_h`` depends on the output
  token too, and contributions are computed block by block.
- `GatedRows`: after a feed-forward gate, a recipe from which `feed_forward.stream_contributions` computes the
  contributions block by block.

Shapes: g items, j columns, R rows (output positions), H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from normscope.decompose.mixing import mix_values, spread_taps
from normscope.tracing.recorded import gather_rows
from normscope.tracing.records import AttentionRecord, NormRecord

ValueBias = Literal["token", "remainder"]

VECTOR_LIMIT = 2**23  # numbers in the vectors f that are computed at a time
EXTRA_VECTORS = 4  # vectors besides those of the heads, see `head_vectors`

SCRATCH_BLOCK = 31 * 2**20  # bytes


class Scratch:
    """Working memory reused by all layers: named buffers, each overwritten by the next user of its name.

    A new large tensor costs a page fault per 4 kB, which is often more than the computation on it.
    """

    def __init__(self) -> None:
        # Freeing one block of this size raises glibc's mmap threshold (to 32 MB at most), so later blocks are reused.
        torch.empty(SCRATCH_BLOCK, dtype=torch.uint8)
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._taken: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}  # in the last requested shape

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        begin: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """A tensor of this shape. It keeps its contents as long as the name is requested with the same shape; a new one
        is uninitialised unless `begin` fills it."""
        key = (name, dtype, device)
        taken = self._taken.get(key)
        if taken is None or taken.shape != shape:
            size = prod(shape)
            if key not in self._buffers or self._buffers[key].numel() < size:
                self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
            taken = self._taken[key] = self._buffers[key][:size].view(shape)
            if begin is not None:
                begin(taken)
        return taken

    def like(
        self, name: str, shape: tuple[int, ...], tensor: Tensor, begin: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """`take` with the dtype and device of `tensor`."""
        return self.take(name, shape, tensor.dtype, tensor.device, begin)

    def trim(self, limit: int) -> None:
        """Free all buffers if they take more than `limit` bytes."""
        if sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values()) > limit:
            self._buffers.clear()
            self._taken.clear()


@dataclass(frozen=True)
class Mixture:
    """The output of an attention, ``sum_j sum_h weights_jhi values_jh matrix_h``, without the diagonal j = i."""

    weights: Tensor  # (g, j, H, R), zero at j = the row's own position; any strides
    own_weights: Tensor  # (g, R, H): the weights at the row's own position; zeros for cross-attention
    values: Tensor  # (g, j, H, d_h)
    matrix: Tensor  # (H, d_h, d)
    all_vectors: (
        Tensor | None
    )  # (H + 4, g, j, d): `head_vectors` of all columns, if small enough; `reduce_states` overwrites it
    cross: bool = False
    sinks: bool = False
    gate: Tensor | None = None  # (g, R, H, d_h): held factor on the mixed values; with fewer heads, see `mixing`
    weight_error: Tensor | None = None  # (g, R): of signed weights
    shares: Tensor | None = None  # (H,): with which the heads enter maps of weights; None: their mean

    @property
    def largest(self) -> Tensor | float:
        """An upper bound on the size of the weights."""
        return 1.0 if self.weight_error is None else self.weights.abs().amax().clamp_min(1)

    def blocks(self, scratch: Scratch) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of columns, with their `head_vectors`."""
        if self.all_vectors is not None:
            yield slice(0, self.values.shape[1]), self.all_vectors
            return
        items, columns, heads, _ = self.values.shape
        step = max(1, VECTOR_LIMIT // (items * (heads + EXTRA_VECTORS) * self.matrix.shape[2]))
        for start in range(0, columns, step):
            js = slice(start, min(start + step, columns))
            yield js, head_vectors(self.values[:, js], self.matrix, self.cross, scratch)

    def vectors(self) -> Tensor:
        """(g, j, H, d): f_jh."""
        if self.all_vectors is not None:
            return self.all_vectors[:-EXTRA_VECTORS].permute(1, 2, 0, 3)
        return torch.einsum("gjhk,hkd->gjhd", self.values, self.matrix)


def head_vectors(values: Tensor, matrix: Tensor, cross: bool, scratch: Scratch) -> Tensor:
    """``f_jh = values_jh matrix_h`` as (H + 4, g, j, d), followed by the probe direction, 1/d, one free vector, and
    zeros, which make the number of vectors even: products of 12 or 16 vectors take half the time of those of 15."""
    items, columns, heads, _ = values.shape
    width = matrix.shape[2]

    def begin(fresh: Tensor) -> None:
        fresh[heads] = probe_direction(width, values.dtype, values.device)
        fresh[heads + 1] = 1 / width
        fresh[heads + 3] = 0

    name = "cross vectors" if cross else "vectors"
    made = scratch.like(name, (heads + EXTRA_VECTORS, items * columns, width), values, begin)
    torch.bmm(values.flatten(0, 1).transpose(0, 1), matrix, out=made[:heads])
    return made.view(heads + EXTRA_VECTORS, items, columns, width)


@dataclass(frozen=True)
class Term:
    """A mixture, and the linear map of the norms applied to it since."""

    mixture: Mixture
    scale: Tensor | None = None  # (g, R)
    centered: bool = False
    gain: Tensor | None = None  # (d,)

    def view(self, x: Tensor) -> Tensor:
        """The linear map of the norms, without the row scale: (..., d) -> (..., d)."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        return x if self.gain is None else x * self.gain

    def after_norm(self, norm: NormRecord) -> Term:
        """After applying a norm."""
        term = self
        if norm.kind == "layer" and self.gain is not None:  # a second norm: fold the first into the matrix
            matrix = self.view(self.mixture.matrix)
            all_vectors = self.mixture.all_vectors
            if all_vectors is not None:
                all_vectors = torch.cat([self.view(all_vectors[:-EXTRA_VECTORS]), all_vectors[-EXTRA_VECTORS:]])
            term = Term(replace(self.mixture, matrix=matrix, all_vectors=all_vectors), self.scale)
        scale = norm.inverse if term.scale is None else term.scale * norm.inverse
        return replace(term.after_scale(norm.gain), scale=scale, centered=term.centered or norm.kind == "layer")

    def after_scale(self, gain: Tensor) -> Term:
        """After multiplying by a gain (d,)."""
        return replace(self, gain=gain if self.gain is None else self.gain * gain)


@dataclass(frozen=True)
class Factored:
    """Contributions as terms over columns, the diagonal and the remainder."""

    terms: tuple[Term, ...]
    own: Tensor  # (g, R, d): c_ii
    others: Tensor | None  # (g, R, d): sum_{j != i} c_ij; None without terms
    bias: Tensor  # (g, R, d): b_i, or (1, 1, d) if it is the same for all rows

    def after_norm(self, norm: NormRecord) -> Factored:
        """After applying a norm."""
        others = None if self.others is None else apply_norm(norm, self.others)
        bias = add_shift(norm, apply_norm(norm, self.bias))
        return Factored(tuple(term.after_norm(norm) for term in self.terms), apply_norm(norm, self.own), others, bias)

    def after_scale(self, gain: Tensor) -> Factored:
        """After multiplying by a gain (d,)."""
        others = None if self.others is None else self.others * gain
        return Factored(tuple(term.after_scale(gain) for term in self.terms), self.own * gain, others, self.bias * gain)

    def add(self, state: Factored) -> Factored:
        """The sum of two states. Their terms must be over different columns."""
        both = [one.others for one in (self, state) if one.others is not None]
        others = both[0] + both[1] if len(both) == 2 else both[0] if both else None
        return Factored(self.terms + state.terms, self.own + state.own, others, self.bias + state.bias)


def initial_state(x: Tensor) -> Factored:
    """The state at the start of a layer: every vector is attributed to its own token."""
    return Factored((), x, None, x.new_zeros(1, 1, x.shape[-1]))


def decompose_attention(
    record: AttentionRecord, positions: Tensor | None, value_bias: ValueBias, scratch: Scratch
) -> Factored:
    """The state after an attention, whose values already include the attention's input and its remainder. b_O is added
    to the remainder. The record's weights may be overwritten.

    `positions` (g, R) are the columns of the record's rows; None: all, in order. With `value_bias="token"` the value
    bias (and the shift of a norm before the attention) is part of f, as in the papers: attention rows sum to one, so it
    is distributed over j. With "remainder" it is added to b_i.
    """
    record = record if record.filter is None else spread_taps(record, record.filter)
    weights = record.weights.permute(0, 3, 1, 2)  # (g, j, H, R)
    items, columns, heads, rows = weights.shape
    width, gate, scale = record.matrix.shape[2], record.gate, record.row_scale
    bias = record.output.new_zeros(width) if record.bias is None else record.bias
    bias = bias if bias.dim() == 3 else bias[None, None]
    values = record.values.transpose(1, 2)  # (g, j, heads of the values, d_h)
    if value_bias == "remainder" and record.value_bias is not None:
        values = values - record.value_bias
        each = record.value_bias.repeat_interleave(heads // len(record.value_bias), dim=0)
        sums = record.weights.sum(-1).transpose(1, 2)  # (g, R, H)
        if gate is None:
            spread = sums @ torch.bmm(each[:, None], record.matrix)[:, 0]
        else:
            spread = mix_values(sums, each, gate) @ record.matrix.flatten(0, 1)
        bias = bias + (spread if scale is None else spread * scale[..., None])
    if values.shape[2] != heads:
        values = values.repeat_interleave(heads // values.shape[2], dim=2)

    if record.cross:
        own_weights = weights.new_zeros(items, rows, heads)
    else:
        own_weights = own_cells(weights.transpose(1, 2), positions).transpose(1, 2)
        own_weights = own_weights.clone(memory_format=torch.contiguous_format)  # (g, R, H)
        set_own_cells(weights.transpose(1, 2), positions, 0)
    few = gate is None and items * columns * (heads + EXTRA_VECTORS) * width <= VECTOR_LIMIT
    all_vectors = head_vectors(values, record.matrix, record.cross, scratch) if few else None
    known = (record.cross, record.sinks, gate, record.weight_error, record.shares)
    mixture = Mixture(weights, own_weights, values, record.matrix, all_vectors, *known)

    own = torch.empty_like(record.output)
    if record.cross:
        own.zero_()
    elif all_vectors is not None and positions is None:
        own_vectors = all_vectors[:heads, :, :rows].flatten(1, 2).transpose(0, 1)  # (g*R, H, d)
        torch.bmm(own_weights.flatten(0, 1)[:, None], own_vectors, out=own.view(items * rows, 1, width))
    else:
        mixed = mix_values(own_weights, gather_rows(values, positions)[:, :rows], gate)
        torch.matmul(mixed, record.matrix.flatten(0, 1), out=own)
    if scale is not None:
        own = own * scale[..., None]
    return Factored((Term(mixture, scale),), own, torch.sub(record.output, own).sub_(bias), bias)


def own_cells(cells: Tensor, positions: Tensor | None) -> Tensor:
    """(..., j, R) -> (..., R): the cell of every row at its own column. `positions` None: row i is column i."""
    if positions is None:
        return cells.diagonal(dim1=-2, dim2=-1)
    return cells.gather(-2, _own_column_index(cells, positions))[..., 0, :]


def set_own_cells(cells: Tensor, positions: Tensor | None, value: Tensor | float) -> None:
    """Overwrite every row's own column of (..., j, R) with `value` (..., R)."""
    if positions is None:
        cells.diagonal(dim1=-2, dim2=-1).copy_(torch.as_tensor(value, dtype=cells.dtype, device=cells.device))
    else:
        index = _own_column_index(cells, positions)
        source = torch.as_tensor(value, dtype=cells.dtype, device=cells.device)
        cells.scatter_(-2, index, source.expand(index[..., 0, :].shape)[..., None, :])


def _own_column_index(cells: Tensor, positions: Tensor) -> Tensor:
    """Positions (g, R) as an index (g, ..., 1, R) into cells (g, ..., j, R)."""
    shape = [len(positions), *[1] * (cells.dim() - 2), positions.shape[1]]
    return positions.view(shape).expand(*cells.shape[:-2], 1, -1)


@dataclass(frozen=True)
class Mixing:
    """The factors with which the vectors of some columns enter some rows."""

    weights: Tensor  # (columns, rows, H), including the scale
    gate: Tensor | None  # (rows, H, d_h)
    matrix: Tensor  # (H, d_h, D)

    def select(self, rows: Tensor) -> Mixing:
        """The factors of some of the rows."""
        return Mixing(self.weights[:, rows], None if self.gate is None else self.gate[rows], self.matrix)

    def contributions(self, vectors: Tensor) -> Tensor:
        """(columns, rows, D) from the vectors of the columns."""
        if self.gate is None:
            return torch.bmm(self.weights, vectors)
        return mix_values(self.weights, vectors[:, None], self.gate) @ self.matrix.flatten(0, 1)


@dataclass(frozen=True)
class TermFactors:
    """The factors of one term for one item: ``c_ij = scale_i sum_h weights_jhi (gate_ih * values_jh) matrix_h``."""

    weights: Tensor  # (j, H, R)
    scale: Tensor | None  # (R,)
    values: Tensor  # (H, j, d_h), multiplied by `rescale`
    matrix: Tensor  # (H, d_h, D)
    gate: Tensor | None = None  # (R, H, d_h)

    def vectors(self, columns: slice, name: str, scratch: Scratch) -> Tensor:
        """(columns, H, D): the vectors f_jh; with a gate, the values (columns, H, d_h)."""
        if self.gate is not None:
            return self.values[:, columns].transpose(0, 1)
        return multiply_heads(self.values[:, columns], self.matrix, name, scratch)

    def mixing(self, columns: slice, rows: slice) -> Mixing:
        """How the vectors of some columns are mixed in some rows."""
        weights = self.weights[columns, :, rows]
        weights = (weights if self.scale is None else weights * self.scale[rows]).transpose(1, 2)
        return Mixing(weights, None if self.gate is None else self.gate[rows], self.matrix)


def multiply_heads(values: Tensor, matrix: Tensor, name: str, scratch: Scratch) -> Tensor:
    """(H, j, d_h) times (H, d_h, D) for each head, as (j, H, D)."""
    out = scratch.like(name, (values.shape[1], values.shape[0], matrix.shape[2]), values)
    torch.bmm(values, matrix, out=out.transpose(0, 1))
    return out


@dataclass(frozen=True)
class GatedUnit:
    """``(sum_k coefficient_ki * (c_ij weight_k)) W_2``: one feed-forward with coefficients for its activation."""

    weights: tuple[Tensor, ...]  # (d, d_ff): one, or two for a gated feed-forward
    coefficients: tuple[Tensor, ...]  # (g, R, d_ff)
    out: Tensor  # (d_ff, d)
    chosen: Tensor | None = None  # (g, R): the rows that are routed to an expert


@dataclass(frozen=True)
class GatedRows:
    """``c_ij = steps(sum of units(source c_ij))``, computed block by block by `stream_contributions`."""

    source: Factored
    units: tuple[GatedUnit, ...]
    own: Tensor  # (g, R, d)
    bias: Tensor  # (g, R, d)
    steps: tuple[NormRecord | Factored | Tensor, ...] = ()  # a norm to apply, a state to add, or a gain to multiply by

    def after_norm(self, norm: NormRecord) -> GatedRows:
        """After applying a norm."""
        return replace(
            self,
            own=apply_norm(norm, self.own),
            bias=add_shift(norm, apply_norm(norm, self.bias)),
            steps=(*self.steps, norm),
        )

    def after_scale(self, gain: Tensor) -> GatedRows:
        """After multiplying by a gain (d,)."""
        return replace(self, own=self.own * gain, bias=self.bias * gain, steps=(*self.steps, gain))

    def add(self, state: Factored) -> GatedRows:
        """The sum with a state before the feed-forward, as in a residual connection."""
        return replace(self, own=self.own + state.own, bias=self.bias + state.bias, steps=(*self.steps, state))


def apply_norm(norm: NormRecord, x: Tensor) -> Tensor:
    """The norm with its statistic frozen, without its shift: ``gain * (x - mean x) / s_i`` (EMNLP 2021, eq. 6)."""
    if norm.kind == "rms":
        return (x * norm.gain) * norm.inverse[..., None]
    # A fused kernel. It also divides by each vector's own standard deviation, which the factor undoes.
    normed, _, reciprocal = torch.native_layer_norm(x, [x.shape[-1]], norm.gain, None, 1e-30)
    factor = norm.inverse[..., None] / reciprocal
    return normed.mul_(factor) if factor.shape[:-1] == normed.shape[:-1] else normed * factor


def add_shift(norm: NormRecord, x: Tensor) -> Tensor:
    """Add the shift of a norm to the remainder, in place."""
    return x if norm.shift is None else x.add_(norm.shift)


def row_norms(x: Tensor) -> Tensor:
    """L2 norm over the last dimension, in float64 where float32 squares would underflow."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    if x.dtype == torch.float32 and x.device.type != "mps":
        tiny = norms < 1e-15
        if bool(tiny.any()):
            norms[tiny] = torch.linalg.vector_norm(x[tiny].to(torch.float64), dim=-1).to(x.dtype)
    return norms


@lru_cache(maxsize=8)
def probe_direction(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(d,): a fixed Gaussian direction. The component of an error e along it estimates ``||e||``."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
