"""Whether the feed-forward amplifies pairs within a word or a named entity (FF paper, Fig. 7 and 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.corpus.store import Run
from normscope.labels import number_ranges_label
from normscope.measures.bootstrap import Difference
from normscope.papers.common import finite_numbers, layer_numbers, paper_layers_text
from normscope.papers.feed_forward import groups as pair_groups
from normscope.papers.feed_forward.amplification import PLAIN, describe_ff_amp_axis
from normscope.papers.feed_forward.groups import MatchedGroups, TokenUnits, group_amplification, matched_pair_groups
from normscope.papers.feed_forward.maps import Texts, Values, read_run_texts
from normscope.papers.feed_forward.pair_tests import DISTANCES, PairTests, run_pair_tests
from normscope.papers.feed_forward.shared import NAME, FeedForwardLayout, require_ff_layout
from normscope.papers.published import published_main_numbers
from normscope.papers.resampling import estimates_along, pick
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, majority, split_layers
from normscope.reports import charts
from normscope.reports.report import VERDICTS, Claim, Picture, Section, Table

INNER = (0.5, 99.5)  # percentiles between which histograms are drawn
MOST = 3  # most histograms that are drawn
TEXT = (
    "FF-amp of {kind.pairs} ({groups.found:,} ordered pairs of positions) is compared with that of an equal number of "
    "other pairs, sampled without replacement so that both groups have the same histogram of {readings.distance} "
    "distances.{dropped} Other pairs are all pairs that do not belong to one {kind.unit}, {specials}. The text is not "
    "masked.\n\n"
    "The difference of means is tested in each layer with a bootstrap of {readings.resamples:,} resamples, in both "
    "directions: a layer counts as larger or as reversed if the one-sided p-value of that direction is at most "
    "{half:g}. Pairs of one sequence are dependent, so the test that decides (unless the reading level says otherwise) "
    "resamples whole sequences. The tests over instances (the paper's unit) and over types of pairs, each ordered pair "
    "of subwords with the mean of its instances, treat them as independent and are optimistic. The claim about most "
    "layers is a partial conjunction test over layers, which is stricter than counting the significant ones.\n\n"
    "Maps are normalised so that {sums}. A gain in a token's contribution to itself is a loss for the others, so the "
    "means of both groups may be negative; the test concerns their difference."
)
REVERSED = "\u2020"  # a dagger
NONE = "none"
DIRECTIONS = {True: "larger", False: "reversed", None: "open"}
BARS = "Error bars: 95 % bootstrap intervals over sequences."
CHOSEN = (
    "The {} of {} layers with the largest difference of means in units of the standard deviation of all pairs are "
    "drawn; this is number {} ({:+.2f}). "
)
OUTSIDE = f"Values beyond the percentiles {INNER[0]} and {INNER[1]} are counted in the outermost bins."
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
    # In causal models the distance has one sign only.
    distances = (readings.distance, *(name for name in DISTANCES if name != readings.distance and not scopes.causal))
    found = units(given, run, scopes)
    matched = {name: matched_pair_groups(given, found, scopes.causal, readings, name) for name in distances}
    groups = matched[readings.distance]
    theirs = _published_pair_layers(kind)
    statement = f"In most layers the feed-forward amplifies {kind.pairs} more than other pairs at the same distance"
    if not len(groups.targets):
        claim = Claim(statement, None, kind.none, theirs)
        return Section(kind.name, kind.title, f"Nothing to compare: {kind.none}.", claims=(claim,))
    values = dict(zip(matched, group_amplification(run, scopes, given, *matched.values()), strict=True))
    tests = run_pair_tests(given, matched, values, readings)
    amp = values[readings.distance]
    both = {kind.targets: amp.targets[readings.axis], "other pairs": amp.others[readings.axis]}
    parts: tuple[Table | Picture, ...] = (
        _mean_amp_bars(kind, tests, readings.alpha),
        _pair_layers_table(kind, readings.axis, tests, readings.alpha),
        _readings_table(kind, tests, readings.alpha),
        _readings_layers_table(kind, tests, readings.alpha),
        *_amp_histograms(kind, both, tests.instances),
    )
    claims = (_pair_claim(statement, theirs, tests, readings.alpha),)
    text = _describe_pair_test(readings, kind, groups)
    return Section(kind.name, kind.title, text, parts, claims, _pair_numbers(kind, tests, readings.level))


def _describe_pair_test(readings: Any, kind: PairKind, groups: MatchedGroups) -> str:
    return TEXT.format(
        kind=kind,
        groups=groups,
        readings=readings,
        half=readings.alpha / 2,
        dropped=DROPPED.format(groups.dropped) if groups.dropped else "",
        specials="special tokens included" if readings.specials else "without special tokens",
        sums=describe_ff_amp_axis(readings.axis),
    )


def _pair_claim(statement: str, theirs: str, tests: PairTests, alpha: float) -> Claim:
    """Decided by the first reading; the layers of the others are named where their verdict differs."""
    larger = [layer for layer, one in enumerate(tests.deciding, 1) if one.value > 0]
    verdicts = list(tests.verdicts(alpha).items())
    under = {}
    for name, verdict in verdicts[1:]:
        above, reversed_, _ = split_layers(tests.margins[name], alpha=alpha)
        where = f"larger in {paper_layers_text(above)}"
        where += f", reversed in {paper_layers_text(reversed_)}" if reversed_ else ""
        under[f"{name} ({where})"] = verdict
    return decided_claim(
        statement,
        tests.deciding,
        f"the mean is larger in {len(larger)} of {len(tests.deciding)}: {paper_layers_text(larger)}",
        theirs,
        at_least=majority(len(tests.deciding)),
        under=under,
        alpha=alpha,
    )


def _pair_numbers(kind: PairKind, tests: PairTests, level: str) -> dict[str, float]:
    """p as published, over single pairs or types; that of the test over sequences; the difference of means."""
    units = tests.types if level == "type" else tests.instances
    by_sequence = tests.margins["level=sequence"]
    return finite_numbers(
        {f"{key}.p": p for key, p in layer_numbers(kind.key, [one.p for one in units]).items()}
        | {f"{key}.p.sequences": p for key, p in layer_numbers(kind.key, [one.above for one in by_sequence]).items()}
        | {f"{key}.difference": d for key, d in layer_numbers(kind.key, [one.value for one in by_sequence]).items()}
    )


def _mean_amp_bars(kind: PairKind, tests: PairTests, alpha: float) -> Picture:
    layers = range(1, len(tests.deciding) + 1)
    names = (kind.targets, "other pairs")
    groups = [estimates_along(pick(tests.means, n, -2)) for n in range(2)]
    above, reversed_, _ = split_layers(tests.deciding, alpha=alpha)
    known = all(np.isfinite(one.low) for some in groups for one in some)
    spread = {name: [(one.high - one.low) / 2 for one in some] for name, some in zip(names, groups, strict=True)}
    chart = charts.bar_chart(
        {name: [one.value for one in some] for name, some in zip(names, groups, strict=True)},
        x=list(layers),
        ylabel="mean FF-amp",
        errors=spread if known else None,
        marks=["*" if layer in above else REVERSED if layer in reversed_ else "" for layer in layers],
    )
    title = f"Fig. 7. Mean FF-amp of pairs {kind.targets} and of other pairs at the same distances"
    note = f"*: significantly larger; {REVERSED}: significantly smaller (reversed). {BARS}"
    return Picture(f"fig7-{kind.stem}", title, chart, note)


def _pair_layers_table(kind: PairKind, axis: str, tests: PairTests, alpha: float) -> Table:
    """The means, their difference and the test that decides."""
    columns = dict.fromkeys((kind.targets, "others", "difference", "low", "high"), ".5f")
    rows = (
        (layer, *means, one.value, one.low, one.high, one.above, one.below, DIRECTIONS[one.decide(alpha)])
        for layer, (means, one) in enumerate(zip(tests.means.value.T, tests.deciding, strict=True), 1)
    )
    return Table.of(
        f"{kind.stem}-layers",
        f"Mean FF-amp of pairs {kind.targets} and of others, normalised by {axis}",
        {"layer": "", **columns, "p larger": ".4f", "p smaller": ".4f", "test": ""},
        rows,
        f"Low and high: 95 % interval of the difference; p-values are one-sided ({tests.deciding[0].method}).",
    )


def _readings_table(kind: PairKind, tests: PairTests, alpha: float) -> Table:
    """The verdict and the layers under each reading."""
    rows = []
    for name, verdict in tests.verdicts(alpha).items():
        split = split_layers(tests.margins[name], alpha=alpha)
        rows.append((name, VERDICTS[verdict], *(number_ranges_label(some) if some else NONE for some in split)))
    return Table.of(
        f"{kind.stem}-readings",
        "The claim about most layers under each reading",
        dict.fromkeys(("reading", "verdict", "larger in layers", "reversed in layers", "open in layers"), ""),
        rows,
        "The first reading decides. Readings of axis and distance are tested over sequences.",
    )


def _readings_layers_table(kind: PairKind, tests: PairTests, alpha: float) -> Table:
    rows = [
        (name, layer, one.value, one.low, one.high, one.above, one.below, DIRECTIONS[one.decide(alpha)])
        for name, margins in tests.margins.items()
        for layer, one in enumerate(margins, 1)
    ]
    numbers = {"difference": ".5f", "low": ".5f", "high": ".5f", "p larger": ".4f", "p smaller": ".4f"}
    return Table.of(
        f"{kind.stem}-readings-layers",
        "The tests of each layer under each reading",
        {"reading": "", "layer": "", **numbers, "test": ""},
        rows,
        folded=True,
    )


def _amp_histograms(kind: PairKind, both: Mapping[str, Values], found: Sequence[Difference]) -> list[Picture]:
    """Histograms for the layers with the largest differences relative to their spread."""
    joined = np.concatenate(list(both.values()), 1)
    effect = [one.difference / max(float(joined[n].std()), 1e-300) for n, one in enumerate(found)]
    order = sorted(range(len(found)), key=lambda n: -effect[n])[:MOST]
    pictures = []
    for n in sorted(order):
        low, high = (float(np.percentile(joined[n], end)) for end in INNER)
        series = {name: values[n] for name, values in both.items()}
        chart = charts.histogram_chart(series, xlabel="FF-amp", ylabel="share of pairs", limits=(low, high))
        title = f"Fig. 8. FF-amp of pairs {kind.targets} and of others, layer {n + 1}"
        note = CHOSEN.format(len(order), len(found), order.index(n) + 1, effect[n]) + OUTSIDE
        pictures.append(Picture(f"fig8-{kind.stem}-layer{n + 1}", title, chart, note))
    return pictures


def _published_pair_layers(kind: PairKind) -> str:
    published = published_main_numbers(NAME)
    layers = [layer for layer in range(1, 13) if f"{kind.key}.L{layer}.p" in published]
    return f"in {len(layers)} of 12: {paper_layers_text(layers)}" if layers else ""
