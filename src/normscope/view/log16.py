"""Numbers from 0 up in 16 bits on a logarithmic scale: zero is exact, all others have the same relative error.

Code 0 is 0; code q from 1 to 65535 is ``exp(low + (q - 1) (high - low) / 65534)``, where low and high are the
logarithms of the smallest and the largest number that is not 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError

STEPS = 65534
ROUNDING = 2.0**-24  # what is decoded is kept in float32


class Range(NamedTuple):
    """Natural logarithms of the smallest and the largest number that is not 0; both 0 where there is none."""

    low: float
    high: float


def encode(values: NDArray[Any]) -> tuple[NDArray[np.uint16], Range]:
    """The codes of an array, of its shape, and their range."""
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise NormscopeError("A map holds NaN or infinite values: they cannot be drawn.")
    if (numbers < 0).any():
        raise NormscopeError("A map holds negative values: norms and weights have none.")
    nonzero = numbers > 0
    codes = np.zeros(numbers.shape, np.uint16)
    if not nonzero.any():
        return codes, Range(0.0, 0.0)
    logs = np.log(numbers, out=np.zeros_like(numbers), where=nonzero)
    span = Range(float(logs.min(where=nonzero, initial=math.inf)), float(logs.max(where=nonzero, initial=-math.inf)))
    width = span.high - span.low
    if width > 0:
        logs -= span.low
        logs *= STEPS / width
        np.copyto(codes, np.rint(logs) + 1, where=nonzero, casting="unsafe")
    else:
        codes[nonzero] = 1
    return codes, span


def decode(codes: NDArray[np.uint16], span: Range) -> NDArray[np.float32]:
    """The numbers of codes, as a viewer computes them."""
    steps = codes.astype(np.float64) - 1
    numbers = np.exp(span.low + steps * (span.high - span.low) / STEPS)
    return np.where(codes == 0, 0.0, numbers).astype(np.float32)


def precision(span: Range) -> float:
    """The largest relative error of a number: half a step, and the rounding to float32."""
    return math.expm1((span.high - span.low) / STEPS / 2) + ROUNDING
