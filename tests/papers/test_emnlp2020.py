"""EMNLP 2020 end to end: every number of a report on a small corpus against an independent computation."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import polars as pl
import pytest
import torch
from scipy.stats import pearsonr, rankdata, spearmanr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

pytest.importorskip("matplotlib")

from normscope import Analyzer, NormscopeError, corpus
from normscope.corpus import Entry, strict
from normscope.corpus.measure_registry import Sample
from normscope.corpus.readers.formats import read
from normscope.measures.alignment import Hits
from normscope.measures.bootstrap import cluster_counts
from normscope.papers.emnlp2020 import PAPER, pair_ranks
from normscope.papers.emnlp2020.alignment_claims import alignment_claims
from normscope.papers.emnlp2020.alignment_example import alignment_examples
from normscope.papers.emnlp2020.alignment_rates import (
    AlignmentItems,
    AlignmentRates,
    AlignmentResult,
    aer_of_sums,
    read_alignment_items,
)
from normscope.papers.emnlp2020.dispersion import resample_norm_sums
from normscope.papers.emnlp2020.frequency import RankedTokens, resample_rank_correlations
from normscope.papers.emnlp2020.measures import (
    KINDS,
    measure_weight_norm_counts,
    measure_weight_norm_pairs,
    token_kind,
)
from normscope.papers.emnlp2020.shared import corpus_norm_moments
from normscope.papers.study import Setting, reproduce
from normscope.reports.report import Picture, Report, Section, Table
from tests.helpers.paper_oracle import six_digits
from tests.helpers.tiny import tiny
from tests.helpers.toys import letters_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["cat", "dog", "sat", "ran", "on", "mat", "and", "big", "red", "bird", "the"]
VOCABULARY = [*SPECIAL, *WORDS, ",", ".", "!", ";", "##s"]
CATEGORY = {"[CLS]": "first", "[SEP]": "separator", ",": "punctuation", ".": "punctuation"}


@lru_cache
def marks_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer with punctuation marks."""
    backend = Tokenizer(models.WordPiece({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = random.Random(0)
    words = [*WORDS, *WORDS[-1:] * 8, ",", ".", ",", "!"]  # "the" is frequent
    lines = [" ".join(generator.choices(words, k=generator.randint(3, 20))) for _ in range(30)]
    lines[4] = "cat sat"  # no punctuation
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def lens() -> Analyzer:
    return Analyzer(tiny("bert", num_hidden_layers=3), marks_tokenizer())


@pytest.fixture(scope="module")
def alone(lens: Analyzer, data: Path) -> list[Any]:
    """The analysis of each line alone."""
    return [lens.analyze(line, heads=True) for line in data.read_text().splitlines()]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def report(lens: Analyzer, data: Path, out: Path) -> Report:
    return reproduce(PAPER, lens, data, out)[0]


EXPERIMENTS = {experiment.name: experiment for experiment in PAPER.experiments}


def setting_of(lens: Analyzer, data: Path, reader: dict[str, Any] | None = None, **readings: Any) -> Setting:
    """As `reproduce` makes it."""
    format = "alignments" if reader else None
    entries = tuple(strict(read(data, format, **(reader or {}))))
    using = replace(PAPER.readings(), **readings)
    return Setting(lens, str(data), format, reader or {}, using, None, None, entries, None)


def section_of(name: str, out: Path, setting: Setting) -> Section:
    """A section computed again from the tables of a report's runs."""
    experiment = EXPERIMENTS[name]
    return experiment.section(
        setting, {plan.name: corpus.open(out / "runs" / plan.name) for plan in experiment.runs(setting)}
    )


def table(made: Report | Section, name: str) -> Table:
    sections = made.sections if isinstance(made, Report) else (made,)
    (found,) = (part for section in sections for part in section.parts if part.name == name)
    assert isinstance(found, Table)
    return found


def section_named(report: Report, name: str) -> Section:
    (found,) = (section for section in report.sections if section.name == name)
    return found


def categories(analysis: Any) -> np.ndarray:
    return np.array([CATEGORY.get(token, "other") for token in analysis.tokens])


def test_every_table_and_figure_of_the_paper_is_there(report: Report) -> None:
    parts = {part.name: type(part) for section in report.sections for part in section.parts}
    assert [section.name for section in report.sections] == ["dispersion", "shares", "correlation", "frequency"]
    assert parts["table1-dispersion"] is parts["table2-spearman"] is parts["frequency-spearman"] is Table
    assert parts["fig3-weight"] is parts["fig3-norm"] is parts["frequency-norm"] is Picture
    assert all(section.claims for section in report.sections)
    assert report.skipped[0][0].startswith("Word alignment")
    assert "BERT has no cross-attention" in report.skipped[0][1]


def test_dispersion(report: Report, alone: list[Any]) -> None:
    norms = np.concatenate([one.value_norms.numpy() for one in alone], axis=-1)
    numbers = report.numbers
    for layer in range(3):
        for head in range(4):
            found = norms[layer, head]
            expected = {
                "mean": found.mean(),
                "sd": found.std(),
                "cv": found.std() / found.mean(),
                "max": found.max(),
                "min": found.min(),
            }
            for key, value in expected.items():
                assert numbers[f"dispersion.L{layer + 1}H{head + 1}.{key}"] == pytest.approx(value, rel=1e-9)
    assert numbers["dispersion.mean"] == pytest.approx(norms.mean(-1).mean())
    assert numbers["dispersion.sd"] == pytest.approx(norms.std(-1).mean())
    assert numbers["dispersion.cv"] == pytest.approx((norms.std(-1) / norms.mean(-1)).mean())
    assert numbers["data.tokens"] == norms.shape[-1]
    assert numbers["data.pairs"] == sum(len(one.tokens) ** 2 for one in alone)
    heads = table(report, "table1-every-head").rows
    assert [row[:2] for row in heads] == [(layer, head) for layer in (1, 2, 3) for head in (1, 2, 3, 4)]


def test_dispersion_of_the_inputs(report: Report, lens: Analyzer, data: Path) -> None:
    norms = []
    for line in data.read_text().splitlines():
        tokens = lens.tokenizer(line, return_tensors="pt")
        with torch.no_grad():
            states = lens.model(**tokens, output_hidden_states=True).hidden_states
        norms.append(torch.stack(states[:3])[:, 0].norm(dim=-1).numpy())
    found = np.concatenate(norms, axis=-1)
    for layer in range(3):
        mean, sd = found[layer].mean(), found[layer].std()
        expected = {"mean": mean, "sd": sd, "cv": sd / mean}
        for key, value in expected.items():
            assert report.numbers[f"dispersion.x.{key}.L{layer + 1}"] == pytest.approx(value, rel=1e-6)
        assert table(report, "table1-by-layer").rows[layer][1:4] == pytest.approx(tuple(expected.values()), rel=1e-6)


def test_resampled_dispersion(lens: Analyzer, data: Path, out: Path, report: Report, alone: list[Any]) -> None:
    """The first resample by hand: the tokens of each sequence as often as it was drawn."""
    run = corpus.open(out / "runs" / "attention")
    order = run.scan("norm_moments").collect()["id"].unique().sort().to_list()
    lines = [int(id.split(":")[1]) - 1 for id in order]
    centres = {(layer, head): 1.0 for layer in range(3) for head in range(4)}
    sums = resample_norm_sums(setting_of(lens, data), run, centres)
    times = cluster_counts(30, 1, np.random.default_rng(0))[0].astype(int)
    drawn = np.concatenate(
        [alone[n].value_norms.numpy() for n, k in zip(lines, times, strict=True) for _ in range(k)], -1
    )
    _, first, second = np.moveaxis(sums.draws[0], -1, 0) / sums.draws[0][:, :1].T
    np.testing.assert_allclose(1 + first, drawn.mean(-1).ravel(), rtol=1e-9)
    np.testing.assert_allclose(second - first**2, drawn.var(-1).ravel(), rtol=1e-6)
    (claim,) = section_named(report, "dispersion").claims
    assert f"average CV {report.numbers['dispersion.cv']:.3g}, 95 % interval" in claim.evidence
    assert "bootstrap over 30 sequences" in claim.evidence


def test_shares(report: Report, alone: list[Any]) -> None:
    for layer in range(3):
        for category in ("first", "separator", "punctuation", "other"):
            weight, norm = [], []
            for one in alone:
                chosen = categories(one) == category
                weight.append(one.heads["weights"][layer].numpy()[..., chosen].sum(-1).mean(-1).mean())
                norm.append(one.heads["attention"][layer].numpy()[..., chosen].sum(-1).mean(-1).mean())
            assert report.numbers[f"share.weight.{category}.L{layer + 1}"] == pytest.approx(fmean(weight))
            assert report.numbers[f"share.norm.{category}.L{layer + 1}"] == pytest.approx(fmean(norm))
    for layer in (1, 2, 3):
        total = sum(
            value for key, value in report.numbers.items() if key.startswith("share.weight") and key[-1] == str(layer)
        )
        assert total == pytest.approx(1)


def test_shares_of_each_head(report: Report, alone: list[Any]) -> None:
    labels = {"first": "[CLS] or first", "separator": "[SEP] or last", "punctuation": "comma, period", "other": "other"}
    found = {tuple(row[:3]): row[3:] for row in table(report, "fig3-by-head").rows}
    assert len(found) == 3 * 4 * 4
    for layer, head, category in product(range(3), range(4), labels):
        both = [
            fmean(one.heads[scope][layer, head].numpy()[:, categories(one) == category].sum(-1).mean() for one in alone)
            for scope in ("weights", "attention")
        ]
        assert found[layer + 1, head + 1, labels[category]] == pytest.approx(both)
    names = [part.name for part in section_named(report, "shares").parts if isinstance(part, Picture)]
    assert names == ["fig3-weight", "fig3-norm", "fig3-weight-heads", "fig3-norm-heads"]


def test_shares_at_the_peak(report: Report) -> None:
    numbers = report.numbers
    special = [sum(numbers[f"share.weight.{c}.L{n}"] for c in ("first", "separator")) for n in (1, 2, 3)]
    at = 1 + special.index(max(special))
    norms = {c: numbers[f"share.norm.{c}.L{at}"] for c in ("first", "separator", "punctuation", "other")}
    assert numbers["share_at_peak.special.weight"] == pytest.approx(max(special))
    part = (norms["first"] + norms["separator"]) / sum(norms.values())
    assert numbers["share_at_peak.special.norm"] == pytest.approx(part)
    (claim, *_) = section_named(report, "shares").claims
    assert f"norms / share of the weight {part / max(special):.3g}, 95 % interval" in claim.evidence


def pairs(alone: list[Any], category: str, layer: int | None = None) -> np.ndarray:
    found = []
    for one in alone:
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        both = np.broadcast_arrays(one.heads["weights"][layers], one.value_norms[layers, :, None])
        found.append(np.stack(both)[..., categories(one) == category].reshape(2, -1))
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_correlation(batch_size: int, lens: Analyzer, data: Path, alone: list[Any], tmp_path: Path) -> None:
    """Exact ranks: the corpus is small. Equal tokens at equal positions have the same ||f|| in the first layer up to
    rounding, which differs between batches and must not decide their order."""
    report, _ = reproduce(PAPER, lens, data, tmp_path, experiments=["correlation"], batch_size=batch_size)
    by_layer = table(report, "table2-by-layer")
    assert "all 80,076 pairs are ranked individually" in report.sections[0].text
    for n, category in enumerate(("first", "separator", "punctuation", "other")):
        weights, norms = six_digits(pairs(alone, category))
        assert report.numbers[f"pairs.{category}"] == weights.size
        expected = spearmanr(weights, norms).statistic
        assert report.numbers[f"spearman.{category}"] == pytest.approx(expected, abs=1e-12)
        for layer in range(3):
            expected = spearmanr(*six_digits(pairs(alone, category, layer))).statistic
            assert by_layer.rows[layer][1 + n] == pytest.approx(expected, abs=1e-12)


def test_binned_correlation(lens: Analyzer, data: Path, out: Path, report: Report, alone: list[Any]) -> None:
    found = section_of("correlation", out, setting_of(lens, data, ranks="binned"))
    assert "are not ranked individually, as requested" in found.text
    for category in ("first", "separator", "punctuation", "other"):
        weights, norms = pairs(alone, category)
        binned = found.numbers[f"spearman.{category}"]
        grouped = spearmanr(np.floor(8 * np.log2(weights)), np.floor(32 * np.log2(norms))).statistic
        assert binned == pytest.approx(grouped, abs=1e-9)
        exact = report.numbers[f"spearman.{category}"]
        assert binned == pytest.approx(exact, abs=2e-3)  # few values: bins are coarse


def test_the_number_of_pairs_decides_whether_they_are_stored(
    lens: Analyzer, data: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, count = setting_of(lens, data), sum(12 * len(one.tokens) ** 2 for one in alone)
    assert pair_ranks.has_few_pairs(setting, count)
    assert not pair_ranks.has_few_pairs(setting, count - 1)
    assert not pair_ranks.has_few_pairs(replace(setting, data=""))
    (plan,) = pair_ranks.correlation_runs(setting)
    assert plan.measures[-1] == "weight_norm_pairs"
    (plan,) = pair_ranks.correlation_runs(setting_of(lens, data, ranks="binned"))
    assert "weight_norm_pairs" not in plan.measures


def test_the_jackknife_leaves_out_groups_of_sequences(
    lens: Analyzer, data: Path, out: Path, report: Report, alone: list[Any]
) -> None:
    setting, run = setting_of(lens, data), corpus.open(out / "runs" / "attention")
    counts = pair_ranks.pair_counts(setting, run, setting.readings)
    rho, _ = pair_ranks.binned_correlations(counts, ())
    found = pair_ranks.jackknifed_correlations(counts, rho)["punctuation"]
    groups = [crc32(f"text.txt:{n}".encode()) % 16 for n in range(1, 31)]
    for group, without in zip(sorted(set(groups)), found.without, strict=True):
        left = [one for one, its in zip(alone, groups, strict=True) if its != group]
        weights, norms = pairs(left, "punctuation")
        expected = spearmanr(np.floor(8 * np.log2(weights)), np.floor(32 * np.log2(norms))).statistic
        assert without == pytest.approx(expected, abs=1e-9)
    row = table(report, "table2-spearman").rows[2]
    assert row[2] < row[1] < row[3]


def test_cancelling_layers(lens: Analyzer, data: Path, out: Path, report: Report, alone: list[Any]) -> None:
    """With limits at the average: more weight than even attention gives, and a smaller ||f|| than the layer's mean."""
    found = section_of("correlation", out, setting_of(lens, data, large_weight=1.0, small_norm=1.0))
    expected = set()
    for layer in range(3):
        norms = np.concatenate([one.value_norms[layer].numpy() for one in alone], axis=-1)
        kinds = np.concatenate([categories(one) for one in alone])
        for category, label in (
            ("first", "[CLS]"),
            ("separator", "[SEP]"),
            ("punctuation", "comma"),
            ("other", "other"),
        ):
            even = fmean((categories(one) == category).mean() for one in alone)
            share = report.numbers[f"share.weight.{category}.L{layer + 1}"]
            if share >= even and norms[:, kinds == category].mean() <= norms.mean():
                expected.add((layer + 1, label))
    rows = table(found, "table2-cancelling").rows
    assert {(row[0], str(row[1]).split(" ")[0].rstrip(",")) for row in rows} == expected
    assert expected


def test_frequency(report: Report, alone: list[Any]) -> None:
    tokens = [token for one in alone for token in one.tokens]
    counts = {token: tokens.count(token) for token in set(tokens)}
    types = sorted(counts)
    rank_of = dict(zip(types, rankdata([-counts[token] for token in types], method="min"), strict=True))
    ranks = [rank_of[token] for token in tokens]
    norms = np.concatenate([one.value_norms.numpy().mean((0, 1)) for one in alone])
    weights = np.concatenate([one.heads["weights"].numpy().mean((0, 1, 2)) for one in alone])
    assert report.numbers["frequency.norm"] == pytest.approx(spearmanr(ranks, norms).statistic)
    assert report.numbers["frequency.weight"] == pytest.approx(spearmanr(ranks, weights).statistic)
    ordinary = np.array([token not in SPECIAL for token in tokens])
    expected = spearmanr(np.array(ranks)[ordinary], norms[ordinary]).statistic
    assert table(report, "frequency-spearman").rows[0][2] == pytest.approx(expected)


def test_resampled_rank_correlations() -> None:
    generator = np.random.default_rng(0)
    sequences = np.sort(generator.integers(0, 9, 200))
    values = {"norm": generator.normal(size=200), "weight": generator.normal(size=200).round(1)}
    ranks = generator.integers(1, 20, 200)
    ranked = RankedTokens(sequences, ranks, values, np.ones(200, bool), np.zeros(200, bool))
    used = generator.random(200) < 0.8
    found = resample_rank_correlations(ranked, used, 3)
    drawing = np.random.default_rng(0)
    for n in range(3):
        times = cluster_counts(9, 1, drawing)[0].astype(int)[sequences[used]]
        for name, some in values.items():
            expected = spearmanr(np.repeat(ranks[used], times), np.repeat(some[used], times)).statistic
            assert found[name].draws[n] == pytest.approx(expected, abs=1e-12)
            assert found[name].value == pytest.approx(spearmanr(ranks[used], some[used]).statistic, abs=1e-12)


def test_one_sequence_decides_nothing(lens: Analyzer, data: Path, tmp_path: Path) -> None:
    report, _ = reproduce(PAPER, lens, data, tmp_path, limit=1)
    assert len(report.claims) == 8
    assert {claim.verdict for claim in report.claims} == {"cannot be said"}
    assert all("too few" in claim.evidence for claim in report.claims)


def test_frequencies_of_a_file(
    lens: Analyzer, data: Path, out: Path, report: Report, alone: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "counts.tsv"
    file.write_text("".join(f"{word}\t{100 - n}\n" for n, word in enumerate(["the", ",", "cat", "[CLS]", ".", "dog"])))
    rank_of = {"the": 1, ",": 2, "cat": 3, "[CLS]": 4, ".": 5, "dog": 6}
    tokens = [token for one in alone for token in one.tokens]
    ranks = np.array([rank_of.get(token, 7) for token in tokens])
    norms = np.concatenate([one.value_norms.numpy().mean((0, 1)) for one in alone])
    setting = replace(setting_of(lens, data), frequencies=file)
    found = section_of("frequency", out, setting).numbers
    assert found["frequency.norm"] == pytest.approx(spearmanr(ranks, norms).statistic)
    setting = replace(setting_of(lens, data, unseen="leave", frequency_tokens="words"), frequencies=file)
    left = section_of("frequency", out, setting).numbers
    seen = (ranks < 7) & np.array([token not in SPECIAL for token in tokens])
    assert left["frequency.norm"] == pytest.approx(spearmanr(ranks[seen], norms[seen]).statistic)


def test_a_frequency_file_of_another_vocabulary_is_refused_before_the_run(
    lens: Analyzer, data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "counts.txt"
    file.write_text("1 90 0\n2 3 20\n")  # padding and a piece that never occurs
    with pytest.raises(NormscopeError, match="another vocabulary or a very different language: it covers 0%"):
        reproduce(PAPER, lens, data, tmp_path / "out", frequencies=file)
    assert not (tmp_path / "out").exists()
    file.write_text("1 90 50\n")
    with pytest.raises(NormscopeError, match=r"counts\.txt:1: Token id 50 is outside"):
        reproduce(PAPER, lens, data, tmp_path / "out", frequencies=file)


def test_other_readings(lens: Analyzer, data: Path, out: Path, report: Report, alone: list[Any]) -> None:
    setting = setting_of(lens, data, sd="sample", punctuation="all", share_norm="layer")
    found: dict[str, float] = {}
    for name in ("dispersion", "shares", "correlation"):
        found |= section_of(name, out, setting).numbers
    norms = np.concatenate([one.value_norms.numpy() for one in alone], axis=-1)
    assert found["dispersion.sd"] == pytest.approx(norms.std(-1, ddof=1).mean())
    marked = [(one, np.isin(one.tokens, [",", ".", "!"])) for one in alone]
    for layer in range(3):
        sums = [one["attention"][layer].numpy()[:, chosen].sum(-1).mean() for one, chosen in marked]
        assert found[f"share.norm.punctuation.L{layer + 1}"] == pytest.approx(fmean(sums))
    size = sum(12 * len(one.tokens) * chosen.sum() for one, chosen in marked)
    before = report.numbers
    assert found["pairs.punctuation"] == size > before["pairs.punctuation"]
    assert size + found["pairs.other"] == before["pairs.punctuation"] + before["pairs.other"]


def test_an_unknown_reading(lens: Analyzer, data: Path, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="population, sample"):
        reproduce(PAPER, lens, data, tmp_path, readings=["sd=both"])


def test_kinds_of_tokens() -> None:
    expected = {
        "[CLS]": "first",
        "</s>": "separator",
        ",": "punctuation",
        "\u2581.": "punctuation",
        "\u0120,": "punctuation",
    }
    expected |= {"!": "symbol", "\u2581--": "symbol", "##)": "symbol", "\u00bb": "symbol", "$": "other", "the": "other"}
    expected |= {"\u2581": "other", "[MASK]": "mask", "[UNK]": "other"}
    assert {token: token_kind(token) for token in expected} == expected
    assert set(expected.values()) == set(KINDS)


def test_pairs_that_a_causal_model_masks_do_not_count() -> None:
    model = tiny("gpt2")
    result = Analyzer(model).analyze({"input_ids": [5, 6, 7, 8, 9]}, heads=True)
    sample = Sample(Entry(id="a", text="a"), None, None, None, result, result)  # type: ignore[arg-type]
    found = measure_weight_norm_counts(sample)
    assert found["count"].sum() == 2 * 4 * 15
    assert found["weight_bin"].min() > -1000


def test_the_pairs_of_a_causal_model() -> None:
    result = Analyzer(tiny("gpt2")).analyze({"input_ids": [5, 6, 7, 8, 9]}, heads=True)
    found = measure_weight_norm_pairs(result)
    assert found["layer"].tolist() == [0, 1]
    for layer in (0, 1):
        queries, weights = found["queries"][layer], found["weights"][layer]
        assert queries.tolist() == [5, 4, 3, 2, 1] * 4
        expected = [result.heads["weights"][layer, head, key:, key] for head in range(4) for key in range(5)]
        np.testing.assert_array_equal(weights, np.concatenate(expected))
        np.testing.assert_array_equal(found["norms"][layer], result.value_norms[layer].flatten())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_rounding_does_not_order_equal_values(side: str) -> None:
    """Texts that begin alike have the same ||f|| at their first token, computed in batches of different shapes: in the
    first layer, and in all layers of a causal model."""
    generator = np.random.default_rng(0)
    heads, texts = 4, 40
    norms = np.tile(np.array([1.0, 2.0, 2.5, 7.0]), (texts, 1))
    noisy = norms * (1 + 1e-9 * generator.standard_normal(norms.shape))
    weights = generator.random((texts, heads, 3))  # of three queries

    def correlation(given: np.ndarray) -> float:
        columns = {"norms": given, "queries": np.full((texts, heads), 3), "weights": weights.reshape(texts, -1)}
        frame = pl.LazyFrame({"side": [side] * texts, "layer": [0] * texts, "kind": [0] * texts, **columns})
        run: Any = SimpleNamespace(scan=lambda name: frame)
        setting: Any = SimpleNamespace(side=side, readings=PAPER.readings())
        return pair_ranks.exact_correlations(setting, run, [0])[0]["first"]

    expected = spearmanr(weights.ravel(), np.repeat(norms.ravel(), 3)).statistic
    assert abs(spearmanr(weights.ravel(), np.repeat(noisy.ravel(), 3)).statistic - expected) > 1e-4
    assert correlation(noisy) == correlation(norms) == pytest.approx(expected, abs=2e-5)  # weights are rounded too


def test_a_causal_model(data: Path, tmp_path: Path) -> None:
    """Its first tokens are seen by more outputs than the last: attention received is the mean over these."""
    lens = Analyzer(tiny("gpt2"), marks_tokenizer())
    corpus.run(data, lens, tmp_path / "run", measures=["token_means"], limit=3)
    rows = corpus.open(tmp_path / "run").scan("token_means").collect().sort("id", "position")
    for line, (_, found) in zip(data.read_text().splitlines(), rows.group_by("id", maintain_order=True), strict=False):
        weights = lens.analyze(line, heads=True).heads["weights"].numpy().mean((0, 1))
        expected = [weights[n:, n].mean() for n in range(len(weights))]
        np.testing.assert_allclose(found["weight"], expected)


def test_an_encoder_decoder_is_read_on_its_encoder(translator: Analyzer, pairs_file: Path, tmp_path: Path) -> None:
    names = ["norm_moments", "category_shares", "weight_norm_counts", "token_means"]
    corpus.run(pairs_file, translator, tmp_path, measures=names, format="alignments", reader=READER, limit=4)
    run = corpus.open(tmp_path)
    alone = [
        translator.analyze(" ".join(entry.words or ()), text_target=" ".join(entry.target or ()), heads=True).encoder
        for entry in entries(pairs_file)[:4]
    ]
    norms = np.concatenate([one.value_norms.numpy() for one in alone], axis=-1)
    found = corpus_norm_moments(setting_of(translator, pairs_file, READER), run, "layer", "head")
    assert {place: one.mean for place, one in found.items()} == pytest.approx(
        {place: norms[place].mean() for place in np.ndindex(2, 4)}
    )
    for name in names:
        assert run.scan(name).collect()["side"].unique().to_list() == ["encoder"]
    pairs = sum(8 * len(one.tokens) ** 2 for one in alone)
    assert run.scan("weight_norm_counts").collect()["count"].sum() == pairs


# Alignment.


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentence pairs with sure and possible links; one of them without any."""
    generator = random.Random(1)
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"

    def words() -> list[str]:
        return [
            "".join(generator.choices("abcdefg", k=generator.randint(1, 3))) for _ in range(generator.randint(3, 7))
        ]

    with path.open("w") as file:
        for n in range(12):
            source, target = words(), words()
            cells = [(s, t) for s in range(len(source)) for t in range(len(target))]
            possible = [] if n == 5 else generator.sample(cells, 5)
            record = {"src_words": source, "tgt_words": target, "alignment": possible[:3], "maybe": possible[3:]}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(scope="module")
def translator() -> Analyzer:
    return Analyzer(tiny("marian", "Seq2SeqLM", vocab_size=64), letters_tokenizer())


READER = {"possible": "maybe"}


ALIGNMENT: dict[str, Any] = {"format": "alignments", "reader": READER, "experiments": ["alignment"]}


@pytest.fixture(scope="module")
def aligned_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aligned")


@pytest.fixture(scope="module")
def aligned(translator: Analyzer, pairs_file: Path, aligned_out: Path) -> Report:
    return reproduce(PAPER, translator, pairs_file, aligned_out, **ALIGNMENT)[0]


def entries(path: Path) -> list[Entry]:
    return list(strict(read(path, "alignments", **READER)))


def drawn_links(matrix: np.ndarray, entry: Entry, way: str) -> set[tuple[int, int]]:
    """Plain loops: the decoder reads start, [CLS] and the letters; the encoder reads [CLS], the letters and [SEP]."""
    assert entry.words is not None
    assert isinstance(entry.target, tuple)
    links, row = set(), 2
    for t, word in enumerate(entry.target):
        rows = [row + n - (way == "AWO") for n in range(len(word))]
        row += len(word)
        scores, column = [], 1
        for source in entry.words:
            scores.append(np.mean([matrix[r, column : column + len(source)].sum() for r in rows]))
            column += len(source)
        ends = [np.mean([matrix[r, c] for r in rows]) for c in (0, column)]
        if max(scores) > max(ends):
            links.add((int(np.argmax(scores)), t))
    return links


@pytest.fixture(scope="module")
def translated(translator: Analyzer, pairs_file: Path) -> list[tuple[Entry, dict[str, np.ndarray]]]:
    """Each entry by itself, with its maps by method: (layers, 1 + heads, decoder inputs, source tokens)."""
    found = []
    for entry in entries(pairs_file):
        result = translator.analyze(" ".join(entry.words or ()), text_target=" ".join(entry.target or ()), heads=True)
        columns = [label.side == "encoder" for label in result.decoder.columns]
        maps = {}
        for method, scope in (("weight", "XATTN-W"), ("norm", "XATTN-N")):
            heads, whole = result.decoder.heads[scope][..., columns].numpy(), result.cross(scope).numpy()
            maps[method] = np.concatenate([whole[:, None], heads], axis=1)
        found.append((entry, maps))
    return found


Rates = dict[tuple[str, str, int, int], tuple[float, float]]  # setting, method, layer, head (-1: the layer)


@pytest.fixture(scope="module")
def error_rates(translated: list[tuple[Entry, dict[str, np.ndarray]]]) -> Rates:
    """AER in percent, of all links and of those of target words that have a gold link."""
    counts: dict[tuple[str, str, int, int], np.ndarray] = {}
    for entry, maps in translated:
        words = {target for _, target in entry.possible}
        for method, layer, head, way in product(maps, range(2), range(-1, 4), ("AWO", "AWI")):
            drawn = drawn_links(maps[method][layer, 1 + head], entry, way)
            linked = {(s, t) for s, t in drawn if t in words}
            added = [
                (len(some & entry.sure) + len(some & entry.possible), len(some) + len(entry.sure))
                for some in (drawn, linked)
            ]
            key = (way, method, layer, head)
            counts[key] = counts.get(key, np.zeros((2, 2))) + np.array(added)
    return {key: tuple(100 * (1 - found[:, 0] / found[:, 1])) for key, found in counts.items()}


def test_error_rates_of_layers_and_heads(aligned: Report, error_rates: Rates) -> None:
    assert len(set(error_rates.values())) > 10
    by_layer = {tuple(row[:3]): row for row in table(aligned, "table3-by-layer").rows}
    by_head = {tuple(row[:4]): row for row in table(aligned, "table3-by-head").rows}
    for (way, method, layer, head), rates in error_rates.items():
        row = by_layer[way, method, layer + 1] if head < 0 else by_head[way, method, layer + 1, head + 1]
        first = 3 if head < 0 else 4
        assert row[first : first + 2] == pytest.approx(rates)
    for way in ("AWO", "AWI"):
        for method in ("weight", "norm"):
            layers = [error_rates[way, method, layer, -1][0] for layer in range(2)]
            assert aligned.numbers[f"alignment.{way}.{method}.mean"] == pytest.approx(fmean(layers))
            assert aligned.numbers[f"alignment.{way}.{method}.best"] == pytest.approx(min(layers))


@pytest.mark.parametrize("average", ["cells", "sentences"])
def test_the_highest_norm(
    translator: Analyzer,
    pairs_file: Path,
    aligned: Report,
    aligned_out: Path,
    translated: list[tuple[Entry, dict[str, np.ndarray]]],
    error_rates: Rates,
    average: str,
) -> None:
    setting = setting_of(translator, pairs_file, READER, average_norm=average, aer_correlation="weight")
    found = section_of("alignment", aligned_out, setting)
    cells = [maps["norm"][:, 1:].reshape(2, 4, -1) for _, maps in translated]
    norms = np.concatenate(cells, -1).mean(-1) if average == "cells" else np.mean([one.mean(-1) for one in cells], 0)
    expected = {key: rates[0] for key, rates in error_rates.items()}
    layer = int(norms.sum(1).argmax())
    head = np.unravel_index(norms.argmax(), norms.shape)
    for way in ("AWO", "AWI"):
        assert found.numbers[f"alignment.{way}.highest_layer"] == pytest.approx(expected[way, "norm", layer, -1])
        assert found.numbers[f"alignment.{way}.highest_head"] == pytest.approx(expected[way, "norm", *map(int, head)])
        errors = [expected[way, "weight", n, m] for n in range(2) for m in range(4)]
        assert found.numbers[f"alignment.{way}.rho"] == pytest.approx(spearmanr(errors, norms.ravel()).statistic)
        assert found.numbers[f"alignment.{way}.r"] == pytest.approx(pearsonr(errors, norms.ravel()).statistic)
    assert table(found, "table3-by-head").rows[0][-1] == pytest.approx(norms[0, 0])


def test_numbers_over_linked_words(aligned: Report, error_rates: Rates) -> None:
    for way, method in product(("AWO", "AWI"), ("weight", "norm")):
        layers = [error_rates[way, method, layer, -1][1] for layer in range(2)]
        assert aligned.numbers[f"alignment.{way}.{method}.linked.mean"] == pytest.approx(fmean(layers))
        assert aligned.numbers[f"alignment.{way}.{method}.linked.best"] == pytest.approx(min(layers))


def test_few_gold_links_make_linked_words_decide(translator: Analyzer, pairs_file: Path, aligned_out: Path) -> None:
    words = [
        "linked" if "use the error rate over linked target words" in section.text else "all"
        for section in (
            section_of("alignment", aligned_out, setting_of(translator, pairs_file, READER, aer=reading))
            for reading in ("auto", "all", "linked")
        )
    ]
    assert words == ["linked", "all", "linked"]


def test_verdicts_over_linked_words() -> None:
    """Each pair has ten target words, five with a sure link. Norms link every word, the linked ones correctly. Weights
    link four of five linked words correctly and leave all others alone but one, which only counts over all words."""
    norm, weight = (10, 5, 5, 5, 5), (5, 4, 5, 4, 4)  # links, linked, sure, in_sure, in_possible
    hits = np.empty((20, 2, 2, 2, 3, 5))
    hits[:, :, 0], hits[:, :, 1] = weight, norm
    hits[::2, :, :, 1, :, 3:] -= 1  # the second layer and its heads are worse in half of the pairs
    norms = np.stack([np.tile([[3.0, 1.0], [2.0, 1.5]], (20, 1, 1)), np.ones((20, 2, 2))], -1)
    rates: dict[tuple[str, str], dict[tuple[int, int], AlignmentRates]] = {}
    for (n, way), (m, method) in product(enumerate(("AWO", "AWI")), enumerate(("weight", "norm"))):
        for layer, head in product(range(2), range(-1, 2)):
            links, linked, sure, *right = (int(x) for x in hits[:, n, m, layer, head + 1].sum(0))
            both = AlignmentRates(Hits(links, sure, *right), Hits(linked, sure, *right))
            rates.setdefault((way, method), {})[layer, head] = both
    heads = dict(zip(product(range(2), range(2)), (3.0, 1.0, 2.0, 1.5), strict=True))
    found = AlignmentResult(rates, heads, "linked")
    claims = alignment_claims(found, AlignmentItems(hits, norms), "norm")
    assert [claim.holds for claim in claims[:4]] == [True] * 4
    assert "AER of linked words 0.0 % against 11.1 % (layers 1 and 1)" in claims[2].ours
    assert all(claim.readings == ("with aer=all: does not hold",) for claim in claims[:4])
    over_all = alignment_claims(replace(found, words="all"), AlignmentItems(hits, norms), "norm")
    assert [claim.holds for claim in over_all[:4]] == [False] * 4
    assert "AER of all words 33.3 % against 20.0 %" in over_all[2].ours
    assert claims[4].holds is None  # AWI and AWO are the same here
    assert claims[5].holds is True  # the first layer has the highest norm, and the fewest errors


def test_resampled_error_rates(translator: Analyzer, pairs_file: Path, aligned_out: Path, aligned: Report) -> None:
    """Weights of one give the numbers of the report, for every layer and head."""
    items = read_alignment_items(corpus.open(aligned_out / "runs" / "alignment"), "cells")
    by_head = {tuple(row[:4]): row for row in table(aligned, "table3-by-head").rows}
    for (n, way), (m, method) in product(enumerate(("AWO", "AWI")), enumerate(("weight", "norm"))):
        for layer, head in product(range(2), range(4)):
            sums = items.hits[:, n, m, layer, 1 + head].sum(0)
            row = by_head[way, method, layer + 1, head + 1]
            assert [aer_of_sums(sums, words) for words in ("all", "linked")] == pytest.approx(row[4:6])
            norm, cells = items.norms[:, layer, head].sum(0)
            assert norm / cells == pytest.approx(row[-1])


def test_the_section_says_what_the_gold_data_are(aligned: Report) -> None:
    (section,) = aligned.sections
    assert "33 sure and 55 possible links in 12 sentence pairs" in section.text
    assert len(section.claims) == 8
    assert all(claim.published for claim in section.claims)


def test_drawn_alignments(aligned: Report, translator: Analyzer, pairs_file: Path) -> None:
    pictures = {part.name: part for part in aligned.sections[0].parts if isinstance(part, Picture)}
    assert {"alignment-awo", "alignment-awi"} <= set(pictures)
    setting = replace(setting_of(translator, pairs_file, READER), example="pairs.jsonl:9")
    layers = {(way, method): 1 for way in ("AWO", "AWI") for method in ("weight", "norm")}
    picture = list(alignment_examples(setting, layers))[1]
    assert (picture.name, picture.note[:14]) == ("alignment-awi", "pairs.jsonl:9.")
    entry = entries(pairs_file)[8]
    for axes in picture.figure.axes[:2]:
        frames = {tuple(np.round(patch.get_xy()).astype(int)): patch.get_linestyle() for patch in axes.patches}
        assert set(frames) == entry.possible
        assert {link for link, style in frames.items() if style == "-"} == entry.sure


def test_what_alignment_needs(
    translator: Analyzer, lens: Analyzer, pairs_file: Path, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"experiments": ["alignment"]}
    with pytest.raises(NormscopeError, match="BERT has no cross-attention"):
        reproduce(PAPER, lens, pairs_file, tmp_path, format="alignments", **options)
    with pytest.raises(NormscopeError, match="no target sentences"):
        reproduce(PAPER, translator, data, tmp_path, **options)
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"src_words": ["a", "b"], "tgt_words": ["c"], "alignment": []}) + "\n")
    with pytest.raises(NormscopeError, match="no gold links between words, sure or possible"):
        reproduce(PAPER, translator, bare, tmp_path, format="alignments", **options)


def faults(translator: Analyzer, path: Path, out: Path) -> dict[str, str]:
    """The reasons for which entries were left out of the run; the others are in its tables."""
    measures = ["alignment_hits", "cross_norms"]
    corpus.run(path, translator, out, measures=measures, format="alignments", reader=READER)
    run = corpus.open(out)
    errors = run.scan("errors").collect()
    assert run.scan("alignment_hits").collect()["id"].n_unique() + len(errors) == 12
    return dict(zip(errors["id"], errors["reason"], strict=True))


def test_a_pair_that_does_not_fit_its_links_is_a_fault(translator: Analyzer, pairs_file: Path, tmp_path: Path) -> None:
    lines = pairs_file.read_text().splitlines()
    lines[2] = json.dumps({"src_words": ["a"], "tgt_words": ["b"], "alignment": [[0, 1]], "maybe": []})
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n")
    (said,) = faults(translator, path, tmp_path / "out").items()
    assert said[0] == "pairs.jsonl:3"
    assert "joins word 1 to target word 2" in said[1]


def test_words_that_cannot_be_distinguished_are_a_fault(translator: Analyzer, pairs_file: Path, tmp_path: Path) -> None:
    """The model read other tokens than those of the words: here one fewer, since the text was truncated."""
    lines = pairs_file.read_text().splitlines()
    lines[4] = json.dumps({"src_words": ["a", "\u0301"], "tgt_words": ["b"], "alignment": [[0, 0]], "maybe": []})
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n")
    lens = Analyzer(translator.model, _dropping(letters_tokenizer()))
    assert faults(lens, path, tmp_path / "out") == {"pairs.jsonl:5": "The word 2 ('\u0301') has no token."}


def _dropping(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that drops accents."""
    found = copy.deepcopy(tokenizer)
    found.backend_tokenizer.normalizer = normalizers.StripAccents()
    return found
