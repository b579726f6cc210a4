"""Moments of a population, in one piece and in parts, against numpy."""

from math import isnan

import numpy as np
import pytest

from normscope.measures.dispersion import EMPTY, Moments, combine_moments, moments


def parts_of(values: np.ndarray, cuts: list[int]) -> Moments:
    found = [moments(part) for part in np.split(values, cuts)]
    return combine_moments(*zip(*(vars(part).values() for part in found), strict=True))


@pytest.mark.parametrize("offset", [0.0, 5.0, 1e8])  # a sum of squares would lose every digit at 1e8
@pytest.mark.parametrize("cuts", [[], [1], [10, 11, 200], [0, 0, 300]])
def test_parts_make_the_whole(offset: float, cuts: list[int]) -> None:
    values = offset + np.random.default_rng(0).gamma(3.0, size=300)
    found = parts_of(values, cuts)
    assert found.count == 300
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.deviation() == pytest.approx(values.std(), rel=1e-6)
    assert found.deviation(sample=True) == pytest.approx(values.std(ddof=1), rel=1e-6)
    assert found.variation() == pytest.approx(values.std() / values.mean(), rel=1e-6)
    assert (found.largest, found.smallest) == (values.max(), values.min())


def test_by_hand() -> None:
    found = combine_moments([1, 2], [2.0, 5.0], [0.0, 2.0], [2.0, 6.0], [2.0, 4.0])  # 2 and 4, 6
    assert found == Moments(3, 4.0, 8.0, 6.0, 2.0)
    assert found.deviation() == pytest.approx((8 / 3) ** 0.5)
    assert found.deviation(sample=True) == 2.0


def test_single_precision_is_added_up_in_double() -> None:
    values = np.full(100_000, 0.1, dtype=np.float32)
    assert moments(values).mean == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_nothing_and_one_value() -> None:
    assert moments([]) is EMPTY
    assert combine_moments([0, 0], [1.0, np.nan], [0, 0], [9, 9], [9, 9]) is EMPTY
    assert isnan(EMPTY.deviation())
    assert isnan(EMPTY.variation())
    one = combine_moments([0, 1], [np.nan, 3.0], [np.nan, 0.0], [np.nan, 3.0], [np.nan, 3.0])
    assert one == Moments(1, 3.0, 0.0, 3.0, 3.0)
    assert one.deviation() == 0
    assert isnan(one.deviation(sample=True))
    assert isnan(moments([0.0, 0.0]).variation())
