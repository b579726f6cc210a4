"""Claims about the similarity of maps, decided by a bootstrap over sequences (FF paper, sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from normscope.measures.uncertainty import Estimate, Resampled, decide_at_least
from normscope.papers.common import paper_layers_text
from normscope.papers.feed_forward.sequences import (
    NORMALISED,
    Pair,
    ResampledSimilarities,
    pick_lowest_layer,
)
from normscope.papers.feed_forward.shared import INCREASES, NAME, FeedForwardLayout
from normscope.papers.published import published_main_numbers, quote_published
from normscope.papers.resampling import SEQUENCES, estimate_mean_along, estimates_along, subtract_resampled
from normscope.papers.verdicts import decided_claim, describe_estimate, describe_layers
from normscope.reports.report import Claim

ByLayer = Mapping[int, float]  # layer, from 1 -> mean over sequences
ByPair = Mapping[Pair, ByLayer]
Layers = Callable[[Pair], Resampled]  # (layers,)
CHANGED = 0.9  # similarity below which a component counts as changing the map
ALIKE = 0.95  # similarity above which two maps count as nearly the same


def similarity_claims(
    scopes: FeedForwardLayout, means: Mapping[str, ByPair], resampled: ResampledSimilarities, readings: Any
) -> tuple[Claim, ...]:
    """The claims with the maps of the readings; the verdicts with the other maps are named where they differ."""
    published, given = published_main_numbers(NAME), means[readings.normalise]
    claim = partial(_claim_under_readings, resampled, readings)
    before_ff = (scopes.input, scopes.ff)
    ff, after_ff, after_residual = (
        given[pair] for pair in (before_ff, (scopes.block, scopes.ff), (scopes.block, scopes.ff_residual))
    )
    lowest = min(ff, key=lambda layer: ff[layer])
    back = [layer for layer in ff if after_residual[layer] > after_ff[layer]]
    keys = [f"similarity.ATTNRESLNFF-N{end}" for end in ("", ".min", ".max")]
    claims = [
        claim(
            f"The feed-forward changes the map: the similarity is below {CHANGED} in at least one layer",
            f"{_mean(ff):.2f}, from {ff[lowest]:.2f} (layer {lowest}) to {max(ff.values()):.2f}",
            quote_published(published, "{:.2f}, from {:.2f} to {:.2f}", *keys),
            lambda layers: estimates_along(layers(before_ff).map(lambda values: CHANGED - values)),
            lambda margins: describe_layers(
                margins, alpha=readings.alpha, words=(f"below {CHANGED} in", f"above {CHANGED} in")
            ),
            at_least=1,
        ),
        claim(
            "RES2 counteracts the feed-forward: in every layer the map after it is closer to the map before the block",
            f"in {len(back)} of {len(ff)}: {paper_layers_text(back)}",
            "in every layer",
            lambda layers: estimates_along(
                subtract_resampled(layers((scopes.block, scopes.ff_residual)), layers((scopes.block, scopes.ff)))
            ),
            lambda margins: describe_layers(margins, alpha=readings.alpha),
        ),
    ]
    if scopes.layer != scopes.ff_residual:
        claims += _last_norm_claims(scopes, given, claim, published, lowest, resampled, readings)
    whole = (scopes.residual, scopes.layer)
    return (
        *claims,
        claim(
            f"The map of the whole layer is nearly that of attention and residual (similarity above {ALIKE})",
            f"{_mean(given[whole]):.2f}",
            quote_published(published, "{:.2f}", "pair.ATTNRES-N.ATTNRESLNFFRESLN-N"),
            lambda layers: [estimate_mean_along(layers(whole).map(lambda values: values - ALIKE))],
            lambda margins: describe_estimate(_shift(margins[0], ALIKE), ".3f", name="similarity"),
        ),
    )


def _claim_under_readings(
    resampled: ResampledSimilarities,
    readings: Any,
    text: str,
    ours: str,
    theirs: str,
    margins: Callable[[Layers], Sequence[Estimate]],
    evidence: Callable[[Sequence[Estimate]], str],
    at_least: int | None = None,
) -> Claim:
    """A claim whose margins are computed with the maps of each normalisation; those of the readings decide."""
    found = {name: margins(partial(resampled.layers, name)) for name in NORMALISED}
    chosen = found.pop(readings.normalise)
    count = len(chosen) if at_least is None else at_least
    return decided_claim(
        text,
        chosen,
        ours,
        theirs,
        at_least=count,
        evidence=evidence(chosen),
        under={f"normalise={name}": decide_at_least(count, some, readings.alpha) for name, some in found.items()},
        alpha=readings.alpha,
    )


def _last_norm_claims(
    scopes: FeedForwardLayout,
    given: ByPair,
    claim: Callable[..., Claim],
    published: Mapping[str, float],
    lowest: int,
    resampled: ResampledSimilarities,
    readings: Any,
) -> list[Claim]:
    """The claims about LN2, which only layers that end with a norm have."""
    step, residual_step = ((scopes.before(scope), scope) for scope in (scopes.layer, scopes.ff_residual))
    norm, residual = (scopes.block, scopes.layer), (scopes.block, scopes.ff_residual)

    def gain(layers: Layers) -> Resampled:
        return subtract_resampled(layers(norm), layers(residual))

    by_layer = estimates_along(gain(partial(resampled.layers, readings.normalise)))
    template = "similarity {:.2f} against {:.2f}"
    return [
        claim(
            "LN2 changes the map more than RES2 does",
            template.format(_mean(given[step]), _mean(given[residual_step])),
            quote_published(published, template, "similarity.ATTNRESLNFFRESLN-N", "similarity.ATTNRESLNFFRES-N"),
            lambda layers: [estimate_mean_along(subtract_resampled(layers(residual_step), layers(step)))],
            lambda margins: describe_estimate(margins[0], ".2g", name="difference"),
        ),
        claim(
            "LN2 counteracts the feed-forward in the layer where the feed-forward changes the map most",
            f"layer {lowest}: the similarity to the map before the block goes from {given[residual][lowest]:.2f} to "
            f"{given[norm][lowest]:.2f}",
            "it increases in layers 10-11, where the feed-forward changes the map most",
            lambda layers: [pick_lowest_layer(gain(layers), layers((scopes.input, scopes.ff))).estimate(SEQUENCES)],
            lambda margins: (
                f"{describe_estimate(margins[0], '.2g', name='increase')}; "
                f"{describe_layers(by_layer, alpha=readings.alpha, words=INCREASES, methods=False)}"
            ),
        ),
    ]


def _shift(one: Estimate, by: float) -> Estimate:
    """The estimate of a number whose margin to a threshold was estimated, for display."""
    return replace(one, value=one.value + by, low=one.low + by, high=one.high + by)


def _mean(values: ByLayer) -> float:
    return float(np.mean(list(values.values())))
