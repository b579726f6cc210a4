"""Mixing ratios by sequence, for intervals: sequences are independent of each other, their tokens are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.measures.uncertainty import Estimate, Resampled, resample_means
from normscope.papers.common import paper_layers_text
from normscope.papers.emnlp2021.ratios import TYPES, aggregate_rounded
from normscope.papers.resampling import SEQUENCES, estimates_along
from normscope.papers.verdicts import describe_estimate, split_layers

Values = NDArray[np.float64]


class SequenceSums(NamedTuple):
    """Mixing ratios of each sequence, summed over the tokens of a kind."""

    ids: tuple[str, ...]
    sums: Values  # (sequences, scopes, layers, kinds), in percent
    counts: Values  # (sequences, kinds): tokens

    @property
    def means(self) -> Values:
        """(sequences, scopes, layers, kinds); NaN for kinds of token that a sequence does not have."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Values = self.sums / self.counts[:, None, None, :]
        return found


def mixing_sums_by_sequence(frame: pl.LazyFrame, scopes: Sequence[str], depth: int) -> SequenceSums:
    """The sums of a frame from `mixing_ratios_of_run` for some scopes and all kinds in TYPES, sequences by id."""
    keys, value = ["id", "scope", "layer", "type"], pl.col("percent")
    chosen = frame.filter(pl.col("scope").is_in(list(scopes)))
    table = aggregate_rounded(chosen, keys, value.sum().alias("sum"), pl.len().alias("count")).sort(keys)
    ids = table["id"].unique().sort().to_list()
    places = [
        np.array([where[one] for one in table[key].to_list()], dtype=np.intp)
        for key, where in (
            ("id", {one: n for n, one in enumerate(ids)}),
            ("scope", {one: n for n, one in enumerate(scopes)}),
            ("layer", {n + 1: n for n in range(depth)}),
            ("type", {one: n for n, one in enumerate(TYPES)}),
        )
    ]
    sums = np.zeros((len(ids), len(scopes), depth, len(TYPES)))
    counts = np.zeros((len(ids), len(TYPES)))
    sums[tuple(places)] = table["sum"].to_numpy()
    counts[places[0], places[3]] = table["count"].to_numpy()
    for values in (sums, counts):
        values[..., -1] = values[..., :-1].sum(-1)  # overall
    return SequenceSums(tuple(ids), sums, counts)


def resample_mixing(given: SequenceSums, average: str, kinds: Sequence[str] = TYPES) -> Resampled:
    """(scopes, layers, kinds): mean mixing ratios under resampling of sequences.

    The mean is over the means of the sequences with such a token (macro), or over all tokens (micro), a ratio of sums.
    """
    chosen = [TYPES.index(kind) for kind in kinds]
    if average == "macro":
        return resample_means(given.means[..., chosen])
    sums, counts = given.sums[..., chosen], given.counts[..., chosen]
    shape = sums.shape[1:]
    table = np.concatenate([sums.reshape(len(sums), -1), counts], 1)

    def ratios(totals: Values) -> Values:
        of_sums = totals[..., : -len(chosen)].reshape(*totals.shape[:-1], *shape)
        found: Values = of_sums / totals[..., None, None, -len(chosen) :]
        return found

    return resample_means(table).map(ratios)


def intervals_evidence(means: Mapping[str, Resampled], unit: str = " %") -> str:
    """ "95 % intervals: ATTN-W 91.0 to 92.1 %; ATTN-N 80.2 to 81.3 % (bootstrap over 872 sequences)" """
    found = {name: one.estimate(SEQUENCES) for name, one in means.items()}
    methods = dict.fromkeys(one.method for one in found.values())
    if any(isnan(one.low) for one in found.values()):
        return "; ".join(methods)
    texts = [f"{name} {one.low:.1f} to {one.high:.1f}{unit}" for name, one in found.items()]
    return f"95 % intervals: {'; '.join(texts)} ({'; '.join(methods)})"


def margin_evidence(
    margin: Estimate, by_layer: Resampled, layers: Sequence[int] | None = None, name: str = "difference"
) -> str:
    """The margin of a mean over layers with its interval, and the layers in which it is significantly reversed."""
    if isnan(margin.low):
        return margin.method
    return describe_estimate(margin, ".2f", " points", name) + reversed_layers_text([by_layer], layers)


def reversed_layers_text(margins: Sequence[Resampled], layers: Sequence[int] | None = None) -> str:
    """ "; reversed in layers 3-4" if one of the margins, (..., layers), is significantly negative there, or empty."""
    found = {layer for one in margins for layer in split_layers(estimates_along(one), layers)[1]}
    return f"; reversed in {paper_layers_text(sorted(found))}" if found else ""
