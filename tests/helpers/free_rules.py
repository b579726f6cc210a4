"""Tensors that know which input token they come from: the rules of `free_oracle`, one for each kind of torch operation.

A layer's own code runs on `Traced` tensors, and every operation that reaches PyTorch's dispatcher arrives in `trace`.
A traced tensor is one of four things:

- `Linear`: value = sum_j part_j + rest, one part for each input token j, the rest from biases;
- `Function`: an elementwise function of linear tensors (its bases), not yet divided among the tokens, because it may
  become part of a larger function, as in x * sigmoid(x) or g(a) * u. What is not elementwise divides it first;
- `Held`: softmax, norm statistics, routing: what the forward pass made of the tokens and is kept constant;
- `Broken`: no rule divides it, as the scores q k^T. That is an error only if it reaches the layer's output.

Parts are float64 whatever the layer computes in: a cast leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.helpers.free_parts import Broken, Function, Held, Linear, Run, State, UntraceableError, owned

# The operations, by name, without the underscore of the in-place forms.
SOFTMAX = {"_softmax", "_safe_softmax"}
HELD = SOFTMAX | {
    "_log_softmax", "logsumexp", "topk", "sort", "max", "min", "amax", "amin", "rsqrt", "sqrt", "var", "std",
    "linalg_vector_norm",
}  # fmt: skip
ELEMENTWISE: dict[str, tuple[float, ...] | None] = {  # nonlinear functions, and where those that bend do so
    **dict.fromkeys(
        ("gelu", "silu", "sigmoid", "tanh", "mish", "softplus", "erf", "exp", "expm1", "pow", "reciprocal"), ()
    ),
    **dict.fromkeys(("relu", "leaky_relu", "elu", "abs"), (0.0,)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), (-3.0, 3.0)),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "hardtanh", "maximum", "minimum"), None),  # at their arguments
}
SAME = {"_to_copy", "clone", "detach", "alias", "lift_fresh"}
MADE = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
SHAPES = {
    "view", "_unsafe_view", "_reshape_alias", "permute", "transpose", "t", "expand", "slice", "select", "squeeze",
    "unsqueeze", "split", "split_with_sizes", "unbind", "cat", "stack", "index", "gather", "index_select", "repeat",
    "flip", "roll", "tril", "triu", "diagonal",
}  # fmt: skip
SUMMANDS: dict[str, tuple[int, ...]] = {  # linear in the arguments at these positions taken together
    **dict.fromkeys((*SAME, *SHAPES, "neg", "sum", "mean", "cumsum"), (0,)),
    **dict.fromkeys(("add", "sub", "rsub", "copy"), (0, 1)),
    **dict.fromkeys(("masked_fill", "index_put", "constant_pad_nd"), (0, 2)),
    **dict.fromkeys(("index_add", "scatter", "scatter_add"), (0, 3)),
    "where": (1, 2),
}
FACTORS: dict[str, tuple[int, int]] = {  # linear in either, if the other is constant or held
    **dict.fromkeys(("mul", "div", "mm", "bmm", "convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}
BIASES = {"addmm": (0,), "baddbmm": (0,), "convolution": (2,)}


class Traced(Tensor):
    """A tensor with the model's own value and its state."""

    value: Tensor
    state: State
    run: Run
    mark: str  # of a softmax in the making: "exp", "sum of exp"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Tensor, state: State, run: Run, mark: str = "") -> Traced:
        self: Traced = Tensor._make_wrapper_subclass(cls, value.shape, strides=value.stride(), dtype=value.dtype)
        self.value, self.state, self.run, self.mark = value, state, run, mark
        return self

    def __init__(self, *_: Any) -> None:
        """All is done in `__new__`."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {type(self.state).__name__})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return trace(func, args, kwargs or {})


def trace(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the value as the model does, and what becomes of the parts."""
    tensors = traced_in(args, kwargs)
    run = tensors[0].run
    for tensor in tensors:
        if not is_complete(tensor, 1e-4):  # written into through a view, by something without parts
            tensor.state = Broken(f"the parts no longer sum to an argument of {run.place(func)}")
    in_place = func._schema.is_mutable
    if in_place and not isinstance(args[0], Traced):
        raise UntraceableError(f"a tensor without parts is overwritten by {run.place(func)}")
    out: Any = None if in_place else func(*plain(args), **plain(kwargs))
    name = func.overloadpacket.__name__
    call = Call(run, func, name.rstrip("_") if in_place else name, args, kwargs, out)
    mark = call.mark()
    state = {"softmax": Held(weights=True), "sum of exp": Held()}.get(mark) or call.state()
    if in_place:
        func(*plain(args), **plain(kwargs))
        args[0].state, args[0].mark = state, mark
        return args[0]
    if name == "topk":
        run.choices.append(out[1])
    if isinstance(out, tuple | list):
        states = state if isinstance(state, list) else [state] * len(out)
        return type(out)(wrapped(one, its, run) for one, its in zip(out, states, strict=True))
    return wrapped(out, state, run, mark)


