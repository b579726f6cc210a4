"""A model frozen at one input: every layer as an affine map, and states carried through these maps.

Attention weights, norm statistics and activation gates keep the values of the forward pass; the rest is linear in the
hidden states. A map acts on states ``X`` (n, sources, d): one vector for each token and each source of information. The
sum over the sources equals the model's own vectors at every step if one source, the remainder, receives all constants.
The adjoint of a map takes directions ``G`` (..., n, d) in its output, one for each target, to those in its input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from normscope.decompose.activations import Gate, gated_unit, projections_of
from normscope.decompose.state import GatedUnit
from normscope.errors import NormscopeError
from normscope.flow.filters import FrozenFilter
from normscope.tracing.recorded import FrozenWeights, row_blocks, unit_rows
from normscope.tracing.records import Unit

BLOCK_UNITS = 2**19  # hidden units of a feed-forward whose coefficients are computed at a time
UPCAST = 1e-6  # rounding of a norm that computes in float32 regardless of the model's dtype


class FrozenMap(Protocol):
    """A frozen component."""

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor: ...

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """The directions (..., n, d) in its input, and in the encoder's states for cross-attention."""
        ...

    def for_rows(self, rows: slice | Tensor) -> FrozenMap:
        """The map restricted to some output tokens: a slice, or their positions."""
        ...

    @property
    def constant(self) -> Tensor | None:
        """(n, d) or (d,): the part of the output that does not depend on the input."""
        ...


