"""The state that walks through a layer: contributions c_ij of input j to output i, and the bias remainder b_i.

At every point ``sum_j c_ij + b_i`` is the vector that the model itself computed. The diagonal ``c_ii`` and the sum of
the others are kept as vectors; the off-diagonal contributions are kept in one of two forms:

- `Factored`: ``c_ij = scale_i * view(sum_h weights_ijh f_jh)`` for j != i, where ``f_jh = values_jh matrix_h`` and
  `view` is what norms have done since (subtract the mean, multiply by a gain): a term. A decoder has two, one over its
  own tokens and one over the encoder's; a layer starts with none. Nothing of size n x n x d exists.
- `Rows`: after a feed-forward gate, a recipe that produces contributions block by block (`feed_forward.stream`).

g items, j columns, R rows (output positions), H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from normscope.tracing.records import AttentionRecord, NormRecord, gather_rows

ValueBias = Literal["token", "remainder"]

VECTOR_LIMIT = 2**23  # numbers in the vectors f that are made at a time
EXTRA_VECTORS = 4  # vectors beside those of the heads, see `probed`


SCRATCH_BLOCK = 31 * 2**20  # bytes


class Scratch:
    """Working memory that is reused layer after layer: named buffers, each overwritten by the next user of its name.

    Fresh large tensors cost a page fault for every 4 kB, more than many of the passes over them.
    """

    def __init__(self) -> None:
        # Freeing one block of this size raises glibc's mmap threshold (to 32 MB at most), so later blocks are reused.
        torch.empty(SCRATCH_BLOCK, dtype=torch.uint8)
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._taken: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}  # in the last shape asked for

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        begin: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """A tensor of this shape. As long as the name is taken in one shape it holds what was last written there; at
        first it is not initialised, but by `begin`."""
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
        """The same, of the dtype and device of `tensor`."""
        return self.take(name, shape, tensor.dtype, tensor.device, begin)

    def trim(self, limit: int) -> None:
        """Let go of everything if it is more than `limit` bytes."""
        if sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values()) > limit:
            self._buffers.clear()
            self._taken.clear()


@dataclass(frozen=True)
class Mixture:
    """The output of an attention: ``sum_h weights_jhi values_jh matrix_h``, without the diagonal j = i."""

    weights: Tensor  # (g, j, H, R), zero at j = the row's own position; any strides
    own_weights: Tensor  # (g, R, H): what stood there; zeros where the columns are the encoder's
    values: Tensor  # (g, j, H, d_h)
    matrix: Tensor  # (H, d_h, d)
    whole: Tensor | None  # (H + 4, g, j, d): all of `probed`, where that is not too much; overwritten by `reduce`
    cross: bool = False
    sinks: bool = False

    def blocks(self, scratch: Scratch) -> Iterator[tuple[slice, Tensor]]:
        """Some columns at a time, with their `probed` vectors."""
        if self.whole is not None:
            yield slice(0, self.values.shape[1]), self.whole
            return
        items, columns, heads, _ = self.values.shape
        step = max(1, VECTOR_LIMIT // (items * (heads + EXTRA_VECTORS) * self.matrix.shape[2]))
        for start in range(0, columns, step):
            js = slice(start, min(start + step, columns))
            yield js, head_vectors(self.values[:, js], self.matrix, self.cross, scratch)

    def vectors(self) -> Tensor:
        """(g, j, H, d): f_jh."""
        if self.whole is not None:
            return self.whole[:-EXTRA_VECTORS].permute(1, 2, 0, 3)
        return torch.einsum("gjhk,hkd->gjhd", self.values, self.matrix)


def head_vectors(values: Tensor, matrix: Tensor, cross: bool, scratch: Scratch) -> Tensor:
    """``f_jh = values_jh matrix_h`` as (H + 4, g, j, d), followed by the `probe`, 1/d, a free place, and zeros,
    which make the number of vectors even: products with 12 and 16 of them take half the time of those with 15."""
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
    """A mixture seen through the norms it has passed since."""

    mixture: Mixture
    scale: Tensor | None = None  # (g, R)
    centered: bool = False
    gain: Tensor | None = None  # (d,)

    def view(self, x: Tensor) -> Tensor:
        """The linear map of the norms passed, without the row scale: (..., d) -> (..., d)."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        return x if self.gain is None else x * self.gain

    def normed(self, norm: NormRecord) -> Term:
        """Behind a norm."""
        term = self
        if norm.kind == "layer" and self.gain is not None:  # a second norm: fold the first into the matrix
            matrix = self.view(self.mixture.matrix)
            whole = self.mixture.whole
            if whole is not None:
                whole = torch.cat([self.view(whole[:-EXTRA_VECTORS]), whole[-EXTRA_VECTORS:]])
            term = Term(replace(self.mixture, matrix=matrix, whole=whole), self.scale)
        scale = norm.inverse if term.scale is None else term.scale * norm.inverse
        return replace(term.scaled(norm.gain), scale=scale, centered=term.centered or norm.kind == "layer")

    def scaled(self, gain: Tensor) -> Term:
        """Multiplied by a gain (d,)."""
        return replace(self, gain=gain if self.gain is None else self.gain * gain)


