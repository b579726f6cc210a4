"""EMNLP 2021: every table against an independent computation, straight from analyze() or from the model."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.stats import pearsonr, rankdata, spearmanr

from normscope import Analyzer, NormscopeError, corpus
from normscope.corpus import Entry
from normscope.inputs.encode import encode
from normscope.measures.tokens import token_category
from normscope.papers import emnlp2021, published
from normscope.papers.common import rank_correlation
from normscope.papers.emnlp2021 import PAPER, MixingReadings
from normscope.papers.emnlp2021.example_maps import example_maps_encoding, example_maps_own_shares
from normscope.papers.emnlp2021.frequency import (
    means_by_frequency_rank,
    mixing_of_tokens,
    resample_rank_correlation,
)
from normscope.papers.emnlp2021.mixing import middle_layers
from normscope.papers.emnlp2021.ratios import (
    attention_block_scopes,
    mean_mixing_by_layer,
    mixing_ratios_of_run,
    summarise_mixing,
)
from normscope.papers.emnlp2021.sequences import mixing_sums_by_sequence, resample_mixing
from normscope.papers.emnlp2021.shared import layer_correlation, layer_correlation_claim
from normscope.papers.readings import describe_readings, parse_readings
from normscope.papers.runs import merge_run_plans
from normscope.papers.study import Setting, reproduce
from normscope.reports.report import Claim, Picture, Section, Table
from tests.helpers.tiny import tiny
from tests.helpers.toys import WORDS as VOCABULARY
from tests.helpers.toys import toy_tokenizer

WORDS = [word for word in VOCABULARY if word.isalpha()]
METHODS = ("ATTN-W", "ATTN-N", "ATTNRES-W", "ATTNRES-N", "ATTNRESLN-N")
SECTIONS = {experiment.name: experiment for experiment in PAPER.experiments}


@dataclass
class Case:
    """A setting and the runs that the experiments read, made on first use."""

    setting: Setting
    folder: Path
    analyses: dict[str, list[Any]] = field(default_factory=dict)  # of each run, by analyze()
    sections: dict[Any, Section] = field(default_factory=dict)

    def section(self, name: str, **readings: Any) -> Section:
        key = (name, *sorted(readings.items()))
        if key not in self.sections:
            self.sections[key] = self.made(name, **readings)
        return self.sections[key]

    def made(self, name: str, data: str | None = None, example: str | None = None, **readings: Any) -> Section:
        setting = replace(self.setting, readings=replace(self.setting.readings, **readings), example=example)
        setting = setting if data is None else replace(setting, data=data)
        runs = {}
        wanted = {plan.name for plan in SECTIONS[name].runs(setting)}
        plans = merge_run_plans(plan for experiment in PAPER.experiments for plan in experiment.runs(setting))
        for plan in (plan for plan in plans if plan.name in wanted):
            out = self.folder / plan.name
            if not out.exists():
                corpus.run(
                    setting.data,
                    setting.lens,
                    out,
                    measures=plan.measures,
                    scopes=plan.scopes,
                    mask_seed=setting.readings.mask_seed if plan.masked else None,
                    shard_size=5,
                )
            runs[plan.name] = corpus.open(out)
        return SECTIONS[name].section(setting, runs)

    def inputs(self, name: str) -> list[list[int]]:
        """The token ids of every entry of a run, as the model was given them."""
        frame = corpus.open(self.folder / name).scan("items").collect()
        return [self.setting.lens.tokenizer.convert_tokens_to_ids(tokens) for tokens in frame["tokens"].to_list()]


def sentences(count: int = 12) -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=generator.randint(3, 18))) for _ in range(count)]


def case(lens: Analyzer, folder: Path, count: int = 12) -> Case:
    data = folder / "data.txt"
    data.write_text("\n".join(sentences(count)) + "\n")
    entries = tuple(Entry(id=str(n), text=text) for n, text in enumerate(sentences(count)))
    return Case(Setting(lens, str(data), None, {}, MixingReadings(), None, None, entries, None), folder / "runs")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A tiny masked language model of four layers."""
    model = tiny("bert", "MaskedLM", num_hidden_layers=4)
    return case(Analyzer(model, toy_tokenizer()), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A tiny causal language model of three layers, whose tokenizer has a mask token."""
    model = tiny("llama", "CausalLM", num_hidden_layers=3)
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return case(Analyzer(model, tokenizer), tmp_path_factory.mktemp("llama"))


def percents(one: Case, run: str, scope: str) -> list[np.ndarray]:
    """entry -> (layers, tokens), in percent, by analyze()."""
    if run not in one.analyses:
        lens = one.setting.lens
        one.analyses[run] = [
            lens.analyze({"input_ids": ids}, scopes=attention_block_scopes(lens)) for ids in one.inputs(run)
        ]
    return [100 * analysis.mixing_ratio(scope).numpy() for analysis in one.analyses[run]]


def kinds(one: Case, run: str) -> list[np.ndarray]:
    named = [one.setting.lens.tokenizer.convert_ids_to_tokens(ids) for ids in one.inputs(run)]
    return [np.array([token_category(token).replace("punctuation", "other") for token in tokens]) for tokens in named]


def table(section: Section, name: str) -> Table:
    return next(part for part in section.parts if isinstance(part, Table) and part.name == name)


def pictures(section: Section) -> Iterator[str]:
    return (part.name for part in section.parts if isinstance(part, Picture))


def test_table_2(bert: Case) -> None:
    section = bert.section("mixing")
    macro = bert.section("mixing", table_average="macro").numbers
    assert [row[0] for row in table(section, "table2-mixing").rows] == list(METHODS)
    for scope in METHODS:
        values = [one.ravel() for one in percents(bert, "masked", scope)]
        joined = np.concatenate(values)
        for key, expected in (("mean", joined.mean()), ("max", joined.max()), ("min", joined.min())):
            assert section.numbers[f"mixing.{scope}.{key}"] == pytest.approx(expected, rel=1e-9)
        assert macro[f"mixing.{scope}.mean"] == pytest.approx(np.mean([one.mean() for one in values]), rel=1e-9)
        assert macro[f"mixing.{scope}.max"] == section.numbers[f"mixing.{scope}.max"]
    assert "12 %" in section.text
    assert any(4 in ids for ids in bert.inputs("masked"))  # [MASK]
    assert len(section.claims) == 4
    assert section.claims[0].published == "96.4 % against 18.8 %"
    assert not any(claim.own for claim in section.claims)


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_intervals_of_means_are_those_of_resampled_sequences(bert: Case, average: str) -> None:
    frame = mixing_ratios_of_run(bert.setting.lens, corpus.open(bert.folder / "masked"))
    found = resample_mixing(mixing_sums_by_sequence(frame, METHODS, 4), average)
    assert found.items == 12
    generator = np.random.default_rng(1)
    draws = generator.integers(0, 12, (2000, 12))
    numbers = bert.section("layers", layer_average=average).numbers
    types = kinds(bert, "masked")
    for s, scope in enumerate(METHODS):
        values = percents(bert, "masked", scope)
        for k, kind in enumerate(("first", "separator", "mask", "other", "overall")):
            assert found.value[s, 2, k] == pytest.approx(numbers[f"mixing.{scope}.L3.{kind}"], rel=1e-8)
            chosen = [one[2][(of == kind) | (kind == "overall")] for one, of in zip(values, types, strict=True)]
            if average == "macro":
                means = np.array([some.mean() for some in chosen])
                drawn = means[draws].mean(1)
            else:
                sums, counts = np.array([(some.sum(), len(some)) for some in chosen]).T
                drawn = sums[draws].sum(1) / counts[draws].sum(1)
            assert np.std(found.draws[:, s, 2, k]) == pytest.approx(drawn.std(), rel=0.1)


def test_claims_of_table_2(bert: Case) -> None:
    """The margins against means by hand; an interval that excludes zero decides."""
    section, numbers = bert.section("mixing"), bert.section("mixing").numbers
    weights, attention, half, residual, block = (numbers[f"mixing.{scope}.mean"] for scope in METHODS)
    margins = (min(weights - 50, 50 - block), attention / 2 - residual, half - residual, residual - block)
    for claim, margin in zip(section.claims, margins, strict=True):
        assert claim.holds in (None, margin > 0)
        assert "bootstrap over 12 sequences" in claim.evidence
    assert section.claims[2].evidence.startswith(f"difference {half - residual:.2f} points, 95 % interval")
    assert [claim.holds for claim in section.claims].count(None) < 4


def test_one_sequence_decides_nothing(tmp_path: Path) -> None:
    one = case(Analyzer(tiny("bert", num_hidden_layers=4), toy_tokenizer()), tmp_path, 1)
    for name in ("comparison", "mixing", "layers", "frequency", "uniform"):
        for claim in one.section(name).claims:
            assert claim.holds is None, claim
    assert "too few sequences" in one.section("mixing").claims[1].evidence


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_fig_3(bert: Case, average: str) -> None:
    section = bert.section("layers", layer_average=average)
    assert set(pictures(section)) == {"fig3-heat", "fig3-lines"}
    types = kinds(bert, "masked")
    for scope in METHODS:
        values = percents(bert, "masked", scope)
        for layer in range(4):
            for kind in ("first", "separator", "mask", "other", "overall"):
                chosen = [one[layer][(of == kind) | (kind == "overall")] for one, of in zip(values, types, strict=True)]
                means = [some.mean() for some in chosen if len(some)]
                expected = np.mean(means) if average == "macro" else np.concatenate(chosen).mean()
                assert section.numbers[f"mixing.{scope}.L{layer + 1}.{kind}"] == pytest.approx(expected, rel=1e-9)
    rows = table(section, "fig3-layers").rows
    assert [row[:2] for row in rows[:5]] == [
        (METHODS[0], 1),
        (METHODS[0], 2),
        (METHODS[0], 3),
        (METHODS[0], 4),
        (METHODS[1], 1),
    ]
    assert rows[0][-1] == section.numbers["mixing.ATTN-W.L1.overall"]


def test_claims_of_the_layers(bert: Case) -> None:
    section = bert.section("layers")
    numbers = section.numbers
    separator, first, mask = section.claims

    def mean(kind: str) -> float:
        return float(np.mean([numbers[f"mixing.ATTNRESLN-N.L{layer}.{kind}"] for layer in (2, 3)]))

    assert separator.holds in (None, mean("separator") < mean("other"))
    assert first.holds in (None, mean("first") < mean("other"))
    assert mask.holds in (None, mean("mask") > mean("other"))
    assert f"difference {mean('mask') - mean('other'):.2f} points" in mask.evidence
    ratios = percents(bert, "masked", "ATTNRESLN-N")
    types = kinds(bert, "masked")
    apart = np.array(
        [
            [one[layer][of == "other"].mean() - one[layer][of == "separator"].mean() for layer in (1, 2)]
            for one, of in zip(ratios, types, strict=True)
        ]
    )
    spread = apart.std(0, ddof=1) / np.sqrt(12)
    reversed_layers = [layer for layer, t in zip((2, 3), apart.mean(0) / spread, strict=True) if t < -3]
    for layer in reversed_layers:  # far beyond chance: named in the evidence
        assert str(layer) in separator.evidence.split("reversed in layer")[1]
    assert f"{mean('mask'):.1f} %" in mask.ours
    assert separator.published == "2.3 % against 19.3 % in layers 4 to 9"
    assert mask.published == "24.5 % against 19.3 % in layers 4 to 9"


def test_macro_and_micro_on_a_small_table() -> None:
    frame = pl.LazyFrame(
        {
            "id": ["a", "a", "a", "b", "b"],
            "scope": ["S"] * 5,
            "layer": [1] * 5,
            "type": ["first", "other", "other", "first", "other"],
            "percent": [10.0, 20.0, 60.0, 30.0, 100.0],
        }
    )
    assert mean_mixing_by_layer(frame, "micro") == {"S": {(1, "first"): 20.0, (1, "other"): 60.0, (1, "overall"): 44.0}}
    assert mean_mixing_by_layer(frame, "macro") == {"S": {(1, "first"): 20.0, (1, "other"): 70.0, (1, "overall"): 47.5}}
    assert summarise_mixing(frame, "micro") == {"S": {"mean": 44.0, "max": 100.0, "min": 10.0}}
    assert summarise_mixing(frame, "macro") == {"S": {"mean": 47.5, "max": 100.0, "min": 10.0}}


def test_middle_layers() -> None:
    assert [middle_layers(depth) for depth in (1, 2, 4, 6, 12)] == [
        [1],
        [1],
        [2, 3],
        [2, 3, 4],
        [4, 5, 6, 7, 8, 9],
    ]


def test_depth(bert: Case) -> None:
    section, by_type = bert.section("depth"), bert.section("layers").numbers
    for scope in METHODS:
        means = [by_type[f"mixing.{scope}.L{layer}.overall"] for layer in range(1, 5)]
        assert section.numbers[f"depth.{scope}"] == pytest.approx(spearmanr(means, range(4)).statistic)
    (claim,) = section.claims
    assert claim.holds is None  # of four layers, no order is rare enough: the rarest has p = 2/24
    assert claim.published == "Spearman -0.67 over 12 layers"
    (sign,) = bert.section("depth", level=1.0).claims
    assert sign.holds == (section.numbers["depth.ATTNRESLN-N"] < 0)


def test_a_claim_over_layers(bert: Case) -> None:
    rising = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]

    def claim(a: Sequence[float], b: Sequence[float], sign: int) -> Claim:
        return layer_correlation_claim(bert.setting, "", layer_correlation(a, b, sign), sign)

    assert claim(rising, range(6), 1).holds is True
    assert claim(rising, range(6), -1).holds is False
    assert claim(rising, range(6), -1).ours == "Spearman 1.00 over 4 layers"
    weak = claim([1.0, 2.0, 3.0, 6.0, 5.0, 4.0], [2.0, 1.0, 3.0, 5.0, 4.0, 6.0], 1)
    assert weak.holds is None
    assert weak.evidence.endswith("(permutation over 6 layers)")
    assert "variation" in claim(rising, [1.0] * 6, 1).ours
    assert "few" in claim(rising[:2], [1.0, 2.0], 1).ours
    shaky = layer_correlation_claim(
        bert.setting,
        "",
        layer_correlation(rising, range(6), 1),
        1,
        under={"layer_average=micro": layer_correlation(rising, [2, 1, 3, 5, 4, 0], 1)},
    )
    assert shaky.readings == ("with layer_average=micro: cannot be said",)


def test_published_depth_is_that_of_the_last_method() -> None:
    """The layers are published in whole percents. What they allow, with ties broken either way, tells the method."""
    reference = published.published_main_numbers("emnlp2021")
    fits = []
    for scope in METHODS:
        means = np.array([reference[f"mixing.{scope}.L{layer}.overall"] for layer in range(1, 13)])
        lowest, highest = (rank_correlation(means + slope * np.arange(12), range(12)) for slope in (-1e-6, 1e-6))
        assert lowest is not None
        assert highest is not None
        fits += [scope] if lowest <= reference["depth.ATTNRESLN-N"] <= highest else []
    assert fits == ["ATTNRESLN-N"]


@pytest.mark.parametrize("special", ["markers", "tokenizer"])
def test_frequency(bert: Case, special: str) -> None:
    section = bert.section("frequency", special=special)
    ids = np.concatenate(bert.inputs("plain"))
    assert 4 not in ids  # unmasked
    counts = np.array([(ids == one).sum() for one in ids])
    ranks = rankdata([-count for count in counts], method="min")  # over tokens: the same order as over their kinds
    left_out = {"markers": (2, 3), "tokenizer": (0, 1, 2, 3, 4)}[special]
    ordinary = ~np.isin(ids, left_out)
    for scope in METHODS:
        values = np.concatenate([one.mean(0) for one in percents(bert, "plain", scope)])
        assert section.numbers[f"frequency.{scope}.all"] == pytest.approx(spearmanr(values, ranks).statistic)
        expected = spearmanr(values[ordinary], ranks[ordinary]).statistic
        assert section.numbers[f"frequency.{scope}.words"] == pytest.approx(expected)
    assert f"{len(ids)} tokens, {ordinary.sum()} of them not special" in table(section, "frequency-spearman").note
    assert "corpus itself" in table(section, "frequency-spearman").note
    assert section.claims[0].holds in (None, section.numbers["frequency.ATTNRESLN-N.words"] < 0)
    lengths = [len(one) for one in bert.inputs("plain")]
    ends = np.cumsum([0, *lengths])
    values = np.concatenate([one.mean(0) for one in percents(bert, "plain", "ATTNRESLN-N")])
    generator, drawn = np.random.default_rng(1), []
    for _ in range(400):
        tokens = np.concatenate([np.arange(ends[n], ends[n + 1]) for n in generator.integers(0, 12, 12)])
        tokens = tokens[ordinary[tokens]]
        drawn.append(spearmanr(values[tokens], ranks[tokens]).statistic)
    frame = mixing_of_tokens(bert.setting, corpus.open(bert.folder / "plain"))
    order = {id: n for n, id in enumerate(f"data.txt:{n}" for n in range(1, 13))}
    places = np.array([ends[order[id]] + position for id, position in frame.select("id", "position").rows()])
    found = resample_rank_correlation(frame, "ATTNRESLN-N", ranks[places].astype(np.int64), ordinary[places])
    assert float(found.value) == pytest.approx(section.numbers["frequency.ATTNRESLN-N.words"], rel=1e-6)
    assert found.draws.std() == pytest.approx(np.std(drawn), rel=0.15)
    assert "bootstrap over 12 sequences" in section.claims[0].evidence
    assert section.claims[0].published == "Spearman -0.58 by ATTNRESLN-N"


def test_frequency_from_a_file(bert: Case, tmp_path: Path) -> None:
    file = tmp_path / "counts.tsv"
    file.write_text("".join(f"{word}\t{10 * n + 5}\n" for n, word in enumerate(VOCABULARY)))
    given = replace(bert, setting=replace(bert.setting, frequencies=file))
    section = given.made("frequency")
    ids = np.concatenate(bert.inputs("plain"))
    values = np.concatenate([one.mean(0) for one in percents(bert, "plain", "ATTNRESLN-N")])
    assert section.numbers["frequency.ATTNRESLN-N.all"] == pytest.approx(spearmanr(values, -ids).statistic)
    assert str(file) in table(section, "frequency-spearman").note
    file.write_text("zebra\t3\n")
    with pytest.raises(NormscopeError, match="zebra"):
        SECTIONS["frequency"].missing(given.setting)  # before anything is run


def test_means_by_rank() -> None:
    x, means = means_by_frequency_rank(np.array([1, 3, 4, 30, 5000]), {"S": np.array([2.0, 4.0, 1.0, 7.0, 9.0])})
    assert x == [0.25, 0.75, 1.25, 3.75]  # 3 < sqrt(10) < 4; 10 < 30 < 10^1.5; 10^3.5 < 5000 < 10^4
    assert means == {"S": [3.0, 1.0, 7.0, 9.0]}


def test_expansion(bert: Case) -> None:
    section = bert.section("expansion")
    rates: dict[str, list[float]] = {"code": [], "paper": []}
    for layer in bert.setting.lens.model.bert.encoder.layer:
        attention = layer.attention
        W_V, b_V = attention.self.value.weight.detach().numpy().T, attention.self.value.bias.detach().numpy()
        W_O, b_O = attention.output.dense.weight.detach().numpy().T, attention.output.dense.bias.detach().numpy()
        product = W_V @ W_O
        paper = np.block([[product, np.zeros((24, 1))], [(b_V @ W_O + b_O)[None], np.ones((1, 1))]])
        code = np.block([[product, (W_V @ b_O)[:, None]], [(b_V @ W_O)[None], np.array([[b_V @ b_O + 1]])]])
        rates["paper"].append(np.linalg.norm(paper) / 5)
        rates["code"].append(np.linalg.norm(code) / 5)
    for matrix, expected in rates.items():
        assert [section.numbers[f"expansion.{matrix}.L{n}"] for n in range(1, 5)] == pytest.approx(expected, rel=1e-9)
        assert section.numbers[f"expansion.{matrix}.mean"] == pytest.approx(np.mean(expected), rel=1e-9)
        assert section.numbers[f"expansion.{matrix}.max"] == pytest.approx(max(expected), rel=1e-9)
        assert section.numbers[f"expansion.{matrix}.min"] == pytest.approx(min(expected), rel=1e-9)
        assert bert.section("expansion", expansion=matrix).claims[0].ours.startswith(f"{np.mean(expected):.2f}")
    assert section.claims[0].published == "0.88 with the code's matrix"
    assert section.claims[0].holds is None  # of four layers, all signs together have p = 2/16
    assert "p = " in section.claims[0].evidence
    assert "about the weights alone" in section.claims[0].evidence
    assert list(pictures(section)) == ["expansion-chart"]


def test_comparison(bert: Case) -> None:
    section = bert.section("comparison")
    everywhere = [f"comparison-layers-{scope}" for scope in METHODS]
    assert list(pictures(section)) == ["comparison-norms", "comparison-weights", *everywhere]
    maps = bert.setting.lens.analyze(sentences()[0])
    expected = [
        [layer, *(100 * np.mean([m[i, i] / m[i].sum() for i in range(len(m))]) for m in at)]
        for layer in range(1, 5)
        for at in [[maps[scope][layer - 1].numpy() for scope in METHODS]]
    ]
    np.testing.assert_allclose(np.array(table(section, "comparison-own").rows, dtype=float), expected, rtol=1e-6)
    assert "layer 2 of 4" in section.parts[0].title
    assert "layer 4 of 4" in bert.section("comparison", example_layer=4).parts[0].title
    assert example_maps_own_shares(torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])) == [12.5]
    assert "without a corpus" in bert.made("comparison", data="", example="a cat").text
    assert not bert.made("comparison", data="", example="a cat").claims


def test_the_diagonal_is_decided_over_the_corpus(bert: Case) -> None:
    section = bert.section("comparison")
    (claim,) = section.claims
    lens = bert.setting.lens
    analyses = [lens.analyze({"input_ids": ids}, scopes=METHODS) for ids in bert.inputs("masked")]
    for scope in METHODS:
        shares = np.array([example_maps_own_shares(one[scope]) for one in analyses])
        assert section.numbers[f"diagonal.{scope}"] == pytest.approx(shares.mean(), rel=1e-6)
        assert section.numbers[f"diagonal.{scope}.L3"] == pytest.approx(shares.mean(0)[2], rel=1e-6)
    assert claim.holds in (None, section.numbers["diagonal.ATTNRESLN-N"] > 50 > section.numbers["diagonal.ATTN-N"])
    assert "95 % intervals: ATTN-N" in claim.evidence
    assert len(table(section, "comparison-diagonal").rows) == 4


def test_examples_are_whole(bert: Case) -> None:
    long, short = " ".join(WORDS * 2), " ".join(WORDS[:9])
    for given in (
        {"example": short},
        {"entries": (Entry(id="a", text=long), Entry(id="b", text=short))},
        {"entries": (Entry(id="a", words=("[CLS]", *WORDS * 2, "[SEP]"), pieces=True), Entry(id="b", text=short))},
        {"entries": (Entry(id="a", pair=(long, long)), Entry(id="b", words=tuple(WORDS[:9])))},
        {"entries": (Entry(id="a", words=("[CLS]", "zebra", "[SEP]"), pieces=True), Entry(id="b", text=short))},
    ):
        encoding = example_maps_encoding(replace(bert.setting, **given))  # type: ignore[arg-type]
        assert encoding["input_ids"] == bert.setting.lens.tokenizer(short)["input_ids"]
    only = replace(bert.setting, entries=(Entry(id="a", text=long + " a"), Entry(id="b", text=long)))
    assert len(example_maps_encoding(only)["input_ids"]) == len(WORDS) * 2 + 2  # the shortest, not cut
    marked = example_maps_encoding(replace(bert.setting, example="a cat [SEP] the dog"))
    assert marked["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(NormscopeError, match="--example"):
        example_maps_encoding(replace(bert.setting, entries=(Entry(id="a", words=("zebra",), pieces=True),)))
    pair = example_maps_encoding(replace(bert.setting, entries=(Entry(id="a", pair=("a cat", "the dog")),)))
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]


def test_what_is_missing(bert: Case) -> None:
    assert all(experiment.missing(bert.setting) is None for experiment in PAPER.experiments)
    without = replace(bert.setting, data="", entries=())
    comparison = SECTIONS["comparison"]
    assert "--example" in (comparison.missing(without) or "")
    assert comparison.missing(replace(without, example="a cat")) is None
    assert "tokenizer" in (comparison.missing(replace(without, lens=Analyzer(tiny("bert")), example="a cat")) or "")
    assert [name for name, one in SECTIONS.items() if not one.runs(without)] == ["comparison", "expansion"]
    vision = replace(bert.setting, lens=Analyzer(tiny("vit"), object()), example="a cat")
    for name in ("comparison", "frequency"):
        assert "this model does not read text" in (SECTIONS[name].missing(vision) or "")


def changed(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    apart = (after - before).norm(dim=-1) / before.norm(dim=-1)
    return float(apart.mean()), float((1 - torch.cosine_similarity(before, after, dim=-1)).mean())


@torch.no_grad()
def test_uniform_attention_of_bert(bert: Case) -> None:
    """Against models whose queries are zero, so that all scores of a layer are equal."""
    section = bert.section("uniform")
    lens, masked = bert.setting.lens, bert.inputs("masked")
    right = [encode(lens.loaded, text)[0].tensors["input_ids"] for text in sentences()]
    models = {0: lens.model}
    for layer in (*range(1, 5), -1):
        models[layer] = copy.deepcopy(lens.model)
        for n, module in enumerate(models[layer].bert.encoder.layer, 1):
            if layer in (n, -1):
                module.attention.self.query.weight.zero_()
                module.attention.self.query.bias.zero_()
    hidden: dict[int, list[torch.Tensor]] = {}
    losses: dict[int, list[float]] = {}
    for layer, model in models.items():
        for ids, gold in zip(masked, right, strict=True):
            given = torch.tensor([ids])
            labels = torch.where(given == 4, gold, -100)
            made = model(input_ids=given, labels=labels, output_hidden_states=True)
            hidden.setdefault(layer, []).append(made.hidden_states[-1][0])
            losses.setdefault(layer, []).extend([float(made.loss)] * int((given == 4).sum()))
    for layer in (*range(1, 5), -1):
        place = "all" if layer == -1 else f"L{layer}"
        both = np.array([changed(a, b) for a, b in zip(hidden[0], hidden[layer], strict=True)])
        assert section.numbers[f"uniform.relative.{place}"] == pytest.approx(100 * both[:, 0].mean(), rel=1e-6)
        assert section.numbers[f"uniform.cosine.{place}"] == pytest.approx(both[:, 1].mean(), rel=1e-6)
        assert section.numbers[f"uniform.loss.{place}"] == pytest.approx(np.mean(losses[layer]), rel=1e-6)
        added = np.mean(losses[layer]) - np.mean(losses[0])
        assert section.numbers[f"uniform.added.{place}"] == pytest.approx(added, rel=1e-5, abs=1e-9)
    assert section.numbers["uniform.loss.plain"] == pytest.approx(np.mean(losses[0]), rel=1e-6)
    assert section.numbers["uniform.relative.L1"] > 1
    lengths = np.array([len(ids) for ids in masked])
    both = np.array([changed(a, b) for a, b in zip(hidden[0], hidden[2], strict=True)])
    micro = bert.section("uniform", layer_average="micro").numbers
    assert micro["uniform.relative.L2"] == pytest.approx(100 * (both[:, 0] * lengths).sum() / lengths.sum(), rel=1e-6)


@pytest.mark.parametrize("change", ["relative", "cosine"])
def test_uniform_attention_against_mixing(bert: Case, change: str) -> None:
    section = bert.section("uniform", change=change)
    numbers, by_type = section.numbers, bert.section("layers").numbers
    made = [numbers[f"uniform.{change}.L{layer}"] for layer in range(1, 5)]
    for scope in ("ATTN-W", "ATTNRESLN-N"):
        mixed = [by_type[f"mixing.{scope}.L{layer}.overall"] for layer in range(1, 5)]
        assert numbers[f"uniform.spearman.{scope}"] == pytest.approx(spearmanr(mixed, made).statistic)
        assert numbers[f"uniform.pearson.{scope}"] == pytest.approx(pearsonr(mixed, made).statistic)
    assert all(claim.own for claim in section.claims)
    assert bert.section("uniform", change=change, level=1.0).claims[0].holds == (
        numbers["uniform.spearman.ATTNRESLN-N"] > 0
    )
    rows = table(section, "uniform-change").rows
    assert [row[0] for row in rows] == [1, 2, 3, 4, "all"]
    assert set(pictures(section)) == {"uniform-scatter", "uniform-layers"}
    frame = corpus.open(bert.folder / "uniform").scan("uniform_attention").collect()
    lengths = [len(ids) for ids in bert.inputs("masked")]
    mixed = [one.mean(1) for one in percents(bert, "masked", "ATTNRESLN-N")]
    for layer in range(4):
        of_layer = frame.filter(frame["layer"] == layer)
        by_id = dict(zip(of_layer["id"].to_list(), of_layer[change].to_list(), strict=True))
        x, y = [one[layer] for one in mixed], [by_id[f"data.txt:{n}"] for n in range(1, 13)]
        ranks = np.stack([rankdata(x), rankdata(y)]) - 6.5
        lever = rankdata(lengths) - 6.5
        rest = ranks - np.outer(ranks @ lever / (lever @ lever), lever)  # what the length does not explain
        assert numbers[f"uniform.within.L{layer + 1}"] == pytest.approx(pearsonr(*rest).statistic, rel=1e-6)
    assert [row[0] for row in table(section, "uniform-within").rows] == [1, 2, 3, 4]


@torch.no_grad()
def test_uniform_attention_of_a_causal_model(llama: Case) -> None:
    section = llama.section("uniform")
    lens = llama.setting.lens
    items = [encode(lens.loaded, text)[0].tensors["input_ids"][None] for text in sentences()]
    assert all(4 not in ids for ids in items)
    models = {0: lens.model}
    for layer in (1, 2, 3, -1):
        models[layer] = copy.deepcopy(lens.model)
        for n, module in enumerate(models[layer].model.layers, 1):
            if layer in (n, -1):
                module.self_attn.q_proj.weight.zero_()
    results = {
        layer: [model(input_ids=ids, labels=ids, output_hidden_states=True) for ids in items]
        for layer, model in models.items()
    }
    weights = np.array([ids.shape[1] - 1 for ids in items])
    for layer in (1, 2, 3, -1):
        place = "all" if layer == -1 else f"L{layer}"
        pairs = zip(results[0], results[layer], strict=True)
        both = np.array([changed(a.hidden_states[-1][0], b.hidden_states[-1][0]) for a, b in pairs])
        assert section.numbers[f"uniform.relative.{place}"] == pytest.approx(100 * both[:, 0].mean(), rel=1e-6)
        assert section.numbers[f"uniform.cosine.{place}"] == pytest.approx(both[:, 1].mean(), rel=1e-6)
        loss = np.average([float(one.loss) for one in results[layer]], weights=weights)
        assert section.numbers[f"uniform.loss.{place}"] == pytest.approx(loss, rel=1e-6)
    assert "next token" in section.text
    assert f"{np.log(50):.3f}" in section.text  # what a guess among the vocabulary would be


def test_a_pre_ln_model_has_its_own_names(llama: Case) -> None:
    names = ("ATTN-W", "LNATTN-N", "LNATTNRES-W", "LNATTNRES-N")
    assert attention_block_scopes(llama.setting.lens) == names
    section = llama.section("mixing")
    for scope in names:
        joined = np.concatenate([one.ravel() for one in percents(llama, "plain", scope)])
        # Llama's norms are always computed in float32, so padding in a batch changes the last digits.
        assert section.numbers[f"mixing.{scope}.mean"] == pytest.approx(joined.mean(), rel=1e-6)
        assert section.numbers[f"mixing.{scope}.min"] == pytest.approx(0, abs=1e-12)  # the first token sees itself only
    assert "not trained with masked tokens" in section.text
    assert section.claims[-1].holds is None  # no norm after the residual
    layers = llama.section("layers")
    assert layers.claims[2].holds is None  # no [MASK]
    assert "attends only to itself" in layers.claims[1].ours
    assert "mask" not in table(layers, "fig3-layers").columns
    expansion = llama.section("expansion").numbers
    assert expansion["expansion.code.mean"] == pytest.approx(expansion["expansion.paper.mean"])  # no biases
    assert llama.section("comparison").claims
    assert -1 <= llama.section("frequency").numbers["frequency.LNATTNRES-N.all"] <= 1


def test_methods_of_other_architectures() -> None:
    def names(family: str, head: str | None = None) -> tuple[str, ...]:
        return attention_block_scopes(Analyzer(tiny(family, head)))

    assert names("gpt_neox") == ("ATTN-W", "LNATTN-N", "LNATTNFFRES-N")
    assert names("gemma2") == ("ATTN-W", "LNATTN-N", "LNATTNLN-N", "LNATTNLNRES-W", "LNATTNLNRES-N")
    assert names("bart") == METHODS
    assert names("opt-post") == METHODS


@pytest.mark.parametrize("family", ["gpt_neox", "bart"])
def test_a_parallel_layer_and_an_encoder_decoder(family: str, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    one = case(Analyzer(tiny(family, "Seq2SeqLM" if family == "bart" else None), tokenizer), tmp_path, 4)
    for experiment in PAPER.experiments:
        section = one.section(experiment.name)
        assert section.parts
        assert all(np.isfinite(value) for value in section.numbers.values())
    scope = attention_block_scopes(one.setting.lens)[-1]
    expected = []
    for text in sentences(4):
        result = one.setting.lens.analyze(text)
        expected.append((result.encoder if family == "bart" else result).mixing_ratio(scope).numpy().ravel())
    assert one.section("mixing").numbers[f"mixing.{scope}.mean"] == pytest.approx(
        100 * np.concatenate(expected).mean(), rel=1e-6
    )


def test_few_layers(tmp_path: Path) -> None:
    one = case(Analyzer(tiny("bert", num_hidden_layers=1), toy_tokenizer()), tmp_path, 3)
    assert one.section("depth").claims[0].holds is None
    section = one.section("uniform")
    assert section.claims[0].holds is None
    assert "without a head" in section.text
    assert not any("loss" in key for key in section.numbers)


def test_readings() -> None:
    assert [one.name for one in describe_readings(MixingReadings())] == [
        "masking",
        "mask_seed",
        "mask_draw",
        "table_average",
        "layer_average",
        "special",
        "expansion",
        "level",
        "change",
        "example_layer",
    ]
    assert parse_readings(MixingReadings, ["layer-average=micro", "mask_seed=3"]) == MixingReadings(
        layer_average="micro", mask_seed=3
    )
    with pytest.raises(NormscopeError, match="macro"):
        parse_readings(MixingReadings, ["layer_average=median"])


def test_no_masking_where_it_is_not_wanted(bert: Case) -> None:
    setting = replace(bert.setting, readings=MixingReadings(masking=False))
    plans = [plan for experiment in PAPER.experiments for plan in experiment.runs(setting)]
    assert not any(plan.masked for plan in plans)
    assert {plan.name for plan in plans} == {"plain", "uniform"}
    assert "as requested" in bert.section("mixing", masking=False).text


def test_every_experiment_of_the_paper() -> None:
    names = ["comparison", "mixing", "layers", "depth", "frequency", "expansion", "uniform"]
    assert [experiment.name for experiment in emnlp2021.PAPER.experiments] == names


def test_the_whole_report(bert: Case, tmp_path: Path) -> None:
    """Every table and figure of the paper, by name; a second call computes nothing anew."""
    lens, data = bert.setting.lens, bert.setting.data
    report, page = reproduce(PAPER, lens, data, tmp_path / "out", limit=4)
    assert not report.skipped
    assert [section.name for section in report.sections] == list(SECTIONS)
    assert {path.stem for path in (tmp_path / "out" / "tables").glob("*.csv")} == {
        "table2-mixing",
        "fig3-layers",
        "depth-spearman",
        "frequency-spearman",
        "table8-expansion",
        "expansion-layers",
        "comparison-own",
        "comparison-diagonal",
        "uniform-change",
        "uniform-within",
        "uniform-correlation",
    }
    assert {path.stem for path in (tmp_path / "out" / "figures").glob("*.svg")} == {
        "fig3-heat",
        "fig3-lines",
        "frequency-ranks",
        "expansion-chart",
        "comparison-norms",
        "comparison-weights",
        *(f"comparison-layers-{scope}" for scope in METHODS),
        "uniform-scatter",
        "uniform-layers",
    }
    assert "Table 2. Mixing ratio" in page.read_text()
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*.parquet")}
    again, _ = reproduce(PAPER, lens, data, tmp_path / "out", limit=4, experiments=["uniform", "depth"])
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert again.numbers == pytest.approx({key: report.numbers[key] for key in again.numbers}, rel=1e-9)
