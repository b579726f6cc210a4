"""Tensors that know which input token they come from: the rules of `free_oracle`, one for each kind of torch operation.

A layer's own code runs on `Traced` tensors, and every operation that reaches PyTorch's dispatcher arrives in `trace`.
A traced tensor is one of four things:

- `Linear`: value = sum_j part_j + rest, one part for each input token j, the rest from biases;
- `Function`: an elementwise function F of linear tensors (bases), not yet split among the tokens, because it may become
  part of a larger function: x * sigmoid(x), g(a) * u. An operation that is not elementwise splits it (`split`);
- `Held`: what the forward pass made of the tokens and the decomposition keeps constant: softmax, norm statistics,
  routing;
- `Broken`: no rule splits it, as the scores q k^T. That is an error only if it reaches the layer's output.

Parts are float64 whatever the layer computes in: a cast leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves, tree_map

PANELS, NODES = 4, 32  # of the Gauss-Legendre rules along a path


class Untraceable(Exception):
    """The contributions of the input tokens are not defined by the rules."""


@dataclass
class Run:
    """One call of a layer."""

    columns: int  # input tokens
    hold_gates: bool = True
    path: list[str] = field(default_factory=list)  # the modules being called, the innermost last
    single: bool = False  # something was computed in float32

    def where(self, func: Any) -> str:
        return f"{func} in {self.path[-1] or 'the layer itself' if self.path else 'the layer itself'}"


@dataclass(eq=False)
class Linear:
    """The parts, then the rest."""

    pieces: list[Tensor]
    depth: int = 0  # attentions passed through

    @property
    def total(self) -> Tensor:
        return torch.stack(self.pieces).sum(0)

    @property
    def constant(self) -> bool:
        return not any(bool(piece.any()) for piece in self.pieces[:-1])


@dataclass(eq=False)
class Function:
    """call(*totals of the bases), all of one shape."""

    bases: tuple[Linear, ...]
    call: Callable[..., Tensor]
    nonlinear: bool
    kinks: tuple[tuple[Linear, float], ...] | None  # a base and the value at which F bends there; None if unknown

    @property
    def depth(self) -> int:
        return max(base.depth for base in self.bases)


@dataclass(eq=False)
class Held:
    weights: bool = False  # made by a softmax


@dataclass(eq=False)
class Broken:
    reason: str


State = Linear | Function | Held | Broken


class Traced(Tensor):
    """A tensor with the model's own value and its state."""

    value: Tensor
    state: State
    run: Run
    mark: str  # "exp", or "sum of exp": a softmax in the making

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor, state: State, run: Run, mark: str = "") -> Traced:
        self = Tensor._make_wrapper_subclass(cls, value.shape, strides=value.stride(), dtype=value.dtype)
        self.value, self.state, self.run, self.mark = value, state, run, mark
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {type(self.state).__name__})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return trace(func, args, kwargs or {})


# The operations, by name, without the underscore of the in-place forms.

