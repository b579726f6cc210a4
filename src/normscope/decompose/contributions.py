"""The state that walks through a layer: contributions c_ij of input j to output i, and the bias remainder b_i.

At every point ``sum_j c_ij + b_i`` is the vector that the model itself computed. The diagonal ``c_ii`` and the sum of
the others are kept as vectors; the off-diagonal contributions are kept in one of two forms:

- `Factored`: ``c_ij = scale_i * view(sum_h weights_ijh f_jh)`` for j != i, where ``f_jh = values_jh matrix_h`` and
  `view` is what norms have done since (subtract the mean, multiply by a gain). Nothing of size n x n x d exists.
- `Rows`: after a feed-forward gate, a recipe that produces contributions block by block (`feed_forward.stream`).

g items, j columns, R rows (output positions), H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from normscope.records import FeedForwardRecord, NormRecord


@dataclass(frozen=True)
class Mixture:
    """The output of an attention: ``sum_h weights_jhi values_jh matrix_h``, without the diagonal j = i."""

    weights: Tensor  # (g, j, H, R), zero at j = the row's own position; any strides
    own_weights: Tensor  # (g, R, H): what stood there
    values: Tensor  # (g, j, H, d_h)
    matrix: Tensor  # (H, d_h, d)
    probed: Tensor  # (H + 1, g, j, d): f_jh = values_jh matrix_h, and after the heads the `probe`

    @property
    def vectors(self) -> Tensor:
        """(g, j, H, d): f_jh."""
        return self.probed[:-1].permute(1, 2, 0, 3)


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
        term = self
        if self.gain is not None:  # a second norm: fold the first into the matrix
            old = self.mixture
            folded = replace(old, matrix=self.view(old.matrix), probed=self.view(old.probed))
            term = Term(folded, self.scale)
        scale = norm.inverse if term.scale is None else term.scale * norm.inverse
        return Term(term.mixture, scale, norm.kind == "layer", norm.gain)


@dataclass(frozen=True)
class Factored:
    term: Term
    split: Tensor  # (2, g, R, d): c_ii, and the sum of the c_ij with j != i
    bias: Tensor  # (g, R, d): b_i, or (1, 1, d) while it is the same for all

    @property
    def own(self) -> Tensor:
        return self.split[0]

    def normed(self, norm: NormRecord) -> Factored:
        bias = with_shift(norm, apply_norm(norm, self.bias))
        return Factored(self.term.normed(norm), apply_norm(norm, self.split), bias)

    def plus_input(self, x: Tensor) -> Factored:
        """The residual connection around an attention that started from x: only the diagonal grows."""
        split = torch.empty_like(self.split)
        torch.add(self.split[0], x, out=split[0])
        split[1] = self.split[1]
        return replace(self, split=split)


@dataclass(frozen=True)
class Rows:
    """``c_ij = steps(gate_i * (source c_ij W_1) W_2)``, produced block by block by `feed_forward.stream`."""

    source: Factored
    record: FeedForwardRecord
    gate: Tensor  # (g, R, d_ff)
    lifted: (
        Tensor | None
    )  # (H, d_h, d_ff): the term's matrix times W_1, where that is cheaper than every vector times W_1
    own: Tensor  # (g, R, d)
    bias: Tensor  # (g, R, d)
    steps: tuple[NormRecord | Factored, ...] = ()  # a norm to pass, or a state to add

    def normed(self, norm: NormRecord) -> Rows:
        return replace(
            self,
            own=apply_norm(norm, self.own),
            bias=with_shift(norm, apply_norm(norm, self.bias)),
            steps=(*self.steps, norm),
        )

    def plus(self, state: Factored) -> Rows:
        """The residual connection around the feed-forward block."""
        return replace(self, own=self.own + state.own, bias=self.bias + state.bias, steps=(*self.steps, state))


def apply_norm(norm: NormRecord, x: Tensor) -> Tensor:
    """The norm with its statistic frozen, without its shift: ``gain * (x - mean x) / s_i`` (EMNLP 2021, eq. 6)."""
    if norm.kind == "rms":
        return (x * norm.gain) * norm.inverse[..., None]
    # One fused pass: layer_norm also divides by each vector's own deviation, which is taken back.
    normed, _, reciprocal = torch.native_layer_norm(x, [x.shape[-1]], norm.gain, None, 1e-30)
    return normed * (norm.inverse[..., None] / reciprocal)


def with_shift(norm: NormRecord, x: Tensor) -> Tensor:
    return x if norm.shift is None else x + norm.shift


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
