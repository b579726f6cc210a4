"""Results of a finished run as arrays, and their statistics by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from normscope.corpus.store import Run
from normscope.measures import faithfulness
from normscope.measures.correlation import kendall_of_lists, spearman_of_lists
from normscope.measures.faithfulness import Interval, Values, faithfulness_interval, faithfulness_mean_by_entry
from normscope.papers.faithfulness.measures import SHARES

ERASER = (0.01, 0.05, 0.1, 0.2, 0.5)
DECOMPX = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class MethodResult:
    """One method in all contexts for which it has scores."""

    method: str
    contexts: tuple[tuple[str, int], ...]  # entry, position
    probability: Values  # (contexts,): of the target, with all tokens
    choice: Values  # (contexts,): the model's choice with all tokens
    given: Values  # (contexts,): the correct answer; -1: unknown
    after: Mapping[tuple[str, str], Values]  # erasure, "without" or "only" -> (contexts, shares)
    choices: Mapping[tuple[str, str], Values]
    scores: tuple[tuple[float, ...], ...]

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(entry for entry, _ in self.contexts)


@dataclass(frozen=True)
class Results:
    """All methods of a run."""

    methods: Mapping[str, MethodResult]  # only methods with scores
    refused: Mapping[str, str]  # method without any scores -> reason
    partly: Mapping[str, tuple[int, str]]  # method -> number of contexts without scores, reason for the first
    contexts: int
    entries: int
    tokens: float  # removable tokens, on average
    probability: float  # of the target, on average
    labelled: bool  # whether the correct answer is always known


def read_results(run: Run, erasures: Sequence[str]) -> Results:
    """Read the results of a finished run."""
    frame = run.scan("faithfulness").collect()
    methods: dict[str, MethodResult] = {}
    refused: dict[str, str] = {}
    partly: dict[str, tuple[int, str]] = {}
    for method in frame["method"].unique(maintain_order=True).to_list():
        rows = frame.filter(frame["method"] == method)
        failed = rows.filter(rows["reason"] != "")
        good = rows.filter(rows["reason"] == "")
        if not len(good):
            refused[method] = str(failed["reason"][0])
            continue
        if len(failed):
            partly[method] = (len(failed), str(failed["reason"][0]))
        pairs = [(erasure, kind) for erasure in erasures for kind in ("without", "only")]
        methods[method] = MethodResult(
            method,
            tuple(zip(good["id"].to_list(), good["position"].to_list(), strict=True)),
            good["probability"].to_numpy(),
            good["choice"].to_numpy(),
            good["given"].to_numpy(),
            {pair: np.array(good[f"{pair[0]}_{pair[1]}"].to_list(), dtype=np.float64) for pair in pairs},
            {pair: np.array(good[f"{pair[0]}_{pair[1]}_choice"].to_list()) for pair in pairs},
            tuple(map(tuple, good["scores"].to_list())),
        )
    first = frame.filter(frame["method"] == frame["method"][0])
    return Results(
        methods,
        refused,
        partly,
        len(first),
        first["id"].n_unique(),
        float(np.mean(first["tokens"].to_numpy())),
        float(np.mean(first["probability"].to_numpy())),
        bool((first["given"] >= 0).all()),
    )


def share_indices(shares: Sequence[float]) -> list[int]:
    """Indices of shares in SHARES."""
    return [SHARES.index(share) for share in shares]


def comprehensiveness(one: MethodResult, erasure: str, shares: Sequence[float] = DECOMPX) -> Values:
    """(contexts,): AOPC of removing the top of the ranking."""
    return _mean_drop(one, erasure, "without", shares)


def sufficiency(one: MethodResult, erasure: str, shares: Sequence[float] = DECOMPX) -> Values:
    """(contexts,): AOPC of keeping only the top of the ranking."""
    return _mean_drop(one, erasure, "only", shares)


AOPC = (comprehensiveness, sufficiency)


def _mean_drop(one: MethodResult, erasure: str, kind: str, shares: Sequence[float]) -> Values:
    after = one.after[erasure, kind][:, share_indices(shares)]
    return faithfulness.aopc(faithfulness.faithfulness_probability_drop(one.probability, after))


def probability_curve_area(one: MethodResult, erasure: str, kind: str) -> Values:
    """(contexts,): the area under the curve of the target's probability while tokens are removed ("without") or added
    ("only") from the top of the ranking."""
    return faithfulness.faithfulness_area_under_curve(one.after[erasure, kind], SHARES)


def choices_kept(one: MethodResult, erasure: str, right: Values) -> Values:
    """(contexts, shares of DecompX): whether the model still chooses `right` without the top of the ranking."""
    return faithfulness.faithfulness_choice_accuracy(one.choices[erasure, "without"][:, share_indices(DECOMPX)], right)


def mean_over_entries(one: MethodResult, values: Values) -> Interval:
    """The mean over entries with its interval; contexts are first averaged within each entry."""
    return faithfulness_interval(faithfulness_mean_by_entry(values, one.entries))


def comprehensiveness_lead(one: MethodResult, other: MethodResult, erasure: str) -> Interval:
    """Difference in comprehensiveness between two methods over their common contexts, paired by entry."""
    both = _common_contexts(one, other)
    mine, theirs = comprehensiveness(one, erasure), comprehensiveness(other, erasure)
    apart = np.array([mine[n] - theirs[m] for n, m in both], dtype=np.float64)
    return faithfulness_interval(faithfulness_mean_by_entry(apart, [one.entries[n] for n, _ in both]))


def score_correlations(one: MethodResult, other: MethodResult, kendall: bool = False) -> Values:
    """(contexts,): rank correlation of two methods' token scores in each context; NaN where one has no scores."""
    measure = kendall_of_lists if kendall else spearman_of_lists
    found = np.full(len(one.contexts), np.nan)
    for n, m in _common_contexts(one, other):
        found[n] = measure(one.scores[n], other.scores[m])
    return found


def _common_contexts(one: MethodResult, other: MethodResult) -> list[tuple[int, int]]:
    """The indices of each common context in both results."""
    theirs_at = {context: n for n, context in enumerate(other.contexts)}
    return [(n, theirs_at[context]) for n, context in enumerate(one.contexts) if context in theirs_at]


def methods_best_first(results: Results, erasure: str) -> list[str]:
    """The methods in descending order of comprehensiveness."""
    reached = {
        name: mean_over_entries(one, comprehensiveness(one, erasure)).mean for name, one in results.methods.items()
    }
    return sorted(reached, key=lambda name: -reached[name])
