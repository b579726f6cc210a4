"""Shapley values of an elementwise function of a sum (named as future work by the FF paper, section 3).

The players are the summands z_j of ``a = sum_j z_j``, the game is ``v(S) = g(sum of S)``, for every hidden unit by
itself; of a gated feed-forward the players are pairs (a_j, u_j) and the game is g(a) u. The value of j is its mean gain
over all orders in which the players may join,

    phi_j = sum over S without j of |S|! (n - |S| - 1)! / n! (g(S + j) - g(S))
          = integral_0^1 E[g(S_t + z_j) - g(S_t)] dt

where S_t holds each other player with probability t. Values sum to ``g(a) - g(0)`` (efficiency). Unlike integrated
gradients there is no one coefficient that all summands share.

Three ways: `enumerated` over all coalitions, `sampled` over random orders, and `gaussian`, where S_t is a few large
players, of which all coalitions are taken, and a normal distribution of the mean and variance of all the others. The
first two are efficient; how far the third is from it is seen in its completeness.

z: (players, units), one tensor or for a gated feed-forward two; all in float64, as small players are differences.
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

Game = Callable[..., Tensor]  # elementwise, of one sum or of two

MOST = 20  # players that are enumerated: a million coalitions
COALITIONS = 2**12  # at a time,
WORTHS = 2**20  # and their worths for so many units
NODES = 8  # of the Gauss-Legendre rule over t
LARGE = 0.05  # players of more than this share of all squares are no part of the normal distribution,
APART = 4  # up to so many of them
AT_ONCE = 2**15  # numbers, so that all that is made of them stays in cache


class Sampled(NamedTuple):
    """Values from random orders, with their standard errors."""

    values: Tensor  # (players, units)
    error: Tensor  # (players, units)


def exact_shapley(game: Game, *z: Tensor) -> Tensor:
    """Exact values, from all ``2^players`` coalitions. Who adds nothing is no player, and has the value 0."""
    active, some = _drop_idle_players(z)
    players = len(some[0])
    if players > MOST:
        raise NormscopeError(
            f"Exact Shapley values of {players} tokens take 2^{players} coalitions for every hidden unit; the most is "
            f"{MOST} tokens. Use gate='shapley-gaussian' or 'shapley-sampled'."
        )
    # What it weighs to join a coalition of a size; nobody joins that of all.
    joining = [1 / (players * math.comb(players - 1, size)) for size in range(players)]
    weight = some[0].new_tensor([*joining, 0.0])
    places = torch.arange(players, device=some[0].device)
    values = torch.zeros_like(some[0])
    step = max(1, WORTHS // min(COALITIONS, 2**players))
    for first in range(0, 2**players, COALITIONS):
        numbers = torch.arange(first, min(first + COALITIONS, 2**players), device=some[0].device)
        inside = (numbers[:, None] >> places) & 1  # (coalitions, players)
        size = inside.sum(1, keepdim=True)
        gain = torch.where(inside == 1, weight[(size - 1).clamp_min(0)], -weight[size])
        members = inside.to(values)
        for into, *units in zip(values.split(step, 1), *(one.split(step, 1) for one in some), strict=True):
            into += gain.t() @ game(*(members @ one for one in units))
    return _restore_idle_players(active, values)


def sampled_shapley(game: Game, *z: Tensor, permutations: int, seed: int = 0) -> Sampled:
    """Mean gains over random orders, each taken forwards and backwards (antithetic pairs); efficient in every order.

    The orders depend on the seed and the number of players alone. The standard error is that of the mean of the pairs.
    """
    active, some = _drop_idle_players(z)
    players = len(some[0])
    pairs = permutations // 2
    if pairs < 2:
        raise NormscopeError(f"Sampled Shapley values need at least 4 permutations, not {permutations}.")
    generator = np.random.default_rng([seed, players])
    total, squares = torch.zeros_like(some[0]), torch.zeros_like(some[0])
    orders = torch.from_numpy(generator.permuted(np.tile(np.arange(players), (pairs, 1)), axis=1)).to(total.device)
    for order in orders.split(max(1, AT_ONCE // max(1, some[0].numel()))):
        both = (_gains_along_orders(game, some, order) + _gains_along_orders(game, some, order.flip(1))) / 2
        total += both.sum(0)
        squares += both.square().sum(0)
    mean = total / pairs
    variance = (squares / pairs - mean.square()).clamp_min_(0) / (pairs - 1)
    return Sampled(_restore_idle_players(active, mean), _restore_idle_players(active, variance.sqrt_()))


def gaussian_shapley(expected: Mean, *z: Tensor, apart: int | None = None) -> Tensor:
    """Values with S_t normal, but for the `apart` largest players of each unit, all of whose coalitions count.

    ``S_t ~ N(t sum z_k, t (1 - t) sum z_k^2)`` over the others k; `expected` is the mean of the game over that
    (`gaussian_means`). The integral over t is a Gauss-Legendre rule in s, ``t = sin^2(pi s / 2)``: the deviation of
    S_t is then smooth at both ends.
    """
    active, z = _drop_idle_players(z)
    shares = _player_shares(z)
    count = count_large_players(shares) if apart is None else apart
    large = shares.topk(count, 0).indices  # (apart, units)
    inside = _coalitions(count).to(z[0])  # (coalitions, apart)
    size = inside.sum(1)
    values = torch.empty_like(z[0])
    step = max(1, AT_ONCE // (len(inside) * len(z[0])))
    for first in range(0, z[0].shape[1], step):
        units = slice(first, first + step)
        places = large[:, units]
        big = [one[:, units].gather(0, places) for one in z]
        others = [one[:, units].scatter(0, places, 0.0) for one in z]  # the large ones are nobody here
        sums = [one.sum(0) for one in others]
        products = [others[0] * one for one in others]  # a_k^2, and a_k u_k
        spreads = [one.sum(0) for one in products]
        shifts = [torch.tensordot(inside, one, 1)[:, None] for one in big]  # (coalitions, 1, units)
        small, lone = torch.zeros_like(others[0]), torch.zeros_like(big[0])
        for t, weight in _unit_interval_rule():
            chance = weight * t**size * (1 - t) ** (count - size)
            means = [t * (total - one) + shift for total, one, shift in zip(sums, others, shifts, strict=True)]
            spread = [t * (1 - t) * (total - one) for total, one in zip(spreads, products, strict=True)]
            spread[0].clamp_min_(0)
            small += torch.tensordot(chance, _expected_gain(expected, means, spread, others), 1)
            if count:
                means = [t * total + shift for total, shift in zip(sums, shifts, strict=True)]
                gain = _expected_gain(expected, means, [t * (1 - t) * total for total in spreads], big)
                lone += ((chance / (1 - t))[:, None, None] * (1 - inside)[..., None] * gain).sum(0)
        values[:, units] = small.scatter_add(0, places, lone)
    return _restore_idle_players(active, values)


def count_large_players(shares: Tensor) -> int:
    """How many players of a unit a normal distribution would not do justice to: on the average over units, the next
    one has at most LARGE of all squares (players, units), or there are APART of them."""
    ordered = shares.topk(min(APART, len(shares)), 0).values.mean(1)
    return int((ordered > LARGE).long().cumprod(0).sum())


def _player_shares(z: Sequence[Tensor]) -> Tensor:
    """(players, units): each player's share of the squares of all; of a gate, the mean of both sides."""
    squares = [one.square() for one in z]
    return torch.stack([one / one.sum(0).clamp_min(1e-300) for one in squares]).mean(0)


