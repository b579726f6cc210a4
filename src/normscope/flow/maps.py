"""A model frozen at one input: every layer as an affine map, and states carried through these maps.

Attention weights, norm statistics and activation gates keep the values of the forward pass; the rest is linear in the
hidden states. A map acts on states ``X`` (n, sources, d): one vector for each token and each source of information. The
sum over the sources equals the model's own vectors at every step if one source, the remainder, receives all constants.
The adjoint of a map takes a direction ``G`` (n, d) in its output to the direction in its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from normscope.decompose.state import GatedUnit
from normscope.tracing.closeness import closeness_misfit

UPCAST = 1e-6  # rounding of a norm that computes in float32 regardless of the model's dtype


class FrozenMap(Protocol):
    """A frozen component."""

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor: ...

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """The direction in its input, and in the encoder's states for cross-attention."""
        ...

    def for_rows(self, rows: slice) -> FrozenMap:
        """The map restricted to some output tokens."""
        ...

    @property
    def constant(self) -> Tensor | None:
        """(n, d) or (d,): the part of the output that does not depend on the input."""
        ...


@dataclass(frozen=True)
class FrozenAttention:
    """``y_i = sum_h sum_j alpha^h_ij (x_j W_V^h + b_V^h) W_O^h + b_O``, mixed in the d_h dimensions of each head."""

    weights: Tensor  # (H, i, j)
    value: Tensor  # (H, d, d_h)
    bias: Tensor | None  # (H, d_h): b_V, also part of the constant
    matrix: Tensor  # (H, d_h, d)
    constant: Tensor | None  # (n, d)
    cross: bool = False
    shared: int = 1  # number of value heads; with grouped queries, fewer than H

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        read = encoder if self.cross else X
        assert read is not None
        return self.mix(self.values(read))

    def values(self, X: Tensor) -> Tensor:
        """(H, j, sources * d_h): the values of (j, sources, d), without their bias. One product for all heads."""
        heads, width, small = self.value.shape
        flat = self.value.transpose(0, 1).reshape(width, heads * small)
        made = (X.reshape(-1, width) @ flat).view(*X.shape[:2], heads, small)
        return made.permute(2, 0, 1, 3).reshape(heads, len(X), -1)

    def mix(self, values: Tensor) -> Tensor:
        """(i, sources, d) from `values`."""
        heads, small, width = self.matrix.shape
        mixed: Tensor = torch.bmm(self.weights, values).unflatten(2, (-1, small))
        return mixed.permute(1, 2, 0, 3).flatten(2) @ self.matrix.reshape(heads * small, width)

    def for_rows(self, rows: slice) -> FrozenAttention:
        return replace(self, weights=self.weights[:, rows], constant=_constant_rows(self.constant, rows))

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        per_head = torch.einsum("id,hsd->his", G, self.matrix)
        back = self.weights.transpose(1, 2) @ per_head  # (H, j, d_h)
        found = torch.einsum("hjs,hds->jd", back, self.value)
        return (torch.zeros_like(G), found) if self.cross else (found, None)


@dataclass(frozen=True)
class FrozenNorm:
    """``gain * (x - mean x) * inverse_i``; RMSNorm does not subtract the mean."""

    centered: bool
    inverse: Tensor  # (n,)
    gain: Tensor  # (d,)
    constant: Tensor | None  # (d,)

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        if self.centered:
            X = X - X.mean(-1, keepdim=True)
        return X * (self.gain * self.inverse[:, None, None])

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        back = G * self.gain * self.inverse[:, None]
        return (back - back.mean(-1, keepdim=True) if self.centered else back), None

    def for_rows(self, rows: slice) -> FrozenNorm:
        return replace(self, inverse=self.inverse[rows])


@dataclass(frozen=True)
class FrozenFeedForward:
    """``sum_k (c_ki * (x W_k)) W_2``: c are the coefficients of the chosen gate."""

    units: tuple[GatedUnit, ...]
    biases: tuple[tuple[Tensor | None, ...], ...]  # (d_ff,) of each unit's projections, also in the constant
    constant: Tensor | None  # (n, d)

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        out = torch.zeros_like(X)
        for unit in self.units:
            rows = slice(None) if unit.chosen is None else unit.chosen[0]
            x = X[rows]
            gated = [(x @ w).mul_(c[0][rows][:, None]) for w, c in zip(unit.weights, unit.coefficients, strict=True)]
            out[rows] += sum(gated[1:], gated[0]) @ unit.out
        return out

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        back = torch.zeros_like(G)
        for unit in self.units:
            hidden = G @ unit.out.t()
            for weight, c in zip(unit.weights, unit.coefficients, strict=True):
                back += (c[0] * hidden) @ weight.t()
        return back, None

    def for_rows(self, rows: slice) -> FrozenFeedForward:
        units = tuple(
            replace(
                unit,
                coefficients=tuple(c[:, rows] for c in unit.coefficients),
                chosen=None if unit.chosen is None else unit.chosen[:, rows],
            )
            for unit in self.units
        )
        return FrozenFeedForward(units, self.biases, _constant_rows(self.constant, rows))


@dataclass(frozen=True)
class FrozenScale:
    """``gain * x``: LayerScale, a multiplier, or an activation frozen at ``g(a) / a``."""

    gain: Tensor  # (d,) or (n, d)
    constant: Tensor | None = None

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return X * (self.gain if self.gain.dim() == 1 else self.gain[:, None])

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return G * self.gain, None

    def for_rows(self, rows: slice) -> FrozenScale:
        return replace(self, gain=self.gain if self.gain.dim() == 1 else self.gain[rows])


