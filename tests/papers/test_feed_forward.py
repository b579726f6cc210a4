"""The feed-forward paper on tiny models: every number against one computed directly from analyze()."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("polars")
pytest.importorskip("matplotlib")

import polars as pl

from normscope import Analyzer, NormscopeError, corpus
from normscope.engine import probing
from normscope.measures.amplification import amplification
from normscope.measures.bootstrap import bootstrap_mean_difference
from normscope.measures.uncertainty import Resampled
from normscope.papers.common import paper_layers_text
from normscope.papers.feed_forward import PAPER, FeedForwardReadings
from normscope.papers.feed_forward import groups as feed_forward_groups
from normscope.papers.feed_forward import maps as feed_forward_maps
from normscope.papers.feed_forward.amplification import amplified_pairs
from normscope.papers.feed_forward.categories import CATEGORIES, FUNCTION_WORDS, pair_categories, token_kinds
from normscope.papers.feed_forward.measures import (
    ROUNDINGS,
    SHARES,
    removal_measure_name,
    removed_dimension_count,
    split_by_gain,
)
from normscope.papers.feed_forward.pair_tests import resample_group_means, run_pair_tests
from normscope.papers.feed_forward.pairs import _pair_claim
from normscope.papers.feed_forward.residual import residual_similarity_bound
from normscope.papers.feed_forward.sequences import pick_lowest_layer
from normscope.papers.feed_forward.shared import FeedForwardLayout, ff_layout
from normscope.papers.published import _load_published, published_corpora, published_models
from normscope.papers.study import Setting, reproduce
from normscope.papers.verify import tolerance_rule
from normscope.reports.report import Report, Section
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_tokenizer

NOUNS, OTHERS = ("cat", "dog", "mat", "bird"), ("a", "the", "sat", "ran", "on", "and", "big", "red", "saw", "it")
SCOPES = (
    *("ATTN-W", "ATTN-N", "ATTNRES-N", "ATTNRESLN-N"),
    *("ATTNRESLNFF-N", "ATTNRESLNFFRES-N", "ATTNRESLNFFRESLN-N"),
)
PARTS = {  # every table and figure of the paper
    *("table1-similarity", "fig5-similarity", "fig9-before", "fig12-all-pairs", "similarity-layers"),
    *("res1-readings", "contextualisation-change", "contextualisation-change-layers"),
    *("pair-categories", "pair-categories-layers"),
    *("ff-amp", "table2-ff-pairs", "table3-ln1-ff-res2-ln2-pairs", "overlap-of-pairs", "amplified-pairs"),
    *("fig7-word-split", "word-split-layers", "word-split-readings", "word-split-readings-layers"),
    *("fig7-entities", "entities-layers", "entities-readings", "entities-readings-layers"),
    *("fig10-norms", "norms-layers", "fig11-gamma", "removed-dimensions", "removed-dimensions-layers"),
}


def sentences() -> list[tuple[list[str], list[str]]]:
    """Words of the toy vocabulary with entity tags; plurals are two subwords."""
    generator = random.Random(0)
    made = []
    for _ in range(14):
        words, tags = [], []
        for _ in range(generator.randint(4, 8)):
            noun = generator.random() < 0.5
            word = generator.choice(NOUNS) + "s" * generator.randint(0, 1) if noun else generator.choice(OTHERS)
            words.append(word)
            before = tags[-1] if tags else "O"
            tags.append(generator.choice(["I-ORG", "I-ORG", "O"] if before != "O" else ["B-ORG", "O"]))
        made.append((words, tags))
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.conll"
    blocks = ["\n".join(f"{w} {t}" for w, t in zip(*pair, strict=True)) for pair in sentences()]
    path.write_text("\n\n".join(blocks) + "\n")
    return path


@pytest.fixture(scope="module")
def lens() -> Analyzer:
    return Analyzer(tiny("bert", max_position_embeddings=24), toy_tokenizer())


@pytest.fixture(scope="module")
def causal() -> Analyzer:
    return Analyzer(tiny("gpt2"), toy_tokenizer())


def run_paper(lens: Analyzer, data: Path, out: Path, **options: Any) -> Report:
    given = {"readings": ["resamples=300"], "format": "conll"} | options
    return reproduce(PAPER, lens, data, out, **given)[0]


@pytest.fixture(scope="module")
def made(lens: Analyzer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("ff")
    return run_paper(lens, data, out), out


@pytest.fixture(scope="module")
def made_causal(causal: Analyzer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("causal")
    return run_paper(causal, data, out, example="the cats sat on the mats"), out


def section(lens: Analyzer, out: Path, name: str, **readings: Any) -> Section:
    """One experiment's section of a finished run, read otherwise."""
    setting = Setting(
        lens, "data", None, {}, FeedForwardReadings(**{"resamples": 300} | readings), None, None, (), None
    )
    (experiment,) = [one for one in PAPER.experiments if one.name == name]
    return experiment.section(setting, {path.name: corpus.open(path) for path in (out / "runs").iterdir()})


