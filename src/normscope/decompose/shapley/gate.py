"""The option `gate="shapley"` and its variants, and the Shapley values that each computes for a unit."""

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

DEFAULT_EXACT_PLAYERS = 10  # with at most this many players, exact values are the default: as cheap as Gaussian ones
PERMUTATIONS = 128
NO_EXPERTS = (
    "Shapley values are not available for a mixture of experts: they leave tokens out, which would change the routing. "
    "Use gate='ig'."
)


@dataclass(frozen=True)
class Shapley:
    """A way to compute Shapley values. The method "" is exact for rows with at most DEFAULT_EXACT_PLAYERS players, and
    Gaussian for others."""

    method: Literal["", "exact", "sampled", "gaussian"] = ""
    permutations: int = PERMUTATIONS
    seed: int = 0

    @property
    def approximate(self) -> bool:
        """Whether values may not sum exactly to the activation. The completeness error shows by how much."""
        return self.method in ("", "gaussian")

    def __str__(self) -> str:
        name = f"shapley-{self.method}" if self.method else "shapley"
        return f"{name}:{self.permutations}:{self.seed}" if self.method == "sampled" else name

    def nanoseconds(self, players: int) -> float:
        """The approximate time for one value, that is, for one player and one hidden unit."""
        if self.method == "exact" or (self.method == "" and players <= DEFAULT_EXACT_PLAYERS):
            return 20 * 2.0 ** min(players, values.MAX_EXACT_PLAYERS) / players
        return 15 * self.permutations if self.method == "sampled" else 5000

    def values(self, unit: Unit, z: Sequence[Tensor]) -> Tensor:
        """The values (players, units), in float64, of players z: (players, units) before g, for each projection."""
        players = [to_float64(one) for one in z]
        if self.method == "exact" or (
            self.method == "" and _shapley_gate_player_count(players) <= DEFAULT_EXACT_PLAYERS
        ):
            return values.exact_shapley_values(_shapley_gate_game(unit), *players)
        if self.method == "sampled":
            return values.sampled_shapley_values(
                _shapley_gate_game(unit), *players, permutations=self.permutations, seed=self.seed
            ).values
        return values.gaussian_shapley_values(_shapley_gate_mean(unit), *players)


def parse_shapley_gate(gate: str) -> Shapley | None:
    """The variant that a gate name selects: "shapley", "shapley-exact", "shapley-gaussian", or "shapley-sampled",
    optionally with the number of permutations and a seed ("shapley-sampled:512:1"). None for other gates."""
    given = re.fullmatch(r"shapley(?:-(exact|gaussian|sampled(?::(\d+))?(?::(\d+))?))?", gate)
    if given is None:
        return None
    method, permutations, seed = given[1] or "", given[2], given[3]
    found = Shapley(
        method.partition(":")[0],  # type: ignore[arg-type]  # the pattern allows no others
        PERMUTATIONS if permutations is None else int(permutations),
        int(seed or 0),
    )
    if found.permutations < 4:
        raise NormscopeError(f"Sampled Shapley values need at least 4 permutations, not {found.permutations}.")
    return found


def shapley_gate_at_zero(unit: Unit) -> Tensor:
    """(units,): g(0), the worth of the empty coalition, which is attributed to no player; 0 for a gated product."""
    nothing = torch.zeros(unit.out.shape[0], dtype=unit.out.dtype, device=unit.out.device)
    return _shapley_gate_game(unit)(*[nothing] * (1 if unit.up is None else 2))


def _shapley_gate_game(unit: Unit) -> values.Game:
    if unit.up is None:
        return unit.activation
    if unit.joint is not None:
        return unit.joint
    return lambda a, u: unit.activation(a) * u


def _shapley_gate_mean(unit: Unit) -> gaussian_means.Mean:
    if unit.up is None:
        return gaussian_means.gaussian_mean(unit.activation_name, unit.activation)
    if unit.joint is not None:
        raise NormscopeError(
            "gate='shapley-gaussian' needs a gate of the form g(a) * u, which this model does not have. Use "
            "'shapley-sampled' or 'ig'."
        )
    return gaussian_means.gated_gaussian_mean(unit.activation_name, unit.activation)


def _shapley_gate_player_count(z: Sequence[Tensor]) -> int:
    return int(torch.stack([(one != 0).any(1) for one in z]).any(0).sum())
