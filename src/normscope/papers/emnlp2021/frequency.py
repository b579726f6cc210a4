"""Mixing ratio against word frequency (EMNLP 2021, section 5.3): of unmasked text, averaged over layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.measures.frequency import spearman
from normscope.papers import charts, frequencies, published
from normscope.papers.emnlp2021.ratios import grouped, methods, ratios, scope
from normscope.papers.emnlp2021.shared import PAPER, PUBLISHED, REFERENCE
from normscope.papers.published import said
from normscope.papers.report import Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    import polars

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

TEXT = """Each token's mixing ratio is averaged over layers and correlated with the frequency rank of its kind; rank 1 \
is the most frequent, so that a negative correlation says that frequent words mix more. The text is not masked."""


def frequency(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Spearman's correlation with the rank, over all tokens and without special ones."""
    lens, run = setting.lens, runs["plain"]
    frame = token_ratios(setting, run)
    ids = lens.tokenizer.convert_tokens_to_ids(frame["token"].to_list())
    counts = frequencies_of(setting, ids)
    ranks = counts.ranks.of(ids)
    ordinary = ~special(setting, frame)
    names = [name for name in methods(lens) if name in frame.columns]
    rho = {
        (name, kind): spearman(frame[name].to_numpy()[chosen], ranks[chosen])
        for name in names
        for kind, chosen in (("all", np.ones(len(ranks), dtype=bool)), ("words", ordinary))
    }
    reference = published.reference(PAPER)
    titles = ("all tokens", "without special tokens")
    columns = (*titles, *(f"{PUBLISHED}, {title.split()[0]}" for title in titles))
    table = Table(
        "frequency-spearman",
        "Spearman's correlation of the mixing ratio with the frequency rank",
        ("method", *columns),
        tuple(
            (
                name,
                *(known(rho[name, kind]) for kind in ("all", "words")),
                *(reference.get(f"frequency.{name}.{kind}") for kind in ("all", "words")),
            )
            for name in names
        ),
        dict.fromkeys(columns, ".2f"),
        f"{len(ranks)} tokens, {int(ordinary.sum())} without special ones. Frequencies: {counts.source}. {REFERENCE}",
    )
    edges, means = by_rank(ranks[ordinary], {name: frame[name].to_numpy()[ordinary] for name in names})
    chart = charts.line_chart(
        means,
        x=edges,
        xlabel="frequency rank, about (logarithm to base 10)",
        ylabel="mixing ratio (%)",
        ylim=(0, 100),
    )
    last = scope(lens, "attention-block")
    found = known(rho[last, "words"])
    claim = Claim(
        "Frequent words mix more: the mixing ratio falls with the frequency rank",
        None if found is None else found < 0,
        "the ratio does not vary" if found is None else f"Spearman {found:.2f} by {last}, without special tokens",
        said(reference, "Spearman {:.2f} by ATTNRESLN-N", "frequency.ATTNRESLN-N.words"),
    )
    return Section(
        "frequency",
        "Mixing ratio against word frequency",
        TEXT,
        (
            table,
            Picture(
                "frequency-ranks",
                "Mean mixing ratio of words by frequency rank",
                chart,
                "Half a power of ten to a point; special tokens are left out.",
            ),
        ),
        (claim,),
        {f"frequency.{name}.{kind}": value for (name, kind), value in rho.items() if not math.isnan(value)},
    )


def token_ratios(setting: Setting, run: Run) -> polars.DataFrame:
    """A row for each token of the corpus: id, position, token, type, and by each method its ratio, mean over layers."""
    import polars as pl

    keys = ["id", "position", "token", "type"]
    found = grouped(ratios(setting.lens, run), ["scope", *keys], pl.col("percent").mean())
    return found.pivot(on="scope", index=keys, values="percent").sort("id", "position")


def special(setting: Setting, frame: polars.DataFrame) -> NDArray[np.bool_]:
    """Which tokens the reading `special` calls so."""
    if setting.readings.special == "tokenizer":
        found: Any = frame["token"].is_in(list(setting.lens.tokenizer.all_special_tokens)).to_numpy()
    else:
        found = frame["type"].is_in(["first", "separator"]).to_numpy()
    return np.asarray(found, dtype=bool)


def frequencies_of(setting: Setting, ids: Sequence[int]) -> frequencies.Frequencies:
    """Those of the file, which must be of this vocabulary, or else those of the corpus itself."""
    own = frequencies.counted(ids)
    return frequencies.given_or_counted(setting.frequencies, own, setting.lens)[0]


def by_rank(
    ranks: NDArray[np.int64], values: Mapping[str, NDArray[np.float64]]
) -> tuple[list[float], dict[str, list[float]]]:
    """The middle of every half power of ten of ranks that occurs, as a logarithm, and the means of the values there."""
    bins = np.floor(2 * np.log10(np.maximum(ranks, 1))).astype(int)
    present = np.unique(bins)
    means: dict[str, list[float]] = {
        name: [float(some[bins == one].mean()) for one in present] for name, some in values.items()
    }
    return [(one + 0.5) / 2 for one in present.tolist()], means
