"""Whether the feed-forward amplifies pairs within a word or a named entity (FF paper, Fig. 7 and 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.corpus.store import Run
from normscope.measures.bootstrap import Difference
from normscope.papers.common import layer_numbers, paper_layers_text
from normscope.papers.feed_forward import groups as pair_groups
from normscope.papers.feed_forward.amplification import PLAIN, describe_ff_amp_axis
from normscope.papers.feed_forward.groups import GroupAmplification, LayerTests, MatchedGroups, TokenUnits
from normscope.papers.feed_forward.maps import Texts, Values, read_run_texts
from normscope.papers.feed_forward.shared import NAME, FeedForwardLayout, require_ff_layout
from normscope.papers.published import published_main_numbers
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Claim, Picture, Section, Table

INNER = (0.5, 99.5)  # percentiles between which histograms are drawn
MOST = 3  # most histograms that are drawn
TEXT = (
    "FF-amp of {kind.pairs} ({groups.found:,} ordered pairs of positions) is compared with that of an equal number of "
    "other pairs, sampled without replacement so that both groups have the same histogram of {readings.distance} "
    "distances.{dropped} Other pairs are all pairs that do not belong to one {kind.unit}, {specials}. The text is not "
    "masked.\n\n"
    "The difference of means is tested with an unpaired bootstrap of {readings.resamples:,} resamples, "
    "{readings.sided}-sided: p is the share of resampled differences on the other side of zero. The test over "
    "instances treats all pairs as independent, which pairs of one sequence are not, so it is optimistic. The test "
    "over types counts each ordered pair of subwords once, with the mean of its instances. The test over sequences "
    "resamples whole sequences.\n\n"
    "Maps are normalised so that {sums}. A gain in a token's contribution to itself is a loss for the others, so the "
    "means of both groups may be negative; the test concerns their difference."
)
DROPPED = " {:,} target pairs, chosen at random, were left out because too few other pairs have their distance."


@dataclass(frozen=True)
class PairKind:
    """The kind of pairs that is compared with other pairs."""

    name: str  # of the section
    key: str  # of its numbers
    unit: str  # "word"
    pairs: str  # in a sentence

    @property
    def title(self) -> str:
        return f"Pairs of {self.pairs.removeprefix('two ')}"

    @property
    def targets(self) -> str:
        """Label of the target pairs in figures and tables."""
        return f"of one {self.unit}"

    @property
    def none(self) -> str:
        """The message if there are no such pairs."""
        return f"no {self.pairs.partition(' of one ')[2]} of these texts has more than one token"

    @property
    def stem(self) -> str:
        """The kind in file names."""
        return self.name.replace("_", "-")


WORDS = PairKind("word_split", "wordsplit", "word", "two subwords of one word")
ENTITIES = PairKind("entities", "entity", "entity", "two subwords of one named entity")


def word_pairs_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 7 and 8 for words that are split into subwords."""
    return _pair_kind_section(setting, runs[PLAIN], WORDS, lambda given, *_: pair_groups.split_word_units(given))


