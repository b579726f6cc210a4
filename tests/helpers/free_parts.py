"""How a tensor inside a layer is divided among the input tokens: the states of `free_rules`, and the two divisions that
are not a matter of applying one operation to every part, integrated gradients and the values of an attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

PANELS, NODES = 4, 32  # of the Gauss-Legendre rules along a path


class UntraceableError(Exception):
    """The rules do not say what the input tokens contribute."""


@dataclass
class Run:
    """One call of a layer."""

    columns: int  # input tokens
    hold_gates: bool = True  # on what an attention returns
    own_biases: bool = True  # the bias inside a value belongs to the value's token, otherwise to the rest
    path: list[str] = field(default_factory=list)  # the modules being called, the innermost last
    single: bool = False  # something with parts was computed in float32
    choices: list[Tensor] = field(default_factory=list)  # indices that topk returned

    linear_gates: bool = False  # a product of two linear tensors may be a gate, see `free_rules.gate_of_own_tokens`
    recurrent: bool = False  # float32 errors have been summed over tokens

    @property
    def rounding(self) -> float:
        """How far the parts may be from the model's own tensor, relative to the largest."""
        return 1e-5 if self.recurrent else 1e-6 if self.single else 1e-12

    def place(self, func: Any) -> str:
        return f"{func} in {(self.path and self.path[-1]) or 'the layer itself'}"


@dataclass(eq=False)
class Linear:
    """value = sum_j part_j + rest."""

    pieces: list[Tensor]  # one part for each input token, then the rest
    depth: int = 0  # attentions passed through
    multiple_of: Linear | None = None  # of which it is a constant multiple, elementwise

    @property
    def root(self) -> Linear:
        return self if self.multiple_of is None else self.multiple_of.root

    @property
    def total(self) -> Tensor:
        return torch.stack(self.pieces).sum(0)

    @property
    def is_own(self) -> bool:
        """Every place has parts of at most one token."""
        return bool((torch.stack([part != 0 for part in self.pieces[:-1]]).sum(0) <= 1).all())

    @property
    def constant(self) -> bool:
        return not any(bool(part.any()) for part in self.pieces[:-1])


@dataclass(eq=False)
class Function:
    """value = call(*totals of the bases), elementwise; all bases have the shape of the value."""

    bases: tuple[Linear, ...]
    call: Callable[..., Tensor]
    nonlinear: bool
    kinks: tuple[tuple[Linear, float], ...] | None  # bases and the values where the function bends; None if unknown

    @property
    def depth(self) -> int:
        return max(base.depth for base in self.bases)

    @cached_property
    def linear(self) -> Linear:
        return split(self)


@dataclass(eq=False)
class Held:
    """A constant that the forward pass made of the tokens."""

    weights: bool = False  # by a softmax


@dataclass(eq=False)
class Broken:
    """Without parts; `reason` says why."""

    reason: str


State = Linear | Function | Held | Broken


def split(function: Function) -> Linear:
    """Integrated gradients from zero, all pieces of all bases scaled together: piece c_p of base z_p contributes
    c_p * integral_0^1 dF/dz_p(t z) dt, and F(0) goes to the rest."""
    z = [base.total for base in function.bases]
    with enable_reentrant_dispatch(), torch.enable_grad():
        slopes = [secant(function.call, z[0])] if len(z) == 1 else mean_slopes(function, z)
    pieces = [
        torch.stack([slope * one for slope, one in zip(slopes, ones, strict=True)]).sum(0)
        for ones in zip(*(base.pieces for base in function.bases), strict=True)
    ]
    pieces[-1] = pieces[-1] + function.call(*(torch.zeros_like(one) for one in z))
    return Linear(pieces, function.depth)


def secant(call: Callable[..., Tensor], a: Tensor) -> Tensor:
    """integral_0^1 g'(t a) dt = (g(a) - g(0)) / a, and g'(0) at a = 0."""
    zero = torch.zeros_like(a).requires_grad_()
    at_zero = call(zero)
    (slope,) = torch.autograd.grad(at_zero.sum(), zero)
    return torch.where(a == 0, slope, (call(a) - at_zero.detach()) / torch.where(a == 0, 1, a)).detach()


def mean_slopes(function: Function, z: list[Tensor]) -> list[Tensor]:
    """integral_0^1 dF/dz_p(t z) dt for each p, by Gauss-Legendre rules on panels that end where F bends."""
    ends = [torch.full_like(z[0], n / PANELS) for n in range(PANELS + 1)]
    for base, bend in function.kinks or ():
        crossing = bend / base.total
        ends.append(torch.where((crossing > 0) & (crossing < 1), crossing, 1.0))
    edges = torch.stack(ends).sort(0).values
    low, width = edges[:-1, None], edges.diff(dim=0)[:, None]
    rule = np.polynomial.legendre.leggauss(NODES)
    nodes, weights = (torch.from_numpy(one).reshape(-1, *[1] * z[0].dim()) for one in rule)
    t = low + width * (1 + nodes) / 2  # (panels, nodes, ...)
    path = [(t * one).detach().requires_grad_() for one in z]
    slopes = torch.autograd.grad(function.call(*path).sum(), path)
    return [(slope * width * weights / 2).sum((0, 1)).detach() for slope in slopes]


def owned(values: Linear, axis: int) -> Linear:
    """What an attention averages along `axis`: a value belongs to its token, bias and all, as in the papers.

    Only if each place along the axis has parts of one token, and no two places have parts of the same; otherwise, as
    where experts are averaged, the rest stays the rest.
    """
    parts = torch.stack(values.pieces[:-1]).movedim(axis + 1, 1)  # (columns, keys, (batch,) d)
    mine = (parts != 0).any(-1, keepdim=True)
    if bool((mine.sum(0) > 1).any()) or bool((mine.sum(1) > 1).any()):
        return values
    rest = values.pieces[-1].movedim(axis, 0)
    pieces = [*(parts + rest * mine), rest * ~mine.any(0)]
    return Linear([piece.movedim(0, axis) for piece in pieces], values.depth)