@dataclass(frozen=True)
class Factored:
    """Contributions as terms over columns, the own part and the remainder."""

    terms: tuple[Term, ...]
    own: Tensor  # (g, R, d): c_ii
    others: Tensor | None  # (g, R, d): the sum of the c_ij with j != i; None without terms
    bias: Tensor  # (g, R, d): b_i, or (1, 1, d) while it is the same for all

    def normed(self, norm: NormRecord) -> Factored:
        """Behind a norm."""
        others = None if self.others is None else apply_norm(norm, self.others)
        bias = add_shift(norm, apply_norm(norm, self.bias))
        return Factored(tuple(term.normed(norm) for term in self.terms), apply_norm(norm, self.own), others, bias)

    def scaled(self, gain: Tensor) -> Factored:
        """Multiplied by a gain (d,)."""
        others = None if self.others is None else self.others * gain
        return Factored(tuple(term.scaled(gain) for term in self.terms), self.own * gain, others, self.bias * gain)

    def plus(self, state: Factored) -> Factored:
        """The sum of two states whose terms are over different columns."""
        both = [one.others for one in (self, state) if one.others is not None]
        others = both[0] + both[1] if len(both) == 2 else both[0] if both else None
        return Factored(self.terms + state.terms, self.own + state.own, others, self.bias + state.bias)


def initial_state(x: Tensor) -> Factored:
    """The state at the start of a layer: every vector is its own token's, nothing has mixed."""
    return Factored((), x, None, x.new_zeros(1, 1, x.shape[-1]))


