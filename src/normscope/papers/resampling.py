"""Parts of resampled statistics, for claims about several layers or methods."""

from __future__ import annotations

from functools import partial

import numpy as np

from normscope.measures.uncertainty import Estimate, Resampled

SEQUENCES = "sequences"  # what is resampled


def pick(given: Resampled, index: int, axis: int = -1) -> Resampled:
    """The statistics at an index of one of their dimensions, counted from the end."""
    return given.map(partial(np.take, indices=index, axis=axis))


def subtract_resampled(first: Resampled, second: Resampled) -> Resampled:
    """The difference of two statistics that were resampled together."""
    return Resampled(first.value - second.value, first.draws - second.draws, first.items)


def estimates_along(margins: Resampled, what: str = SEQUENCES) -> list[Estimate]:
    """The estimates of statistics along their last dimension, such as layers."""
    return [pick(margins, n).estimate(what) for n in range(margins.value.shape[-1])]


def estimate_mean_along(margins: Resampled, what: str = SEQUENCES) -> Estimate:
    """The estimate of the mean along the last dimension, such as layers."""
    return margins.map(partial(np.mean, axis=-1)).estimate(what)
