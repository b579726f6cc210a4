"""How faithful token scores are: what a prediction loses when the tokens with the highest scores are removed.

The model gives its target the probability p(x). Removing the k tokens with the highest scores, or all others, gives

- comprehensiveness ``p(x) - p(x without the top k)``: large if the scores found what the model needs,
- sufficiency ``p(x) - p(the top k only)``: small if what they found is enough (ERASER, DeYoung et al. 2020),

The mean over several k is the area over the perturbation curve, AOPC. The area under the curve itself, over shares of
removed or inserted tokens, should be low for deletion and high for insertion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import NormscopeError
from normscope.measures.bootstrap import bootstrap_resampled_means
from normscope.measures.uncertainty import Resampled

Values = NDArray[np.float64]


def faithfulness_count_in_share(share: float, tokens: int) -> int:
    """The number of tokens in a share of them, rounded up: at least one for any share above zero."""
    if not 0 <= share <= 1:
        raise NormscopeError(f"A share of the tokens must be between 0 and 1, not {share}.")
    return math.ceil(share * tokens - 1e-9)


def faithfulness_token_ranking(scores: Sequence[float]) -> tuple[int, ...]:
    """Token positions by falling score; among equal scores the earlier token comes first."""
    values = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(values).all():
        raise NormscopeError("Tokens can only be ranked by finite scores; some are NaN or infinite.")
    return tuple(np.argsort(-values, kind="stable").tolist())


def faithfulness_top_tokens(order: Sequence[int], share: float) -> frozenset[int]:
    """The top `share` of the tokens: what comprehensiveness removes."""
    return frozenset(order[: faithfulness_count_in_share(share, len(order))])


def faithfulness_all_but_top_tokens(order: Sequence[int], share: float) -> frozenset[int]:
    """All tokens but the top `share`: what sufficiency removes."""
    return frozenset(order[faithfulness_count_in_share(share, len(order)) :])


def faithfulness_probability_drop(full: Any, after: Any) -> Values:
    """(..., shares): ``p(x) - p(after)``, the comprehensiveness or sufficiency at each share."""
    found: Values = np.asarray(full, dtype=np.float64)[..., None] - np.asarray(after, dtype=np.float64)
    return found


def aopc(drops: Any, *, with_empty: bool = False) -> Values:
    """(...,): the area over the perturbation curve: the mean of the drops (..., shares) over the shares.

    With `with_empty` the empty removal, whose drop is zero, counts too: the sum over K shares is divided by K + 1, as
    in ERASER's paper and ALTI; without it by K, as in ERASER's code and DecompX.
    """
    values = np.asarray(drops, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise NormscopeError("An area over a curve needs at least one share.")
    found: Values = values.sum(-1) / (values.shape[-1] + int(with_empty))
    return found


def faithfulness_area_under_curve(curve: Any, shares: Sequence[float]) -> Values:
    """(...,): the area under a curve (..., shares) by the trapezoidal rule, divided by the range of the shares."""
    values, at = np.asarray(curve, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    if values.shape[-1:] != at.shape or len(at) < 2 or not (np.diff(at) > 0).all():
        raise NormscopeError("The area under a curve needs at least two increasing shares and one value for each.")
    found: Values = ((values[..., 1:] + values[..., :-1]) / 2 * np.diff(at)).sum(-1) / (at[-1] - at[0])
    return found


def faithfulness_choice_accuracy(choices: Any, right: Any) -> Values:
    """(..., shares): 1 where the model's choice (..., shares) equals the right one (...,), 0 elsewhere."""
    found: Values = (np.asarray(choices) == np.asarray(right)[..., None]).astype(np.float64)
    return found


@dataclass(frozen=True)
class Interval:
    """A mean over entries with its 1 - alpha bootstrap interval and the two-sided p-value of a mean of zero."""

    mean: float
    low: float
    high: float
    p: float = nan


def faithfulness_interval(values: Any, *, resamples: int = 10_000, alpha: float = 0.05, seed: int = 0) -> Interval:
    """The mean of one value per entry with its bootstrap interval (see `uncertainty`); NaN if there are none.

    A single entry has no interval. The p-value tests for a mean of zero. For differences of two methods on the same
    entries this is a paired test.
    """
    given = np.asarray(values, dtype=np.float64).ravel()
    given = given[~np.isnan(given)]
    if not 0 < alpha < 1 or resamples < 1:
        raise NormscopeError(f"A bootstrap needs 0 < alpha < 1 and at least one resample, not {alpha} and {resamples}.")
    if not len(given):
        return Interval(nan, nan, nan)
    if len(given) == 1:
        return Interval(float(given[0]), nan, nan)
    found = Resampled(
        given.mean(), bootstrap_resampled_means(given, resamples, np.random.default_rng(seed)), len(given)
    )
    one = found.estimate("entries", alpha)
    return Interval(one.value, one.low, one.high, min(1.0, 2 * min(one.above, one.below)))


def faithfulness_mean_by_entry(values: Any, entries: Sequence[Any]) -> Values:
    """(distinct entries,): the mean of each entry's values without NaN, in order of first appearance.

    A bootstrap should resample these means, since the values of one entry are not independent.
    """
    given = np.asarray(values, dtype=np.float64)
    if len(given) != len(entries):
        raise NormscopeError(f"Expected one entry for each of {len(given)} values, got {len(entries)}.")
    places = {entry: n for n, entry in enumerate(dict.fromkeys(entries))}
    index = np.array([places[entry] for entry in entries], dtype=np.int64)
    known = ~np.isnan(given)
    sums = np.bincount(index[known], given[known], len(places))
    counts = np.bincount(index[known], minlength=len(places))
    found: Values = np.where(counts > 0, sums / np.maximum(counts, 1), nan)
    return found
