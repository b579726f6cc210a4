"""Similarities and norms of single sequences, and bootstrap resamples of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from normscope.corpus.store import Run
from normscope.measures.uncertainty import Estimate, Resampled, resample_means
from normscope.papers.common import scan_paper_side
from normscope.papers.feed_forward.maps import Values
from normscope.papers.feed_forward.shared import FeedForwardLayout

NORMALISED = ("raw", "row", "column")
Bands = dict[str, tuple[list[float], list[float]]]
Pair = tuple[str, str]


@dataclass(frozen=True)
class ResampledSimilarities:
    """Similarities of pairs of scopes, averaged over sequences, under resampling of the sequences."""

    places: Mapping[tuple[str, Pair], int]  # normalisation of the maps, scopes
    resampled: Resampled  # (places, layers)

    def layers(self, normalised: str, pair: Pair) -> Resampled:
        """(layers,): one pair of scopes."""
        place = self.places[normalised, pair]
        return self.resampled.map(lambda values: values[..., place, :])


def sequence_similarities(run: Run, scopes: FeedForwardLayout) -> dict[tuple[str, Pair], Values]:
    """(normalisation, pair of scopes) -> (sequences, layers): Spearman's correlations of their maps."""
    tables = {"raw": scan_paper_side(run, "similarity", scopes.side)}
    shares = scan_paper_side(run, "similarity_shares", scopes.side)
    tables |= {name: shares.filter(pl.col("normalised") == name) for name in NORMALISED[1:]}
    found = {}
    for name, table in tables.items():
        frame = table.select("scope", "other", "layer", "spearman").collect()
        depth = frame["layer"].n_unique()
        # Rows are stored sequence by sequence, with the layers of each pair in order.
        for (scope, other), rows in frame.partition_by(["scope", "other"], as_dict=True, maintain_order=True).items():
            found[name, (scope, other)] = rows["spearman"].to_numpy().reshape(-1, depth)
    return found


def resample_similarities(
    given: Mapping[tuple[str, Pair], Values], pairs: Sequence[Pair], resamples: int, seed: int
) -> ResampledSimilarities:
    """The means of these pairs of scopes in all normalisations, resampled together."""
    chosen = [(name, pair) for name in NORMALISED for pair in dict.fromkeys(pairs)]
    table = np.stack([given[key] for key in chosen], 1)
    return ResampledSimilarities(
        {key: n for n, key in enumerate(chosen)}, resample_means(table, resamples, seed=(seed, 5))
    )


def pick_lowest_layer(values: Resampled, by: Resampled) -> Resampled:
    """The value in the layer where `by` is lowest, chosen anew in each resample; both (layers,), resampled together."""

    def pick(some: Values, others: Values) -> Values:
        place = np.where(np.isnan(others), np.inf, others).argmin(-1)
        found: Values = np.take_along_axis(some, place[..., None], -1)[..., 0]
        return found

    return Resampled(np.asarray(pick(values.value, by.value)), pick(values.draws, by.draws), values.items)


def interval_bands(estimates: Mapping[str, Sequence[Estimate]]) -> Bands:
    """The intervals of the layers of each series, for `charts.line_chart`."""
    return {name: ([one.low for one in some], [one.high for one in some]) for name, some in estimates.items()}
