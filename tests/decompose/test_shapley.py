"""Shapley values of an activation of a sum, against all orders of joining."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from normscope import NormscopeError
from normscope.decompose import activations
from normscope.decompose.shapley import gaussian_means, values


def draw(players: int, units: int = 30, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(players, units, generator=generator, dtype=torch.float64)


def all_orders(game: Callable[..., Tensor], *z: Tensor) -> Tensor:
    """The mean gain over every order, written out."""
    players = len(z[0])
    values = torch.zeros_like(z[0])
    for order in permutations(range(players)):
        sums = [torch.zeros_like(one[0]) for one in z]
        before = game(*sums)
        for j in order:
            sums = [total + one[j] for total, one in zip(sums, z, strict=True)]
            after = game(*sums)
            values[j] += after - before
            before = after
    return values / math.factorial(players)


def product(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, u: ACT2FN[name](a) * u


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "sigmoid", "hardswish"])
@pytest.mark.parametrize("players", [1, 2, 3, 6])
def test_enumerated(name: str, players: int) -> None:
    z = draw(players)
    found = values.exact_shapley_values(ACT2FN[name], z)
    torch.testing.assert_close(found, all_orders(ACT2FN[name], z), rtol=1e-12, atol=1e-13)
    gained = ACT2FN[name](z.sum(0)) - ACT2FN[name](torch.zeros_like(z[0]))
    torch.testing.assert_close(found.sum(0), gained, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("players", [1, 2, 5])
def test_enumerated_of_pairs(players: int) -> None:
    a, u = draw(players), draw(players, seed=1)
    found = values.exact_shapley_values(product("silu"), a, u)
    torch.testing.assert_close(found, all_orders(product("silu"), a, u), rtol=1e-12, atol=1e-13)


def test_coalitions_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    z = draw(6)
    whole = values.exact_shapley_values(ACT2FN["gelu"], z)
    monkeypatch.setattr(values, "COALITION_CHUNK", 7)
    monkeypatch.setattr(values, "WORTH_CHUNK", 7 * 11)
    torch.testing.assert_close(values.exact_shapley_values(ACT2FN["gelu"], z), whole, rtol=1e-13, atol=1e-14)


def test_by_hand() -> None:
    """ReLU(3 - 2): the 3 gains 3 if it joins first and 1 after the -2; the -2 loses 2 if it joins last and 0 first."""
    z = torch.tensor([[3.0], [-2.0]], dtype=torch.float64)
    assert values.exact_shapley_values(torch.relu, z).flatten().tolist() == [2.0, -1.0]


def test_a_linear_game_returns_its_summands() -> None:
    z = draw(7)
    torch.testing.assert_close(values.exact_shapley_values(lambda a: 3 * a, z), 3 * z, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        values.gaussian_shapley_values(lambda m, v: 3 * m, z, large_players=2), 3 * z, rtol=1e-7, atol=1e-8
    )


def test_a_zero_summand_is_not_a_player() -> None:
    z = draw(4)
    more = torch.cat([z[:1], torch.zeros(20, 30, dtype=torch.float64), z[1:]])
    found = values.exact_shapley_values(ACT2FN["gelu"], more)
    assert not bool(found[1:21].any())
    torch.testing.assert_close(found[[0, 21, 22, 23]], values.exact_shapley_values(ACT2FN["gelu"], z))
    some = values.sampled_shapley_values(ACT2FN["gelu"], more, permutations=16)
    assert not bool(some.values[1:21].any())
    assert torch.equal(
        some.values[[0, 21, 22, 23]], values.sampled_shapley_values(ACT2FN["gelu"], z, permutations=16).values
    )
    normal = values.gaussian_shapley_values(gaussian_means.gaussian_mean("gelu", ACT2FN["gelu"]), more)
    assert not bool(normal[1:21].any())
    assert not bool(values.exact_shapley_values(ACT2FN["gelu"], torch.zeros(3, 2, dtype=torch.float64)).any())


def test_small_players_keep_their_digits() -> None:
    """A player of 1e-9 gains its value times the slope, averaged over the coalitions of the others."""
    z = draw(5)
    z[2] = 1e-9 * z[2].sign()
    found = values.exact_shapley_values(ACT2FN["gelu"], z) / z
    rest = z[[0, 1, 3, 4]]
    slopes = torch.zeros_like(z[0])
    for order in permutations(range(5)):
        before = list(order[: order.index(4)])
        slopes += activations.activation_slope(ACT2FN["gelu"], rest[before].sum(0))
    torch.testing.assert_close(found[2], slopes / 120, rtol=1e-6, atol=1e-6)


def test_too_many_to_enumerate() -> None:
    with pytest.raises(NormscopeError, match="2\\^21 coalitions"):
        values.exact_shapley_values(torch.relu, draw(21, 2))


@pytest.mark.parametrize("gated", [False, True])
def test_sampled_is_within_its_standard_error(gated: bool) -> None:
    z = [draw(8, 200), draw(8, 200, seed=1)][: 1 + gated]
    game = product("silu") if gated else ACT2FN["gelu"]
    exact = values.exact_shapley_values(game, *z)
    found = values.sampled_shapley_values(game, *z, permutations=400)
    off = (found.values - exact) / found.error
    assert 0.8 < float(off.square().mean()) < 1.25
    assert float((off.abs() < 3).double().mean()) > 0.985
    total = game(*(one.sum(0) for one in z)) - game(*(torch.zeros_like(one[0]) for one in z))
    torch.testing.assert_close(found.values.sum(0), total, rtol=1e-12, atol=1e-13)


def test_sampled_is_fixed_by_its_seed() -> None:
    z = draw(8)
    first = values.sampled_shapley_values(torch.relu, z, permutations=20)
    assert torch.equal(first.values, values.sampled_shapley_values(torch.relu, z, permutations=20).values)
    assert not torch.equal(first.values, values.sampled_shapley_values(torch.relu, z, permutations=20, seed=1).values)
    more = values.sampled_shapley_values(torch.relu, z, permutations=2000)
    assert 0.07 < float(more.error.mean() / first.error.mean()) < 0.14  # one over the root of a hundred
    with pytest.raises(NormscopeError, match="at least 4"):
        values.sampled_shapley_values(torch.relu, z, permutations=2)


def test_pairs_of_orders_cancel_what_is_even() -> None:
    """For a square, an order and its reverse give the exact value: the antithetic pair has no error at all."""
    found = values.sampled_shapley_values(torch.square, draw(9), permutations=8)
    torch.testing.assert_close(found.values, values.exact_shapley_values(torch.square, draw(9)), rtol=1e-12, atol=1e-13)
    assert float(found.error.max()) < 1e-7


@pytest.mark.parametrize(("name", "limit"), [("gelu", 0.005), ("silu", 0.005), ("relu", 0.04)])
@pytest.mark.parametrize("gated", [False, True])
def test_gaussian(name: str, limit: float, gated: bool) -> None:
    """Twelve players, the first two large, like the own token and the biases. A kink costs accuracy."""
    z = [draw(12, 300, scale=0.3), draw(12, 300, seed=1, scale=0.3)][: 1 + gated]
    for one in z:
        one[0] *= 6
        one[1] *= 4
    game = product(name) if gated else ACT2FN[name]
    expected = (gaussian_means.gated_gaussian_mean if gated else gaussian_means.gaussian_mean)(name, ACT2FN[name])
    exact = values.exact_shapley_values(game, *z)
    found = values.gaussian_shapley_values(expected, *z)
    assert 2 <= values.count_large_shapley_players(values._shapley_value_player_shares(z)) <= 4
    apart = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(apart.max()) < limit
    naive = values.gaussian_shapley_values(expected, *z, large_players=0)
    assert float((naive - exact).norm(dim=1).max()) > 3 * float((found - exact).norm(dim=1).max())
    total = game(*(one.sum(0) for one in z))
    assert float((found.sum(0) - total).norm() / total.norm()) < limit


def test_gaussian_with_all_players_large_is_exact() -> None:
    z = draw(4)
    found = values.gaussian_shapley_values(gaussian_means.gaussian_mean("gelu", ACT2FN["gelu"]), z, large_players=4)
    torch.testing.assert_close(found, values.exact_shapley_values(ACT2FN["gelu"], z), rtol=1e-6, atol=1e-7)
    lone = values.gaussian_shapley_values(gaussian_means.gaussian_mean("gelu", ACT2FN["gelu"]), z[:1])
    torch.testing.assert_close(lone, ACT2FN["gelu"](z[:1]), rtol=1e-7, atol=1e-8)


def test_units_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    z = draw(12, 100)
    whole = values.gaussian_shapley_values(gaussian_means.gaussian_mean("gelu", ACT2FN["gelu"]), z)
    some = values.sampled_shapley_values(ACT2FN["gelu"], z, permutations=30)
    monkeypatch.setattr(values, "CHUNK_NUMBERS", 500)
    torch.testing.assert_close(
        values.gaussian_shapley_values(gaussian_means.gaussian_mean("gelu", ACT2FN["gelu"]), z), whole
    )
    torch.testing.assert_close(values.sampled_shapley_values(ACT2FN["gelu"], z, permutations=30).values, some.values)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_many_small_players_come_to_integrated_gradients(name: str) -> None:
    """Aumann and Shapley (1974): with infinitesimal players, values are gradients along the diagonal."""
    a = torch.linspace(-4, 4, 41, dtype=torch.float64)
    drops = (a / 5000).expand(5000, -1).clone()
    found = values.gaussian_shapley_values(gaussian_means.gaussian_mean(name, ACT2FN[name]), drops)
    shared = drops * activations.gate_coefficient("ig", name, ACT2FN[name], a)
    torch.testing.assert_close(found, shared, rtol=1e-3, atol=2e-7)