def entity_pairs_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 7 and 8 for named entities."""
    return _pair_kind_section(setting, runs[PLAIN], ENTITIES, pair_groups.entity_units)


def _pair_kind_section(
    setting: Setting, run: Run, kind: PairKind, units: Callable[[Texts, Run, FeedForwardLayout], TokenUnits]
) -> Section:
    scopes, readings = require_ff_layout(setting), setting.readings
    given = read_run_texts(run, scopes)
    groups = pair_groups.matched_pair_groups(given, units(given, run, scopes), scopes.causal, readings)
    theirs = _published_pair_layers(kind)
    statement = f"In most layers the feed-forward amplifies {kind.pairs} more than other pairs at the same distance"
    if not len(groups.targets):
        claim = Claim(statement, None, kind.none, theirs)
        return Section(kind.name, kind.title, f"Nothing to compare: {kind.none}.", claims=(claim,))
    values = pair_groups.group_amplification(run, scopes, given, groups)
    found = pair_groups.bootstrap_layer_tests(given, groups, values, readings)
    chosen = [one.types if readings.level == "type" else one.instances for one in found]
    above, by_sequence, by_other = (
        _significant_layers(some, readings.alpha)
        for some in (chosen, [one.sequences for one in found], [one.other_axis for one in found])
    )
    claim = Claim(
        statement,
        2 * len(above) > len(found),
        f"in {len(above)} of {len(found)}: {paper_layers_text(above)}; resampling whole sequences: "
        f"{paper_layers_text(by_sequence)}; normalised by {pair_groups.other_ff_amp_axis(readings.axis)}: "
        f"{paper_layers_text(by_other)}",
        theirs,
    )
    both = {kind.targets: values.targets[readings.axis], "other pairs": values.others[readings.axis]}
    parts: tuple[Table | Picture, ...] = (
        _mean_amp_bars(kind, both, above),
        *_pair_test_tables(kind, readings.axis, values, found),
        *_amp_histograms(kind, both, chosen),
    )
    numbers = {f"{key}.p": p for key, p in layer_numbers(kind.key, [one.p for one in chosen]).items()}
    return Section(kind.name, kind.title, _describe_pair_test(readings, kind, groups), parts, (claim,), numbers)


def _describe_pair_test(readings: Any, kind: PairKind, groups: MatchedGroups) -> str:
    return TEXT.format(
        kind=kind,
        groups=groups,
        readings=readings,
        dropped=DROPPED.format(groups.dropped) if groups.dropped else "",
        specials="special tokens included" if readings.specials else "without special tokens",
        sums=describe_ff_amp_axis(readings.axis),
    )


def _mean_amp_bars(kind: PairKind, both: Mapping[str, Values], above: Sequence[int]) -> Picture:
    layers = range(1, len(both[kind.targets]) + 1)
    chart = charts.bar_chart(
        {name: list(values.mean(1)) for name, values in both.items()},
        x=list(layers),
        ylabel="mean FF-amp",
        errors={name: list(1.96 * values.std(1) / np.sqrt(values.shape[1])) for name, values in both.items()},
        marks=["*" if layer in above else "" for layer in layers],
    )
    title = f"Fig. 7. Mean FF-amp of pairs {kind.targets} and of other pairs at the same distances"
    note = "*: significantly larger. Error bars: 1.96 standard errors, for independent instances."
    return Picture(f"fig7-{kind.stem}", title, chart, note)


def _pair_test_tables(
    kind: PairKind, axis: str, values: GroupAmplification, found: Sequence[LayerTests]
) -> tuple[Table, Table]:
    """The means and their difference, and the test under the other readings."""
    other = pair_groups.other_ff_amp_axis(axis)
    means = dict.fromkeys((kind.targets, "others", "difference", "low", "high"), ".5f")
    levels = dict.fromkeys(("p, instances", "p, types", "p, sequences"), ".4f")
    targets, others = ([float(row.mean()) for row in side[axis]] for side in (values.targets, values.others))
    return (
        Table.of(
            f"{kind.stem}-layers",
            f"Mean FF-amp of pairs {kind.targets} and of others, over instances, normalised by {axis}",
            {"layer": "", **means, "p": ".4f"},
            ((n + 1, targets[n], others[n], *vars(one.instances).values()) for n, one in enumerate(found)),
            "Low and high: ends of the percentile interval.",
        ),
        Table.of(
            f"{kind.stem}-readings",
            "The same test under other readings",
            {"layer": "", **levels, f"difference, by {other}": ".5f", f"p, by {other}": ".4f"},
            (
                (n, one.instances.p, one.types.p, one.sequences.p, one.other_axis.difference, one.other_axis.p)
                for n, one in enumerate(found, 1)
            ),
            f"The last two columns: over instances, with maps normalised so that {describe_ff_amp_axis(other)}.",
        ),
    )


def _amp_histograms(kind: PairKind, both: Mapping[str, Values], found: Sequence[Difference]) -> list[Picture]:
    """Histograms for the layers with the largest differences relative to their spread."""
    joined = np.concatenate(list(both.values()), 1)
    effect = [one.difference / max(float(joined[n].std()), 1e-300) for n, one in enumerate(found)]
    order = sorted(range(len(found)), key=lambda n: -effect[n])[:MOST]
    note = f"Values beyond the percentiles {INNER[0]} and {INNER[1]} are counted in the outermost bins."
    pictures = []
    for n in sorted(order):
        low, high = (float(np.percentile(joined[n], end)) for end in INNER)
        series = {name: values[n] for name, values in both.items()}
        chart = charts.histogram_chart(series, xlabel="FF-amp", ylabel="share of pairs", limits=(low, high))
        title = f"Fig. 8. FF-amp of pairs {kind.targets} and of others, layer {n + 1}"
        pictures.append(Picture(f"fig8-{kind.stem}-layer{n + 1}", title, chart, note))
    return pictures


def _significant_layers(found: Sequence[Difference], alpha: float) -> list[int]:
    """The layers (from 1) with a significant positive difference."""
    return [layer for layer, one in enumerate(found, 1) if one.p < alpha and one.difference > 0]


def _published_pair_layers(kind: PairKind) -> str:
    published = published_main_numbers(NAME)
    layers = [layer for layer in range(1, 13) if f"{kind.key}.L{layer}.p" in published]
    return f"in {len(layers)} of 12: {paper_layers_text(layers)}" if layers else ""
