"""ICLR 2024: "Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps".

The readings follow its preprint, "Feed-Forward Blocks Control Contextualization in Masked Language Models"; there is
no public code.
"""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.experiments import Experiment, Paper, RunPlan, Setting
from normscope.papers.feed_forward.amplification import PLAIN, amplification
from normscope.papers.feed_forward.measures import ROUNDINGS, SHARES, removed_name
from normscope.papers.feed_forward.norms import gamma, norms
from normscope.papers.feed_forward.pairs import entities, missing_entities, missing_words, word_split
from normscope.papers.feed_forward.shared import ends_with_norm, layout, masked_run, missing
from normscope.papers.feed_forward.similarity import similarity
from normscope.papers.readings import reading


@dataclass(frozen=True)
class Readings:
    """Where the paper leaves something open."""

    mask_seed: int = reading(0, "seed of the masked tokens of similarities, norms and gains; pairs are of plain text")
    normalise: str = reading(
        "raw",
        "maps of Table 1 and Fig. 5: as they are, each row divided by its sum, or each column; Table 1 has all three",
        ("raw", "row", "column"),
    )
    axis: str = reading(
        "output",
        "FF-amp, where the paper has every column sum to 1: the contributions to every output do (steadier), or those "
        "of every input (the letter of it, with inputs in columns); tests are reported for both",
        ("output", "input"),
    )
    distance: str = reading(
        "absolute", "distance of the pairs that are matched: |i - j|, or i - j with its sign", ("absolute", "signed")
    )
    level: str = reading(
        "instance",
        "what the test of the claims counts: every pair of positions, or every pair of types with its mean; both are "
        "reported",
        ("instance", "type"),
    )
    resamples: int = reading(10_000, "resamples of the bootstrap, which the paper does not say")
    sided: str = reading("one", "the test: whether the targets are above, or whether they differ", ("one", "two"))
    alpha: float = reading(0.05, "level of significance")
    specials: bool = reading(False, "special tokens among the other pairs that words and entities are compared with")
    seed: int = reading(0, "seed of the drawn pairs and of the bootstrap")
    list_specials: bool = reading(True, "special tokens in the lists of amplified pairs; the paper's have some")
    min_sequences: int = reading(
        2, "sequences in which a listed pair occurs at the least; with 1, words that one text repeats win"
    )
    min_occurrences: int = reading(2, "occurrences of a listed pair at the least; the paper drops what occurs once")
    gamma_share: float = reading(0.01, "share of the dimensions, of the lowest gain, that is removed", SHARES)
    gamma_rounding: str = reading(
        "floor", "how that share becomes a number of dimensions, at least 1: 768 x 1 % = 7.68", tuple(ROUNDINGS)
    )
    gamma_layer: int = reading(0, "layer of Fig. 11, from 1; 0 for the one where the feed-forward changes the map most")


def _missing_words(setting: Setting) -> str | None:
    return missing(setting) or missing_words(setting)


def _missing_entities(setting: Setting) -> str | None:
    return missing(setting) or missing_words(setting) or missing_entities(setting)


def _missing_norm(setting: Setting) -> str | None:
    found = missing(setting)
    if found is None and not ends_with_norm(setting.lens):
        return (
            f"No norm follows the feed-forward's residual in a layer of {setting.lens.family.name}: the next one that "
            "reads the stream is not in the layer."
        )
    return found


def _masked(setting: Setting, *measures: str) -> tuple[RunPlan, ...]:
    scopes = layout(setting.lens)
    chain = () if scopes is None else scopes.chain
    return (RunPlan(masked_run(setting), measures, chain, masked=setting.masks),)


def _similarity(setting: Setting) -> tuple[RunPlan, ...]:
    return _masked(setting, "similarity", "similarity_normalised")


def _norms(setting: Setting) -> tuple[RunPlan, ...]:
    return _masked(setting, "ff_magnitudes")


def _gamma(setting: Setting) -> tuple[RunPlan, ...]:
    readings = setting.readings
    return _masked(setting, "ff_magnitudes", removed_name(readings.gamma_share, readings.gamma_rounding))


def _maps(setting: Setting, *measures: str) -> tuple[RunPlan, ...]:
    scopes = layout(setting.lens)
    maps = () if scopes is None else tuple(dict.fromkeys((scopes.input, scopes.ff, scopes.residual, scopes.layer)))
    return (RunPlan(PLAIN, ("token_words", *measures), maps, maps),)


def _words(setting: Setting) -> tuple[RunPlan, ...]:
    return _maps(setting)


def _entities(setting: Setting) -> tuple[RunPlan, ...]:
    return _maps(setting, "entity_spans")


PAPER = Paper(
    name="ff",
    title="Analyzing Feed-Forward Blocks in Transformers through the Lens of Attention Maps",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Analyzing Feed-Forward Blocks in Transformers "
        "through the Lens of Attention Maps. ICLR 2024. arXiv 2302.00456"
    ),
    readings=Readings,
    experiments=(
        Experiment("similarity", "Similarity of the maps of a layer's scopes", missing, _similarity, similarity),
        Experiment("amplification", "Pairs of subwords that are amplified", _missing_words, _words, amplification),
        Experiment("word_split", "Pairs of subwords of one word", _missing_words, _words, word_split),
        Experiment(
            "entities",
            "Pairs of subwords of one named entity",
            _missing_entities,
            _entities,
            entities,
            needs="sentences with named entities",
        ),
        Experiment("norms", "Norms of the feed-forward's output and of what passes it by", missing, _norms, norms),
        Experiment("gamma", "Dimensions that the last norm makes small", _missing_norm, _gamma, gamma),
    ),
)
