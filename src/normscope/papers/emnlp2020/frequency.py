"""Word frequency compared with ||f(x)|| and with attention weights (EMNLP 2020, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.measures.correlation import ordinal_codes, spearman_of_codes, spearman_of_lists
from normscope.measures.uncertainty import Resampled, resample_statistic
from normscope.papers import frequencies
from normscope.papers.common import CLEAR, finite_numbers, scan_paper_side
from normscope.papers.emnlp2020.shared import PLAIN, REFERENCE, THEIRS, other_readings
from normscope.papers.published import quote_published
from normscope.papers.resampling import SEQUENCES
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table, none_if_nan

QUANTITIES = {"norm": "||f(x)||", "weight": "alpha"}
POINTS = 4000  # most points of a scatter plot, evenly sampled from the corpus
SHOWN = 10  # types listed at each end of ||f||
RESAMPLES = 1000
FEWER = 200  # resamples for other readings
OFTEN = 5  # occurrences that a listed type needs
TEXT = (
    "For each token of the corpus, the mean ||f(x)|| (over layers and heads) and the mean attention weight it receives "
    "(over layers, heads and the outputs that can see it) are compared with the frequency rank of its type. Rank 1 is "
    "the most frequent type; types with equal counts share the best rank, and types without a count come last. "
    "Frequencies: {}."
)
FITS = (
    " The file covers {:.1%} of the corpus tokens; its most frequent types, which make up half of its counts, make up "
    "{:.0%} of the corpus; for the {:,} types in both, Spearman's correlation of the counts is {:.2f}."
)


@dataclass(frozen=True)
class RankedTokens:
    """The tokens of the corpus."""

    sequences: NDArray[Any]  # the sequence of each token, from 0
    ranks: NDArray[np.int64]  # frequency rank
    values: Mapping[str, NDArray[np.float64]]  # quantity -> value of each token
    ordinary: NDArray[np.bool_]  # not special
    unseen: NDArray[np.bool_]  # no count

    def used(self, readings: Any) -> NDArray[np.bool_]:
        """The tokens whose ranks are correlated."""
        found = np.ones(len(self.ranks), dtype=bool)
        if readings.frequency_tokens == "words":
            found &= self.ordinary
        if readings.unseen == "leave":
            found &= ~self.unseen
        return found


def norm_frequency_section(setting: Setting, runs: Runs) -> Section:
    """Spearman's correlation of the frequency rank with ||f(x)|| and with alpha."""
    tokens = scan_paper_side(runs[PLAIN], "token_means", setting.side).sort("id", "position").collect()
    counts, fit = frequencies.load_or_count_frequencies(setting, tokens["token_id"].to_list())
    ranks = counts.ranks.of(tokens["token_id"].to_list())
    unseen = ranks == counts.ranks.unseen  # the last rank
    ordinary = ~tokens["kind"].is_in(["first", "separator", "mask"]).to_numpy()
    values = {name: tokens[name].to_numpy() for name in QUANTITIES}
    ranked = RankedTokens(tokens["id"].rle_id().to_numpy(), ranks, values, ordinary, unseen)
    used = ranked.used(setting.readings)
    rho, of_words = (
        {name: spearman_of_lists(ranks[some], found[some]) for name, found in values.items()}
        for some in (used, ordinary)
    )
    columns = ("Spearman", "Spearman without special tokens", f"Spearman, {REFERENCE}")
    table = Table.of(
        "frequency-spearman",
        "Spearman's correlation with the frequency rank",
        {"rank against": "", **dict.fromkeys(columns, ".2f")},
        (
            (label, none_if_nan(rho[name]), none_if_nan(of_words[name]), THEIRS.get(f"frequency.{name}"))
            for name, label in QUANTITIES.items()
        ),
        f"{int(used.sum()):,} tokens; {int(ordinary.sum()):,} tokens are not special, {int(unseen.sum()):,} have a "
        "type without a count.",
    )
    fits = "" if fit is None else FITS.format(fit.covered, fit.common, fit.types, fit.correlation)
    return Section(
        "frequency",
        "Word frequency",
        TEXT.format(counts.source) + fits,
        (table, *_rank_scatters(ranks, values, ordinary), _extreme_types(tokens, ranks)),
        _norm_frequency_claims(ranked, setting.readings, rho),
        finite_numbers({f"frequency.{name}": value for name, value in rho.items()}),
    )


