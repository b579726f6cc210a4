"""Readings: values from KEY=VALUE, and refused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from normscope import NormscopeError
from normscope.papers.readings import describe_readings, parse_readings, reading


@dataclass(frozen=True)
class Readings:
    mask_seed: int = reading(0, "seed of the draw")
    distance: str = reading("absolute", "how far apart", choices=("absolute", "signed"))
    share: float = reading(0.01, "share of the dimensions")
    special: bool = reading(True, "whether special tokens count")
    draws: int = reading(1, "draws", choices=(1, 5))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("mask_seed=7", "mask_seed", 7),
        ("mask-seed = 7", "mask_seed", 7),
        ("distance=signed", "distance", "signed"),
        ("share=1e-3", "share", 0.001),
        ("special=false", "special", False),
        ("special=Yes", "special", True),
        ("draws=5", "draws", 5),
    ],
)
def test_values_have_the_type_of_the_default(given: str, name: str, value: Any) -> None:
    found = parse_readings(Readings, [given])
    assert getattr(found, name) == value
    assert type(getattr(found, name)) is type(value)


def test_the_last_of_two_counts() -> None:
    assert parse_readings(Readings, ["mask_seed=1", "mask_seed=2"]).mask_seed == 2
    assert parse_readings(Readings, []) == Readings()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("distance", "KEY=VALUE, not 'distance'"),
        ("=3", "KEY=VALUE"),
        ("distanse=signed", "Did you mean 'distance'.*Known: mask_seed, distance"),
        ("distance=far", "one of absolute, signed, not 'far'"),
        ("mask_seed=one", "mask_seed must be a whole number, not 'one'"),
        ("mask_seed=1.5", "whole number"),
        ("share=nan", "share must be a number, not 'nan'"),
        ("special=maybe", "true or false"),
        ("draws=2", "one of 1, 5"),
    ],
)
def test_refusals_name_what_is_known(given: str, said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        parse_readings(Readings, [given])


def test_describe_states_value_choices_and_default() -> None:
    readings = describe_readings(parse_readings(Readings, ["distance=signed"]))
    found = {one.name: (one.value, one.meaning) for one in readings}
    assert [one.name for one in readings if one.changed] == ["distance"]
    assert found["distance"] == ("signed", "how far apart (one of absolute, signed; default absolute)")
    assert found["special"] == ("true", "whether special tokens count (default true)")
    assert list(found) == ["mask_seed", "distance", "share", "special", "draws"]
