"""Which Shapley values: `gate="shapley"` and its variants, as an option and as a function of one unit's players."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normscope.decompose.activations import to_float64
from normscope.decompose.shapley import gaussian_means, values
from normscope.errors import NormscopeError
from normscope.tracing.records import Unit

FEW = 10  # players that are enumerated where nothing else is said: as cheap as the Gaussian form
PERMUTATIONS = 128
EXPERTS = (
    "Shapley values leave tokens out, and without them a mixture of experts would choose other experts. Use gate='ig'."
)


@dataclass(frozen=True)
class Shapley:
    """`way` "": enumerated for outputs of at most FEW players, Gaussian for the others."""

    way: Literal["", "exact", "sampled", "gaussian"] = ""
    permutations: int = PERMUTATIONS
    seed: int = 0

    @property
    def approximate(self) -> bool:
        """Whether the values need not sum to the activation: the completeness tells how far they are from it."""
        return self.way in ("", "gaussian")

    def __str__(self) -> str:
        name = f"shapley-{self.way}" if self.way else "shapley"
        return f"{name}:{self.permutations}:{self.seed}" if self.way == "sampled" else name

    def nanoseconds(self, players: int) -> float:
        """About what a player's value of one hidden unit takes."""
        if self.way == "exact" or (self.way == "" and players <= FEW):
            return 20 * 2.0 ** min(players, values.MOST) / players
        return 15 * self.permutations if self.way == "sampled" else 5000

    def values(self, unit: Unit, z: Sequence[Tensor]) -> Tensor:
        """(players, units) of each projection -> (players, units), in float64; the players' z W_1 before g."""
        players = [to_float64(one) for one in z]
        if self.way == "exact" or (self.way == "" and _player_count(players) <= FEW):
            return values.exact_shapley(_activation_game(unit), *players)
        if self.way == "sampled":
            return values.sampled_shapley(
                _activation_game(unit), *players, permutations=self.permutations, seed=self.seed
            ).values
        return values.gaussian_shapley(_activation_mean(unit), *players)


def parse_shapley_gate(gate: str) -> Shapley | None:
    """The variant that a gate's name stands for: "shapley", "shapley-exact", "shapley-gaussian", or "shapley-sampled"
    with the number of permutations and a seed behind it where wanted: "shapley-sampled:512:1". None: another gate."""
    given = re.fullmatch(r"shapley(?:-(exact|gaussian|sampled(?::(\d+))?(?::(\d+))?))?", gate)
    if given is None:
        return None
    way, permutations, seed = given[1] or "", given[2], given[3]
    found = Shapley(
        way.partition(":")[0],  # type: ignore[arg-type]  # the pattern has no others
        PERMUTATIONS if permutations is None else int(permutations),
        int(seed or 0),
    )
    if found.permutations < 4:
        raise NormscopeError(f"Sampled Shapley values need at least 4 permutations, not {found.permutations}.")
    return found


def activation_at_zero(unit: Unit) -> Tensor:
    """(units,): the game of nobody, g(0), which belongs to no player; zero where a zero gates it."""
    nothing = torch.zeros(unit.out.shape[0], dtype=unit.out.dtype, device=unit.out.device)
    return _activation_game(unit)(*[nothing] * (1 if unit.up is None else 2))


def _activation_game(unit: Unit) -> values.Game:
    if unit.up is None:
        return unit.activation
    if unit.joint is not None:
        return unit.joint
    return lambda a, u: unit.activation(a) * u


def _activation_mean(unit: Unit) -> gaussian_means.Mean:
    if unit.up is None:
        return gaussian_means.gaussian_mean(unit.activation_name, unit.activation)
    if unit.joint is not None:
        raise NormscopeError(
            "gate='shapley-gaussian' needs a gated product; this model's gate is another function. Use "
            "'shapley-sampled' or 'ig'."
        )
    return gaussian_means.gated_gaussian_mean(unit.activation_name, unit.activation)


def _player_count(z: Sequence[Tensor]) -> int:
    return int(torch.stack([(one != 0).any(1) for one in z]).any(0).sum())
