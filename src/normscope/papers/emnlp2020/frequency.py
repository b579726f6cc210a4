"""Word frequency compared with ||f(x)|| and with attention weights (EMNLP 2020, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.measures.correlation import spearman_of_lists
from normscope.papers import frequencies
from normscope.papers.common import CLEAR, claim_with_published, finite_numbers, scan_paper_side
from normscope.papers.emnlp2020.shared import PLAIN, REFERENCE, THEIRS
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table, none_if_nan

QUANTITIES = {"norm": "||f(x)||", "weight": "alpha"}
POINTS = 4000  # most points of a scatter plot, evenly sampled from the corpus
SHOWN = 10  # types listed at each end of ||f||
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


def norm_frequency_section(setting: Setting, runs: Runs) -> Section:
    """Spearman's correlation of the frequency rank with ||f(x)|| and with alpha."""
    tokens = scan_paper_side(runs[PLAIN], "token_means", setting.side).sort("id", "position").collect()
    counts, fit = frequencies.load_or_count_frequencies(setting, tokens["token_id"].to_list())
    ranks = counts.ranks.of(tokens["token_id"].to_list())
    unseen = ranks == counts.ranks.unseen  # the last rank
    ordinary = ~tokens["kind"].is_in(["first", "separator", "mask"]).to_numpy()
    used: NDArray[np.bool_] = np.ones(len(tokens), dtype=bool)
    if setting.readings.frequency_tokens == "words":
        used &= ordinary
    if setting.readings.unseen == "leave":
        used &= ~unseen
    values = {name: tokens[name].to_numpy() for name in QUANTITIES}
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
        _norm_frequency_claims(**rho),
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


def _norm_frequency_claims(norm: float, weight: float) -> tuple[Claim, ...]:
    constant = "||f(x)|| does not vary"
    return (
        claim_with_published(
            f"Frequent words have a small ||f(x)||: it increases with the frequency rank (correlation above {CLEAR})",
            norm > CLEAR,
            "Spearman {:.2f}",
            (norm,),
            THEIRS,
            "frequency.norm",
            undefined=constant,
        ),
        claim_with_published(
            "Attention weights reflect word frequency less: their correlation with the rank is weaker",
            abs(weight) < abs(norm),
            "{:.2f} against {:.2f}",
            (weight, norm),
            THEIRS,
            *("frequency.weight", "frequency.norm"),
            undefined=constant if isnan(norm) else f"Spearman {norm:.2f}",
        ),
    )
