"""Claims on word alignment (EMNLP 2020, section 5), decided by a bootstrap over sentence pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import nan
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.measures.alignment import SETTINGS
from normscope.measures.correlation import spearman
from normscope.measures.uncertainty import Estimate, Resampled, decide_at_least, permute_spearman, resample_means
from normscope.papers.common import CLEAR
from normscope.papers.emnlp2020.alignment_rates import (
    METHODS,
    WORDS,
    AlignmentItems,
    AlignmentResult,
    aer_of_sums,
)
from normscope.papers.emnlp2020.measures import LAYER_LEVEL
from normscope.papers.emnlp2020.shared import THEIRS
from normscope.papers.published import quote_published
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports.report import Claim

Others = Mapping[str, tuple[AlignmentResult, AlignmentItems]]  # another reading -> the results with it

PAIRS = "sentence pairs"
RESAMPLES = 1000  # of rank correlations
WHAT = {"all": " of all words", "linked": " of linked words"}
WEIGHT, NORM = (METHODS.index(method) for method in ("weight", "norm"))
AWO, AWI = (SETTINGS.index(way) for way in ("AWO", "AWI"))


def alignment_claims(
    found: AlignmentResult, items: AlignmentItems, method_of_errors: str, others: Others | None = None
) -> tuple[Claim, ...]:
    """The paper's claims, each decided on the error rate over `found.words`; `others` have other mean norms."""
    layers = resample_means(items.hits[..., 0, :])
    rates = {words: layers.map(partial(aer_of_sums, words=words)) for words in WORDS}
    return (
        *_better_than_weights(found, rates),
        _early_layers(found, rates),
        _highest_layer(found, rates, others or {}),
        *_norms_of_heads(found, items, method_of_errors, others or {}),
    )


def _better_than_weights(found: AlignmentResult, rates: Mapping[str, Resampled]) -> Iterator[Claim]:
    """Error rates (settings, methods, layers): weights minus norms, on average and each in its best layer."""
    what = WHAT[found.words]
    for end, where, reduce in (("mean", "on average over layers", np.mean), ("best", "in the best layer", np.min)):
        for n, way in enumerate(SETTINGS):
            apart = {
                words: one.map(itemgetter((..., n, slice(None), slice(None))))
                .map(partial(reduce, axis=-1))
                .map(lambda r: r[..., WEIGHT] - r[..., NORM])
                for words, one in rates.items()
            }
            ours = [
                float(reduce([rate.aer(found.words) for rate in found.by_layer(way, method)]))
                for method in ("norm", "weight")
            ]
            keys = [f"alignment.{way}.{method}.{end}" for method in ("norm", "weight")]
            best = [found.best_layer(way, method) + 1 for method in ("norm", "weight")]
            at = f" (layers {best[0]} and {best[1]})" if end == "best" else ""
            text = f"Norms give better alignments than weights {where} ({way})"
            template = "AER{} {:.1f} % against {:.1f} %{}"
            published = quote_published(THEIRS, "AER {:.1f} % against {:.1f} %", *keys)
            numbers = template.format(what, *ours, at)
            yield _claim_on_rates(text, found.words, apart, numbers, published, "weights minus norms")