def analyses(lens: Analyzer, run: corpus.Run) -> Iterator[Any]:
    """Every entry of a run, masked as it was there, analysed alone."""
    for tokens in run.scan("items").collect()["tokens"].to_list():
        ids = lens.tokenizer.convert_tokens_to_ids(tokens)
        yield lens.analyze({"input_ids": ids, "token_type_ids": [0] * len(ids)})


def scopes_of(lens: Analyzer) -> FeedForwardLayout:
    found = ff_layout(lens)
    assert found is not None
    return found


def table(report: Report, name: str) -> list[dict[str, Any]]:
    (found,) = [part for section in report.sections for part in section.parts if part.name == name]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]  # type: ignore[union-attr]


def correlation(a: torch.Tensor, b: torch.Tensor, cells: torch.Tensor | None = None) -> float:
    chosen = torch.ones_like(a, dtype=torch.bool) if cells is None else cells
    return float(stats.spearmanr(a[chosen].numpy(), b[chosen].numpy()).statistic)


def test_every_table_and_figure_is_there(made: tuple[Report, Path]) -> None:
    report, out = made
    parts = {part.name for section in report.sections for part in section.parts}
    assert {name for name in parts if not name.startswith("fig8")} == PARTS
    assert any(name.startswith("fig8-word-split") for name in parts)
    assert any(name.startswith("fig8-entities") for name in parts)
    assert report.skipped == ()
    assert {section.name for section in report.sections} == {experiment.name for experiment in PAPER.experiments}
    for name in parts:
        assert list(out.glob(f"*/{name}.*")), name
    assert all(claim.ours and claim.evidence for claim in report.claims)
    assert sum(len(section.claims) for section in report.sections) == 9


