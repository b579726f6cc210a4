"""How far to trust scores of input tokens: what a prediction loses when the tokens they name are taken away.

A model gives its target the probability p(x). Removing the k tokens of the highest scores, or all others, gives

- comprehensiveness ``p(x) - p(x without the top k)``: large where the scores found what the model needs,
- sufficiency ``p(x) - p(the top k only)``: small where what they found is enough (ERASER, DeYoung et al. 2020),

and the mean over several k is the area over the perturbation curve, AOPC. The curves themselves, over shares of removed
or of inserted tokens, have an area under them (deletion: the lower the better; insertion: the higher).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.measures import frequency
from normscope.measures.bootstrap import resampled_means

Values = NDArray[np.float64]


def count(share: float, tokens: int) -> int:
    """How many of the tokens a share of them is: at least one of any share above zero (rounded up)."""
    if not 0 <= share <= 1:
        raise NormscopeError(f"A share of the tokens lies between 0 and 1, not at {share}.")
    return math.ceil(share * tokens - 1e-9)


def ranking(scores: Sequence[float]) -> tuple[int, ...]:
    """The places of the tokens, that of the highest score first; of equal scores the earlier token first."""
    values = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(values).all():
        raise NormscopeError("Some scores are no finite numbers: the tokens cannot be ranked by them.")
    return tuple(np.argsort(-values, kind="stable").tolist())


def removed(order: Sequence[int], share: float) -> frozenset[int]:
    """The tokens that go when the top `share` is taken away."""
    return frozenset(order[: count(share, len(order))])


def all_but(order: Sequence[int], share: float) -> frozenset[int]:
    """The tokens that go when only the top `share` is kept."""
    return frozenset(order[count(share, len(order)) :])


def drop(full: Any, after: Any) -> Values:
    """(..., shares): ``p(x) - p(after)``: comprehensiveness of what was removed, or sufficiency of what was kept."""
    found: Values = np.asarray(full, dtype=np.float64)[..., None] - np.asarray(after, dtype=np.float64)
    return found


def aopc(drops: Any, *, with_empty: bool = False) -> Values:
    """(...,): the mean of drops over the shares (..., shares), the area over the perturbation curve.

    `with_empty` counts the empty removal as well, whose drop is zero: the sum over K shares is divided by K + 1, as by
    ERASER's text and ALTI; without it by K, as by ERASER's code and DecompX.
    """
    values = np.asarray(drops, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise NormscopeError("An area over a curve needs at least one share.")
    found: Values = values.sum(-1) / (values.shape[-1] + int(with_empty))
    return found


def area(curve: Any, shares: Sequence[float]) -> Values:
    """(...,): the area under a curve (..., shares) by the trapezoidal rule, over the range of the shares: a mean."""
    values, at = np.asarray(curve, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    if values.shape[-1:] != at.shape or len(at) < 2 or not (np.diff(at) > 0).all():
        raise NormscopeError("The area under a curve needs a value at each of at least two rising shares.")
    found: Values = ((values[..., 1:] + values[..., :-1]) / 2 * np.diff(at)).sum(-1) / (at[-1] - at[0])
    return found


def accuracy(choices: Any, right: Any) -> Values:
    """(..., shares): 1 where the model's choice (..., shares) is the right one (...,), else 0."""
    found: Values = (np.asarray(choices) == np.asarray(right)[..., None]).astype(np.float64)
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN where one side does not vary."""
    return frequency.spearman(*_same_length(a, b))


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b: concordant less discordant pairs, over the root of the pairs that are no ties in either; NaN
    where one side does not vary."""
    x, y = (_column(values) for values in _same_length(a, b))
    first, second = ((values[:, None] - values).sign() for values in (x, y))
    pairs = first.square().sum() * second.square().sum()
    return float((first * second).sum() / pairs.sqrt()) if float(pairs) > 0 else nan


@dataclass(frozen=True)
class Interval:
    """A mean over entries, with its bootstrap interval (1 - alpha) and, of a difference, a two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float = nan


def interval(values: Any, *, resamples: int = 10_000, alpha: float = 0.05, seed: int = 0) -> Interval:
    """The mean of values, one for each entry, and its percentile bootstrap; NaN where there are none. The p-value is
    that of a mean of zero: of a difference of two methods on the same entries, a paired test."""
    given = np.asarray(values, dtype=np.float64).ravel()
    given = given[~np.isnan(given)]
    if not 0 < alpha < 1 or resamples < 1:
        raise NormscopeError(f"A bootstrap needs an alpha between 0 and 1 and resamples, not {alpha} and {resamples}.")
    if not len(given):
        return Interval(nan, nan, nan)
    drawn = resampled_means(given, resamples, np.random.default_rng(seed))
    low, high = np.quantile(drawn, [alpha / 2, 1 - alpha / 2])
    below, above = ((1 + int(side.sum())) / (1 + resamples) for side in (drawn <= 0, drawn >= 0))
    return Interval(float(given.mean()), float(low), float(high), min(1.0, 2 * min(below, above)))


def by_entry(values: Any, entries: Sequence[Any]) -> Values:
    """(distinct entries,): the mean of the values of each entry, NaN left out, in the order of first appearance: what
    is drawn as a whole by a bootstrap, as values of one entry are not independent."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) != len(entries):
        raise NormscopeError(f"There are {len(given)} values, but {len(entries)} entries.")
    places = {entry: n for n, entry in enumerate(dict.fromkeys(entries))}
    index = np.array([places[entry] for entry in entries], dtype=np.int64)
    known = ~np.isnan(given)
    sums = np.bincount(index[known], given[known], len(places))
    counts = np.bincount(index[known], minlength=len(places))
    found: Values = np.where(counts > 0, sums / np.maximum(counts, 1), nan)
    return found


def _same_length(a: Sequence[float], b: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    if len(a) != len(b):
        raise NormscopeError(f"Scores of {len(a)} tokens cannot be compared with scores of {len(b)}.")
    return a, b


def _column(values: Sequence[float]) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float64))
