"""Non-negative numbers in 16 bits on a logarithmic scale: zero is exact, all others have the same relative error.

Code 0 is 0; code q from 1 to 65535 is ``exp(low + (q - 1) (high - low) / 65534)``, where low and high are the
logarithms of the smallest and the largest nonzero number.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError

STEPS = 65534
ROUNDING = 2.0**-24  # decoded numbers are float32


class LogRange(NamedTuple):
    """Natural logarithms of the smallest and the largest nonzero number; both 0 if all numbers are 0."""

    low: float
    high: float


def encode_log16(values: NDArray[Any]) -> tuple[NDArray[np.uint16], LogRange]:
    """The codes of an array, in its shape, and their range."""
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise NormscopeError("The map contains NaN or infinite values, which cannot be drawn.")
    if (numbers < 0).any():
        raise NormscopeError("The map contains negative values; norms and weights cannot be negative.")
    nonzero = numbers > 0
    codes = np.zeros(numbers.shape, np.uint16)
    if not nonzero.any():
        return codes, LogRange(0.0, 0.0)
    logs = np.log(numbers, out=np.zeros_like(numbers), where=nonzero)
    span = LogRange(float(logs.min(where=nonzero, initial=math.inf)), float(logs.max(where=nonzero, initial=-math.inf)))
    width = span.high - span.low
    if width > 0:
        logs -= span.low
        logs *= STEPS / width
        np.copyto(codes, np.rint(logs) + 1, where=nonzero, casting="unsafe")
    else:
        codes[nonzero] = 1
    return codes, span


def decode_log16(codes: NDArray[np.uint16], span: LogRange) -> NDArray[np.float32]:
    """The numbers of codes, computed as in the viewer."""
    steps = codes.astype(np.float64) - 1
    numbers = np.exp(span.low + steps * (span.high - span.low) / STEPS)
    return np.where(codes == 0, 0.0, numbers).astype(np.float32)


def log16_precision(span: LogRange) -> float:
    """The largest relative error of a decoded number: half a step plus the rounding to float32."""
    return math.expm1((span.high - span.low) / STEPS / 2) + ROUNDING
