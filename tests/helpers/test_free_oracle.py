"""The oracle without descriptions on layers made by hand, whose contributions are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.free_oracle import FreeLayer, LayerCall, decompose_call, first
from tests.helpers.free_parts import UntraceableError

N, D = 4, 6


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = noise(1, N, D, seed=1)
W, W2, B, B2 = noise(D, D, seed=2), noise(D, D, seed=3), noise(D, seed=4), noise(D, seed=5)
MIX = noise(N, N, seed=6)  # constant: every token of MIX @ x comes from all input tokens
A = (MIX @ X + B)[0]
A_PARTS = torch.stack([MIX[:, j, None] * X[0, j] for j in range(N)])  # (columns, N, D), and the rest is B


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, hidden_states: Tensor) -> Any:
        return self.inner(hidden_states)


class Inner(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def decompose(function: Callable[[Tensor], Any], x: Tensor = X, **options: Any) -> FreeLayer:
    with torch.no_grad():
        return decompose_call(LayerCall(Layer(function), (x,), {}, first(function(x))), **options)


def assert_shares(layer: FreeLayer, parts: Tensor, rest: Tensor, tolerance: float = 1e-13) -> None:
    """parts (columns, N, D), rest (N, D)."""
    torch.testing.assert_close(layer.output.parts[:, 0], parts, rtol=0, atol=tolerance)
    torch.testing.assert_close(layer.output.rest[0], rest.expand_as(parts[0]), rtol=0, atol=tolerance)
    (inner,) = layer.modules["inner"]
    assert torch.equal(inner.parts, layer.output.parts)


def own(vectors: Tensor) -> Tensor:
    """(columns, N, D): each token's vector comes from that token alone."""
    return torch.stack([torch.zeros_like(vectors).index_copy(0, torch.tensor([j]), vectors[[j]]) for j in range(N)])


# --- linear operations -----------------------------------------------------------------------------------------------


def written(x: Tensor) -> Tensor:
    """x W + b, part by part into a buffer."""
    y = torch.zeros_like(x)
    y[..., :2] = (x @ W + B)[..., :2]
    y[..., 2:].copy_((x @ W + B)[..., 2:])
    return y


def experts(x: Tensor) -> Tensor:
    """x W + b, each expert for half of the tokens."""
    flat = x.view(-1, D)
    y = torch.zeros_like(flat)
    for chosen in (torch.tensor([0, 2]), torch.tensor([3, 1])):
        y.index_add_(0, chosen, functional.linear(flat[chosen], W.T, B))
    return y.view(x.shape)


LINEAR = {
    "linear": lambda x: functional.linear(x, W.T, B),
    "matmul": lambda x: x @ W + B,
    "einsum": lambda x: torch.einsum("bnd,de->bne", x, W).add_(B),
    "addmm": lambda x: torch.addmm(B, x.view(-1, D), W).view(x.shape),
    "heads": lambda x: torch.cat([x @ W[:, :2], x @ W[:, 2:]], dim=-1) + B,
    "difference": lambda x: (3 * (x @ W) - x @ W / 0.5) + B,
    "tuple": lambda x: (x @ W + B, None),
    "written": written,
    "experts": experts,
}


@pytest.mark.parametrize("function", LINEAR.values(), ids=LINEAR.keys())
def test_linear(function: Callable[[Tensor], Tensor]) -> None:
    assert_shares(decompose(function), own(X[0] @ W), B)


def test_residual_and_mixing() -> None:
    assert_shares(decompose(lambda x: x + (MIX @ x + B)), A_PARTS + own(X[0]), B)


# --- attention -------------------------------------------------------------------------------------------------------


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def spelled_softmax(scores: Tensor) -> Tensor:
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def single_softmax(scores: Tensor) -> Tensor:
    return functional.softmax(20 * torch.tanh(scores / 20), dim=-1, dtype=torch.float64).to(scores.dtype)


