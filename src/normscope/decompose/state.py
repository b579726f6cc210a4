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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from normscope.decompose.scratch import Scratch
from normscope.tracing.records import NormRecord, apply_norm

VECTORS = 2**23  # numbers in the vectors f that are made at a time
BESIDE = 4  # vectors beside those of the heads, see `probed`


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
        step = max(1, VECTORS // (items * (heads + BESIDE) * self.matrix.shape[2]))
        for start in range(0, columns, step):
            js = slice(start, min(start + step, columns))
            yield js, probed(self.values[:, js], self.matrix, self.cross, scratch)

    def vectors(self) -> Tensor:
        """(g, j, H, d): f_jh."""
        if self.whole is not None:
            return self.whole[:-BESIDE].permute(1, 2, 0, 3)
        return torch.einsum("gjhk,hkd->gjhd", self.values, self.matrix)


def probed(values: Tensor, matrix: Tensor, cross: bool, scratch: Scratch) -> Tensor:
    """``f_jh = values_jh matrix_h`` as (H + 4, g, j, d), followed by the `probe`, 1/d, a free place, and zeros,
    which make the number of vectors even: products with 12 and 16 of them take half the time of those with 15."""
    items, columns, heads, _ = values.shape
    width = matrix.shape[2]

    def begin(fresh: Tensor) -> None:
        fresh[heads] = probe(width, values.dtype, values.device)
        fresh[heads + 1] = 1 / width
        fresh[heads + 3] = 0

    name = "cross vectors" if cross else "vectors"
    made = scratch.like(name, (heads + BESIDE, items * columns, width), values, begin)
    torch.bmm(values.flatten(0, 1).transpose(0, 1), matrix, out=made[:heads])
    return made.view(heads + BESIDE, items, columns, width)


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
                whole = torch.cat([self.view(whole[:-BESIDE]), whole[-BESIDE:]])
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
        bias = with_shift(norm, apply_norm(norm, self.bias))
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


def untouched(x: Tensor) -> Factored:
    """The state at the start of a layer: every vector is its own token's, nothing has mixed."""
    return Factored((), x, None, x.new_zeros(1, 1, x.shape[-1]))


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
            bias=with_shift(norm, apply_norm(norm, self.bias)),
            steps=(*self.steps, norm),
        )

    def scaled(self, gain: Tensor) -> Rows:
        """Multiplied by a gain (d,)."""
        return replace(self, own=self.own * gain, bias=self.bias * gain, steps=(*self.steps, gain))

    def plus(self, state: Factored) -> Rows:
        """The residual connection around the feed-forward block."""
        return replace(self, own=self.own + state.own, bias=self.bias + state.bias, steps=(*self.steps, state))


def with_shift(norm: NormRecord, x: Tensor) -> Tensor:
    """The shift of a norm, which goes to the remainder, added in place."""
    return x if norm.shift is None else x.add_(norm.shift)


def reach(weights: Tensor) -> slice:
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
def probe(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(d,) a fixed Gaussian direction: the size of an error e along it estimates ``||e||``."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
