"""The 16-bit code: zero is exact, everything else within the stated precision."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from normscope import NormscopeError
from normscope.view.log16 import STEPS, LogRange, decode_log16, encode_log16, log16_precision

TINY = float(np.finfo(np.float32).tiny)
numbers = st.one_of(st.just(0.0), st.floats(TINY, 1e30), st.floats(1e-9, 10.0))


@given(arrays(np.float64, array_shapes(max_dims=3, max_side=6), elements=numbers))
@settings(deadline=None)
def test_round_trip(values: np.ndarray) -> None:
    codes, span = encode_log16(values)
    assert codes.dtype == np.uint16
    assert codes.shape == values.shape
    found = decode_log16(codes, span).astype(np.float64)
    assert np.array_equal(found == 0, values == 0)
    assert np.all(np.abs(found - values) <= log16_precision(span) * values * (1 + 1e-9))


@given(arrays(np.float64, 8, elements=numbers))
@settings(deadline=None)
def test_order_is_kept(values: np.ndarray) -> None:
    codes, _ = encode_log16(np.sort(values))
    assert np.all(np.diff(codes.astype(int)) >= 0)


def test_ends_are_the_smallest_and_the_largest() -> None:
    codes, span = encode_log16(np.array([0.0, 1e-6, 3.0, 0.5]))
    assert codes[0] == 0
    assert codes[1] == 1
    assert codes[2] == STEPS + 1
    assert span == LogRange(pytest.approx(math.log(1e-6)), pytest.approx(math.log(3.0)))


def test_one_value_and_none() -> None:
    codes, span = encode_log16(np.array([[2.5, 0.0], [2.5, 2.5]]))
    assert codes.tolist() == [[1, 0], [1, 1]]
    assert span.low == span.high
    assert decode_log16(codes, span).tolist() == [[2.5, 0.0], [2.5, 2.5]]
    codes, span = encode_log16(np.zeros((2, 3)))
    assert not codes.any()
    assert span == LogRange(0.0, 0.0)
    assert not decode_log16(codes, span).any()


def test_precision_of_a_wide_range() -> None:
    """Attention weights from the smallest float32 to 1 are kept to better than a thousandth."""
    _, span = encode_log16(np.array([TINY, 1.0]))
    assert 6e-4 < log16_precision(span) < 7e-4


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
def test_values_without_a_code_are_refused(wrong: float) -> None:
    with pytest.raises(NormscopeError, match="The map contains"):
        encode_log16(np.array([1.0, wrong]))
