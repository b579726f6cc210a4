"""Shapley values of an elementwise function of a sum (named as future work by the FF paper, section 3).

The players are the summands z_j of ``a = sum_j z_j``, and the game is ``v(S) = g(sum of S)``, separately for every
hidden unit. In a gated feed-forward the players are pairs (a_j, u_j) and the game is g(a) u. The value of j is its mean
gain over all orders in which the players may join,

    phi_j = sum over S without j of |S|! (n - |S| - 1)! / n! (g(S + j) - g(S))
          = integral_0^1 E[g(S_t + z_j) - g(S_t)] dt

where S_t contains each other player with probability t. Values sum to ``g(a) - g(0)`` (efficiency). Unlike with
integrated gradients, the summands share no common coefficient.

There are three methods: `exact_shapley_values` over all coalitions, `sampled_shapley_values` over random orders, and
`gaussian_shapley_values`, which takes all coalitions of a few large players and approximates the sum of the others by a
normal distribution with their mean and variance. The first two are efficient; the completeness error shows how far the
third is from efficiency.

z: (players, units), one tensor, or two for a gated feed-forward. In float64, because values of small players are
differences of large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from normscope.decompose.shapley.gaussian_means import Mean
from normscope.errors import NormscopeError

Game = Callable[..., Tensor]  # elementwise, of one sum or two

MAX_EXACT_PLAYERS = 20  # a million coalitions
COALITION_CHUNK = 2**12  # coalitions per chunk
WORTH_CHUNK = 2**20  # worths (coalitions x units) per chunk
NODES = 8  # of the Gauss-Legendre rule over t
LARGE_SHARE = 0.05  # players with a larger share of the sum of squares are kept out of the normal distribution,
MAX_LARGE_PLAYERS = 4  # up to this many
CHUNK_NUMBERS = 2**15  # numbers per chunk, so that intermediate results stay in cache


class Sampled(NamedTuple):
    """Values estimated from random orders, with standard errors."""

    values: Tensor  # (players, units)
    error: Tensor  # (players, units)


def exact_shapley_values(game: Game, *z: Tensor) -> Tensor:
    """Exact values from all ``2^players`` coalitions. Players that are zero are not counted and have the value 0."""
    active, some = _drop_idle_shapley_players(z)
    players = len(some[0])
    if players > MAX_EXACT_PLAYERS:
        raise NormscopeError(
            f"Exact Shapley values of {players} tokens need 2^{players} coalitions for every hidden unit; the limit is "
            f"{MAX_EXACT_PLAYERS} tokens. Use gate='shapley-gaussian' or 'shapley-sampled'."
        )
    # The weight of joining a coalition of each size. No player can join the coalition of all.
    joining = [1 / (players * math.comb(players - 1, size)) for size in range(players)]
    weight = some[0].new_tensor([*joining, 0.0])
    places = torch.arange(players, device=some[0].device)
    values = torch.zeros_like(some[0])
    step = max(1, WORTH_CHUNK // min(COALITION_CHUNK, 2**players))
    for first in range(0, 2**players, COALITION_CHUNK):
        numbers = torch.arange(first, min(first + COALITION_CHUNK, 2**players), device=some[0].device)
        inside = (numbers[:, None] >> places) & 1  # (coalitions, players)
        size = inside.sum(1, keepdim=True)
        gain = torch.where(inside == 1, weight[(size - 1).clamp_min(0)], -weight[size])
        members = inside.to(values)
        for into, *units in zip(values.split(step, 1), *(one.split(step, 1) for one in some), strict=True):
            into += gain.t() @ game(*(members @ one for one in units))
    return _restore_idle_shapley_values(active, values)


def sampled_shapley_values(game: Game, *z: Tensor, permutations: int, seed: int = 0) -> Sampled:
    """Mean gains over random orders, each used forwards and backwards (antithetic pairs). Efficient for every order.

    The orders depend only on the seed and the number of players. The standard error is that of the mean over pairs.
    """
    active, some = _drop_idle_shapley_players(z)
    players = len(some[0])
    pairs = permutations // 2
    if pairs < 2:
        raise NormscopeError(f"Sampled Shapley values need at least 4 permutations, not {permutations}.")
    generator = np.random.default_rng([seed, players])
    total, squares = torch.zeros_like(some[0]), torch.zeros_like(some[0])
    orders = torch.from_numpy(generator.permuted(np.tile(np.arange(players), (pairs, 1)), axis=1)).to(total.device)
    for order in orders.split(max(1, CHUNK_NUMBERS // max(1, some[0].numel()))):
        both = (
            _shapley_value_gains_by_order(game, some, order) + _shapley_value_gains_by_order(game, some, order.flip(1))
        ) / 2
        total += both.sum(0)
        squares += both.square().sum(0)
    mean = total / pairs
    variance = (squares / pairs - mean.square()).clamp_min_(0) / (pairs - 1)
    return Sampled(_restore_idle_shapley_values(active, mean), _restore_idle_shapley_values(active, variance.sqrt_()))


def gaussian_shapley_values(expected: Mean, *z: Tensor, large_players: int | None = None) -> Tensor:
    """Values with S_t normal, except for the `large_players` largest players of each unit, whose coalitions are exact.

    ``S_t ~ N(t sum z_k, t (1 - t) sum z_k^2)`` over the others k; `expected` gives the mean of the game over this
    distribution (`gaussian_means`). The integral over t is a Gauss-Legendre rule in s with ``t = sin^2(pi s / 2)``,
    which makes the standard deviation of S_t smooth at both ends.
    """
    active, z = _drop_idle_shapley_players(z)
    shares = _shapley_value_player_shares(z)
    count = count_large_shapley_players(shares) if large_players is None else large_players
    large = shares.topk(count, 0).indices  # (large players, units)
    inside = _shapley_value_coalitions(count).to(z[0])  # (coalitions, large players)
    size = inside.sum(1)
    values = torch.empty_like(z[0])
    step = max(1, CHUNK_NUMBERS // (len(inside) * len(z[0])))
    for first in range(0, z[0].shape[1], step):
        units = slice(first, first + step)
        places = large[:, units]
        big = [one[:, units].gather(0, places) for one in z]
        others = [one[:, units].scatter(0, places, 0.0) for one in z]  # large players set to zero
        sums = [one.sum(0) for one in others]
        products = [others[0] * one for one in others]  # a_k^2, and a_k u_k
        spreads = [one.sum(0) for one in products]
        shifts = [torch.tensordot(inside, one, 1)[:, None] for one in big]  # (coalitions, 1, units)
        small, lone = torch.zeros_like(others[0]), torch.zeros_like(big[0])
        for t, weight in _shapley_value_interval_rule():
            chance = weight * t**size * (1 - t) ** (count - size)
            means = [t * (total - one) + shift for total, one, shift in zip(sums, others, shifts, strict=True)]
            spread = [t * (1 - t) * (total - one) for total, one in zip(spreads, products, strict=True)]
            spread[0].clamp_min_(0)
            small += torch.tensordot(chance, _expected_shapley_value_gain(expected, means, spread, others), 1)
            if count:
                means = [t * total + shift for total, shift in zip(sums, shifts, strict=True)]
                gain = _expected_shapley_value_gain(expected, means, [t * (1 - t) * total for total in spreads], big)
                lone += ((chance / (1 - t))[:, None, None] * (1 - inside)[..., None] * gain).sum(0)
        values[:, units] = small.scatter_add(0, places, lone)
    return _restore_idle_shapley_values(active, values)


def count_large_shapley_players(shares: Tensor) -> int:
    """The number of players to keep out of the normal distribution, from the shares of squares (players, units): those
    with a mean share over units above LARGE_SHARE, at most MAX_LARGE_PLAYERS."""
    ordered = shares.topk(min(MAX_LARGE_PLAYERS, len(shares)), 0).values.mean(1)
    return int((ordered > LARGE_SHARE).long().cumprod(0).sum())


def _shapley_value_player_shares(z: Sequence[Tensor]) -> Tensor:
    """(players, units): each player's share of the sum of squares; for a gated product, the mean over both factors."""
    squares = [one.square() for one in z]
    return torch.stack([one / one.sum(0).clamp_min(1e-300) for one in squares]).mean(0)


