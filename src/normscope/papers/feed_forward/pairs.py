"""Whether the feed-forward amplifies pairs of one word, or of one named entity (FF paper, Fig. 7 and 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.measures.amplification import AXES
from normscope.measures.bootstrap import Difference
from normscope.papers import charts, published
from normscope.papers.feed_forward.amplification import PLAIN, sums_to_one
from normscope.papers.feed_forward.groups import (
    Amplified,
    Groups,
    Tested,
    Units,
    amplified,
    entities_in,
    matched_groups,
    tests,
    words_in,
)
from normscope.papers.feed_forward.maps import Texts, Values, texts
from normscope.papers.feed_forward.shared import PAPER, known_layout, listed
from normscope.papers.report import Claim, Picture, Section, Table

if TYPE_CHECKING:
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

INNER = (0.5, 99.5)  # percentiles between which histograms are drawn
MOST = 3  # histograms


@dataclass(frozen=True)
class Kind:
    """What is compared with other pairs."""

    name: str  # of the section and of its files
    key: str  # of its numbers
    title: str
    targets: str  # in a figure's legend
    pairs: str  # in a sentence
    none: str  # said where there are none


WORDS = Kind(
    "word_split",
    "wordsplit",
    "Pairs of subwords of one word",
    "of one word",
    "two subwords of one word",
    "no word of these texts has more than one token",
)
ENTITIES = Kind(
    "entities",
    "entity",
    "Pairs of subwords of one named entity",
    "of one entity",
    "two subwords of one named entity",
    "no named entity of these texts has more than one token",
)


def word_split(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Fig. 7 and 8 of words that were split into subwords."""
    given = texts(runs[PLAIN], known_layout(setting))
    return _section(setting, runs[PLAIN], given, WORDS, words_in(given))