def test_similarity(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    found = list(analyses(lens, corpus.open(out / "runs" / "masked")))
    assert any("[MASK]" in one.tokens for one in found)
    numbers = report.numbers
    for n, scope in enumerate(SCOPES):
        for m, other in enumerate(SCOPES[:n]):
            by_layer = [np.mean([correlation(one[other][k], one[scope][k]) for one in found]) for k in range(2)]
            assert numbers[f"pair.{other}.{scope}"] == pytest.approx(np.mean(by_layer), abs=1e-9)
            if m == n - 1:
                assert numbers[f"similarity.{scope}"] == pytest.approx(np.mean(by_layer), abs=1e-9)
                assert [numbers[f"similarity.{scope}.L{k}"] for k in (1, 2)] == pytest.approx(by_layer, abs=1e-9)
                assert numbers[f"similarity.{scope}.min"] == pytest.approx(min(by_layer), abs=1e-9)
            if other == "ATTNRESLN-N":
                assert [numbers[f"before.{scope}.L{k}"] for k in (1, 2)] == pytest.approx(by_layer, abs=1e-9)


def test_similarity_of_normalised_maps(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    found = list(analyses(lens, corpus.open(out / "runs" / "masked")))
    rows = {row["scope"]: row for row in table(report, "table1-similarity")}
    for before, scope in pairwise(SCOPES):
        for name, summed in (("row", -1), ("column", -2)):
            values = [
                correlation(*(one[s][k] / one[s][k].sum(summed, keepdim=True) for s in (before, scope)))
                for one in found
                for k in range(2)
            ]
            assert rows[scope][name] == pytest.approx(np.mean(values), abs=1e-6)
    again = section(lens, out, "similarity", normalise="column")
    assert again.numbers["similarity.ATTN-N"] == pytest.approx(rows["ATTN-N"]["column"])


def test_norms(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    found = list(analyses(lens, corpus.open(out / "runs" / "masked")))
    for layer in range(2):
        for key, scope in (("bypass", "attention-block"), ("ff", "ff")):
            vectors = torch.cat([one.parts(scope, layer).actual for one in found])
            assert report.numbers[f"norm.{key}.L{layer + 1}"] == pytest.approx(float(vectors.norm(dim=-1).mean()))
    sizes = corpus.open(out / "runs" / "masked").scan("ff_magnitudes").collect()
    assert sizes.height == 2 * 25
    one = sizes.filter((pl.col("layer") == 1) & (pl.col("dimension") == 7)).row(0, named=True)
    vectors = torch.cat([one.parts("ff", 1).actual for one in found])
    assert (one["tokens"], one["output"]) == (len(vectors), pytest.approx(float(vectors[:, 7].abs().sum())))


def test_removed_dimensions(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    found = list(analyses(lens, corpus.open(out / "runs" / "masked")))
    gains = probing.probe_norm_gains(lens.loaded, "layer")
    rows = table(report, "removed-dimensions-layers")
    for layer in range(2):
        removed = int(gains[layer].argmin())
        assert rows[layer]["dimensions removed"] == str(removed)
        kept = [d for d in range(24) if d != removed]
        values = []
        for one in found:
            norms = one.vectors("ff", layer)[..., kept].norm(dim=-1)
            values.append(correlation(one["attention-block"][layer], norms))
        assert report.numbers[f"removed.L{layer + 1}"] == pytest.approx(np.mean(values), abs=1e-6)
        assert rows[layer]["all dimensions"] == pytest.approx(report.numbers[f"similarity.ATTNRESLNFF-N.L{layer + 1}"])


@pytest.mark.parametrize(
    ("width", "share", "counts"),
    [(768, 0.01, (7, 8, 8)), (384, 0.01, (3, 4, 4)), (24, 0.01, (1, 1, 1)), (100, 0.05, (5, 5, 5))],
)
def test_how_many_dimensions(width: int, share: float, counts: tuple[int, ...]) -> None:
    assert tuple(removed_dimension_count(width, share, rounding) for rounding in ROUNDINGS) == counts


def test_lowest_gains_are_signed() -> None:
    removed, rest = split_by_gain(torch.tensor([0.5, -2.0, 0.1, -0.3]), 2)
    assert (removed.tolist(), rest.tolist()) == ([1, 3], [0, 2])


def test_all_the_measures_of_gains_are_known() -> None:
    for share in SHARES:
        for rounding in ROUNDINGS:
            assert removal_measure_name(share, rounding) in corpus.measures()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("axis", ["output", "input"])
def test_amplified_pairs(kind: str, axis: Any, request: pytest.FixtureRequest) -> None:
    lens = request.getfixturevalue("lens" if kind == "bert" else "causal")
    _, out = request.getfixturevalue("made" if kind == "bert" else "made_causal")
    run, scopes = corpus.open(out / "runs" / "plain"), scopes_of(lens)
    texts = feed_forward_maps.read_run_texts(run, scopes)
    readings = FeedForwardReadings(axis=axis, min_sequences=2, min_occurrences=3)
    found = amplified_pairs(run, scopes, texts, readings)
    sums: dict[tuple[str, str], Any] = defaultdict(lambda: np.zeros((2, 2)))
    counts: Counter[tuple[str, str]] = Counter()
    inside: dict[tuple[str, str], set[int]] = defaultdict(set)
    for number, one in enumerate(analyses(lens, run)):
        ff = amplification(one[scopes.input], one[scopes.ff], axis)
        block = amplification(one["attention-residual"], one["layer"], axis)
        for i, output in enumerate(one.tokens):
            for j, input in enumerate(one.tokens):
                if i == j or (kind == "gpt2" and j > i):
                    continue
                sums[input, output] += torch.stack([ff[:, i, j], block[:, i, j]]).numpy()
                counts[input, output] += 1
                inside[input, output].add(number)
    kept = {pair for pair, count in counts.items() if count >= 3 and len(inside[pair]) >= 2}
    assert {texts.pair(key) for key in found.keys} == kept
    for place, key in enumerate(found.keys):
        pair = texts.pair(key)
        assert (found.occurrences[place], found.sequences[place]) == (counts[pair], len(inside[pair]))
        expected = sums[pair] / counts[pair]
        np.testing.assert_allclose(np.stack([found.ff[:, place], found.block[:, place]]), expected, atol=1e-10)
    best = max(kept, key=lambda pair: sums[pair][0, 1] / counts[pair])
    assert texts.pair(found.keys[found.top(found.ff[1], 1)[0]]) == best


def test_lists_in_the_report(made: tuple[Report, Path]) -> None:
    report, _ = made
    rows = table(report, "amplified-pairs")
    first = [row for row in rows if row["amplified by"] == "FF" and row["layer"] == 2]
    assert [row["rank"] for row in first] == list(range(1, 11))
    assert [row["amp"] for row in first] == sorted((row["amp"] for row in first), reverse=True)
    short = table(report, "table2-ff-pairs")[1]["top 10"]
    assert short.startswith(f"({first[0]['input']}, {first[0]['output']}) · ")
    second = [row for row in rows if row["amplified by"] == "LN1 FF RES2 LN2" and row["layer"] == 2]
    both = {(row["input"], row["output"]) for row in first} & {(row["input"], row["output"]) for row in second}
    assert table(report, "overlap-of-pairs")[1]["of the top 10"] == len(both)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("distance", ["absolute", "signed"])
def test_pairs_of_one_word(kind: str, distance: str, request: pytest.FixtureRequest) -> None:
    """A plural's two subwords, in both orders; others at exactly the same distances and never of one word."""
    lens = request.getfixturevalue("lens" if kind == "bert" else "causal")
    _, out = request.getfixturevalue("made" if kind == "bert" else "made_causal")
    run, scopes = corpus.open(out / "runs" / "plain"), scopes_of(lens)
    texts = feed_forward_maps.read_run_texts(run, scopes)
    units, readings = (
        feed_forward_groups.split_word_units(texts),
        FeedForwardReadings(distance=distance, seed=1),
    )
    groups = feed_forward_groups.matched_pair_groups(texts, units, kind == "gpt2", readings)
    found = list(analyses(lens, run))
    plurals = sum(one.tokens.count("##s") for one in found)
    assert groups.found == plurals * (1 if kind == "gpt2" else 2)
    assert groups.dropped == groups.found - len(groups.targets)
    assert Counter(groups.targets.distances.tolist()) == Counter(groups.others.distances.tolist())
    (values,) = feed_forward_groups.group_amplification(run, scopes, texts, groups)
    for cells, got in ((groups.targets, values.targets), (groups.others, values.others)):
        for n in range(0, len(cells), 7):
            one = found[cells.entries[n]]
            i, j = divmod(int(cells.cells[n]), len(one.tokens))
            same = one.tokens[max(i, j)] == "##s" and abs(i - j) == 1
            assert same == (cells is groups.targets)
            assert "[CLS]" not in (one.tokens[i], one.tokens[j])
            assert "[SEP]" not in (one.tokens[i], one.tokens[j])
            assert cells.distances[n] == (abs(i - j) if distance == "absolute" else i - j)
            if kind == "gpt2":
                assert j < i
            for axis in ("output", "input"):
                expected = amplification(one[scopes.input], one[scopes.ff], axis)[:, i, j]  # type: ignore[arg-type]
                np.testing.assert_allclose(got[axis][:, n], expected.numpy(), atol=1e-10)


def test_tests_of_words(lens: Analyzer, made: tuple[Report, Path]) -> None:
    """Types are means of their instances, sequences are drawn whole; p-values are those of the report."""
    report, out = made
    run, scopes = corpus.open(out / "runs" / "plain"), scopes_of(lens)
    texts = feed_forward_maps.read_run_texts(run, scopes)
    readings = FeedForwardReadings(resamples=300)
    units = feed_forward_groups.split_word_units(texts)
    matched = {
        name: feed_forward_groups.matched_pair_groups(texts, units, False, readings, name)
        for name in ("absolute", "signed")
    }
    groups = matched["absolute"]
    found = feed_forward_groups.group_amplification(run, scopes, texts, *matched.values())
    values = dict(zip(matched, found, strict=True))
    tested = run_pair_tests(texts, matched, values, readings)
    rows = table(report, "word-split-layers")
    other = {(row["reading"], row["layer"]): row for row in table(report, "word-split-readings-layers")}
    assert list(tested.margins) == ["level=sequence", "level=instance", "level=type", "axis=input", "distance=signed"]
    for layer in range(2):
        both = [part["output"][layer] for part in (values["absolute"].targets, values["absolute"].others)]
        instances, types, sequences = tested.instances[layer], tested.types[layer], tested.deciding[layer]
        assert instances.difference == pytest.approx(both[0].mean() - both[1].mean())
        assert sequences.value == pytest.approx(both[0].mean() - both[1].mean())
        means = []
        for cells, given in zip((groups.targets, groups.others), both, strict=True):
            by_type: dict[int, list[float]] = defaultdict(list)
            for key, value in zip(feed_forward_groups.pair_type_keys(texts, cells), given, strict=True):
                by_type[int(key)].append(value)
            means.append(np.mean([np.mean(some) for some in by_type.values()]))
        assert types.difference == pytest.approx(means[0] - means[1])
        assert report.numbers[f"wordsplit.L{layer + 1}.p"] == instances.p == instances.above
        assert report.numbers[f"wordsplit.L{layer + 1}.p.sequences"] == sequences.above == rows[layer]["p larger"]
        assert rows[layer]["difference"] == pytest.approx(sequences.value)
        assert rows[layer][f"{'of one word'}"] == pytest.approx(both[0].mean())
        for name, one in (("level=instance", instances), ("level=type", types)):
            assert other[name, layer + 1]["p larger"] == one.above
            assert other[name, layer + 1]["p smaller"] == one.below
        for name, distance, axis in (("axis=input", "absolute", "input"), ("distance=signed", "signed", "output")):
            targets, others = values[distance].targets[axis][layer], values[distance].others[axis][layer]
            assert other[name, layer + 1]["difference"] == pytest.approx(targets.mean() - others.mean())
    by_type = section(lens, out, "word_split", level="type")
    assert by_type.numbers["wordsplit.L1.p"] == tested.types[0].p
    (listed,) = [part for part in by_type.parts if part.name == "word-split-readings"]
    assert listed.rows[0][0] == "level=type"  # type: ignore[union-attr]


def made_groups(counts: Any) -> feed_forward_groups.MatchedGroups:
    """Pairs of clusters with these counts (clusters, 2) of targets and others."""
    sides = []
    for column in np.asarray(counts).T:
        entries = np.repeat(np.arange(len(column)), column)
        sides.append(feed_forward_groups.PairCells(entries, np.arange(len(entries)), np.ones(len(entries), int)))
    return feed_forward_groups.MatchedGroups(sides[0], sides[1], 0, len(sides[0]))


def test_pairs_of_a_sequence_are_drawn_together() -> None:
    """Against a loop that draws sequences, for two layers; the second has no difference at all."""
    generator = np.random.default_rng(7)
    counts = generator.integers(0, 5, (30, 2))
    counts[0] = 3
    counts[1] = 0  # a sequence without such pairs is not drawn
    groups = made_groups(counts)
    values = [
        np.stack([np.repeat(generator.normal(mean, 0.3, 30), column), np.full(column.sum(), 2.0)])
        for mean, column in ((1.0, counts[:, 0]), (0.8, counts[:, 1]))
    ]
    readings = FeedForwardReadings(resamples=5000)
    found = resample_group_means(groups, *values, 30, readings)
    assert found.items == (counts.sum(1) > 0).sum()
    sides = zip((groups.targets, groups.others), values, strict=True)
    sums = np.stack([np.bincount(g.entries, v[0], 30) for g, v in sides], 1)
    kept, used = sums[counts.sum(1) > 0], counts[counts.sum(1) > 0]
    drawn = []
    for _ in range(4000):
        some = generator.integers(0, len(kept), len(kept))
        drawn.append(np.subtract(*(kept[some].sum(0) / used[some].sum(0))))
    apart = found.map(lambda means: means[..., 0, :] - means[..., 1, :])
    assert apart.value == pytest.approx([np.subtract(*(kept.sum(0) / used.sum(0))), 0.0], abs=1e-12)
    ends = np.quantile(apart.draws[:, 0], [0.025, 0.975])
    assert ends == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.15 * np.std(drawn))
    assert np.abs(apart.draws[:, 1]).max() < 1e-12


def test_dependent_pairs_look_different_too_often_when_drawn_one_by_one() -> None:
    """Pairs of one sequence share an offset: only the test over sequences keeps its level."""
    generator = np.random.default_rng(6)
    tries, clusters, each = 200, 40, 20
    groups = made_groups(np.full((clusters, 2), each))
    by_instance = by_sequence = 0
    for seed in range(tries):
        values = generator.standard_normal((2, clusters, 1)) + 0.3 * generator.standard_normal((2, clusters, each))
        targets, others = (side.reshape(1, -1) for side in values)
        by_instance += bootstrap_mean_difference(targets, others, resamples=200, seed=seed).p < 0.05
        means = resample_group_means(groups, targets, others, clusters, FeedForwardReadings(resamples=400, seed=seed))
        one = means.map(lambda some: some[..., 0, 0] - some[..., 1, 0]).estimate("sequences")
        by_sequence += one.decide() is not None
    assert by_instance / tries > 0.2
    assert 0.005 < by_sequence / tries < 0.105


def test_reversed_layers_are_named(lens: Analyzer, made: tuple[Report, Path]) -> None:
    """A layer in which targets are significantly smaller is called reversed, whatever its one-sided p."""
    _, out = made
    run, scopes = corpus.open(out / "runs" / "plain"), scopes_of(lens)
    texts = feed_forward_maps.read_run_texts(run, scopes)
    readings = FeedForwardReadings(resamples=300)
    groups = feed_forward_groups.matched_pair_groups(
        texts, feed_forward_groups.split_word_units(texts), False, readings
    )
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 2, len(groups.targets)))
    shift = np.array([[1.0], [-1.0]])  # larger in layer 1, smaller in layer 2
    amp = feed_forward_groups.GroupAmplification(
        dict.fromkeys(("output", "input"), noise[0] + shift), dict.fromkeys(("output", "input"), noise[1])
    )
    tests = run_pair_tests(texts, {"absolute": groups}, {"absolute": amp}, readings)
    claim = _pair_claim("In most layers", "", tests, 0.05)
    assert "significant in layer 1; reversed in layer 2" in claim.evidence
    assert claim.holds is False  # two of two would be needed
    assert "level=sequence" in tests.margins
    assert tests.instances[1].p > 0.99


def test_entities(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    run, scopes = corpus.open(out / "runs" / "plain"), scopes_of(lens)
    texts = feed_forward_maps.read_run_texts(run, scopes)
    units = feed_forward_groups.entity_units(texts, run, scopes)
    spans = run.scan("entity_spans").collect()
    assert set(spans["label"]) == {"ORG"}
    for number, (words, tags) in enumerate(sentences()):
        place = 1  # after [CLS]
        expected: list[list[int]] = []
        for word, tag in zip(words, tags, strict=True):
            pieces = [place + k for k in range(2 if word[-1] == "s" and word[:-1] in NOUNS else 1)]
            if tag == "B-ORG":
                expected.append(pieces)
            elif tag != "O":
                expected[-1] += pieces
            place += len(pieces)
        assert [unit.tolist() for unit in units(number)] == expected
    groups = feed_forward_groups.matched_pair_groups(texts, units, False, FeedForwardReadings())
    assert groups.found == sum(len(unit) * (len(unit) - 1) for n in range(len(texts)) for unit in units(n))
    assert Counter(groups.targets.distances.tolist()) == Counter(groups.others.distances.tolist())
    assert {f"entity.L{layer}.p" for layer in (1, 2)} <= set(report.numbers)


def test_a_causal_pre_ln_model(causal: Analyzer, made_causal: tuple[Report, Path]) -> None:
    report, out = made_causal
    assert [title for title, _ in report.skipped] == ["Dimensions that the last norm scales down"]
    assert "have no norm after" in report.skipped[0][1]
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["plain"]
    scopes = scopes_of(causal)
    assert scopes.components == ("ATTN-W", "LN1 ATTN", "RES1", "LN2", "FF", "RES2")
    assert (scopes.block, scopes.input, scopes.layer) == ("LNATTNRES-N", "LNATTNRESLN-N", "LNATTNRESLNFFRES-N")
    found = list(analyses(causal, corpus.open(out / "runs" / "plain")))
    for layer in range(2):
        values = [
            correlation(one[scopes.input][layer], one["ff"][layer], torch.ones_like(one["ff"][layer]).tril().bool())
            for one in found
        ]
        assert report.numbers[f"similarity.{scopes.ff}.L{layer + 1}"] == pytest.approx(np.mean(values), abs=1e-9)
        for key, scope in (("bypass", scopes.block), ("ff", "ff")):
            vectors = torch.cat([one.parts(scope, layer).actual for one in found])
            assert report.numbers[f"norm.{key}.L{layer + 1}"] == pytest.approx(float(vectors.norm(dim=-1).mean()))
    assert "published" not in table(report, "table1-similarity")[0]
    assert "table3-ln2-ff-res2-pairs" in {part.name for section in report.sections for part in section.parts}


def test_the_same_readings_give_the_same_numbers(lens: Analyzer, made: tuple[Report, Path], data: Path) -> None:
    report, out = made
    again = run_paper(lens, data, out, experiments=["norms"])
    assert "norm.ff.L1" in again.numbers
    assert again.numbers.items() <= report.numbers.items()
    assert section(lens, out, "word_split").numbers.items() <= report.numbers.items()


def test_other_readings_need_no_other_run(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    options = {"axis": "input", "distance": "signed", "level": "type", "sided": "two", "specials": True, "seed": 4}
    words = section(lens, out, "word_split", **options)
    assert words.numbers["wordsplit.L1.p"] != report.numbers["wordsplit.L1.p"]
    assert "signed distances" in words.text
    assert "special tokens included" in words.text
    pairs = section(lens, out, "amplification", list_specials=False, min_sequences=1, min_occurrences=1, axis="input")
    assert "contributions of each input" in pairs.text
    (rows,) = [part.rows for part in pairs.parts if part.name == "amplified-pairs"]  # type: ignore[union-attr]
    assert not {token for row in rows for token in row[3:5]} & {"[CLS]", "[SEP]"}


def test_nothing_to_compare(lens: Analyzer, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("the cat sat\na dog ran on\n")
    report = run_paper(lens, path, tmp_path / "out", format=None, experiments=["word_split"])
    assert [claim.holds for claim in report.sections[0].claims] == [None]
    with pytest.raises(NormscopeError, match="no named entities"):
        run_paper(lens, path, tmp_path / "other", format=None, experiments=["entities"])


def test_what_cannot_run(data: Path, tmp_path: Path) -> None:
    parallel = Analyzer(tiny("gpt_neox"), toy_tokenizer())
    assert ff_layout(parallel) is None
    with pytest.raises(NormscopeError, match="in parallel with attention"):
        run_paper(parallel, data, tmp_path / "out")
    setting = Setting(parallel, "", None, {}, FeedForwardReadings(), None, None, (), None)
    for experiment in PAPER.experiments:
        assert experiment.missing(setting) is not None
        assert experiment.runs(setting)
    without = replace(setting, lens=Analyzer(tiny("bert")))
    reasons = {one.name: one.missing(without) for one in PAPER.experiments}
    assert reasons["similarity"] is None
    assert "tokenizer" in (reasons["word_split"] or "")
    with pytest.raises(NormscopeError, match="gamma_layer"):
        run_paper(
            Analyzer(tiny("bert"), toy_tokenizer()),
            data,
            tmp_path / "gamma",
            experiments=["gamma"],
            readings=["gamma_layer=9"],
            limit=2,
        )


def test_gemma_has_a_norm_after_its_feed_forward() -> None:
    found = scopes_of(Analyzer(tiny("gemma2")))
    assert found.added != found.ff
    assert found.chain[found.chain.index(found.ff) + 1] == found.added
    assert found.component(found.ff) == "FF"


def test_layers_in_words() -> None:
    assert paper_layers_text([3, 4, 5, 9, 11, 12]) == "layers 3-5, 9, 11-12"
    assert paper_layers_text([6]) == "layer 6"
    assert paper_layers_text([]) == "no layer"


def test_what_a_changed_diagonal_can_do_to_ranks() -> None:
    """No pair of maps that differ on the diagonal only is below the bound, and the worst comes near it."""
    generator = np.random.default_rng(0)
    assert residual_similarity_bound(122) == pytest.approx(0.9504, abs=5e-5)
    assert residual_similarity_bound(25) == pytest.approx(0.75, abs=0.01)
    assert residual_similarity_bound(1) == -1.0
    for size in (3, 5, 8, 12, 20):
        bound, lowest = residual_similarity_bound(size), 1.0
        for _ in range(150):
            before = generator.random((size, size))
            after = before.copy()
            scale = generator.choice([1.0, -1.0, 3.0], size)  # below all others, above them, or anywhere
            np.fill_diagonal(after, generator.random(size) + scale)
            if generator.random() < 0.5:  # the diagonal was lowest
                np.fill_diagonal(before, -generator.random(size))
            lowest = min(lowest, float(stats.spearmanr(before.ravel(), after.ravel()).statistic))
        # from the lowest to the highest ranks
        extreme = generator.random((size, size)), generator.random(size)
        low, high = extreme[0].copy(), extreme[0].copy()
        np.fill_diagonal(low, -extreme[1])
        np.fill_diagonal(high, 1 + extreme[1])
        lowest = min(lowest, float(stats.spearmanr(low.ravel(), high.ravel()).statistic))
        assert bound <= lowest
        assert size < 8 or lowest < 1 - 0.75 * (1 - bound)
    causal = residual_similarity_bound(10, 55)  # only the cells j <= i
    assert causal < residual_similarity_bound(10)


def test_published_number_of_the_residual(made: tuple[Report, Path]) -> None:
    report, out = made
    text = report.sections[0].text
    assert "rules out 0.41 for raw maps" in text
    assert "0.95 for n = 122" in text
    assert "no bound is proved" in text
    assert "ICLR numbering not checked" in text
    assert "ICLR numbering not checked" in report.citation
    single = corpus.open(out / "runs" / "masked").scan("similarity_shares").collect()
    column = single.filter(
        (pl.col("normalised") == "column") & (pl.col("scope") == "ATTN-N") & (pl.col("other") == "ATTNRES-N")
    )["spearman"].to_numpy()
    (row,) = [row for row in table(report, "res1-readings") if row["maps"] == "column"]
    assert row["lowest"] == pytest.approx(column.min())
    assert row["5 %"] == pytest.approx(np.quantile(column, 0.05))
    assert row["median"] == pytest.approx(np.median(column))
    assert row["at most 0.41 (%)"] == pytest.approx(100 * (column <= 0.41).mean())


def test_change_of_contextualisation(made: tuple[Report, Path]) -> None:
    report, _ = made
    rows = {row["component"]: row for row in table(report, "contextualisation-change")}
    assert list(rows) == ["ATTN", "RES1", "LN1", "FF", "RES2", "LN2", "whole block"]
    for name, key in (("FF", "similarity.ATTNRESLNFF-N"), ("whole block", "pair.ATTNRESLN-N.ATTNRESLNFFRESLN-N")):
        assert rows[name]["mean"] == pytest.approx(1 - report.numbers[key])
        assert rows[name]["low"] < rows[name]["mean"] < rows[name]["high"]
    assert report.numbers["change.FF"] == rows["FF"]["mean"]
    assert report.numbers["change.whole-block.L2"] == rows["whole block"]["layer 2"]
    assert report.numbers["change.LN2.L1"] == pytest.approx(1 - report.numbers["similarity.ATTNRESLNFFRESLN-N.L1"])


def test_the_layer_is_chosen_anew_in_each_resample() -> None:
    by = Resampled(np.array([0.5, 0.4]), np.array([[0.3, 0.4], [0.5, 0.1], [np.nan, 0.2]]), 10)
    values = Resampled(np.array([1.0, 2.0]), np.array([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), 10)
    found = pick_lowest_layer(values, by)
    assert (float(found.value), found.draws.tolist()) == (2.0, [3.0, 6.0, 8.0])


def test_claims_are_decided_by_sequences(lens: Analyzer, made: tuple[Report, Path], data: Path, tmp_path: Path) -> None:
    report, out = made
    by_text = {claim.text: claim for claim in report.claims}
    assert all(
        "bootstrap over 14 sequences" in claim.evidence for claim in by_text.values() if "most" not in claim.text
    )
    (norms,) = section(lens, out, "norms").claims
    assert "layer" in norms.evidence
    single = run_paper(lens, data, tmp_path / "one", limit=1)
    assert {claim.verdict for claim in single.claims} == {"cannot be said"}
    assert all("too few sequences" in claim.evidence or "no named" in claim.ours for claim in single.claims)


def test_intervals_of_norms(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    rows = table(report, "norms-layers")
    single = corpus.open(out / "runs" / "masked").scan("ff_norms").collect()
    for layer, row in enumerate(rows):
        here = single.filter(pl.col("layer") == layer)
        assert here.height == 14
        assert row["ratio"] == pytest.approx(here["output"].sum() / here["bypass"].sum())
        assert row["ratio low"] < row["ratio"] < row["ratio high"]
        assert report.numbers[f"norm.ratio.L{layer + 1}"] == row["ratio"]


def test_unmasked_text(lens: Analyzer, made: tuple[Report, Path], data: Path, tmp_path: Path) -> None:
    report = run_paper(lens, data, tmp_path, readings=["resamples=50", "masking=false"], limit=6)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plain"]
    assert "not masked, as requested" in report.sections[0].text
    found = list(analyses(lens, corpus.open(tmp_path / "runs" / "plain")))
    assert not any("[MASK]" in one.tokens for one in found)
    values = [correlation(one["attention-block"][0], one["ff"][0]) for one in found]
    assert report.numbers["similarity.ATTNRESLNFF-N.L1"] == pytest.approx(np.mean(values), abs=1e-9)


def test_categories_of_pairs(lens: Analyzer, made: tuple[Report, Path]) -> None:
    report, out = made
    run, scopes = corpus.open(out / "runs" / "plain"), scopes_of(lens)
    texts = feed_forward_maps.read_run_texts(run, scopes)
    pairs = amplified_pairs(run, scopes, texts, FeedForwardReadings())
    named = dict(zip(map(texts.pair, pairs.keys), np.take(CATEGORIES, pair_categories(pairs, texts)), strict=True))
    assert {kind for pair, kind in named.items() if "[CLS]" in pair or "[SEP]" in pair} == {"special token"}
    for (input, output), kind in named.items():
        if kind == "same subword":
            assert input == output
        elif kind == "one word":
            assert "##s" in (input, output)
        elif kind.startswith("function"):
            count = sum(token in FUNCTION_WORDS for token in (input, output))
            assert count == (2 if kind == "function words" else 1)
        elif kind == "content words":
            assert not {input, output} & FUNCTION_WORDS
    assert {"same subword", "function words", "function and content", "content words"} <= set(named.values())
    rows = table(report, "pair-categories-layers")
    whole = Counter(named.values())
    for row in rows:
        assert (row["in all"], row["all"]) == (whole[row["category"]], len(named))
    for name in ("FF", "LN1 FF RES2 LN2"):
        some = [row for row in rows if row["amplified by"] == name and row["layer"] == 1]
        assert sum(row["in the top"] for row in some) == some[0]["top"] == max(10, len(named) // 10)
        values = pairs.ff[0] if name == "FF" else pairs.block[0]
        top = Counter(named[texts.pair(pairs.keys[place])] for place in pairs.top(values, some[0]["top"]))
        assert {row["category"]: row["in the top"] for row in some if row["in the top"]} == dict(top)
        if name == "FF":
            share = top["content words"] / some[0]["top"]
            assert report.numbers["amplified.content-words.L1"] == pytest.approx(share)
    short = table(report, "pair-categories")
    assert [row["pairs"] for row in short] == ["all pairs", "layer 1", "layer 2"]


def test_a_pair_of_one_word_is_within_it_in_half_of_its_occurrences() -> None:
    vocabulary = ("cat", "##s", "the", "##9")
    texts = feed_forward_maps.Texts(("a",), (np.arange(4),), (np.array([0, 0, 1, 2]),), vocabulary)
    keys = np.array([0 * 4 + 1, 1 * 4 + 0, 3 * 4 + 1, 2 * 4 + 2])
    counts, within = np.array([4, 4, 2, 2]), np.array([2, 1, 2, 0])
    empty = np.zeros((1, 4))
    pairs = feed_forward_maps.AmplifiedPairs(keys, counts, counts, within, empty, empty)
    expected = ["one word", "content words", "one word", "same subword"]
    assert [CATEGORIES[n] for n in pair_categories(pairs, texts)] == expected


def test_kinds_of_tokens_by_their_form() -> None:
    words = ("[CLS]", "the", "##the", "Cat", "19", "##9th", ".", "\u2581Of", "of")
    for vocabulary, expected in (
        (words[:7], [0, 2, 3, 3, 1, 1, 1]),  # WordPiece
        (("<s>", "\u2581Of", "of", "\u2581,", "\u01202"), [0, 2, 3, 1, 1]),  # starts of words are marked
    ):
        places = np.arange(len(vocabulary))
        texts = feed_forward_maps.Texts(("a",), (places,), (places - 1,), vocabulary)
        assert token_kinds(texts).tolist() == expected


def test_the_whole_input_is_drawn(made: tuple[Report, Path], made_causal: tuple[Report, Path]) -> None:
    for report, _ in (made, made_causal):
        (picture,) = [part for part in report.sections[1].parts if part.name == "ff-amp"]
        axes = picture.figure.axes[0]  # type: ignore[union-attr]
        shown = int(axes.get_xlim()[1] + 0.5)
        assert picture.note.startswith(f"All {shown} tokens of ")
        assert len(axes.get_yticks()) == shown


def test_every_published_number_can_be_reached(data: Path, tmp_path: Path) -> None:
    """A model with the paper's scopes and twelve layers has every stored key, so that `verify` compares all of them;
    numbers that are shown but not counted have a reason."""
    twelve = Analyzer(tiny("bert", max_position_embeddings=24, num_hidden_layers=12), toy_tokenizer())
    report = run_paper(twelve, data, tmp_path, readings=["resamples=20"], limit=4)
    stored = [key for entry in _load_published()["ff"] for key in entry["figures"]]
    assert len(stored) == len(set(stored)) == 34
    assert set(stored) <= set(report.numbers)
    for entry in _load_published()["ff"]:
        assert entry["model"] in published_models("ff")
        assert entry["data"] in published_corpora("ff", entry["model"])
        for key in entry["figures"]:
            assert tolerance_rule(key).counts or tolerance_rule(key).why
