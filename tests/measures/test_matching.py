"""Pairs matched by distance: the same histogram, exactly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope import NormscopeError
from normscope.measures.matching import match_distances

DISTANCES = st.lists(st.integers(-6, 6), max_size=60)


@given(DISTANCES, DISTANCES, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_histograms_are_the_same_and_as_large_as_can_be(targets: list[int], others: list[int], seed: int) -> None:
    found = match_distances(np.array(targets, int), np.array(others, int), seed)
    left, right = Counter(targets[n] for n in found.targets), Counter(others[n] for n in found.others)
    assert left == right == Counter(targets) & Counter(others)
    assert len(set(found.targets)) == len(found.targets) == len(found)
    assert len(set(found.others)) == len(found.others)
    assert found.dropped == len(targets) - len(found)


def test_all_targets_are_kept_where_there_are_enough_others() -> None:
    generator = np.random.default_rng(0)
    targets, others = generator.integers(1, 5, 500), generator.integers(1, 100, 100_000)
    found = match_distances(targets, others, 3)
    assert found.dropped == 0
    assert (np.bincount(others[found.others]) == np.bincount(targets)).all()
    again = match_distances(targets, others, 3)
    assert (again.others == found.others).all()
    assert not (match_distances(targets, others, 4).others == found.others).all()


def test_draws_are_even() -> None:
    """Every other pair of a distance has the same chance, and so has every target when some must be dropped."""
    targets, others = np.array([1, 1, 2, 2, 2, 2]), np.array([1, 1, 1, 1, 2, 2])
    seen, kept = np.zeros(6), np.zeros(6)
    for seed in range(2000):
        found = match_distances(targets, others, seed)
        seen[found.others] += 1
        kept[found.targets] += 1
    assert np.abs(seen / 2000 - [0.5, 0.5, 0.5, 0.5, 1, 1]).max() < 0.05
    assert np.abs(kept / 2000 - [1, 1, 0.5, 0.5, 0.5, 0.5]).max() < 0.05


def test_signs_are_not_mixed_up() -> None:
    found = match_distances(np.array([-1, -1, 2]), np.array([1, 1, -1, -2, 2]))
    assert (found.targets.tolist()[-1], found.others.tolist(), found.dropped) == (2, [2, 4], 1)


def test_nothing_to_match() -> None:
    assert (len(match_distances([], [1])), match_distances([], [1]).dropped) == (0, 0)
    assert (len(match_distances([1, 2], [])), match_distances([1, 2], []).dropped) == (0, 2)
    with pytest.raises(NormscopeError, match="integers"):
        match_distances([0.5], [1])