@dataclass(frozen=True)
class FrozenAttention:
    """``y_i = sum_h gate^h_i * (sum_j alpha^h_ij (s^h_j x_j W_V^h + b_V^h)) W_O^h + b_O``, mixed in the d_h dimensions
    of each head; s is `read_scale`."""

    weights: FrozenWeights  # (H, i, j)
    value: Tensor  # (H, d, d_h)
    bias: Tensor | None  # (H, d_h): b_V, also part of the constant
    matrix: Tensor  # (H, d_h, d)
    constant: Tensor | None  # (n, d)
    cross: bool = False
    shared: int = 1  # number of value heads; with grouped queries, fewer than H
    gate: Tensor | None = None  # (H, i, d_h)
    read_scale: Tensor | None = None  # (H or 1, j): 1 / s_j of norms on the way to the values
    filter: FrozenFilter | None = None  # of the values

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        read = encoder if self.cross else X
        assert read is not None
        return self.mix(self.values(read))

    def values(self, X: Tensor) -> Tensor:
        """(H, j, sources * d_h): the values that are mixed of (j, sources, d), without their bias."""
        made = self.projected(X)
        return made if self.filter is None else self.filter.forward(made)

    def projected(self, X: Tensor) -> Tensor:
        """The values of some tokens before the filter. One product for all heads."""
        heads, width, small = self.value.shape
        flat = self.value.transpose(0, 1).reshape(width, heads * small)
        made = (X.reshape(-1, width) @ flat).view(*X.shape[:2], heads, small)
        found = made.permute(2, 0, 1, 3).reshape(heads, len(X), -1)
        return found if self.read_scale is None else found * self.read_scale[..., None]

    def mix(self, values: Tensor) -> Tensor:
        """(i, sources, d) from `values`."""
        heads, small, width = self.matrix.shape
        mixed: Tensor = torch.bmm(self.weights.all, values).unflatten(2, (-1, small))
        if self.gate is not None:
            mixed = mixed * self.gate[:, :, None]
        return mixed.permute(1, 2, 0, 3).flatten(2) @ self.matrix.reshape(heads * small, width)

    def for_rows(self, rows: slice | Tensor) -> FrozenAttention:
        gate = None if self.gate is None else self.gate[:, rows]
        constant = _constant_rows(self.constant, rows)
        return replace(self, weights=self.weights.for_rows(rows), constant=constant, gate=gate)

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        heads, width, small = self.value.shape
        every = G.reshape(-1, *G.shape[-2:])  # (targets, i, d)
        outward = self.matrix.reshape(heads * small, -1).t()
        # With read_scale, the heads that share values may still divide them by statistics of their own.
        shared = self.shared if self.read_scale is None or len(self.read_scale) == 1 else heads
        back = G.new_zeros(shared, self.weights.columns, len(every) * small)
        for rows, weights in self.weights.blocks(used_rows(every)):
            # One product with the weights for all targets and the heads that share values.
            per_head = (every[:, rows] @ outward).unflatten(2, (heads, small))  # (targets, i, H, d_h)
            if self.gate is not None:
                per_head = per_head * self.gate[:, rows].transpose(0, 1)
            grouped = per_head.permute(2, 1, 0, 3).flatten(2).reshape(shared, -1, len(every) * small)
            columns = weights.shape[2]
            back[:, :columns].baddbmm_(weights.reshape(shared, -1, columns).transpose(1, 2), grouped)
        back = back if self.filter is None else self.filter.adjoint(back)
        if self.read_scale is not None:
            back = back * self.read_scale[..., None]
        by_target = back.unflatten(2, (-1, small)).permute(2, 1, 0, 3).flatten(2)  # (targets, j, shared * d_h)
        values = self.value[:: heads // shared].transpose(1, 2).reshape(-1, width)
        found = (by_target @ values).reshape(*G.shape[:-2], -1, width)
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

    def for_rows(self, rows: slice | Tensor) -> FrozenNorm:
        return replace(self, inverse=self.inverse[rows])


@dataclass(frozen=True)
class FrozenFeedForward:
    """``sum_k (c_ki * (x W_k)) W_2``: c are the coefficients of the gate, computed some rows at a time."""

    parts: tuple[Unit, ...]  # of one item
    gate: Gate
    constant: Tensor | None  # (n, d)

    @cached_property
    def units(self) -> tuple[GatedUnit, ...]:
        """The coefficients of all rows, kept from the first use on."""
        with torch.no_grad():  # an activation may have parameters
            return tuple(gated_unit(part, self.gate) for part in self.parts)

    @property
    def biases(self) -> tuple[tuple[Tensor | None, ...], ...]:
        """(d_ff,) of each unit's projections, also in the constant."""
        return tuple(tuple(projection.bias for projection in projections_of(part)) for part in self.parts)

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        out = torch.zeros_like(X)
        for unit in self.units:
            rows = slice(None) if unit.chosen is None else unit.chosen[0]
            x = X[rows]
            gated = [(x @ w).mul_(c[0][rows][:, None]) for w, c in zip(unit.weights, unit.coefficients, strict=True)]
            out[rows] += sum(gated[1:], gated[0]) @ unit.out
        return out

    @torch.no_grad()
    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        every = G.reshape(-1, *G.shape[-2:])  # (targets, n, d)
        back = torch.zeros_like(every)
        used = used_rows(every)
        widest = max(part.out.shape[0] for part in self.parts)
        for block in row_blocks(used.stop - used.start, BLOCK_UNITS // (widest * len(every))):
            rows = slice(used.start + block.start, used.start + block.stop)
            for unit in (gated_unit(unit_rows(part, rows), self.gate) for part in self.parts):
                chosen = slice(None) if unit.chosen is None else unit.chosen[0]
                hidden = every[:, rows][:, chosen] @ unit.out.t()
                for weight, c in zip(unit.weights, unit.coefficients, strict=True):
                    back[:, rows][:, chosen] += (c[0][chosen] * hidden) @ weight.t()
        return back.view(G.shape), None

    def for_rows(self, rows: slice | Tensor) -> FrozenFeedForward:
        parts = tuple(unit_rows(part, rows) for part in self.parts)
        return FrozenFeedForward(parts, self.gate, _constant_rows(self.constant, rows))


@dataclass(frozen=True)
class FrozenScale:
    """``gain * x``: LayerScale, a multiplier, or an activation frozen at ``g(a) / a``."""

    gain: Tensor  # (d,) or (n, d)
    constant: Tensor | None = None

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return X * (self.gain if self.gain.dim() == 1 else self.gain[:, None])

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return G * self.gain, None

    def for_rows(self, rows: slice | Tensor) -> FrozenScale:
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

    def for_rows(self, rows: slice | Tensor) -> FrozenLinear:
        return self


@dataclass(frozen=True)
class FrozenPool:
    """One vector from all tokens: weighted sums of their rows, concatenated. The input of a pooler or classifier."""

    weights: Tensor  # (sums, n)
    constant: Tensor | None = None

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return torch.einsum("sn,nkd->ksd", self.weights, X).flatten(1)[None]

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.weights.t() @ G[..., 0, :].unflatten(-1, (len(self.weights), -1)), None

    def for_rows(self, rows: slice | Tensor) -> FrozenPool:
        return self  # one output only


@dataclass(frozen=True)
class FrozenRows:
    """A map after the last layer that is known at some tokens only."""

    map: FrozenMap
    positions: Tensor  # (rows,), ascending

    @property
    def constant(self) -> Tensor | None:
        return self.map.constant

    def forward(self, X: Tensor, encoder: Tensor | None) -> Tensor:
        return self.map.forward(X, encoder)

    def adjoint(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.map.adjoint(G)

    def for_rows(self, rows: slice | Tensor) -> FrozenMap:
        assert isinstance(rows, Tensor)
        found = torch.searchsorted(self.positions, rows)
        if not torch.equal(self.positions[found.clamp_max(len(self.positions) - 1)], rows):
            raise NormscopeError("A target reads logits that were not computed. Run the flow for this target again.")
        return self.map.for_rows(found)


@dataclass(frozen=True)
class FrozenBlock:
    """``y = after(skip * x + sum of branches)``; a branch is a chain of maps."""

    branches: tuple[tuple[FrozenMap, ...], ...]
    after: FrozenMap | None
    residual: bool = True  # False: maps after the last layer
    skip: Tensor | None = None  # (d,)

    def kept(self, x: Tensor) -> Tensor:
        """What the residual connection keeps of x (..., d)."""
        return x if self.skip is None else x * self.skip


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
    added: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> (n, d): what pictures add to its input

    @property
    def end(self) -> FrozenBlock:
        """The tail as a block without a residual connection."""
        return FrozenBlock((self.tail,), None, residual=False)

    @property
    def end_states(self) -> Tensor:
        """(n, d): the states after the tail."""
        return forward_block(self.end, self.states[-1][:, None], None, True)[:, 0]


@dataclass(frozen=True)
class FrozenModel:
    """All sides of a model, and its output head if it was frozen too."""

    stacks: tuple[FrozenStack, ...]
    head: tuple[FrozenMap, ...] = ()  # from the output of the last stack to the logits
    logits: Tensor | None = None  # (n or 1, classes or vocabulary), as the model computed them
    notes: tuple[str, ...] = ()  # remarks on the head, shown with the target
    outputs: tuple[str, ...] = ()  # the names of the model's outputs


def used_rows(every: Tensor) -> slice:
    """The range of rows of directions (targets, n, d) that are not all zero."""
    used = every.abs().amax((0, 2)).nonzero()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)


def _constant_rows(constant: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    """The rows of a constant (n, d); a constant (d,) is the same for all rows."""
    return constant if constant is None or constant.dim() == 1 else constant[rows]


def forward_layer(layer: FrozenLayer, X: Tensor, encoder: Tensor | None = None, remainder: bool = True) -> Tensor:
    """(n, sources, d) after a layer. With `remainder`, the last source receives every constant."""
    for block in layer.blocks:
        X = forward_block(block, X, encoder, remainder)
    return X


def forward_block(block: FrozenBlock, X: Tensor, encoder: Tensor | None, remainder: bool) -> Tensor:
    """(n, sources, d) after a block."""
    total = block.kept(X) if block.residual else None
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
    """Directions on their way back to the input, and the constants passed so far. The leading dimensions (...) are
    those of the targets, none for a single one."""

    direction: Tensor  # (..., n, d)
    constants: Tensor  # (...), float64: what the constants of the maps passed so far add to each target
    encoder: Tensor | None = None  # (..., n_encoder, d): the directions in the encoder's last states, summed so far


def start_backward(direction: Tensor) -> BackwardState:
    """The state at the output, before any map has been passed."""
    return BackwardState(direction, direction.new_zeros(direction.shape[:-2], dtype=torch.float64))


def backward_layer(layer: FrozenLayer, state: BackwardState) -> None:
    """Take the directions from the output of a layer to its input."""
    for block in reversed(layer.blocks):
        backward_block(block, state)


def backward_block(block: FrozenBlock, state: BackwardState) -> None:
    """Take the directions from the output of a block to its input."""
    if block.after is not None:
        backward_chain((block.after,), state)
    output, total = state.direction, block.kept(state.direction) if block.residual else None
    for chain in block.branches:
        state.direction = output
        backward_chain(chain, state)
        total = state.direction if total is None else total + state.direction
    assert total is not None
    state.direction = total


def backward_chain(chain: Sequence[FrozenMap], state: BackwardState) -> None:
    """Take the directions from the output of a chain of maps to its input."""
    for one in reversed(chain):
        if one.constant is not None:
            added = (state.direction * one.constant).sum((-2, -1), dtype=torch.float64)
            state.constants = state.constants + added
        state.direction, encoder = one.adjoint(state.direction)
        if encoder is not None:
            state.encoder = encoder if state.encoder is None else state.encoder + encoder
