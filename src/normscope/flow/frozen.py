"""A model frozen at one input: every layer as the affine map that it was there.

Attention weights, norm statistics and activation gates are held at what the forward pass made of them; what is left is
linear in the hidden states. A map acts on states ``X`` (n, sources, d), one vector for each token and each source of
information, so that ``sum over sources = the model's own vectors`` stays true at every step when one source, the
remainder, takes all constants. Each map has an adjoint, which takes a direction ``G`` (n, d) from behind it to
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from normscope.decompose.activations import Gate
from normscope.decompose.feed_forward import gated_constant, gated_unit, projections_of
from normscope.decompose.state import GatedUnit
from normscope.models.scopes import Step
from normscope.tracing.records import AttentionRecord, FeedForwardRecord, LayerRecord, NormRecord, Record, ScaleRecord


class Map(Protocol):
    """A component, frozen."""

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor: ...

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """The direction before it, and that in the encoder's states where it reads them."""
        ...

    def at(self, rows: slice) -> Map:
        """What it does to these output tokens."""
        ...

    @property
    def constant(self) -> Tensor | None:
        """(n, d) or (d,): what it puts out whatever comes in."""
        ...


@dataclass(frozen=True)
class FrozenAttention:
    """``y_i = sum_h sum_j alpha^h_ij (x_j W_V^h + b_V^h) W_O^h + b_O``, mixed in the small space of each head."""

    weights: Tensor  # (H, i, j)
    value: Tensor  # (H, d, d_h)
    bias: Tensor | None  # (H, d_h): b_V, which is in the constant too
    matrix: Tensor  # (H, d_h, d)
    constant: Tensor | None  # (n, d)
    cross: bool = False
    shared: int = 1  # heads of the values, each of which serves several of H

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

    def at(self, rows: slice) -> FrozenAttention:
        return replace(self, weights=self.weights[:, rows], constant=_some(self.constant, rows))

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        per_head = torch.einsum("id,hsd->his", G, self.matrix)
        back = self.weights.transpose(1, 2) @ per_head  # (H, j, d_h)
        found = torch.einsum("hjs,hds->jd", back, self.value)
        return (torch.zeros_like(G), found) if self.cross else (found, None)


@dataclass(frozen=True)
class FrozenNorm:
    """``gain * (x - mean x) * inverse_i``, without the mean for "rms"."""

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

    def at(self, rows: slice) -> FrozenNorm:
        return replace(self, inverse=self.inverse[rows])


@dataclass(frozen=True)
class FrozenFeedForward:
    """``sum_k (c_ki * (x W_k)) W_2``: the gates c are those of integrated gradients (or as asked for)."""

    units: tuple[GatedUnit, ...]
    biases: tuple[tuple[Tensor | None, ...], ...]  # (d_ff,) of each unit's projections, which are in the constant too
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

    def at(self, rows: slice) -> FrozenFeedForward:
        units = tuple(
            replace(
                unit,
                coefficients=tuple(c[:, rows] for c in unit.coefficients),
                chosen=None if unit.chosen is None else unit.chosen[:, rows],
            )
            for unit in self.units
        )
        return FrozenFeedForward(units, self.biases, _some(self.constant, rows))


@dataclass(frozen=True)
class FrozenScale:
    """``gain * x``: LayerScale, a multiplier, or an activation held at ``g(a) / a``."""

    gain: Tensor  # (d,) or (n, d)
    constant: Tensor | None = None

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return X * (self.gain if self.gain.dim() == 1 else self.gain[:, None])

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return G * self.gain, None

    def at(self, rows: slice) -> FrozenScale:
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

    def at(self, rows: slice) -> FrozenLinear:
        return self


@dataclass(frozen=True)
class FrozenPool:
    """One vector made of all tokens': weighted sums of their rows, side by side. What a pooler or a head reads."""

    weights: Tensor  # (sums, n)
    constant: Tensor | None = None

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return torch.einsum("sn,nkd->ksd", self.weights, X).flatten(1)[None]

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.weights.t() @ G[0].view(len(self.weights), -1), None

    def at(self, rows: slice) -> FrozenPool:
        return self  # it has one output only


@dataclass(frozen=True)
class FrozenBlock:
    """``y = after(x + sum over branches of their maps one after the other)``."""

    branches: tuple[tuple[Map, ...], ...]
    after: Map | None
    residual: bool = True  # False: a chain behind the last layer


@dataclass(frozen=True)
class FrozenLayer:
    blocks: tuple[FrozenBlock, ...]


def frozen_parts(
    record: LayerRecord, values: Sequence[tuple[Tensor, Tensor | None]], gate: Gate
) -> tuple[Map | None, ...]:
    """The maps of a record of one item, part by part; None is a residual connection's sum. `values` are W_V (H, d, d_h)
    and b_V (H, d_h) of its attentions, in order."""
    given = iter(values)
    return tuple(_part(part, given, gate) for part in record.parts)


def _part(part: Record, values: Iterator[tuple[Tensor, Tensor | None]], gate: Gate) -> Map | None:
    if isinstance(part, AttentionRecord):
        return _attention(part, *next(values))
    if isinstance(part, NormRecord):
        return FrozenNorm(part.kind == "layer", part.inverse[0], part.gain, part.shift)
    if isinstance(part, FeedForwardRecord):
        return frozen_feed_forward(part, gate)
    return FrozenScale(part.gain) if isinstance(part, ScaleRecord) else None


def frozen_layer(steps: Sequence[Step], parts: Sequence[Map | None]) -> FrozenLayer:
    """The layer that these parts, one for each step, make up."""
    blocks: list[FrozenBlock] = []
    branches: list[tuple[Map, ...]] = []
    chain: list[Map] = []
    for step, part in zip(steps, parts, strict=True):
        if step.starts and chain:
            branches.append(tuple(chain))
            chain = []
        if part is None:
            blocks.append(FrozenBlock((*branches, tuple(chain)), None))
            branches, chain = [], []
        elif step.role == "after":
            blocks[-1] = replace(blocks[-1], after=part)
        else:
            chain.append(part)
    return FrozenLayer(tuple(blocks))


def _attention(part: AttentionRecord, value: Tensor, bias: Tensor | None) -> FrozenAttention:
    weights = part.weights[0].clone(memory_format=torch.contiguous_format)
    constant = part.bias
    if bias is not None:  # (H, d): attention rows sum to one, but for sinks
        through = torch.bmm(bias[:, None], part.matrix)[:, 0]
        spread = weights.sum(-1).t() @ through
        constant = spread if constant is None else spread + constant
    return FrozenAttention(weights, value, bias, part.matrix, constant, part.cross, part.values.shape[1])


def frozen_feed_forward(part: FeedForwardRecord, gate: Gate) -> FrozenFeedForward:
    """All units of a feed-forward; their biases and g(0) are its constant."""
    units, biases, constant = [], [], torch.zeros_like(part.output)
    nothing = part.output.new_zeros(1, 1, part.output.shape[-1])
    for unit in part.units:
        made = gated_unit(unit, gate)
        units.append(made)
        biases.append(tuple(projection.bias for projection in projections_of(unit)))
        constant = constant + gated_constant(unit, made, nothing)
    return FrozenFeedForward(tuple(units), tuple(biases), constant[0])


def _some(constant: Tensor | None, rows: slice) -> Tensor | None:
    """The rows of a constant (n, d); one of all rows (d,) stays as it is."""
    return constant if constant is None or constant.dim() == 1 else constant[rows]