def heads(x: Tensor) -> Tensor:
    return x.view(1, N, 2, D // 2)


def attention(x: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
    """Two heads; queries and keys are the states themselves."""
    alpha = weights(torch.einsum("bihd,bjhd->bhij", heads(x), heads(x)))
    return torch.einsum("bhij,bjhd->bihd", alpha, heads(x @ W + B)).reshape(x.shape)


def fused(x: Tensor) -> Tensor:
    q, v = heads(x).transpose(1, 2), heads(x @ W + B).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, v, scale=1.0).transpose(1, 2).reshape(x.shape)


def attention_parts(weights: Callable[[Tensor], Tensor] = softmax) -> Tensor:
    """alpha_ij v_j, with the bias of the values inside."""
    alpha = weights(torch.einsum("ihd,jhd->hij", heads(X)[0], heads(X)[0]))
    v = heads(X @ W + B)[0]
    return torch.stack([torch.einsum("hi,hd->ihd", alpha[:, :, j], v[j]).reshape(N, D) for j in range(N)])


@pytest.mark.parametrize("weights", [softmax, spelled_softmax, single_softmax])
def test_attention(weights: Callable[[Tensor], Tensor]) -> None:
    """A value's bias belongs to its token, that of the output projection to none."""
    layer = decompose(lambda x: attention(x, weights) @ W2 + B2)
    assert_shares(layer, attention_parts(weights) @ W2, B2)


def test_value_biases_in_the_rest() -> None:
    layer = decompose(lambda x: attention(x, softmax) + B2, own_biases=False)
    (weights,) = (attention_parts() - layer.output.parts[:, 0]).sum(0, keepdim=True)
    torch.testing.assert_close(weights, B.expand(N, D), rtol=0, atol=1e-13)  # the weights of a row sum to one
    torch.testing.assert_close(layer.output.rest[0], (B + B2).expand(N, D), rtol=0, atol=1e-13)


def test_fused_attention() -> None:
    assert_shares(decompose(lambda x: fused(x) @ W2 + B2), attention_parts() @ W2, B2)


def test_gate_on_attention_is_held() -> None:
    layer = decompose(lambda x: torch.sigmoid(x @ W2) * attention(x, softmax))
    assert_shares(layer, attention_parts() * torch.sigmoid(X[0] @ W2), torch.zeros(D).double())


def test_gate_on_attention_not_held() -> None:
    layer = decompose(lambda x: torch.sigmoid(x @ W2) * attention(x, softmax), hold_gates=False)
    parts, rest = gated_shares(torch.sigmoid, own(X[0] @ W2), 0 * A, attention_parts(), 0 * A)
    assert_shares(layer, parts, rest, 1e-9)


def test_router_is_held() -> None:
    """Sigmoid scores, the two largest normalised; a shared expert with its own share."""

    def scores(x: Tensor) -> Tensor:
        chosen, indices = torch.sigmoid(x @ W), (torch.sigmoid(x @ W) + B).topk(2).indices
        taken = chosen.gather(-1, indices)
        taken = taken / taken.sum(-1, keepdim=True)
        return torch.zeros_like(chosen).scatter(-1, indices, taken)[..., :1]

    def share(x: Tensor) -> Tensor:
        return torch.sigmoid(x @ W2[:, :1])

    layer = decompose(lambda x: scores(x) * (MIX @ x + B) + share(x) * (x @ W))
    expected = scores(X)[0] * A_PARTS + own(share(X)[0] * (X[0] @ W))
    assert_shares(layer, expected, scores(X)[0] * B)


# --- norms -----------------------------------------------------------------------------------------------------------


def by_variance(a: Tensor) -> Tensor:
    return W[0] * (a - a.mean(-1, keepdim=True)) / torch.sqrt(a.var(-1, keepdim=True, unbiased=False) + 1e-5) + B2


def by_squares(a: Tensor) -> Tensor:
    centred = a - a.mean(-1, keepdim=True)
    return W[0] * (centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)) + B2


def by_torch(a: Tensor) -> Tensor:
    return functional.layer_norm(a, (D,), W[0], B2, 1e-5)


