"""ICLR 2024: "Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps".

The readings follow its preprint, "Feed-Forward Blocks Control Contextualization in Masked Language Models"; there is
no public code.
"""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.common import masked_plan
from normscope.papers.feed_forward.amplification import PLAIN, amplification
from normscope.papers.feed_forward.measures import ROUNDINGS, SHARES, removal_name
from normscope.papers.feed_forward.norms import gamma, norms
from normscope.papers.feed_forward.pairs import entities, word_split
from normscope.papers.feed_forward.shared import (
    NAME,
    layout,
    missing_entities,
    missing_layout,
    missing_norm,
    missing_words,
)
from normscope.papers.feed_forward.similarity import similarity
from normscope.papers.readings import choice, reading
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class Readings:
    """Where the paper leaves something open."""

    mask_seed: int = reading(0, "seed of the masked tokens of similarities, norms and gains; pairs are of plain text")
    normalise: str = choice(
        "maps of Table 1 and Fig. 5: as they are, each row divided by its sum, or each column; Table 1 has all three",
        *("raw", "row", "column"),
    )
    axis: str = choice(
        "FF-amp, where the paper lets every column sum to 1: the contributions to every output do (steadier), or "
        "those of every input (the literal reading, with inputs in columns); tests are reported for both",
        *("output", "input"),
    )
    distance: str = choice(
        "distance of the pairs that are matched: |i - j|, or i - j with its sign", "absolute", "signed"
    )
    level: str = choice(
        "what the test of the claims counts: every pair of positions, or every pair of types with its mean; both "
        "are reported",
        *("instance", "type"),
    )
    resamples: int = reading(10_000, "resamples of the bootstrap, which the paper does not say")
    sided: str = choice("the test: whether the targets are above, or whether they differ", "one", "two")
    alpha: float = reading(0.05, "level of significance")
    specials: bool = reading(False, "special tokens among the other pairs that words and entities are compared with")
    seed: int = reading(0, "seed of the sampled pairs and of the bootstrap")
    list_specials: bool = reading(True, "special tokens in the lists of amplified pairs; the paper's have some")
    min_sequences: int = reading(
        2, "least number of sequences in which a listed pair occurs; with 1, words that one text repeats win"
    )
    min_occurrences: int = reading(2, "least number of occurrences of a listed pair; the paper drops single ones")
    gamma_share: float = reading(0.01, "share of the dimensions, of the lowest gain, that is removed", SHARES)
    gamma_rounding: str = reading(
        "floor", "how that share becomes a number of dimensions, at least 1: 768 x 1 % = 7.68", tuple(ROUNDINGS)
    )
    gamma_layer: int = reading(0, "layer of Fig. 11, from 1; 0 for the one where the feed-forward changes the map most")


def _masked_runs(setting: Setting, *measures: str) -> tuple[RunPlan, ...]:
    scopes = layout(setting.lens)
    return (masked_plan(setting, measures, () if scopes is None else scopes.chain),)


def _similarity(setting: Setting) -> tuple[RunPlan, ...]:
    return _masked_runs(setting, "similarity", "similarity_normalised")


def _norms(setting: Setting) -> tuple[RunPlan, ...]:
    return _masked_runs(setting, "ff_magnitudes")


def _gamma(setting: Setting) -> tuple[RunPlan, ...]:
    return _masked_runs(
        setting, "ff_magnitudes", removal_name(setting.readings.gamma_share, setting.readings.gamma_rounding)
    )


def _words(setting: Setting, *measures: str) -> tuple[RunPlan, ...]:
    scopes = layout(setting.lens)
    maps = () if scopes is None else tuple(dict.fromkeys((scopes.input, scopes.ff, scopes.residual, scopes.layer)))
    return (RunPlan(PLAIN, ("token_words", *measures), maps, maps),)


def _entities(setting: Setting) -> tuple[RunPlan, ...]:
    return _words(setting, "entity_spans")


PAPER = Paper(
    name=NAME,
    title="Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Analyzing Feed-Forward Blocks in Transformers "
        "through the Lens of Attention Maps. ICLR 2024. arXiv 2302.00456"
    ),
    readings=Readings,
    experiments=(
        Experiment("similarity", "Similarity of the maps of a layer's scopes", similarity, _similarity, missing_layout),
        Experiment("amplification", "Pairs of subwords that are amplified", amplification, _words, missing_words),
        Experiment("word_split", "Pairs of subwords of one word", word_split, _words, missing_words),
        Experiment(
            "entities",
            "Pairs of subwords of one named entity",
            entities,
            _entities,
            missing_entities,
            needs="sentences with named entities",
        ),
        Experiment(
            "norms", "Norms of the feed-forward's output and of what bypasses it", norms, _norms, missing_layout
        ),
        Experiment("gamma", "Dimensions that the last norm makes small", gamma, _gamma, missing_norm),
    ),
)