def _expected_shapley_value_gain(
    expected: Mean, means: Sequence[Tensor], spreads: Sequence[Tensor], joined: Sequence[Tensor]
) -> Tensor:
    """``E[g(S + z_j) - g(S)]``; exactly zero for z_j = 0."""
    moved = [mean + one for mean, one in zip(means, joined, strict=True)]
    return expected(*moved, *spreads) - expected(*means, *spreads)


def _shapley_value_gains_by_order(game: Game, z: Sequence[Tensor], orders: Tensor) -> Tensor:
    """(orders, players, units): the gain of each player when all join in each order (orders, players)."""
    sums = [torch.nn.functional.pad(one[orders].cumsum(1), (0, 0, 1, 0)) for one in z]
    gains = game(*sums).diff(dim=1)  # by position in the order
    places = orders.argsort(1)
    return gains.gather(1, places[..., None].expand(gains.shape))


def _drop_idle_shapley_players(z: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A mask of the players that are not zero in every unit, and z of those."""
    active = torch.stack([(one != 0).any(1) for one in z]).any(0)
    return active, tuple(one[active] for one in z)


def _restore_idle_shapley_values(active: Tensor, values: Tensor) -> Tensor:
    found = values.new_zeros(len(active), values.shape[1])
    found[active] = values
    return found


@cache
def _shapley_value_coalitions(players: int) -> Tensor:
    """(2^players, players): the members of every coalition, as 0 and 1."""
    return (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1


@cache
def _shapley_value_interval_rule() -> tuple[tuple[float, float], ...]:
    """Values of t and their weights, for the integral over t from 0 to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    s = (nodes + 1) / 2
    t, slope = np.sin(np.pi * s / 2) ** 2, np.pi / 2 * np.sin(np.pi * s)
    return tuple(zip(t.tolist(), (weights / 2 * slope).tolist(), strict=True))