@pytest.mark.parametrize("norm", [by_variance, by_squares, by_torch])
def test_layer_norm(norm: Callable[[Tensor], Tensor]) -> None:
    s = torch.sqrt(A.var(-1, keepdim=True, unbiased=False) + 1e-5)

    def frozen(c: Tensor) -> Tensor:
        return W[0] * (c - c.mean(-1, keepdim=True)) / s

    assert_shares(decompose(lambda x: norm(MIX @ x + B)), frozen(A_PARTS), frozen(B.expand(N, D)) + B2)


RMS = {
    "torch": lambda a: functional.rms_norm(a, (D,), W[0], 1e-5),
    "rsqrt": lambda a: W[0] * (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "power": lambda a: W[0] * (a * torch.pow(a.square().mean(-1, keepdim=True) + 1e-5, -0.5)),
    "quotient": lambda a: a / (a * a).mean(-1, keepdim=True).add_(1e-5).sqrt() * W[0],
    "reciprocal": lambda a: a * (1 / torch.sqrt((a**2).mean(-1, keepdim=True) + 1e-5)) * W[0],
}


@pytest.mark.parametrize("norm", RMS.values(), ids=RMS.keys())
def test_rms_norm(norm: Callable[[Tensor], Tensor]) -> None:
    factor = W[0] / torch.sqrt(A.square().mean(-1, keepdim=True) + 1e-5)
    assert_shares(decompose(lambda x: norm(MIX @ x + B)), A_PARTS * factor, B * factor)


# --- activations -----------------------------------------------------------------------------------------------------

SPELLINGS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (functional.silu, functional.silu),
    "silu by sigmoid": (lambda a: a * torch.sigmoid(a), functional.silu),
    "silu by exp": (lambda a: a / (1 + torch.exp(-a)), functional.silu),
    "gelu": (functional.gelu, functional.gelu),
    "gelu by erf": (lambda a: a * 0.5 * (1.0 + torch.erf(a / math.sqrt(2))), functional.gelu),
    "gelu by tanh": (
        lambda a: 0.5 * a * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * torch.pow(a, 3.0)))),
        lambda a: functional.gelu(a, approximate="tanh"),
    ),
    "quick gelu": (lambda a: a * torch.sigmoid(1.702 * a), lambda a: a / (1 + torch.exp(-1.702 * a))),
    "relu": (lambda a: torch.relu_(a.clone()), functional.relu),
    "squared relu": (lambda a: functional.relu(a).square(), lambda a: functional.relu(a) ** 2),
    "sigmoid": (torch.sigmoid, torch.sigmoid),  # 1/2 at zero
    "softplus": (functional.softplus, functional.softplus),
    "xielu": (
        lambda a: torch.where(a > 0, 0.8 * a * a + 0.5 * a, (torch.expm1(a) - a) * 0.8 + 0.5 * a),
        lambda a: 0.5 * a + 0.8 * torch.where(a > 0, a**2, torch.exp(a) - 1 - a),
    ),
    "clamped": (lambda a: a.clamp(-0.5, 0.7), lambda a: torch.minimum(torch.maximum(a, 0 * a - 0.5), 0 * a + 0.7)),
}


