"""Word frequency against ||f(x)|| and against attention (EMNLP 2020, section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.measures.frequency import spearman
from normscope.papers import charts, frequencies, published
from normscope.papers.emnlp2020.shared import CLEAR, PAPER, PLAIN, REFERENCE, finite, rows_of
from normscope.papers.published import said
from normscope.papers.report import Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    import polars

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting
    from normscope.papers.frequencies import Fit, Frequencies

POINTS = 4000  # of the scatter plot at most, evenly taken from the corpus
SHOWN = 10  # types at either end of ||f||
OFTEN = 5  # occurrences that a type needs to be shown there
TEXT = (
    "Each token of the corpus has a mean ||f(x)|| (over layers and heads) and a mean attention that it receives (over "
    "layers, heads and the outputs that can see it). Both are set against the frequency rank of its type: 1 is the "
    "most frequent, types of one count share the best rank, and types without a count come after the last. "
    "Frequencies: {}."
)
FITS = (
    " The file holds {:.1%} of the corpus's tokens; its most frequent types, half of its counts, are {:.0%} of the "
    "corpus; Spearman's correlation of the counts of {:,} types in both is {:.2f}."
)


def frequency(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Spearman's correlation of the frequency rank with ||f(x)|| and with alpha."""
    tokens = rows_of(setting, runs[PLAIN], "token_means").sort("id", "position").collect()
    counts, fit = _frequencies(setting, tokens)
    ranks = counts.ranks.of(tokens["token_id"].to_list())
    used = _used(setting, tokens, ranks < counts.ranks.unseen)
    values = {name: tokens[name].to_numpy() for name in ("norm", "weight")}
    rho = {name: spearman(ranks[used], found[used]) for name, found in values.items()}
    ordinary = ~tokens["kind"].is_in(["first", "separator", "mask"]).to_numpy()
    reference = published.reference(PAPER)
    rows = tuple(
        (
            label,
            known(rho[name]),
            known(spearman(ranks[ordinary], values[name][ordinary])),
            reference.get(f"frequency.{name}"),
        )
        for name, label in (("norm", "||f(x)||"), ("weight", "alpha"))
    )
    columns = ("rank against", "Spearman", "Spearman without special tokens", f"Spearman, {REFERENCE}")
    return Section(
        "frequency",
        "Word frequency",
        TEXT.format(counts.source)
        + ("" if fit is None else FITS.format(fit.covered, fit.common, fit.types, fit.correlation)),
        (
            Table(
                "frequency-spearman",
                "Spearman's correlation with the frequency rank",
                columns,
                rows,
                dict.fromkeys(columns[1:], ".2f"),
                f"{int(used.sum()):,} tokens, {int(ordinary.sum()):,} of them not special; "
                f"{int((ranks == counts.ranks.unseen).sum()):,} of a type without a count.",
            ),
            *_pictures(ranks, values, tokens),
            _ends(tokens, ranks),
        ),
        _claims(rho, reference),
        finite({f"frequency.{name}": value for name, value in rho.items()}),
    )


def refuse_foreign(setting: Setting) -> None:
    """Refuse a frequency file of another vocabulary before anything is run, by the first entries of the corpus."""
    if setting.frequencies is not None and setting.entries and setting.lens.tokenizer is not None:
        own = frequencies.counted(frequencies.ids_of(setting.entries, setting.lens.tokenizer))
        frequencies.given_or_counted(setting.frequencies, own, setting.lens)


def _frequencies(setting: Setting, tokens: polars.DataFrame) -> tuple[Frequencies, Fit | None]:
    own = frequencies.counted(tokens["token_id"].to_list())
    return frequencies.given_or_counted(setting.frequencies, own, setting.lens)


def _used(setting: Setting, tokens: polars.DataFrame, seen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The tokens that the readings take."""
    used: NDArray[np.bool_] = np.ones(len(tokens), dtype=bool)
    if setting.readings.frequency_tokens == "words":
        used &= ~tokens["kind"].is_in(["first", "separator", "mask"]).to_numpy()
    if setting.readings.unseen == "leave":
        used &= seen
    return used


def _pictures(
    ranks: NDArray[np.int64], values: Mapping[str, NDArray[np.float64]], tokens: polars.DataFrame
) -> tuple[Picture, ...]:
    step = max(1, len(ranks) // POINTS)
    groups = np.where(tokens["kind"].is_in(["first", "separator", "mask"]).to_numpy(), "special tokens", "words")
    found = []
    for name, title, ylabel in (("norm", "||f(x)||", "mean ||f(x)||"), ("weight", "alpha", "mean alpha received")):
        found.append(
            Picture(
                f"frequency-{name}",
                f"Frequency rank and {title} of each token",
                charts.scatter(
                    np.log10(ranks[::step]),
                    values[name][::step] if name == "norm" else np.log10(values[name][::step]),
                    xlabel="frequency rank (logarithm to base 10)",
                    ylabel=ylabel if name == "norm" else f"{ylabel} (logarithm to base 10)",
                    groups=groups[::step].tolist(),
                ),
                f"One token in {step}." if step > 1 else "",
            )
        )
    return tuple(found)


def _ends(tokens: polars.DataFrame, ranks: NDArray[np.int64]) -> Table:
    """The types with the smallest and the largest ||f||."""
    import polars as pl

    types = (
        tokens.with_columns(pl.Series("rank", ranks))
        .group_by("token", "token_id")
        .agg(pl.col("rank").first(), pl.len().alias("times"), pl.col("norm", "weight").mean())
        .filter(pl.col("times") >= OFTEN)
        .sort("norm", "token_id")
    )
    shown: Any = types if len(types) <= 2 * SHOWN else pl.concat([types.head(SHOWN), types.tail(SHOWN)])
    columns = ("token", "rank", "times here", "mean ||f||", "mean alpha received")
    return Table(
        "frequency-types",
        "Types with the smallest and the largest mean ||f(x)||",
        columns,
        tuple(shown.select("token", "rank", "times", "norm", "weight").iter_rows()),
        {columns[1]: ",", columns[3]: ".2f", columns[4]: ".4f"},
        f"Of {len(types):,} types that occur at least {OFTEN} times, the first and the last {SHOWN}.",
        folded=True,
    )


def _claims(rho: Mapping[str, float], reference: Mapping[str, float]) -> tuple[Claim, ...]:
    norm, weight = known(rho["norm"]), known(rho["weight"])
    ours = "it does not vary" if norm is None else f"Spearman {norm:.2f}"
    theirs = said(reference, "Spearman {:.2f}", "frequency.norm")
    return (
        Claim(
            f"Frequent words have a small ||f(x)||: it grows with the frequency rank (correlation above {CLEAR})",
            None if norm is None else norm > CLEAR,
            ours,
            theirs,
        ),
        Claim(
            "Attention weights do not tell frequent words: their correlation with the rank is weaker",
            None if norm is None or weight is None else abs(weight) < abs(norm),
            ours if norm is None or weight is None else f"{weight:.2f} against {norm:.2f}",
            said(reference, "{:.2f} against {:.2f}", "frequency.weight", "frequency.norm"),
        ),
    )
