"""How well scores of sources agree with what a model does without them. Pure functions of numbers.

Scores are one number for each source; `drops` are what the log-probability of the answer loses. Ties count as the mean
over their orders, so that equal scores are at chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, nan

import numpy as np
from numpy.typing import NDArray

from normscope.measures.correlation import spearman_of_lists

Values = NDArray[np.float64]
LogProbability = Callable[[Sequence[int]], float]  # of the answer, given the sources that are kept
HALVINGS = 60  # steps of the search for a scale, to the last digit


def recovery(scores: Sequence[float], gold: Sequence[int]) -> float:
    """The share of the true sources among the top ones, as many as there are true ones."""
    values = np.asarray(scores, dtype=np.float64)
    threshold = np.sort(values)[-len(gold)]
    above, level = values > threshold, values == threshold
    share = (len(gold) - above.sum()) / level.sum()  # of the sources at the threshold that get in
    return float(sum(above[g] + share * level[g] for g in gold) / len(gold))


def wins(scores: Sequence[float], gold: Sequence[int], decoys: Sequence[int]) -> float:
    """How often a true source scores higher than its decoy; a tie is half a win. NaN without decoys."""
    pairs = [(scores[a], scores[b]) for a, b in zip(gold, decoys, strict=False)]
    return float(np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs])) if pairs else nan


def rank_correlation(scores: Sequence[float], drops: Sequence[float]) -> float:
    """Spearman's correlation with what leaving each source out loses; 0 for scores that are all equal."""
    if len(set(scores)) == 1 and len(set(drops)) > 1:
        return 0.0
    return spearman_of_lists(list(scores), list(drops))


def leave_one_out(log_probability: LogProbability, sources: int) -> list[float]:
    """What the log-probability loses without each source."""
    everything = range(sources)
    full = log_probability(everything)
    return [full - log_probability([n for n in everything if n != one]) for one in everything]


def linear_datamodelling_score(
    scores: Sequence[float], subsets: Sequence[Sequence[int]], actual: Sequence[float]
) -> float:
    """Spearman's correlation over subsets of the sources of the sum of their scores and the log-odds of the answer
    (ContextCite, Cohen-Wang et al. 2024; Park et al. 2023)."""
    predicted = [sum(scores[n] for n in kept) for kept in subsets]
    return rank_correlation(predicted, actual)


def log_odds(log_probability: float) -> float:
    """``log p - log(1 - p)``"""
    return log_probability - float(np.log(-np.expm1(min(log_probability, -1e-12))))


def top_drop(scores: Sequence[float], log_probability: LogProbability, k: int) -> float:
    """What the log-probability loses without the k sources with the highest scores."""
    everything = range(len(scores))
    gone = _descending(scores)[:k]
    return log_probability(everything) - log_probability([n for n in everything if n not in gone])


def comprehensiveness_area(scores: Sequence[float], log_probability: LogProbability) -> float:
    """AOPC: the mean drop of the probability when the top 1, 2, ... sources are removed, up to all but one."""
    everything, order = range(len(scores)), _descending(scores)
    full = exp(log_probability(everything))
    drops = [full - exp(log_probability([n for n in everything if n not in order[:k]])) for k in range(1, len(order))]
    return float(np.mean(drops))


def keep_probabilities(scores: Sequence[float], share: float) -> Values:
    """``min(1, c s_i)`` with c such that their mean is `share`; s are the scores moved to [0, 1].

    A fixed share retained makes soft perturbations of different methods comparable: without it, larger scores win.
    """
    values = np.asarray(scores, dtype=np.float64)
    spread = values.max() - values.min()
    s = (values - values.min()) / spread if spread > 0 else np.ones_like(values)
    s = np.maximum(s, 1e-6)
    low, high = 0.0, 1 / s.min()
    for _ in range(HALVINGS):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1, c * s).mean() < share else (low, c)
    found: Values = np.minimum(1, high * s)
    return found


def random_subsets(sources: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Subsets of the sources, each source with probability 1/2."""
    drawn = np.random.default_rng(seed).random((count, sources)) < 0.5
    return [tuple(np.flatnonzero(row).tolist()) for row in drawn]


def _descending(scores: Sequence[float]) -> list[int]:
    """The sources by falling score. Among equal scores the order is random but fixed."""
    shuffled = np.random.default_rng(len(scores)).permutation(len(scores))
    return sorted(range(len(scores)), key=lambda n: (-scores[n], shuffled[n]))
