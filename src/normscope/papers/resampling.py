"""Parts of resampled statistics, for claims about several layers or methods."""

from __future__ import annotations

from functools import partial

import numpy as np

from normscope.measures.uncertainty import Estimate, Resampled


def pick(given: Resampled, index: int, axis: int = -1) -> Resampled:
    """The statistics at an index of one of their dimensions, counted from the end."""
    return given.map(partial(np.take, indices=index, axis=axis))


def estimates_along(margins: Resampled, what: str) -> list[Estimate]:
    """The estimates of statistics along their last dimension, such as layers."""
    return [pick(margins, n).estimate(what) for n in range(margins.value.shape[-1])]