@dataclass(frozen=True)
class FrozenLinear:
    """``x W + b``."""

    weight: Tensor  # (d, d')
    constant: Tensor | None  # (d',)

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return X @ self.weight

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return G @ self.weight.t(), None

    def for_rows(self, rows: slice) -> FrozenLinear:
        return self


@dataclass(frozen=True)
class FrozenPool:
    """One vector from all tokens: weighted sums of their rows, concatenated. The input of a pooler or classifier."""

    weights: Tensor  # (sums, n)
    constant: Tensor | None = None

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return torch.einsum("sn,nkd->ksd", self.weights, X).flatten(1)[None]

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.weights.t() @ G[0].view(len(self.weights), -1), None

    def for_rows(self, rows: slice) -> FrozenPool:
        return self  # one output only


@dataclass(frozen=True)
class FrozenBlock:
    """``y = after(x + sum of branches)``; a branch is a chain of maps."""

    branches: tuple[tuple[FrozenMap, ...], ...]
    after: FrozenMap | None
    residual: bool = True  # False: maps after the last layer


@dataclass(frozen=True)
class FrozenLayer:
    """The blocks of one layer, in order."""

    blocks: tuple[FrozenBlock, ...]


@dataclass(frozen=True)
class FrozenStack:
    """One side of a model."""

    side: str
    states: tuple[Tensor, ...]  # (n, d): the input of the first layer, and the output of each layer
    layers: tuple[FrozenLayer, ...]
    tail: tuple[FrozenMap, ...]  # from the last layer to the input of the decoder or head
    real: Tensor  # (n,): False for masked tokens

    @property
    def end(self) -> FrozenBlock:
        """The tail as a block without a residual connection."""
        return FrozenBlock((self.tail,), None, residual=False)


@dataclass(frozen=True)
class FrozenModel:
    """All sides of a model, and its output head if it was frozen too."""

    stacks: tuple[FrozenStack, ...]
    head: tuple[FrozenMap, ...] = ()  # from the output of the last stack to the logits
    logits: Tensor | None = None  # (n or 1, classes or vocabulary), as the model computed them
    notes: tuple[str, ...] = ()  # remarks on the head, shown with the target
    outputs: tuple[str, ...] = ()  # the names of the model's outputs


def _constant_rows(constant: Tensor | None, rows: slice) -> Tensor | None:
    """The rows of a constant (n, d); a constant (d,) is the same for all rows."""
    return constant if constant is None or constant.dim() == 1 else constant[rows]


def norm_misfit(one: FrozenNorm, offset: float, x: Tensor, made: Tensor, tolerance: float) -> float:
    """How far a norm of x (rows, d) is from `made`; equal up to 1. The gain of the norm is a weight plus `offset`."""

    def guess(rows: slice) -> tuple[Tensor, Tensor]:
        found = one.for_rows(rows).forward(x[rows, None], None)[:, 0]
        inverse = one.inverse[rows, None]
        size = x[rows].abs() * inverse
        if one.centered:  # the mean is rounded too, by a fraction of the deviation
            size += x[rows].mean(-1, keepdim=True).abs() * inverse + 1
        size *= one.gain.abs() + offset
        return (found, size) if one.constant is None else (found + one.constant, size + one.constant.abs())

    return closeness_misfit(guess, made, tolerance)


def forward_layer(layer: FrozenLayer, X: Tensor, encoder: Tensor | None = None, remainder: bool = True) -> Tensor:
    """(n, sources, d) after a layer. With `remainder`, the last source receives every constant."""
    for block in layer.blocks:
        X = forward_block(block, X, encoder, remainder)
    return X


def forward_block(block: FrozenBlock, X: Tensor, encoder: Tensor | None, remainder: bool) -> Tensor:
    """(n, sources, d) after a block."""
    total = X if block.residual else None
    for chain in block.branches:
        state = X
        for one in chain:
            state = forward_map(one, state, encoder, remainder)
        total = state if total is None else total + state
    assert total is not None
    return total if block.after is None else forward_map(block.after, total, encoder, remainder)


def forward_map(one: FrozenMap, X: Tensor, encoder: Tensor | None, remainder: bool) -> Tensor:
    """(n, sources, d) after one map; with `remainder`, its constant is added to the last source."""
    made = one.forward(X, encoder)
    if remainder and one.constant is not None:
        made[:, -1] += one.constant
    return made


@dataclass
class BackwardState:
    """A direction on its way back to the input, and the constants passed so far."""

    direction: Tensor  # (n, d)
    encoder: Tensor | None = None  # (n_encoder, d): the direction in the encoder's last states, summed so far
    constants: float = 0.0  # what the constants of the maps passed so far add to the target


def backward_layer(layer: FrozenLayer, state: BackwardState) -> None:
    """Take the direction from the output of a layer to its input."""
    for block in reversed(layer.blocks):
        backward_block(block, state)


def backward_block(block: FrozenBlock, state: BackwardState) -> None:
    """Take the direction from the output of a block to its input."""
    if block.after is not None:
        backward_chain((block.after,), state)
    output, total = state.direction, state.direction if block.residual else None
    for chain in block.branches:
        state.direction = output
        backward_chain(chain, state)
        total = state.direction if total is None else total + state.direction
    assert total is not None
    state.direction = total


def backward_chain(chain: Sequence[FrozenMap], state: BackwardState) -> None:
    """Take the direction from the output of a chain of maps to its input."""
    for one in reversed(chain):
        if one.constant is not None:
            constant = one.constant.expand_as(state.direction)
            state.constants += float((state.direction.double() * constant.double()).sum())
        state.direction, encoder = one.adjoint(state.direction)
        if encoder is not None:
            state.encoder = encoder if state.encoder is None else state.encoder + encoder
