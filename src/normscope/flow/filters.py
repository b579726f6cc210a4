"""The convolution and activation between the values of a token and those that a recurrence mixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.decompose.mixing import spread_weights, tap_values
from normscope.tracing.recorded import convolve, correlate
from normscope.tracing.records import FilterRecord


@dataclass(frozen=True)
class FrozenFilter:
    """``slope_j * sum_t taps_t * entry_(j-t) * v_(j-t)`` of values (H, j, sources * d_h)."""

    taps: Tensor  # (K, H, d_h)
    slope: Tensor  # (1, H, j, d_h)
    entry: Tensor | None  # (1, H, j, d_h)

    def forward(self, values: Tensor) -> Tensor:
        return _from_sources(self.slope * convolve(self.taps, self._entered(self._by_source(values))))

    def adjoint(self, back: Tensor) -> Tensor:
        """(H, j, targets * d_h): directions in the values before it, from those after it."""
        return _from_sources(self._entered(correlate(self.taps, self.slope * self._by_source(back))))

    def _entered(self, x: Tensor) -> Tensor:
        return x if self.entry is None else x * self.entry

    def spread(self, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (H, i, j) and values (H, j, d_h) as those (K H, i, j), (K H, j, d_h) of a head for each tap and head;
        see `decompose.mixing`."""
        spread = spread_weights(weights.permute(2, 0, 1)[None], len(self.taps))[0].permute(1, 2, 0)
        made = FilterRecord(self.taps, self.slope, None, self.entry)
        return spread, torch.cat([tap_values(made, t, values[None])[0] for t in range(len(self.taps))])

    def _by_source(self, x: Tensor) -> Tensor:
        """(sources, H, j, d_h)"""
        found: Tensor = x.unflatten(2, (-1, self.taps.shape[2])).permute(2, 0, 1, 3)
        return found


def _from_sources(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3).flatten(2)


def freeze_filter(made: FilterRecord) -> FrozenFilter:
    """The filter of an attention, for one item; its constant is part of the attention's."""
    return FrozenFilter(made.taps, made.slope, made.entry)
