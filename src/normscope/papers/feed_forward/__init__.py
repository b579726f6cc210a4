"""ICLR 2024: "Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps".

The readings follow its preprint, "Feed-Forward Blocks Control Contextualization in Masked Language Models"; there is
no public code.
"""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.common import masked_plan
from normscope.papers.feed_forward.amplification import PLAIN, amplification_section
from normscope.papers.feed_forward.measures import ROUNDINGS, SHARES, removal_name
from normscope.papers.feed_forward.norms import bypass_norms_section, low_gain_section
from normscope.papers.feed_forward.pairs import entity_pairs_section, word_pairs_section
from normscope.papers.feed_forward.shared import (
    NAME,
    feed_forward_layout,
    missing_entities,
    missing_layout,
    missing_norm,
    missing_tokenizer,
)
from normscope.papers.feed_forward.similarity import similarity_section
from normscope.papers.readings import choice_field, reading_field
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class FeedForwardReadings:
    """Where the paper leaves something open."""

    mask_seed: int = reading_field(
        0, "seed of the masked tokens of similarities, norms and gains; pairs are of plain text"
    )
    normalise: str = choice_field(
        "maps of Table 1 and Fig. 5: as they are, each row divided by its sum, or each column; Table 1 has all three",
        *("raw", "row", "column"),
    )
    axis: str = choice_field(
        "FF-amp, where the paper lets every column sum to 1: the contributions to every output do (steadier), or "
        "those of every input (the literal reading, with inputs in columns); tests are reported for both",
        *("output", "input"),
    )
    distance: str = choice_field(
        "distance of the pairs that are matched: |i - j|, or i - j with its sign", "absolute", "signed"
    )
    level: str = choice_field(
        "what the test of the claims counts: every pair of positions, or every pair of types with its mean; both "
        "are reported",
        *("instance", "type"),
    )
    resamples: int = reading_field(10_000, "resamples of the bootstrap, which the paper does not say")
    sided: str = choice_field("the test: whether the targets are above, or whether they differ", "one", "two")
    alpha: float = reading_field(0.05, "level of significance")
    specials: bool = reading_field(
        False, "special tokens among the other pairs that words and entities are compared with"
    )
    seed: int = reading_field(0, "seed of the sampled pairs and of the bootstrap")
    list_specials: bool = reading_field(True, "special tokens in the lists of amplified pairs; the paper's have some")
    min_sequences: int = reading_field(
        2, "least number of sequences in which a listed pair occurs; with 1, words that one text repeats win"
    )
    min_occurrences: int = reading_field(2, "least number of occurrences of a listed pair; the paper drops single ones")
    gamma_share: float = reading_field(0.01, "share of the dimensions, of the lowest gain, that is removed", SHARES)
    gamma_rounding: str = reading_field(
        "floor", "how that share becomes a number of dimensions, at least 1: 768 x 1 % = 7.68", tuple(ROUNDINGS)
    )
    gamma_layer: int = reading_field(
        0, "layer of Fig. 11, from 1; 0 for the one where the feed-forward changes the map most"
    )


def _plan_masked_run(setting: Setting, *measures: str) -> tuple[RunPlan, ...]:
    scopes = feed_forward_layout(setting.lens)
    return (masked_plan(setting, measures, () if scopes is None else scopes.chain),)


def _plan_similarity(setting: Setting) -> tuple[RunPlan, ...]:
    return _plan_masked_run(setting, "similarity", "similarity_normalised")


def _plan_magnitudes(setting: Setting) -> tuple[RunPlan, ...]:
    return _plan_masked_run(setting, "ff_magnitudes")


def _plan_gain_removal(setting: Setting) -> tuple[RunPlan, ...]:
    return _plan_masked_run(
        setting, "ff_magnitudes", removal_name(setting.readings.gamma_share, setting.readings.gamma_rounding)
    )


def _plan_pairs(setting: Setting, *measures: str) -> tuple[RunPlan, ...]:
    scopes = feed_forward_layout(setting.lens)
    maps = () if scopes is None else tuple(dict.fromkeys((scopes.input, scopes.ff, scopes.residual, scopes.layer)))
    return (RunPlan(PLAIN, ("token_words", *measures), maps, maps),)


def _plan_entity_pairs(setting: Setting) -> tuple[RunPlan, ...]:
    return _plan_pairs(setting, "entity_spans")


PAPER = Paper(
    name=NAME,
    title="Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Analyzing Feed-Forward Blocks in Transformers "
        "through the Lens of Attention Maps. ICLR 2024. arXiv 2302.00456"
    ),
    readings=FeedForwardReadings,
    experiments=(
        Experiment(
            "similarity",
            "Similarity of the maps of a layer's scopes",
            similarity_section,
            _plan_similarity,
            missing_layout,
        ),
        Experiment(
            "amplification",
            "Pairs of subwords that are amplified",
            amplification_section,
            _plan_pairs,
            missing_tokenizer,
        ),
        Experiment("word_split", "Pairs of subwords of one word", word_pairs_section, _plan_pairs, missing_tokenizer),
        Experiment(
            "entities",
            "Pairs of subwords of one named entity",
            entity_pairs_section,
            _plan_entity_pairs,
            missing_entities,
            needs="sentences with named entities",
        ),
        Experiment(
            "norms",
            "Norms of the feed-forward's output and of what bypasses it",
            bypass_norms_section,
            _plan_magnitudes,
            missing_layout,
        ),
        Experiment(
            "gamma", "Dimensions that the last norm makes small", low_gain_section, _plan_gain_removal, missing_norm
        ),
    ),
)