def entities(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Fig. 7 and 8 of named entities."""
    scopes = known_layout(setting)
    given = texts(runs[PLAIN], scopes)
    return _section(setting, runs[PLAIN], given, ENTITIES, entities_in(given, runs[PLAIN], scopes))


def _section(setting: Setting, run: Run, given: Texts, kind: Kind, units: Units) -> Section:
    scopes, readings = known_layout(setting), setting.readings
    groups = matched_groups(
        given,
        units,
        causal=scopes.side == "decoder",
        specials=readings.specials,
        distance=readings.distance,
        seed=readings.seed,
    )
    theirs = _published_layers(kind)
    statement = f"The feed-forward amplifies {kind.pairs} more than other pairs as far apart"
    if not len(groups.targets):
        claim = Claim(f"{statement}, in most layers", None, kind.none, theirs)
        return Section(kind.name, kind.title, f"There is nothing to compare: {kind.none}.", claims=(claim,))
    values = amplified(run, scopes, given, groups)
    found = tests(
        given,
        groups,
        values,
        axis=readings.axis,
        resamples=readings.resamples,
        sided=readings.sided,
        alpha=readings.alpha,
        seed=readings.seed,
    )
    chosen = [one.types if readings.level == "type" else one.instances for one in found]
    above = _significant(chosen, readings.alpha)
    cautious = _significant([one.sequences for one in found], readings.alpha)
    otherwise = _significant([one.other_axis for one in found], readings.alpha)
    return Section(
        kind.name,
        kind.title,
        _text(setting, kind, groups),
        (
            _bars(kind, values.targets[readings.axis], values.others[readings.axis], above),
            *_tables(kind, readings.axis, values, found),
            *_histograms(kind, values.targets[readings.axis], values.others[readings.axis], chosen),
        ),
        (
            Claim(
                f"{statement}, in most layers",
                2 * len(above) > len(found),
                f"in {len(above)} of {len(found)}: {listed(above)}; drawing whole sequences: {listed(cautious)}; "
                f"normalised by {_other(readings.axis)}: {listed(otherwise)}",
                theirs,
            ),
        ),
        {f"{kind.key}.L{layer}.p": one.p for layer, one in enumerate(chosen, 1)},
    )


def _text(setting: Setting, kind: Kind, groups: Groups) -> str:
    readings = setting.readings
    dropped = (
        f" {groups.dropped:,} of them were left out, drawn at random, since at their distance there are too few others."
        if groups.dropped
        else ""
    )
    return (
        f"FF-amp of {kind.pairs} ({groups.found:,} ordered pairs at two positions) against as many other pairs, drawn "
        f"without replacement with exactly the same histogram of {readings.distance} distances.{dropped} Other pairs "
        f"are all that are not of one {'word' if kind is WORDS else 'entity'}, "
        f"{'special tokens included' if readings.specials else 'without special tokens'}. Nothing is masked.\n\n"
        f"The unpaired bootstrap of the difference of means, {readings.resamples:,} resamples, {readings.sided}-sided: "
        "p is the share of resampled differences on the other side of zero. Over instances it takes every pair for "
        "independent, which pairs of one sequence are not, and is optimistic; over types every ordered pair of "
        "subwords counts once, with the mean of its instances; over sequences whole sequences are drawn.\n\n"
        f"Maps are normalised so that {sums_to_one(readings.axis)}. What a token gains in itself others lose, so that "
        "the means of both groups may be below zero: the test is of their difference."
    )


def _bars(kind: Kind, targets: Values, others: Values, above: Sequence[int]) -> Picture:
    layers = range(1, len(targets) + 1)
    groups = {kind.targets: targets, "other pairs": others}
    return Picture(
        f"fig7-{kind.name.replace('_', '-')}",
        f"Fig. 7. Mean FF-amp of pairs {kind.targets}, and of others as far apart",
        charts.bars_with_errors(
            {name: list(values.mean(1)) for name, values in groups.items()},
            x=list(layers),
            ylabel="mean FF-amp",
            errors={name: list(1.96 * values.std(1) / np.sqrt(values.shape[1])) for name, values in groups.items()},
            marks=["*" if layer in above else "" for layer in layers],
        ),
        "*: significantly larger. Bars of 1.96 standard errors, of independent instances.",
    )


def _tables(kind: Kind, axis: str, values: Amplified, found: Sequence[Tested]) -> tuple[Table, Table]:
    """The means with their difference, and the same test under the other readings."""
    other = _other(axis)
    name = kind.name.replace("_", "-")
    means = ("layer", kind.targets, "others", "difference", "low", "high", "p")
    tested = (
        "layer", "p, instances", "p, types", "p, sequences", f"difference, by {other}", f"p, by {other}",
    )  # fmt: skip
    numbered = list(enumerate(found, 1))
    return (
        Table(
            f"{name}-layers",
            f"Mean FF-amp of pairs {kind.targets} and of others, over instances, maps normalised by {axis}",
            means,
            tuple(
                (
                    layer, float(values.targets[axis][layer - 1].mean()), float(values.others[axis][layer - 1].mean()),
                    *vars(one.instances).values(),
                )
                for layer, one in numbered
            ),
            dict.fromkeys(means[1:-1], ".5f") | {"p": ".4f"},
            "Low and high are the ends of the interval of percentiles.",
        ),
        Table(
            f"{name}-readings",
            "The same test under other readings",
            tested,
            tuple(
                (layer, one.instances.p, one.types.p, one.sequences.p, one.other_axis.difference, one.other_axis.p)
                for layer, one in numbered
            ),
            {column: ".4f" if column.startswith("p") else ".5f" for column in tested[1:]},
            f"The last two columns are over instances, of maps normalised so that {sums_to_one(other)}.",
        ),
    )  # fmt: skip


def _other(axis: str) -> str:
    return next(name for name in AXES if name != axis)


def _histograms(kind: Kind, targets: Values, others: Values, found: Sequence[Difference]) -> list[Picture]:
    """Of the layers with the largest differences, measured by their spread."""
    both = np.concatenate([targets, others], 1)
    effect = [one.difference / max(float(both[n].std()), 1e-300) for n, one in enumerate(found)]
    order = sorted(range(len(found)), key=lambda n: -effect[n])[:MOST]
    return [
        Picture(
            f"fig8-{kind.name.replace('_', '-')}-layer{n + 1}",
            f"Fig. 8. FF-amp of pairs {kind.targets} and of others, layer {n + 1}",
            charts.histogram(
                {kind.targets: targets[n], "other pairs": others[n]},
                xlabel="FF-amp",
                ylabel="share of pairs",
                limits=(float(np.percentile(both[n], INNER[0])), float(np.percentile(both[n], INNER[1]))),
            ),
            f"What lies beyond the percentiles {INNER[0]} and {INNER[1]} is counted in the outermost bins.",
        )
        for n in sorted(order)
    ]


def _significant(found: Sequence[Difference], alpha: float) -> list[int]:
    """The layers, from 1, in which the difference is above zero and significant."""
    return [layer for layer, one in enumerate(found, 1) if one.p < alpha and one.difference > 0]


def _published_layers(kind: Kind) -> str:
    theirs = published.reference(PAPER)
    layers = [layer for layer in range(1, 13) if f"{kind.key}.L{layer}.p" in theirs]
    return f"in {len(layers)} of 12: {listed(layers)}" if layers else ""


def missing_words(setting: Setting) -> str | None:
    """Why words cannot be told."""
    if setting.lens.tokenizer is None:
        return "Words are told by their tokens, but there is no tokenizer."
    return None


def missing_entities(setting: Setting) -> str | None:
    """Why there are no named entities."""
    if not setting.has_entities:
        return "The corpus has no named entities: give one in CoNLL columns, with IOB tags (--format conll)."
    if not getattr(setting.lens.tokenizer, "is_fast", False):
        return "The tokenizer does not say which word a token belongs to, so that entities have no place."
    return None