SOFTMAX = {"_softmax", "_safe_softmax"}
HELD = SOFTMAX | {
    "_log_softmax", "logsumexp", "topk", "sort", "max", "min", "amax", "amin", "rsqrt", "sqrt", "var", "std",
    "linalg_vector_norm",
}  # fmt: skip
ELEMENTWISE = {  # nonlinear functions, and where those that bend do so
    **dict.fromkeys(
        ("gelu", "silu", "sigmoid", "tanh", "mish", "softplus", "erf", "exp", "expm1", "log1p", "pow", "sin", "cos"), ()
    ),
    **dict.fromkeys(("relu", "leaky_relu", "elu", "celu", "selu", "abs"), (0.0,)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), (-3.0, 3.0)),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "hardtanh"), None),  # at their arguments
}
ARITHMETIC = {"add", "sub", "rsub", "neg", "mul", "div"}
SAME = {"_to_copy", "clone", "detach", "alias", "lift_fresh"}
MADE = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
SUMMANDS: dict[str, tuple[int, ...]] = {  # linear in the arguments at these positions taken together
    **dict.fromkeys(SAME, (0,)),
    **dict.fromkeys(
        (
            "view", "_unsafe_view", "_reshape_alias", "permute", "transpose", "t", "expand", "slice", "select", "squeeze",
            "unsqueeze", "split", "split_with_sizes", "unbind", "cat", "stack", "neg", "sum", "mean", "index", "gather",
            "index_select", "repeat", "flip", "roll", "tril", "triu", "cumsum", "diagonal",
        ),
        (0,),
    ),
    **dict.fromkeys(("add", "sub", "rsub", "copy"), (0, 1)),
    **dict.fromkeys(("masked_fill", "index_put", "constant_pad_nd"), (0, 2)),
    **dict.fromkeys(("index_add", "scatter", "scatter_add"), (0, 3)),
    "where": (1, 2),
}  # fmt: skip
FACTORS: dict[
    str, tuple[int, int]
] = {  # products: linear in one factor if the other is held, and in a bias before them
    **dict.fromkeys(("mul", "div", "mm", "bmm", "mv"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
    "convolution": (0, 1),
}


def trace(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the value as the model does, and what becomes of the parts."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Traced)]
    run = tensors[0].run
    for tensor in tensors:
        assert_complete(tensor, 1e-4, run.where(func))  # fails where memory is shared in a way that the rules miss
    name = func.overloadpacket.__name__
    in_place = name.endswith("_")
    if in_place and not isinstance(args[0], Traced):
        raise Untraceable(f"{run.where(func)} writes into a tensor without parts")
    call = Call(run, func, name.rstrip("_"), args, kwargs)
    mark = call.mark()
    state = Held(weights=True) if mark == "softmax" else Held() if mark == "sum of exp" else call.state()
    out = func(*plain(args), **plain(kwargs))
    if in_place:
        args[0].state, args[0].mark = state, mark
        return args[0]
    if isinstance(out, tuple | list):
        states = state if isinstance(state, list) else [state] * len(out)
        return type(out)(wrap(one, its, run, mark) for one, its in zip(out, states, strict=True))
    if isinstance(out, Tensor) and out.dtype == torch.float32:
        run.single = True
    return wrap(out, state, run, mark)


def wrap(value: Any, state: State, run: Run, mark: str) -> Any:
    """Numbers, indices and conditions are not traced."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return Traced(value, state, run, mark) if floating else value


def plain(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.value if isinstance(leaf, Traced) else leaf, tree)


def double(leaf: Any) -> Any:
    """A constant as the parts meet it."""
    leaf = leaf.value if isinstance(leaf, Traced) else leaf
    return leaf.detach().double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def linear(tensor: Traced) -> Linear:
    assert isinstance(tensor.state, Linear | Function)
    return tensor.state if isinstance(tensor.state, Linear) else split(tensor.state)


def constant(value: Tensor, run: Run) -> Linear:
    rest = value.double()
    return Linear([torch.zeros_like(rest) for _ in range(run.columns)] + [rest.clone()])


def assert_complete(tensor: Traced, tolerance: float, where: str) -> None:
    """sum_j part_j + rest = the model's own tensor, up to `tolerance` of the largest piece."""
    if not isinstance(tensor.state, Linear):
        return
    value, total = tensor.value.double(), tensor.state.total
    size = max(
        float(piece[piece.isfinite()].abs().amax()) if piece.isfinite().any() else 0.0 for piece in tensor.state.pieces
    )
    if not torch.allclose(total, value, rtol=0, atol=tolerance * max(size, 1e-30), equal_nan=True):
        raise Untraceable(f"the parts do not sum to the tensor at {where}")


def live(arg: Any) -> bool:
    """A factor that depends on the tokens and is not held."""
    if not isinstance(arg, Traced) or isinstance(arg.state, Held):
        return False
    return not (isinstance(arg.state, Linear) and arg.state.constant)


@dataclass
class Call:
    """One operation."""

    run: Run
    func: Any
    name: str  # without the underscore of the in-place form
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def mark(self) -> str:
        """A softmax spelled out: exp, its sum, and their quotient."""
        marks = [arg.mark if isinstance(arg, Traced) else "" for arg in self.args[:2]]
        if self.name == "exp":
            return "exp"
        if marks[0] == "exp" and self.name == "sum":
            return "sum of exp"
        if marks == ["exp", "sum of exp"] and self.name == "div":
            return "softmax"
        return marks[0] if self.name in SAME or (self.name in ("mul", "masked_fill") and marks[0] == "exp") else ""

    def state(self) -> State | list[State]:
        """The rule that applies."""
        states = [leaf.state for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Traced)]
        power = self.args[1] if self.name == "pow" else 1
        if self.name in HELD or not (isinstance(power, int | float) and power > 0 and power == int(power)):
            return Held(weights=self.name in SOFTMAX or any(isinstance(one, Held) and one.weights for one in states))
        if self.name in MADE:
            return constant(self.func(*plain(self.args), **plain(self.kwargs)), self.run)
        if all(isinstance(one, Held) for one in states):
            return Held(weights=any(one.weights for one in states if isinstance(one, Held)))
        broken = [one for one in states if isinstance(one, Broken)]
        if broken:
            return broken[0]
        if self.name in FACTORS:
            return self.product()
        if self.name == "native_layer_norm":
            return self.layer_norm()
        first = self.args[0]
        if self.name == "reciprocal" and isinstance(first.state, Linear):
            return Held()
        if self.name in ELEMENTWISE or self.name == "reciprocal":
            return self.compose()
        if self.name in SAME and isinstance(first.state, Function):
            return first.state
        if self.name in ("add", "sub", "rsub", "neg") and self.is_function():
            return self.compose()
        if self.name in SUMMANDS:
            return self.piecewise(SUMMANDS[self.name])
        return self.broken("there is no rule for")

    def broken(self, why: str) -> Broken:
        return Broken(f"{why} {self.run.where(self.func)}")

    # elementwise functions

    def is_function(self) -> bool:
        """A sum with a function, or with a number: (u + 1) * g(a) is a function of u, whereas biases are tensors."""
        traced = [arg for arg in self.args if isinstance(arg, Traced)]
        shapes = {tuple(arg.shape) for arg in self.args if isinstance(arg, Tensor) and arg.dim()}
        functions = any(isinstance(arg.state, Function) for arg in traced)
        number = self.name != "neg" and not isinstance(self.args[1], Tensor)
        return (functions or number) and len(shapes) == 1 and not any(isinstance(arg.state, Held) for arg in traced)

    def compose(self) -> State:
        """This operation as a function of the bases of its arguments."""
        pure = getattr(getattr(torch.ops.aten, self.name), self.func._overloadname)
        traced = [arg for arg in self.args if live(arg)]
        if not traced:
            return constant(pure(*plain(self.args), **plain(self.kwargs)), self.run)
        found = [base for arg in traced for base in bases(arg.state)]
        order = list({id(base): base for base in found}.values())
        place = {id(base): n for n, base in enumerate(order)}
        fixed = [None if live(arg) else double(arg) for arg in self.args]
        inner = [arg.state if live(arg) else None for arg in self.args]
        options = {key: double(one) for key, one in self.kwargs.items()}

        def call(*z: Tensor) -> Tensor:
            given = []
            for constant_argument, state in zip(fixed, inner, strict=True):
                if state is None:
                    given.append(constant_argument)
                elif isinstance(state, Linear):
                    given.append(z[place[id(state)]])
                else:
                    given.append(state.call(*(z[place[id(base)]] for base in state.bases)))
            made: Tensor = pure(*given, **options)
            return made

        nonlinear = self.name in ELEMENTWISE or self.name in ("reciprocal", "mul", "div") and len(traced) > 1
        nonlinear |= any(isinstance(arg.state, Function) and arg.state.nonlinear for arg in traced)
        return Function(tuple(order), call, nonlinear, self.kinks(traced))

    def kinks(self, traced: list[Traced]) -> tuple[tuple[Linear, float], ...] | None:
        known: list[tuple[Linear, float]] = []
        for arg in traced:
            if isinstance(arg.state, Function):
                if arg.state.kinks is None:
                    return None
                known += arg.state.kinks
        own = ELEMENTWISE.get(self.name, ())
        if own is None:
            limits = (*self.args[1:], *self.kwargs.values())
            own = tuple(float(limit) for limit in limits if limit is not None)
        if own and not isinstance(traced[0].state, Linear):
            return None
        return (*known, *((traced[0].state, at) for at in own if isinstance(traced[0].state, Linear)))

    # linear operations

    def piecewise(self, summands: Sequence[int], depth: int = 0) -> State | list[State]:
        """The operation on every part and on the rest; constants among the summands go to the rest."""
        chosen = tree_leaves([self.args[n] for n in summands if n < len(self.args)])
        traced = [arg for arg in chosen if isinstance(arg, Traced)]
        others = [arg for n, arg in enumerate(self.args) if n not in summands]
        if any(isinstance(arg.state, Held) for arg in traced):
            return self.broken("a held tensor is a summand in")
        if any(live(arg) for arg in tree_leaves((others, self.kwargs))):
            return self.broken("there is no rule for")
        options = {key: double(one) for key, one in self.kwargs.items() if key != "dtype"}

        def piece(arg: Any, k: int) -> Any:
            if isinstance(arg, Traced):
                return linear(arg).pieces[k]
            if k == self.run.columns or arg is None:
                return double(arg)
            return torch.zeros_like(double(arg)) if isinstance(arg, Tensor) else 0.0

        made = []
        for k in range(self.run.columns + 1):
            given = [
                tree_map(lambda arg, k=k: piece(arg, k), arg) if n in summands else tree_map(double, arg)
                for n, arg in enumerate(self.args)
            ]
            made.append(given[0].clone() if self.name == "_to_copy" else self.func(*given, **options))
        depth += max([linear(arg).depth for arg in traced], default=0)
        if isinstance(made[0], Tensor):
            return Linear(made, depth)
        return [Linear(list(pieces), depth) for pieces in zip(*made, strict=True)]

    def product(self) -> State | list[State]:
        """Linear in one factor if the other does not depend on the tokens, or is held."""
        positions = FACTORS[self.name]
        factors = [self.args[n] for n in positions]
        moving = [n for n, arg in zip(positions, factors, strict=True) if live(arg)]
        elementwise = self.name in ("mul", "div")
        biases = {"convolution": (2,)}.get(self.name, tuple(range(positions[0])))
        if len(moving) == 2:
            return self.joint_product(factors) if elementwise else self.broken("two traced tensors are multiplied by")
        if not moving:
            return self.piecewise(biases or positions[:1])
        factor = self.args[moving[0]]
        if elementwise and isinstance(factor.state, Function) and self.broadcast() == factor.shape:
            return self.compose()
        if self.name == "div" and moving[0] == positions[1]:
            return Held()  # as the reciprocal of a statistic
        other = factors[1 - positions.index(moving[0])]
        mixing = not elementwise and isinstance(other, Traced) and isinstance(other.state, Held) and other.state.weights
        if mixing:
            token_axis = factor.dim() - 2 if moving[0] == positions[1] else factor.dim() - 1
            args = list(self.args)
            args[moving[0]] = Traced(factor.value, owned(linear(factor), token_axis), self.run)
            self.args = args
        return self.piecewise((*biases, moving[0]), depth=int(mixing))

    def broadcast(self) -> torch.Size:
        return torch.broadcast_shapes(*(arg.shape for arg in self.args[:2] if isinstance(arg, Tensor)))

    def joint_product(self, factors: list[Any]) -> State | list[State]:
        """g(a) * u. A gate on what an attention returns is held: g(a) has passed through fewer attentions than u."""
        gates = [isinstance(arg.state, Function) and arg.state.nonlinear for arg in factors]
        for n in (0, 1):
            gate, other = factors[n], factors[1 - n]
            if self.run.hold_gates and self.name == "mul" and gates[n] and gate.state.depth < other.state.depth:
                args = list(self.args)
                args[n] = gate.value
                return Call(self.run, self.func, self.name, args, self.kwargs).product()
        same = factors[0].state is factors[1].state
        if (any(gates) or same) and factors[0].shape == factors[1].shape:
            return self.compose()
        return self.broken("two traced tensors are multiplied by")

    def layer_norm(self) -> list[State] | State:
        """gamma * (c - mean c) / s for every piece c, with the s of the forward pass; beta goes to the rest."""
        x, shape, gamma, beta, _ = self.args
        if any(live(one) for one in (gamma, beta)):
            return self.broken("a norm's parameters are traced in")
        statistic = double(self.func(*plain(self.args))[2])
        axes = tuple(range(-len(shape), 0))
        scale = 1.0 if gamma is None else double(gamma)
        pieces = [(piece - piece.mean(axes, keepdim=True)) * statistic * scale for piece in linear(x).pieces]
        if beta is not None:
            pieces[-1] = pieces[-1] + double(beta)
        return [Linear(pieces, linear(x).depth), Held(), Held()]


def bases(state: State) -> tuple[Linear, ...]:
    assert isinstance(state, Linear | Function)
    return (state,) if isinstance(state, Linear) else state.bases


def owned(values: Linear, axis: int) -> Linear:
    """What an attention averages: a value belongs to its token, bias and all, for the weights of a row sum to one.

    Only if each place along `axis` has parts of a single token, and no two places of the same; otherwise unchanged.
    """
    parts = torch.stack(values.pieces[:-1]).movedim(axis + 1, 1)  # (columns, keys, ...)
    parts = parts.reshape(*parts.shape[:2], -1, parts.shape[-1]) if parts.dim() > 2 else parts[..., None, None]
    nonzero = (parts != 0).any(-1)  # (columns, keys, batch)
    if bool((nonzero.sum(0) > 1).any()) or bool((nonzero.sum(1) > 1).any()):
        return values
    rest = values.pieces[-1].movedim(axis, 0)
    pieces = []
    for part, mask in zip(values.pieces[:-1], nonzero, strict=True):
        where = mask.reshape(*rest.shape[:-1], 1)
        pieces.append(part + (rest * where).movedim(0, axis))
    nobody = ~nonzero.any(0).reshape(*rest.shape[:-1], 1)
    return Linear([*pieces, (rest * nobody).movedim(0, axis)], values.depth)


# Integrated gradients.


def split(function: Function) -> Linear:
    """Integrated gradients from zero, all pieces of all bases scaled together: the share of piece c_p of base z_p is
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
    if function.kinks is None:
        raise Untraceable("a product has a factor that bends at an unknown place")
    ends = [torch.full_like(z[0], n / PANELS) for n in range(PANELS + 1)]
    for base, at in function.kinks:
        crossing = at / base.total
        ends.append(torch.where((crossing > 0) & (crossing < 1), crossing, 1.0))
    sorted_ends = torch.stack(ends).sort(0).values
    low, width = sorted_ends[:-1, None], sorted_ends.diff(dim=0)[:, None]
    nodes, weights = (
        torch.from_numpy(one).reshape(-1, *[1] * z[0].dim()) for one in np.polynomial.legendre.leggauss(NODES)
    )
    t = low + width * (1 + nodes) / 2  # (panels, nodes, ...)
    path = [(t * one).detach().requires_grad_() for one in z]
    slopes = torch.autograd.grad(function.call(*path).sum(), path)
    return [(slope * width * weights / 2).sum((0, 1)).detach() for slope in slopes]
