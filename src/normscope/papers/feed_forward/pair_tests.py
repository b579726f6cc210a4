"""Tests of the difference in FF-amp between target pairs and other pairs, layer by layer (FF paper, Fig. 7).

The pairs of one sequence share its maps, so they are dependent and the test that decides resamples whole sequences. The
tests over instances and over types of pairs, which treat them as independent, are readings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.measures.bootstrap import Difference, bootstrap_mean_difference
from normscope.measures.uncertainty import Estimate, Resampled, decide_at_least, resample_means
from normscope.papers.feed_forward.groups import (
    GroupAmplification,
    MatchedGroups,
    other_ff_amp_axis,
    pair_type_keys,
)
from normscope.papers.feed_forward.maps import Numbers, Texts, Values
from normscope.papers.resampling import estimates_along, pick, subtract_resampled
from normscope.papers.verdicts import majority

LEVELS = ("sequence", "instance", "type")
DISTANCES = ("absolute", "signed")


@dataclass(frozen=True)
class PairTests:
    """The tests of all layers under each reading."""

    means: Resampled  # (2, layers): targets, others, under resampling of sequences
    instances: Sequence[Difference]  # the paper's unit
    types: Sequence[Difference]
    margins: Mapping[str, Sequence[Estimate]]  # reading, as "axis=input" -> layers; the first one decides

    @property
    def deciding(self) -> Sequence[Estimate]:
        """The margins that decide the claim."""
        return next(iter(self.margins.values()))

    def verdicts(self, alpha: float) -> dict[str, bool | None]:
        """reading -> whether the targets are larger in most layers."""
        most = majority(len(self.deciding))
        return {name: decide_at_least(most, margins, alpha) for name, margins in self.margins.items()}


def run_pair_tests(
    given: Texts,
    matched: Mapping[str, MatchedGroups],
    values: Mapping[str, GroupAmplification],
    readings: Any,
) -> PairTests:
    """All tests; `matched` and `values` by distance, the one of the readings first."""
    axis, distance = readings.axis, readings.distance
    groups, amp = matched[distance], values[distance]
    instances, types = (_unit_differences(given, groups, amp, level, readings) for level in LEVELS[1:])
    means = resample_group_means(groups, amp.targets[axis], amp.others[axis], len(given), readings)
    by_level = {
        "sequence": _margins(means),
        "instance": _as_estimates(instances, f"{len(groups.targets):,} pairs of each kind"),
        "type": _as_estimates(types, "types of pairs"),
    }
    margins = {f"level={readings.level}": by_level[readings.level]}
    margins |= {f"level={level}": some for level, some in by_level.items() if level != readings.level}
    other = other_ff_amp_axis(axis)
    swapped = resample_group_means(groups, amp.targets[other], amp.others[other], len(given), readings)
    margins[f"axis={other}"] = _margins(swapped)
    for name in matched:
        if name != distance and len(matched[name].targets):
            again = values[name].targets[axis], values[name].others[axis]
            margins[f"distance={name}"] = _margins(resample_group_means(matched[name], *again, len(given), readings))
    return PairTests(means, instances, types, margins)


def resample_group_means(
    groups: MatchedGroups, targets: Values, others: Values, sequences: int, readings: Any
) -> Resampled:
    """(2, layers): mean FF-amp of targets and others, under resampling of the sequences that have such pairs.

    Instances of a sequence are drawn together: the means are ratios of resampled sums to resampled counts.
    """
    both = ((groups.targets, targets), (groups.others, others))
    counts = np.stack([np.bincount(cells.entries, minlength=sequences) for cells, _ in both], 1)
    sums = np.stack([[np.bincount(cells.entries, row, sequences) for row in some] for cells, some in both], 0)
    # (sequences, 2, layers + 1): the sums of each layer, then the count
    table = np.concatenate([sums.transpose(2, 0, 1), counts[..., None]], 2)
    table = table[counts.sum(1) > 0]
    return resample_means(table, readings.resamples, seed=(readings.seed, 3)).map(
        lambda means: means[..., :-1] / means[..., -1:]
    )


def _margins(means: Resampled) -> list[Estimate]:
    return estimates_along(subtract_resampled(*(pick(means, n, -2) for n in range(2))))


def _unit_differences(
    given: Texts, groups: MatchedGroups, amp: GroupAmplification, level: str, readings: Any
) -> list[Difference]:
    """Unpaired bootstrap over single pairs, or over types of pairs with their means."""
    both = [(groups.targets, amp.targets[readings.axis]), (groups.others, amp.others[readings.axis])]
    targets, others = (
        _means_by_type(pair_type_keys(given, cells), some) if level == "type" else some for cells, some in both
    )
    options: dict[str, Any] = {"resamples": readings.resamples, "sided": readings.sided, "alpha": readings.alpha}
    number = LEVELS.index(level) - 1
    return [
        bootstrap_mean_difference(a, b, seed=(readings.seed, layer, number), **options)
        for layer, (a, b) in enumerate(zip(targets, others, strict=True))
    ]


def _as_estimates(found: Sequence[Difference], what: str) -> list[Estimate]:
    method = f"bootstrap over {what}"
    return [Estimate(one.difference, one.low, one.high, one.above, one.below, method) for one in found]


def _means_by_type(keys: Numbers, values: Values) -> Values:
    """(layers, types): the means of the values (layers, pairs) of each type's instances."""
    _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return np.stack([np.bincount(place, weights=row) for row in values]) / counts
