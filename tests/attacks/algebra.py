"""The algebra of tests/helpers/layer_oracle.py without its loops, and without anything from the library.

Row vectors; i = output token, j = source (an input token of the layer, or of the model), h = head. A state holds
vectors (n, columns, d), a remainder (n, d) and the model's own vector (n, d) that they sum to.
`tests/attacks/test_judge.py` compares these functions with the loops.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.helpers.layer_oracle import State, Unit

NODES, NODE_WEIGHTS = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(24))


class Norm(NamedTuple):
    """gamma * (x - mean x) * inverse_i + beta, or without the mean; inverse_i is frozen at the real vectors."""

    gamma: Tensor  # (d,), or (n, d) where each token has its own
    beta: Tensor
    inverse: Tensor  # (n,)
    centred: bool


class Values(NamedTuple):
    """An attention's values: one vector for each head and key, and how it depends on the key's vector.

    The first `virtual` keys depend on no vector.
    """

    each: Tensor  # (H, keys, width), the model's own
    weight: Tensor | None  # (H, d, width); None: no affine map
    constant: Tensor | None  # (H, width)
    shift: Tensor | None  # (d,): beta of the norm that the values are read behind
    virtual: int = 0

    def of_no_token(self) -> Tensor:
        """(H, keys, width): b_V, and the shift of the norm before it by way of W_V."""
        assert self.weight is not None
        assert self.constant is not None
        one = (
            self.constant if self.shift is None else self.constant + torch.einsum("d,hdk->hk", self.shift, self.weight)
        )
        return torch.cat([torch.zeros_like(self.each[:, : self.virtual]), one[:, None].expand_as(self.made)], 1)

    @property
    def made(self) -> Tensor:
        """The values of the real keys."""
        return self.each[:, self.virtual :]


def normalise(state: State, norm: Norm, actual: Tensor) -> State:
    gain = norm.gamma * norm.inverse[:, None]  # (n, d)

    def scaled(vectors: Tensor, gain: Tensor) -> Tensor:
        return gain * (vectors - vectors.mean(-1, keepdim=True) if norm.centred else vectors)

    return State(scaled(state.vectors, gain[:, None]), scaled(state.bias, gain) + norm.beta, actual)


def attend(weights: Tensor, each: Tensor, out: Tensor, bias: Tensor, actual: Tensor) -> State:
    """c_ij = sum_h alpha^h_ij v^h_j W_O^h: the keys are the columns."""
    vectors = torch.einsum("hij,hjk,hkd->ijd", weights, each, out)
    return State(vectors, bias.expand_as(actual).clone(), actual)


def attend_without_constants(weights: Tensor, values: Values, out: Tensor, bias: Tensor, actual: Tensor) -> State:
    """The same, with the part of a value that belongs to no token in the remainder."""
    constants = values.of_no_token()
    rest = torch.einsum("hij,hjk,hkd->id", weights, constants, out)
    return attend(weights, values.each - constants, out, rest + bias, actual)


def carry(weights: Tensor, given: State, values: Values, out: Tensor, bias: Tensor, actual: Tensor) -> State:
    """What every source sends through an attention: sum_j alpha_ij (x_j<-k W_V) W_O; constants go to the remainder.
    The first sources are the virtual keys."""
    assert values.weight is not None
    assert values.constant is not None
    own, real = weights[:, :, : values.virtual], weights[:, :, values.virtual :]
    vectors = torch.einsum("hij,jkd,hde,heo->iko", real, given.vectors, values.weight, out)
    vectors[:, : values.virtual] += torch.einsum("hij,hje,heo->ijo", own, values.each[:, : values.virtual], out)
    rest = torch.einsum("jd,hde->hje", given.bias, values.weight) + values.constant[:, None]
    return State(vectors, torch.einsum("hij,hje,heo->io", real, rest, out) + bias, actual)


def feed_forward(state: State, units: list[Unit], actual: Tensor) -> State:
    """Integrated gradients from zero, as in `layer_oracle.feed_forward`; an expert adds nothing to tokens that are
    not routed to it."""
    vectors, bias = torch.zeros_like(state.vectors), torch.zeros_like(state.bias)
    for unit in units:
        takes = unit.share != 0
        if not takes.any():
            continue
        z = [state.actual[takes] @ weight + hidden_bias for weight, hidden_bias in in_rows(unit, takes)]
        at_zero = unit.function(*(torch.zeros_like(argument[:1]) for argument in z))[0]
        hidden, rest = 0, at_zero
        for coefficient, (weight, hidden_bias) in zip(integrated(unit.function, *z), in_rows(unit, takes), strict=True):
            hidden = hidden + coefficient[:, None] * (state.vectors[takes] @ weight)
            rest = rest + coefficient * (state.bias[takes] @ weight + hidden_bias)
        share, out_bias = unit.share[takes], unit.bias if unit.bias.dim() == 1 else unit.bias[takes]
        vectors[takes] += share[:, None, None] * (hidden @ unit.weight)
        bias[takes] += share[:, None] * (rest @ unit.weight + out_bias)
    return State(vectors, bias, actual)


def in_rows(unit: Unit, takes: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each argument; a bias may be one for each token."""
    return [(weight, bias if bias.dim() == 1 else bias[takes]) for weight, bias in unit.inputs]


@torch.enable_grad()
def integrated(function: Callable[..., Tensor], *z: Tensor) -> list[Tensor]:
    """`oracle_parts.integrated_gradients`, with panels that end at integers up to 12 only and grow by half from there:
    activations have their kinks at small integers, and weights may be huge here. A function of one argument
    needs no quadrature: integral_0^1 F'(t z) dt = (F(z) - F(0)) / z."""
    if len(z) == 1 and bool((z[0] != 0).all()):
        (argument,) = (one.detach() for one in z)
        return [(function(argument) - function(torch.zeros_like(argument))).detach() / argument]
    largest = max(float(argument.detach().abs().max()) for argument in z)
    ends = [float(n) for n in range(1, min(12, int(largest)) + 1)]
    while largest >= 12 and ends[-1] * 1.5 < largest:
        ends.append(ends[-1] * 1.5)
    steps, tiny = torch.tensor(ends, dtype=torch.float64), torch.finfo(torch.float64).tiny
    crossings = [(steps / argument.detach().abs().clamp_min(tiny)[..., None]).clamp_max(1) for argument in z]
    start = torch.zeros_like(z[0].detach())[..., None]
    bounds = torch.cat((start, *crossings, start + 1), dim=-1).sort(dim=-1).values
    low, width = bounds[..., :-1, None], bounds.diff(dim=-1)[..., None]
    t = low + width * (1 + NODES) / 2
    arguments = [(t * argument.detach()[..., None, None]).requires_grad_() for argument in z]
    gradients = torch.autograd.grad(function(*arguments).sum(), arguments)
    return [(gradient * width * NODE_WEIGHTS / 2).sum(dim=(-2, -1)) for gradient in gradients]