def traced_in(*trees: Any) -> list[Traced]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Traced)]


def wrapped(value: Any, state: Any, run: Run, mark: str = "") -> Any:
    """Numbers, indices and conditions are not traced."""
    if not (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())):
        return value
    run.single |= value.dtype == torch.float32 and isinstance(state, Linear | Function)
    return Traced(value, state, run, mark)


def plain(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.value if isinstance(leaf, Traced) else leaf, tree)


def double(leaf: Any) -> Any:
    """A constant as the parts meet it."""
    leaf = leaf.value if isinstance(leaf, Traced) else leaf
    return leaf.detach().double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def linear(tensor: Traced) -> Linear:
    assert isinstance(tensor.state, Linear | Function)
    return tensor.state if isinstance(tensor.state, Linear) else tensor.state.linear


def is_live(arg: Any) -> bool:
    """Whether it depends on the tokens and is not held."""
    if not isinstance(arg, Traced) or isinstance(arg.state, Held):
        return False
    return not (isinstance(arg.state, Linear) and arg.state.constant)


def is_complete(tensor: Traced, tolerance: float) -> bool:
    """sum_j part_j + rest = the model's own tensor, up to `tolerance` of the largest piece."""
    if not isinstance(tensor.state, Linear) or not tensor.numel():
        return True
    size = float(torch.stack(tensor.state.pieces).nan_to_num(0, 0, 0).abs().max())
    value = tensor.value.double()
    return torch.allclose(tensor.state.total, value, rtol=0, atol=tolerance * size, equal_nan=True)


