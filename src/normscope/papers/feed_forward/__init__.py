"""ICLR 2024: "Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps".

The readings, and the numbers of tables and figures, follow the preprint, "Feed-Forward Blocks Control Contextualization
in Masked Language Models" (arXiv 2302.00456, versions 1 and 2); no code was published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normscope.papers.common import masked_plan
from normscope.papers.feed_forward.amplification import PLAIN, amplification_section
from normscope.papers.feed_forward.measures import ROUNDINGS, SHARES, removal_measure_name
from normscope.papers.feed_forward.norms import bypass_norms_section, low_gain_section
from normscope.papers.feed_forward.pair_tests import LEVELS
from normscope.papers.feed_forward.pairs import entity_pairs_section, word_pairs_section
from normscope.papers.feed_forward.shared import (
    EDITION,
    NAME,
    ff_layout,
    missing_entities,
    missing_ff_layout,
    missing_last_norm,
    missing_tokenizer,
)
from normscope.papers.feed_forward.similarity import similarity_section
from normscope.papers.readings import reading, reading_choice
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class FeedForwardReadings:
    """Choices that the paper leaves open."""

    masking: bool = reading(
        True,
        "mask 12 % of the tokens for similarities, norms and gains, as the paper does; pairs are from unmasked text",
    )
    mask_seed: int = reading(0, "seed for masking")
    normalise: str = reading_choice(
        "maps that similarities are computed from: unnormalised, or each row or column divided by its sum; Table 1 has "
        "all three",
        *("raw", "row", "column"),
    )
    axis: str = reading_choice(
        "normalisation of FF-amp, for which the paper has each column sum to 1: over the contributions to each output "
        "(more stable), or of each input (the literal reading, inputs in columns); tests are reported for both",
        *("output", "input"),
    )
    distance: str = reading_choice(
        "distance by which pairs are matched: |i - j|, or i - j with its sign", "absolute", "signed"
    )
    level: str = reading_choice(
        "unit of the test that decides the claims about pairs: whole sequences, which are independent, each pair of "
        "positions, or each pair of types with its mean; all are reported",
        *LEVELS,
    )
    resamples: int = reading(10_000, "number of bootstrap resamples, not stated in the paper")
    sided: str = reading_choice(
        "p-values that are compared with the published ones: one-sided (targets are larger) or two-sided (targets "
        "differ); the claims are tested in both directions",
        *("one", "two"),
    )
    alpha: float = reading(0.05, "significance level")
    specials: bool = reading(False, "include special tokens in the pairs that words and entities are compared with")
    seed: int = reading(0, "seed for sampling pairs and for the bootstrap")
    list_specials: bool = reading(True, "include special tokens in the lists of amplified pairs, as the paper does")
    min_sequences: int = reading(
        2, "minimum number of sequences for a listed pair; with 1, words repeated within one text dominate"
    )
    min_occurrences: int = reading(
        2, "minimum number of occurrences for a listed pair; the paper drops single occurrences"
    )
    gamma_share: float = reading(0.01, "share of the dimensions to remove, those with the lowest gain", SHARES)
    gamma_rounding: str = reading(
        "floor", "how that share is rounded to a number of dimensions (at least 1): 768 x 1 % = 7.68", tuple(ROUNDINGS)
    )
    gamma_layer: int = reading(0, "layer of Fig. 11, from 1; 0: the layer whose feed-forward changes the map most")


def _masked_layout_plan(*measures: str) -> Callable[[Setting], tuple[RunPlan, ...]]:
    """The masked run with all scopes of the layer."""

    def plan(setting: Setting) -> tuple[RunPlan, ...]:
        layout = ff_layout(setting.lens)
        return (masked_plan(setting, measures, layout.chain if layout else ()),)

    return plan


def _low_gain_plan(setting: Setting) -> tuple[RunPlan, ...]:
    removal = removal_measure_name(setting.readings.gamma_share, setting.readings.gamma_rounding)
    return _masked_layout_plan("ff_magnitudes", removal)(setting)


def _stored_maps_plan(*measures: str) -> Callable[[Setting], tuple[RunPlan, ...]]:
    """The unmasked run, which stores the maps that amplification is computed from."""

    def plan(setting: Setting) -> tuple[RunPlan, ...]:
        layout = ff_layout(setting.lens)
        maps = tuple(dict.fromkeys((layout.input, layout.ff, layout.residual, layout.layer))) if layout else ()
        return (RunPlan(PLAIN, measures, maps, maps),)

    return plan


SIMILARITIES = _masked_layout_plan("similarity", "similarity_shares")
MAGNITUDES = _masked_layout_plan("ff_magnitudes", "ff_norms")
PAIRS = _stored_maps_plan("token_words")
ENTITIES = _stored_maps_plan("token_words", "entity_spans")

PAPER = Paper(
    name=NAME,
    title="Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Analyzing Feed-Forward Blocks in Transformers "
        f"through the Lens of Attention Maps. ICLR 2024. arXiv 2302.00456. {EDITION}"
    ),
    readings=FeedForwardReadings,
    experiments=(
        Experiment(
            "similarity", "Similarity of the maps within a layer", similarity_section, SIMILARITIES, missing_ff_layout
        ),
        Experiment("amplification", "Amplified pairs of subwords", amplification_section, PAIRS, missing_tokenizer),
        Experiment("word_split", "Pairs of subwords of one word", word_pairs_section, PAIRS, missing_tokenizer),
        Experiment(
            "entities",
            "Pairs of subwords of one named entity",
            entity_pairs_section,
            ENTITIES,
            missing_entities,
            needs="sentences with named entities",
        ),
        Experiment(
            "norms",
            "Norms of the feed-forward output and of the bypass",
            bypass_norms_section,
            MAGNITUDES,
            missing_ff_layout,
        ),
        Experiment(
            "gamma", "Dimensions that the last norm scales down", low_gain_section, _low_gain_plan, missing_last_norm
        ),
    ),
)