def _rank_scatters(
    ranks: NDArray[np.int64], values: Mapping[str, NDArray[np.float64]], ordinary: NDArray[np.bool_]
) -> Iterator[Picture]:
    step = max(1, len(ranks) // POINTS)
    groups = np.where(ordinary, "words", "special tokens")[::step].tolist()
    base = "(logarithm to base 10)"
    for name, y, ylabel in (
        ("norm", values["norm"][::step], "mean ||f(x)||"),
        ("weight", np.log10(values["weight"][::step]), f"mean alpha received {base}"),
    ):
        chart = charts.scatter_chart(
            np.log10(ranks[::step]), y, xlabel=f"frequency rank {base}", ylabel=ylabel, groups=groups
        )
        title = f"Frequency rank and {QUANTITIES[name]} of each token"
        yield Picture(f"frequency-{name}", title, chart, f"One token in {step} is shown." if step > 1 else "")


def _extreme_types(tokens: pl.DataFrame, ranks: NDArray[np.int64]) -> Table:
    """The types with the smallest and the largest ||f||."""
    types = (
        tokens.with_columns(pl.Series("rank", ranks))
        .group_by("token", "token_id")
        .agg(pl.col("rank").first(), pl.len().alias("times"), pl.col("norm", "weight").mean())
        .filter(pl.col("times") >= OFTEN)
        .sort("norm", "token_id")
    )
    shown: Any = types if len(types) <= 2 * SHOWN else pl.concat([types.head(SHOWN), types.tail(SHOWN)])
    return Table.of(
        "frequency-types",
        "Types with the smallest and the largest mean ||f(x)||",
        {"token": "", "rank": ",", "times here": "", "mean ||f||": ".2f", "mean alpha received": ".4f"},
        shown.select("token", "rank", "times", "norm", "weight").iter_rows(),
        f"The first and last {SHOWN} of {len(types):,} types that occur at least {OFTEN} times.",
        folded=True,
    )


def _norm_frequency_claims(ranked: RankedTokens, readings: Any, rho: Mapping[str, float]) -> tuple[Claim, ...]:
    used = ranked.used(readings)
    found = resample_rank_correlations(ranked, used, RESAMPLES)
    larger, weaker = _frequency_margins(found)
    changed = {}
    for reading, other in other_readings(readings, frequency_tokens=("all", "words"), unseen=("rank", "leave")).items():
        chosen = ranked.used(other)
        if (chosen != used).any():
            changed[reading] = _frequency_margins(resample_rank_correlations(ranked, chosen, FEWER))
    norm, weight = rho["norm"], rho["weight"]
    one, two = "Spearman {:.2f}", "{:.2f} against {:.2f}"
    constant = "||f(x)|| does not vary"
    return (
        decided_claim(
            f"Frequent words have a small ||f(x)||: it increases with the frequency rank (correlation above {CLEAR})",
            larger.estimate(SEQUENCES),
            constant if isnan(norm) else one.format(norm),
            quote_published(THEIRS, one, "frequency.norm"),
            evidence=describe_estimate(found["norm"].estimate(SEQUENCES), name="Spearman"),
            under={reading: margins[0].estimate().decide() for reading, margins in changed.items()},
        ),
        decided_claim(
            "Attention weights reflect word frequency less: their correlation with the rank is weaker",
            weaker.estimate(SEQUENCES),
            constant if isnan(norm) else two.format(weight, norm),
            quote_published(THEIRS, two, "frequency.weight", "frequency.norm"),
            evidence=describe_estimate(weaker.estimate(SEQUENCES), name="difference of the absolute values"),
            under={reading: margins[1].estimate().decide() for reading, margins in changed.items()},
        ),
    )


def _frequency_margins(found: Mapping[str, Resampled]) -> tuple[Resampled, Resampled]:
    """rho of ||f|| minus CLEAR, and |rho| of ||f|| minus |rho| of alpha."""
    norm, weight = found["norm"], found["weight"]
    apart = Resampled(abs(norm.value) - abs(weight.value), abs(norm.draws) - abs(weight.draws), norm.items)
    return norm.map(lambda rho: rho - CLEAR), apart


def resample_rank_correlations(ranked: RankedTokens, used: NDArray[np.bool_], resamples: int) -> dict[str, Resampled]:
    """quantity -> Spearman's correlation with the frequency rank under resampling of sequences, the same for all.

    The frequency ranks of the types stay as they are.
    """
    sequences, items = ranked.sequences[used], int(ranked.sequences.max()) + 1
    ranks = ordinal_codes(ranked.ranks[used])
    found = {}
    for name, values in ranked.values.items():
        codes = ordinal_codes(values[used])
        # In the order of the values, so that their ranks are read in sequence.
        order = np.argsort(codes, kind="stable")
        correlate = partial(_weighted_rank_correlation, ranks[order], codes[order], sequences[order])
        found[name] = resample_statistic(correlate, items, resamples)
    return found


def _weighted_rank_correlation(
    x: NDArray[np.intp], y: NDArray[np.intp], owners: NDArray[Any], counts: NDArray[np.float64]
) -> float:
    """Spearman's correlation of tokens that count as often as their sequences."""
    return spearman_of_codes(x, y, counts[owners])