def _expected_gain(
    expected: Mean, means: Sequence[Tensor], spreads: Sequence[Tensor], joined: Sequence[Tensor]
) -> Tensor:
    """``E[g(S + z_j) - g(S)]``; of a player that is zero, exactly zero."""
    moved = [mean + one for mean, one in zip(means, joined, strict=True)]
    return expected(*moved, *spreads) - expected(*means, *spreads)


def _gains_along_orders(game: Game, z: Sequence[Tensor], orders: Tensor) -> Tensor:
    """(orders, players, units): what each player adds when they join in each order (orders, players)."""
    sums = [torch.nn.functional.pad(one[orders].cumsum(1), (0, 0, 1, 0)) for one in z]
    gains = game(*sums).diff(dim=1)  # by place in the order
    places = orders.argsort(1)
    return gains.gather(1, places[..., None].expand(gains.shape))


def _drop_idle_players(z: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Which players there are that add anything, and those alone."""
    active = torch.stack([(one != 0).any(1) for one in z]).any(0)
    return active, tuple(one[active] for one in z)


def _restore_idle_players(active: Tensor, values: Tensor) -> Tensor:
    found = values.new_zeros(len(active), values.shape[1])
    found[active] = values
    return found


@cache
def _coalitions(players: int) -> Tensor:
    """(2^players, players): who is in each."""
    return (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1


@cache
def _unit_interval_rule() -> tuple[tuple[float, float], ...]:
    """t and its weight."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    s = (nodes + 1) / 2
    t, slope = np.sin(np.pi * s / 2) ** 2, np.pi / 2 * np.sin(np.pi * s)
    return tuple(zip(t.tolist(), (weights / 2 * slope).tolist(), strict=True))