@pytest.mark.parametrize(("spelling", "g"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_activations(spelling: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    """c (g(a) - g(0)) / a for every part c, and g(0) in the rest, however the function is spelled."""
    slope = (g(A) - g(0 * A)) / A
    layer = decompose(lambda x: spelling(MIX @ x + B) @ W)
    assert_shares(layer, (A_PARTS * slope) @ W, (B * slope + g(0 * A)) @ W)


def test_activation_at_zero() -> None:
    """Parts that cancel: the limit of (g(a) - g(0)) / a is g'(0)."""
    x = torch.stack((X[0, 0], -X[0, 0], X[0, 2], X[0, 3]))[None]
    pair = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64).expand(N, N)
    layer = decompose(lambda x: functional.gelu(pair @ x), x)
    assert not (pair @ x).any()
    assert_shares(layer, 0.5 * torch.stack([pair[:, j, None] * x[0, j] for j in range(N)]), torch.zeros(D).double())


def simpson(function: Callable[[Tensor], Tensor], steps: int = 2000) -> Tensor:
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    weights = torch.full_like(t, 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    return sum(w * function(one) for w, one in zip(weights, t, strict=True)) / (3 * steps)  # type: ignore[return-value]


def gated_shares(
    g: Callable[[Tensor], Tensor], a: Tensor, a_rest: Tensor, u: Tensor, u_rest: Tensor
) -> tuple[Tensor, Tensor]:
    """integral_0^1 [g'(t a) a_j u t + g(t a) u_j] dt by Simpson's rule; the same for the rests, and g(0) * 0."""
    whole_a, whole_u = a.sum(0) + a_rest, u.sum(0) + u_rest
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(g)))
    of_a = simpson(lambda t: slope(t * whole_a) * whole_u * t)
    of_u = simpson(lambda t: g(t * whole_a))
    return a * of_a + u * of_u, a_rest * of_a + u_rest * of_u


@pytest.mark.parametrize("g", [functional.silu, functional.gelu, torch.sigmoid, torch.relu])
def test_gated_feed_forward(g: Callable[[Tensor], Tensor]) -> None:
    def layer(x: Tensor) -> Tensor:
        gate, up = ((MIX @ x + B) @ torch.cat((W, W2), dim=1) + torch.cat((B2, B))).chunk(2, dim=-1)
        return (g(gate) * up) @ W + B

    parts, rest = gated_shares(g, A_PARTS @ W, (B @ W + B2).expand(N, D), A_PARTS @ W2, (B @ W2 + B).expand(N, D))
    assert_shares(decompose(layer), parts @ W, rest @ W + B, 1e-9)


def test_clamped_gate() -> None:
    """min(a, 1) * u: the share of a_j is a_j u integral_0^m t dt = a_j u m^2 / 2, with m = min(1, 1/a) where a > 0."""
    a, u = A_PARTS, own(X[0] @ W)
    m = torch.where(A > 1, 1 / A, 1.0)
    of_a = u.sum(0) * m**2 / 2
    of_u = torch.where(A > 1, A * m**2 / 2 + 1 - m, A / 2)
    layer = decompose(lambda x: (MIX @ x + B).clamp(max=1.0) * (x @ W))
    assert bool((A > 1).any())
    assert_shares(layer, a * of_a + u * of_u, B * of_a)


def test_shifted_product() -> None:
    """(u + 1) * silu(a) is u * silu(a) + silu(a)."""
    one = decompose(lambda x: (x @ W + 1) * functional.silu(MIX @ x + B))
    other = decompose(lambda x: (x @ W) * functional.silu(MIX @ x + B) + functional.silu(MIX @ x + B))
    assert_shares(one, other.output.parts[:, 0], other.output.rest[0])


# --- what it refuses -------------------------------------------------------------------------------------------------


def overwritten(x: Tensor) -> Tensor:
    y = x @ W
    y[..., :2] = (y * x)[..., :2]
    return y


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "product": (lambda x: (x @ W) * (x @ W2), r"two traced tensors are multiplied by aten.mul.Tensor in inner"),
    "scores": (lambda x: x @ x.transpose(1, 2) @ x, r"multiplied by aten.bmm.default in inner"),
    "shifted": (lambda x: (1 + x @ W) * (x @ W2), r"aten.mul.Tensor in inner"),
    "transform": (lambda x: torch.fft.fft(x).real, r"no rule for aten._fft_\w+.default in inner"),
    "overwritten": (overwritten, r"no longer sum to an argument of aten.\w+.\w+ in the layer itself"),
    "buffer": (lambda x: torch.zeros(1, N, D).double().add_(x), r"without parts is overwritten by aten.add_.Tensor"),
    "held sum": (lambda x: x + x.softmax(-1), r"traced and held tensors together in aten.add.Tensor in inner"),
    "held": (lambda x: x.softmax(-1), r"the output is held"),
    "constant": (lambda x: W[None], r"does not depend on its input"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(function: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(UntraceableError, match=message):
        decompose(function)