def decompose_attention(
    record: AttentionRecord, positions: Tensor | None, value_bias: ValueBias, scratch: Scratch
) -> Factored:
    """A fresh state: what came in, its remainder included, is inside the values. b_O goes to the remainder. The
    record's weights may be overwritten.

    `positions` (g, R) are the columns that the rows of the record stand for; None: all, in order. With
    `value_bias="token"` the value bias (and the shift of a norm before it) is part of f, as in the papers (attention
    rows sum to one, so it is spread over j); with "remainder" it goes to b_i.
    """
    weights = record.weights.permute(0, 3, 1, 2)  # (g, j, H, R)
    items, columns, heads, rows = weights.shape
    width = record.matrix.shape[2]
    bias = (record.output.new_zeros(width) if record.bias is None else record.bias)[None, None]
    values = record.values.transpose(1, 2)  # (g, j, heads of the values, d_h)
    if value_bias == "remainder" and record.value_bias is not None:
        values = values - record.value_bias
        each = record.value_bias.repeat_interleave(heads // len(record.value_bias), dim=0)
        constant = torch.bmm(each[:, None], record.matrix)[:, 0]  # (H, d)
        bias = bias + record.weights.sum(-1).transpose(1, 2) @ constant
    if values.shape[2] != heads:
        values = values.repeat_interleave(heads // values.shape[2], dim=2)

    if record.cross:
        own_weights = weights.new_zeros(items, rows, heads)
    else:
        own_weights = own_cells(weights.transpose(1, 2), positions).transpose(1, 2)
        own_weights = own_weights.clone(memory_format=torch.contiguous_format)  # (g, R, H)
        set_own_cells(weights.transpose(1, 2), positions, 0)
    few = items * columns * (heads + EXTRA_VECTORS) * width <= VECTOR_LIMIT
    whole = head_vectors(values, record.matrix, record.cross, scratch) if few else None
    mixture = Mixture(weights, own_weights, values, record.matrix, whole, record.cross, record.sinks)

    own = torch.empty_like(record.output)
    if record.cross:
        own.zero_()
    elif whole is not None and positions is None:
        own_vectors = whole[:heads, :, :rows].flatten(1, 2).transpose(0, 1)  # (g*R, H, d)
        torch.bmm(own_weights.flatten(0, 1)[:, None], own_vectors, out=own.view(items * rows, 1, width))
    else:
        mixed = (own_weights[..., None] * gather_rows(values, positions)[:, :rows]).flatten(2)
        torch.matmul(mixed, record.matrix.flatten(0, 1), out=own)
    return Factored((Term(mixture),), own, torch.sub(record.output, own).sub_(bias), bias)


def own_cells(cells: Tensor, positions: Tensor | None) -> Tensor:
    """(..., j, R) -> (..., R): every row's own column. `positions` None: row and column indices agree."""
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
class GatedUnit:
    """``sum_k coefficient_ki * (c_ij weight_k)``, then W_2: one feed-forward with its activation split."""

    weights: tuple[Tensor, ...]  # (d, d_ff), one for a plain and two for a gated feed-forward
    coefficients: tuple[Tensor, ...]  # (g, R, d_ff)
    out: Tensor  # (d_ff, d)
    chosen: Tensor | None = None  # (g, R): the rows that an expert serves


@dataclass(frozen=True)
class Rows:
    """``c_ij = steps(sum of units(source c_ij))``, produced block by block by `feed_forward.stream`."""

    source: Factored
    units: tuple[GatedUnit, ...]
    own: Tensor  # (g, R, d)
    bias: Tensor  # (g, R, d)
    steps: tuple[NormRecord | Factored | Tensor, ...] = ()  # a norm to pass, a state to add, a gain to multiply with

    def normed(self, norm: NormRecord) -> Rows:
        """Behind a norm."""
        return replace(
            self,
            own=apply_norm(norm, self.own),
            bias=add_shift(norm, apply_norm(norm, self.bias)),
            steps=(*self.steps, norm),
        )

    def scaled(self, gain: Tensor) -> Rows:
        """Multiplied by a gain (d,)."""
        return replace(self, own=self.own * gain, bias=self.bias * gain, steps=(*self.steps, gain))

    def plus(self, state: Factored) -> Rows:
        """The residual connection around the feed-forward block."""
        return replace(self, own=self.own + state.own, bias=self.bias + state.bias, steps=(*self.steps, state))


def apply_norm(norm: NormRecord, x: Tensor) -> Tensor:
    """The norm with its statistic frozen, without its shift: ``gain * (x - mean x) / s_i`` (EMNLP 2021, eq. 6)."""
    if norm.kind == "rms":
        return (x * norm.gain) * norm.inverse[..., None]
    # One fused pass: layer_norm also divides by each vector's own deviation, which is taken back.
    normed, _, reciprocal = torch.native_layer_norm(x, [x.shape[-1]], norm.gain, None, 1e-30)
    factor = norm.inverse[..., None] / reciprocal
    return normed.mul_(factor) if factor.shape[:-1] == normed.shape[:-1] else normed * factor


def add_shift(norm: NormRecord, x: Tensor) -> Tensor:
    """The shift of a norm, which goes to the remainder, added in place."""
    return x if norm.shift is None else x.add_(norm.shift)


def rows_with_weight(weights: Tensor) -> slice:
    """The rows of (tokens, H, R) that have any weight: a causal or local attention leaves many out."""
    touched = weights.amax((0, 1)).nonzero()
    return slice(int(touched[0]), int(touched[-1]) + 1) if len(touched) else slice(0, 0)


def row_norms(x: Tensor) -> Tensor:
    """L2 norm over the last dimension; where float32 squares would underflow, through float64."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    if x.dtype == torch.float32 and x.device.type != "mps":
        tiny = norms < 1e-15
        if bool(tiny.any()):
            norms[tiny] = torch.linalg.vector_norm(x[tiny].to(torch.float64), dim=-1).to(x.dtype)
    return norms


@lru_cache(maxsize=8)
def probe_direction(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(d,) a fixed Gaussian direction: the size of an error e along it estimates ``||e||``."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