@dataclass
class Call:
    """One operation."""

    run: Run
    func: Any
    name: str  # without the underscore of the in-place form
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any  # its value; not known of an in-place operation

    def broken(self, why: str) -> Broken:
        return Broken(f"{why} {self.run.place(self.func)}")

    def mark(self) -> str:
        """A softmax spelled out: exp, its sum, and their quotient."""
        marks = [arg.mark if isinstance(arg, Traced) else "" for arg in self.args[:2]]
        if self.name == "exp":
            return "exp"
        if marks[0] == "exp" and self.name == "sum":
            return "sum of exp"
        if marks == ["exp", "sum of exp"] and self.name == "div":
            return "softmax"
        return marks[0] if self.name in (*SAME, "masked_fill") else ""

    def state(self) -> State | list[State]:
        """By the rule that applies."""
        tensors = traced_in(self.args, self.kwargs)
        held = [one.state for one in tensors if isinstance(one.state, Held)]
        power = self.args[1] if self.name == "pow" else 1
        if isinstance(power, Tensor):
            return self.broken("there is no rule for")
        held_power = power <= 0 or power != int(power)
        routed = self.name == "gather" and any(self.args[2] is choice for choice in self.run.choices)
        if self.name in HELD or held_power or routed or (held and not any(map(is_live, tensors))):
            return Held(weights=self.name in SOFTMAX or any(one.weights for one in held))
        broken = next((one.state for one in tensors if isinstance(one.state, Broken)), None)
        if broken is not None:
            return broken
        constant = isinstance(self.out, Tensor) and self.name not in SUMMANDS and not any(map(is_live, tensors))
        if self.name in MADE or constant:
            rest = self.out.double().clone()
            return Linear([torch.zeros_like(rest) for _ in range(self.run.columns)] + [rest])
        if self.name in FACTORS:
            return self.product()
        if self.name == "native_layer_norm":
            return self.layer_norm()
        if self.name == "reciprocal" and isinstance(tensors[0].state, Linear):
            return Held()  # of a statistic
        if self.name in ELEMENTWISE or (self.name in ("add", "sub", "rsub", "neg") and self.is_function()):
            return self.compose()
        if self.name in SAME and isinstance(tensors[0].state, Function):
            return tensors[0].state
        if self.name == "unsqueeze" and isinstance(tensors[0].state, Function):
            return self.reshaped(tensors[0].state)
        if self.name in SUMMANDS and "reduce" not in self.kwargs:
            return self.piecewise(SUMMANDS[self.name])
        return self.broken("there is no rule for")

    # Elementwise functions.

    def is_function(self) -> bool:
        """A sum with a function, or with a number: (u + 1) * g(a) is a function of u, whereas biases are tensors."""
        tensors = [arg for arg in self.args if isinstance(arg, Tensor)]
        function = any(isinstance(arg, Traced) and isinstance(arg.state, Function) for arg in tensors)
        number = self.name != "neg" and len(tensors) == 1
        live = all(is_live(arg) for arg in tensors if isinstance(arg, Traced))
        return live and (function or number) and len({arg.shape for arg in tensors}) == 1

    def pure(self) -> Any:
        return getattr(getattr(torch.ops.aten, self.name), self.func._overloadname)

    def reshaped(self, function: Function) -> Function:
        """A function of its bases in another shape, which stays one: a gate with one number for each head."""
        made = {
            id(base): Linear([self.func(piece, *self.args[1:]) for piece in base.pieces], base.depth)
            for base in function.bases
        }
        kinks = None if function.kinks is None else tuple((made[id(base)], bend) for base, bend in function.kinks)
        return Function(tuple(made[id(base)] for base in function.bases), function.call, function.nonlinear, kinks)

    def compose(self) -> State:
        """This operation as a function of the bases of its arguments."""
        live = [arg.state for arg in self.args if is_live(arg)]
        own = ELEMENTWISE.get(self.name, ())
        if own is None:
            limits = [plain(limit) for limit in (*self.args[1:], *self.kwargs.values()) if limit is not None]
            if len(live) > 1 or any(isinstance(limit, Tensor) and limit.numel() > 1 for limit in limits):
                return self.broken("there is no rule for")
            own = tuple(float(limit) for limit in limits)
        functions = [state for state in live if isinstance(state, Function)]
        bases = [base for state in live for base in (state.bases if isinstance(state, Function) else (state,))]
        order = list({id(base): base for base in bases}.values())
        kinks = (
            None
            if (own and functions) or any(one.kinks is None for one in functions)
            else (
                *(kink for one in functions for kink in one.kinks or ()),
                *((base, bend) for base in order for bend in own),
            )
        )
        if kinks is None and len(order) > 1:
            return self.broken("a function of several tensors bends at an unknown place in")
        place = {id(base): n for n, base in enumerate(order)}
        pure, given = self.pure(), [arg.state if is_live(arg) else double(arg) for arg in self.args]
        options = {key: double(one) for key, one in self.kwargs.items()}

        def call(*z: Tensor) -> Tensor:
            def evaluate(arg: Any) -> Any:
                if isinstance(arg, Linear):
                    return z[place[id(arg)]]
                return arg.call(*(z[place[id(base)]] for base in arg.bases)) if isinstance(arg, Function) else arg

            made: Tensor = pure(*map(evaluate, given), **options)
            return made

        nonlinear = self.name in ELEMENTWISE or any(one.nonlinear for one in functions) or self.name in FACTORS
        return Function(tuple(order), call, nonlinear, kinks)

    # Linear operations.

    def piecewise(self, summands: Sequence[int], more_depth: int = 0) -> State | list[State]:
        """The operation on every part and on the rest; constants among the summands go to the rest."""
        tensors = traced_in([arg for n, arg in enumerate(self.args) if n in summands])
        others = traced_in([arg for n, arg in enumerate(self.args) if n not in summands], self.kwargs)
        if any(isinstance(one.state, Held) for one in tensors) or any(map(is_live, others)):
            return self.broken("there is no rule for traced and held tensors together in")
        func = self.func if isinstance(self.args[0], Traced) and isinstance(self.args[0].state, Linear) else self.pure()
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
                tree_map(lambda leaf, k=k: piece(leaf, k), arg)
                if n in summands and arg is not None
                else tree_map(double, arg)
                for n, arg in enumerate(self.args)
            ]
            made.append(given[0].clone() if self.name == "_to_copy" else func(*given, **options))
        depth = max(linear(one).depth for one in tensors) + more_depth
        if isinstance(made[0], Tensor):
            return Linear(made, depth)
        return [Linear(list(pieces), depth) for pieces in zip(*made, strict=True)]

    def product(self) -> State | list[State]:
        """Linear in one factor if the other does not depend on the tokens, or is held."""
        factors = FACTORS[self.name]
        biases = BIASES.get(self.name, ())
        live = [n for n in factors if is_live(self.args[n])]
        elementwise = self.name in ("mul", "div")
        if len(live) == 2:
            return self.joint_product() if elementwise else self.broken("two traced tensors are multiplied by")
        if not live:
            return self.piecewise(biases or [n for n in factors if isinstance(self.args[n], Traced)])
        factor, other = self.args[live[0]], self.args[factors[0] + factors[1] - live[0]]
        if elementwise and isinstance(factor.state, Function) and factor.shape == shape_of(*self.args[:2]):
            return self.compose()
        if self.name == "div" and live == [1]:
            return Held()  # as the reciprocal
        if elementwise or not (isinstance(other, Traced) and isinstance(other.state, Held) and other.state.weights):
            made = self.piecewise((*biases, live[0]))
            if elementwise and not isinstance(other, Traced) and isinstance(made, Linear):
                made.multiple_of = linear(factor) if factor.shape == shape_of(factor, other) else None
            return made
        args = list(self.args)  # an attention
        if self.run.own_biases:
            values = owned(linear(factor), factor.dim() - 1 - (live[0] == factors[1]))
            args[live[0]] = Traced(factor.value, values, self.run)
        return Call(self.run, self.func, self.name, args, self.kwargs, self.out).piecewise((*biases, live[0]), 1)

    def joint_product(self) -> State | list[State]:
        """g(a) * u. Two kinds of g(a) are held: a gate on what an attention returns, which has passed through fewer
        attentions than u, and one number for each token, the share of an expert."""
        factors = self.args[:2]
        gates = [isinstance(arg.state, Function) and arg.state.nonlinear for arg in factors]
        for n, (gate, other) in enumerate((factors, factors[::-1])):
            share = gate.shape[-1:] == (1,) != other.shape[-1:]
            if (
                self.name == "mul"
                and gates[n]
                and (share or (self.run.hold_gates and gate.state.depth < other.state.depth))
            ):
                args = [gate.value, other] if n == 0 else [other, gate.value]
                return Call(self.run, self.pure(), self.name, args, self.kwargs, self.out).product()
        if self.name == "mul" and self.run.linear_gates and all(isinstance(arg.state, Linear) for arg in factors):
            gated = self.gate_of_own_tokens()
            if gated is not None:
                return gated
        roots = [arg.state.root for arg in factors if isinstance(arg.state, Linear)]
        square = len(roots) == 2 and roots[0] is roots[1]
        if (any(gates) or square) and factors[0].shape == factors[1].shape:
            return self.compose()
        return self.broken("two traced tensors are multiplied by")

    def gate_of_own_tokens(self) -> State | list[State] | None:
        """B * x, where every place of B has parts of one token only. If that is so of x too, and neither has a rest,
        the product belongs to that token; if x has been mixed, B is held."""
        first, second = (linear(arg) for arg in self.args[:2])
        own = [one for one in (first, second) if one.is_own]
        if len(own) == 2 and not bool(first.pieces[-1].any()) and not bool(second.pieces[-1].any()):
            pairs = zip(first.pieces, second.pieces, strict=True)
            return Linear([a * b for a, b in pairs], max(first.depth, second.depth))
        if len(own) != 1 or not self.run.hold_gates:
            return None
        gate = 0 if own[0] is first else 1
        args = [self.args[0].value, self.args[1]] if gate == 0 else [self.args[0], self.args[1].value]
        return Call(self.run, self.pure(), self.name, args, self.kwargs, self.out).product()

    def layer_norm(self) -> State | list[State]:
        """gamma * (c - mean c) / s for every piece c, with the s of the forward pass; beta goes to the rest."""
        x, shape, gamma, beta, _ = self.args
        axes = tuple(range(-len(shape), 0))
        if not is_live(x) or is_live(gamma) or is_live(beta):
            return self.broken("there is no rule for")
        scale = double(self.out[2]) * (1.0 if gamma is None else double(gamma))
        pieces = [(piece - piece.mean(axes, keepdim=True)) * scale for piece in linear(x).pieces]
        if beta is not None:
            pieces[-1] = pieces[-1] + double(beta)
        return [Linear(pieces, linear(x).depth), Held(), Held()]


def shape_of(*args: Any) -> torch.Size:
    return torch.Size(torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Tensor))))