def _early_layers(found: AlignmentResult, rates: Mapping[str, Resampled]) -> Claim:
    """AWO minus AWI, by norms, on average over the first half of the layers."""
    early = found.layers[: max(1, len(found.layers) // 2)]
    apart = {
        words: one.map(lambda r: r[..., NORM, : len(early)].mean(-1)).map(lambda r: r[..., AWO] - r[..., AWI])
        for words, one in rates.items()
    }
    awi, awo = (
        fmean(found.rates[way, "norm"][n, LAYER_LEVEL].aer(found.words) for n in early) for way in ("AWI", "AWO")
    )
    both = ("alignment.AWI.norm.best", "alignment.AWO.norm.best")
    return _claim_on_rates(
        "In early layers AWI gives better alignments than AWO",
        found.words,
        apart,
        f"AER{WHAT[found.words]} by norms {awi:.1f} % against {awo:.1f} % in layers 1 to {early[-1] + 1}",
        quote_published(THEIRS, "best layer by norms: {:.1f} % (2) against {:.1f} % (5)", *both),
        "AWO minus AWI",
    )


def _highest_layer(found: AlignmentResult, rates: Mapping[str, Resampled], others: Others) -> Claim:
    """With AWI: the lowest error rate of the other layers minus that of the layer with the highest norm."""
    text = "With AWI the layer with the highest norm has the lowest error rate"
    best = found.best_layer("AWI", "norm") + 1
    ours = f"layer {found.highest_layer + 1} has the highest norm, layer {best} the lowest AER{WHAT[found.words]}"
    published = "layer 2 in all five models"
    if len(found.layers) == 1:
        return decided_claim(text, [], ours, published, evidence="the model has a single layer")
    apart = {words: _other_layers_minus_highest(found, one) for words, one in rates.items()}
    under = {
        reading: _other_layers_minus_highest(other, rates[found.words]).estimate(PAIRS).decide()
        for reading, (other, _) in others.items()
    }
    return _claim_on_rates(text, found.words, apart, ours, published, "best other layer minus this layer", under)


def _other_layers_minus_highest(found: AlignmentResult, rates: Resampled) -> Resampled:
    at = found.layers.index(found.highest_layer)
    rest = [n for n in range(len(found.layers)) if n != at]
    return rates.map(lambda r: r[..., AWI, NORM, rest].min(-1) - r[..., AWI, NORM, at])


def _norms_of_heads(found: AlignmentResult, items: AlignmentItems, method: str, others: Others) -> Iterator[Claim]:
    """Correlation of a head's error rate with its mean norm: clear over resampled sentence pairs, and unlikely to arise
    by chance between this many heads."""
    (other_method,) = (one for one in METHODS if one != method)
    (other_words,) = (words for words in WORDS if words != found.words)
    for way, sign, end in (
        ("AWI", -1, "align better: error rate and norm correlate negatively (below {})"),
        ("AWO", 1, "align worse: error rate and norm correlate positively (above {})"),
    ):
        rho = _resample_head_correlation(items, way, method, found.words)
        margins = _head_margins(found, items, way, sign, method, found.words)
        changed = {
            f"aer={other_words}": _head_margins(found, items, way, sign, method, other_words),
            f"aer_correlation={other_method}": _head_margins(found, items, way, sign, other_method, found.words),
        }
        changed |= {reading: _head_margins(*both, way, sign, method, found.words) for reading, both in others.items()}
        yield decided_claim(
            f"With {way}, heads with a higher norm {end.format(sign * CLEAR)}",
            margins,
            f"Spearman {float(rho.value):.2f} with AER{WHAT[found.words]} by {method}",
            quote_published(THEIRS, "Spearman {:.2f}", f"alignment.{way}.rho"),
            evidence="; ".join(
                (describe_estimate(rho.estimate(PAIRS), name="Spearman"), describe_estimate(margins[1]))
            ),
            under={reading: decide_at_least(2, some) for reading, some in changed.items()},
        )


def _head_margins(
    found: AlignmentResult, items: AlignmentItems, way: str, sign: int, method: str, words: str
) -> list[Estimate]:
    """sign * rho - CLEAR over resampled sentence pairs, and sign * rho over permuted heads."""
    rho = _resample_head_correlation(items, way, method, words)
    margin = rho.map(partial(np.multiply, sign)).map(lambda value: value - CLEAR).estimate(PAIRS)
    errors = [sign * error for error in found.head_errors(way, method, words)]
    return [margin, permute_spearman(errors, list(found.norms.values()), "heads")]


def _resample_head_correlation(items: AlignmentItems, way: str, method: str, words: str) -> Resampled:
    """Spearman's correlation of the error rates and the mean norms of all heads under resampling of sentence pairs."""
    hits = items.hits[:, SETTINGS.index(way), METHODS.index(method), :, 1:]
    table = np.concatenate([hits, items.norms], -1)

    def correlate(sums: NDArray[np.float64]) -> Any:
        errors, norms = aer_of_sums(sums[..., :-2], words), sums[..., -2] / sums[..., -1]
        flat = (torch.from_numpy(values.reshape(*values.shape[:-2], -1)) for values in (errors, norms))
        return spearman(*flat).numpy()

    if table.shape[1] * table.shape[2] < 3:
        return Resampled(np.array(nan), np.array([nan]), len(table))
    return resample_means(table, RESAMPLES).map(correlate)


def _claim_on_rates(
    text: str,
    words: str,
    apart: Mapping[str, Resampled],
    ours: str,
    published: str,
    name: str,
    under: Mapping[str, bool | None] | None = None,
) -> Claim:
    """A claim whose margin is a difference of error rates, in percentage points."""
    margins = {one: found.estimate(PAIRS) for one, found in apart.items()}
    return decided_claim(
        text,
        margins[words],
        ours,
        published,
        evidence=describe_estimate(margins[words], ".1f", " points", name),
        under={f"aer={one}": margin.decide() for one, margin in margins.items() if one != words} | dict(under or {}),
    )
