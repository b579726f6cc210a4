"""Mixing ratio and word frequency (EMNLP 2021, section 5.3), on unmasked text, averaged over layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.measures.correlation import ordinal_codes, spearman_of_codes, spearman_of_lists
from normscope.measures.uncertainty import Resampled, resample_statistic
from normscope.papers import frequencies
from normscope.papers.common import finite_numbers
from normscope.papers.emnlp2021.ratios import (
    aggregate_rounded,
    attention_block_scopes,
    mixing_ratios_of_run,
    scope_of_alias,
)
from normscope.papers.emnlp2021.shared import PUBLISHED, REFERENCE, THEIRS
from normscope.papers.published import quote_published
from normscope.papers.resampling import SEQUENCES
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table, none_if_nan

OTHER_SPECIAL = {"markers": "tokenizer", "tokenizer": "markers"}
TITLES = {"all": "all tokens", "words": "without special tokens"}
TEXT = """Each token's mixing ratio is averaged over layers and correlated with the frequency rank of its type. Rank 1 \
is the most frequent type, so a negative correlation means that frequent words mix more. The text is not masked."""


def mixing_frequency_section(setting: Setting, runs: Runs) -> Section:
    """Spearman's correlation of mixing ratio and frequency rank, with and without special tokens."""
    lens = setting.lens
    frame = mixing_of_tokens(setting, runs["plain"])
    ids = lens.tokenizer.convert_tokens_to_ids(frame["token"].to_list())
    counts, _ = frequencies.load_or_count_frequencies(setting, ids)
    ranks = counts.ranks.of(ids)
    ordinary = ~special_token_mask(setting, frame)
    groups = {"all": np.ones(len(ranks), dtype=bool), "words": ordinary}
    values = {name: frame[name].to_numpy() for name in attention_block_scopes(lens) if name in frame.columns}
    rho = {
        name: {kind: spearman_of_lists(some[chosen], ranks[chosen]) for kind, chosen in groups.items()}
        for name, some in values.items()
    }
    columns = (*TITLES.values(), *(f"{PUBLISHED}, {title.split()[0]}" for title in TITLES.values()))
    table = Table.of(
        "frequency-spearman",
        "Spearman's correlation of the mixing ratio with the frequency rank",
        {"method": "", **dict.fromkeys(columns, ".2f")},
        (
            (
                name,
                *(none_if_nan(some[kind]) for kind in TITLES),
                *(THEIRS.get(f"frequency.{name}.{kind}") for kind in TITLES),
            )
            for name, some in rho.items()
        ),
        f"{len(ranks)} tokens, {int(ordinary.sum())} of them not special. Frequencies: {counts.source}. {REFERENCE}",
    )
    places, means = means_by_frequency_rank(ranks[ordinary], {name: some[ordinary] for name, some in values.items()})
    xlabel = "frequency rank (logarithm to base 10), binned"
    chart = charts.line_chart(means, x=places, xlabel=xlabel, ylabel="mixing ratio (%)", ylim=(0, 100))
    title, note = "Mean mixing ratio of words by frequency rank", "Two points per power of ten; no special tokens."
    claim = _frequency_claim(setting, frame, ranks)
    return Section(
        "frequency",
        "Mixing ratio and word frequency",
        TEXT,
        (table, Picture("frequency-ranks", title, chart, note)),
        (claim,),
        finite_numbers({f"frequency.{name}.{kind}": rho[name][kind] for name in rho for kind in groups}),
    )


def resample_rank_correlation(frame: pl.DataFrame, scope: str, ranks: NDArray[np.int64], chosen: Any) -> Resampled:
    """Spearman's correlation of mixing ratio and frequency rank under resampling of sequences.

    The ratios of the tokens of a sequence depend on each other, so whole sequences are drawn. The frequency ranks are
    those of the data in every resample.
    """
    values = frame[scope].to_numpy()
    order = np.flatnonzero(chosen)[np.argsort(values[chosen], kind="stable")]  # sorted, which makes ranking faster
    sequences, of_token = np.unique(frame["id"].to_numpy(), return_inverse=True)
    ratio, rank, place = ordinal_codes(values[order]), ordinal_codes(ranks[order]), of_token[order]
    return resample_statistic(lambda weights: spearman_of_codes(ratio, rank, weights[place]), len(sequences))


def _frequency_claim(setting: Setting, frame: pl.DataFrame, ranks: NDArray[np.int64]) -> Claim:
    """The claim without special tokens, with the other reading of `special` where it leaves out other tokens."""
    last = scope_of_alias(setting.lens, "attention-block")
    chosen, other = (
        ~special_token_mask(replace(setting, readings=replace(setting.readings, special=special)), frame)
        for special in (setting.readings.special, OTHER_SPECIAL[setting.readings.special])
    )
    text = "Frequent words mix more: the mixing ratio decreases with the frequency rank"
    theirs = quote_published(THEIRS, "Spearman {:.2f} by ATTNRESLN-N", "frequency.ATTNRESLN-N.words")
    found = resample_rank_correlation(frame, last, ranks, chosen)
    if np.isnan(found.value):
        return Claim(text, None, "the mixing ratio or the frequency does not vary", theirs)
    rho, margin = found.estimate(SEQUENCES), found.map(np.negative).estimate(SEQUENCES)
    under = {}
    if (chosen != other).any():
        differently = resample_rank_correlation(frame, last, ranks, other).map(np.negative).estimate(SEQUENCES)
        under[f"special={OTHER_SPECIAL[setting.readings.special]}"] = differently.decide()
    ours = f"Spearman {rho.value:.2f} by {last}, without special tokens"
    return decided_claim(text, margin, ours, theirs, evidence=describe_estimate(rho, ".2f"), under=under)


def mixing_of_tokens(setting: Setting, run: Run) -> pl.DataFrame:
    """One row per token of the corpus: id, position, token, type and, for each method, the mean ratio over layers."""
    keys = ["id", "position", "token", "type"]
    found = aggregate_rounded(mixing_ratios_of_run(setting.lens, run), ["scope", *keys], pl.col("percent").mean())
    return found.pivot(on="scope", index=keys, values="percent").sort("id", "position")


def special_token_mask(setting: Setting, frame: pl.DataFrame) -> NDArray[np.bool_]:
    """Boolean mask of the tokens that the reading `special` counts as special."""
    if setting.readings.special == "tokenizer":
        found: Any = frame["token"].is_in(list(setting.lens.tokenizer.all_special_tokens)).to_numpy()
    else:
        found = frame["type"].is_in(["first", "separator"]).to_numpy()
    return np.asarray(found, dtype=bool)


def means_by_frequency_rank(
    ranks: NDArray[np.int64], values: Mapping[str, NDArray[np.float64]]
) -> tuple[list[float], dict[str, list[float]]]:
    """Centres (log10) of the non-empty bins of half a power of ten, and the means of the values in each bin."""
    bins = np.floor(2 * np.log10(np.maximum(ranks, 1))).astype(int)
    present = np.unique(bins)
    means = {name: [float(some[bins == one].mean()) for one in present] for name, some in values.items()}
    return [(one + 0.5) / 2 for one in present.tolist()], means
