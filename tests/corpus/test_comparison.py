"""Models compared over a corpus, against the same numbers from single analyses, numpy and scipy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from typer.testing import CliRunner

import normscope
from normscope import Analysis, Analyzer, NormscopeError
from normscope.cli import app
from normscope.corpus.comparison import corresponding_layers
from tests.helpers.corpus_runs import toy_lines
from tests.helpers.tiny import tiny
from tests.helpers.toys import letters_tokenizer, save_model, toy_tokenizer

LINES = toy_lines(6)
Values = NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, a tuned one, one that reads letters, a causal one, and data."""
    root = tmp_path_factory.mktemp("compared")
    save_model(root / "base", max_position_embeddings=80)
    tuned = tiny("bert", dtype=torch.float32, max_position_embeddings=80)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(root / "tuned")
    toy_tokenizer().save_pretrained(root / "tuned")
    sizes = {"max_position_embeddings": 80, "num_hidden_layers": 3, "vocab_size": 60}
    tiny("bert", dtype=torch.float32, **sizes).save_pretrained(root / "letters")
    letters_tokenizer().save_pretrained(root / "letters")
    (root / "data.txt").write_text("\n".join(LINES) + "\n")
    return root


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Any:
    return normscope.compare([folder / "base", folder / "tuned"], folder / "data.txt", folder / "two")


def analysed(folder: Path, name: str, line: int) -> Analysis:
    found = Analyzer.from_pretrained(folder / name).analyze(LINES[line])
    assert isinstance(found, Analysis)
    return found


def shares(cells: Values) -> Values:
    made: Values = cells / cells.sum(-1, keepdims=True)
    return made


def test_quantities_are_those_of_single_analyses(folder: Path, tuned: Any) -> None:
    assert tuned.summary.finished
    assert tuned.summary.faults == 0
    for line in (0, 3):
        a, b = analysed(folder, "base", line), analysed(folder, "tuned", line)
        rows = tuned.table().filter(pl.col("id") == f"data.txt:{line + 1}").collect()
        assert len(rows) == 5 * 2
        for row in rows.iter_rows(named=True):
            scope, layer = row["scope"], row["layer"]
            x, y = (one.at(scope, layer).double().numpy() for one in (a, b))
            assert row["other_layer"] == layer
            assert (row["units"], row["unmatched"]) == (len(a.tokens), 0)
            assert row["similarity"] == pytest.approx(stats.spearmanr(x.ravel(), y.ravel()).statistic, abs=1e-6)
            assert row["distance"] == pytest.approx(np.abs(shares(x) - shares(y)).sum(-1).mean() / 2, abs=1e-6)
            for one, name in ((a, "mixing_first"), (b, "mixing")):
                assert row[name] == pytest.approx(float(one.mixing_ratio(scope)[layer].mean()), rel=1e-5)
            for cells, name in ((x, "sink_first"), (y, "sink")):
                assert row[name] == pytest.approx(shares(cells)[1:, 0].mean(), rel=1e-5)
            for one, name in ((a, "ff_first"), (b, "ff")):
                before, after = (shares(one.at(s, layer).double().numpy()) for s in ("attention-block", "ff"))
                expected = np.abs(after - before).sum(-1).mean() / 2 if scope == "ff" else np.nan
                assert row[name] == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_changed_units_and_pairs(folder: Path, tuned: Any) -> None:
    a, b = analysed(folder, "base", 2), analysed(folder, "tuned", 2)
    x, y = (shares(one["layer"].double().numpy()) for one in (a, b))
    rows = tuned.run.scan("compared_units").filter(pl.col("id") == "data.txt:3").collect()
    assert rows["text"].to_list() == list(a.tokens)
    assert rows["received"].to_list() == pytest.approx((y - x).mean((0, 1)).tolist(), abs=1e-6)
    assert sum(rows["received"]) == pytest.approx(0, abs=1e-6)
    mixing = (b.mixing_ratio("layer") - a.mixing_ratio("layer")).mean(0).tolist()
    assert rows["mixing"].to_list() == pytest.approx(mixing, abs=1e-6)
    pairs = tuned.run.scan("compared_pairs").filter(pl.col("id") == "data.txt:3").collect()
    assert pairs["change"].abs().to_list() == pytest.approx(np.sort(np.abs(y - x).ravel())[::-1][:5].tolist(), abs=1e-6)
    first = pairs.row(0, named=True)
    layer, i, j = (int(one[0]) for one in np.where(np.isclose(y - x, first["change"], atol=1e-7)))
    assert (first["layer"], first["output"], first["input"]) == (layer, a.tokens[i], a.tokens[j])


def test_other_tokenizers_are_aligned_by_characters(folder: Path) -> None:
    """Letters are put together to words: the norm of the sum of the letters' vectors, averaged over the word's rows."""
    found = normscope.compare([folder / "base", folder / "letters"], folder / "data.txt", folder / "other", limit=2)
    a, b = analysed(folder, "base", 1), analysed(folder, "letters", 1)
    words = LINES[1].split()
    groups = [[0]]
    for word in words:
        start = groups[-1][-1] + 1
        groups.append(list(range(start, start + len(word))))
    groups.append([groups[-1][-1] + 1])
    assert groups[-1][0] == len(b.tokens) - 1
    rows = found.table().filter((pl.col("id") == "data.txt:2") & (pl.col("scope") == "attention")).collect()
    assert rows["units"].to_list() == [len(words) + 2] * 2
    for layer, other in ((0, 0), (1, 2)):  # two layers against three
        vectors = b.vectors("attention", other).double()
        summed = torch.stack([vectors[:, group].sum(1) for group in groups], 1).norm(dim=-1)
        y = torch.stack([summed[group].mean(0) for group in groups]).numpy()
        x = a.at("attention", layer).double().numpy()
        row = rows.row(layer, named=True)
        assert row["other_layer"] == other
        assert row["similarity"] == pytest.approx(stats.spearmanr(x.ravel(), y.ravel()).statistic, abs=1e-5)
        assert row["distance"] == pytest.approx(np.abs(shares(x) - shares(y)).sum(-1).mean() / 2, abs=1e-5)
        own = shares(b.at("attention", other).double().numpy())[1:, 0].mean()  # between letters, as the model sees it
        assert row["sink"] == pytest.approx(own, rel=1e-5)


def test_the_report(folder: Path, tuned: Any) -> None:
    page = tuned.report.read_text()
    for title in ("What changed", "Similarity of maps", "Movement by the feed-forward", "Tokens that changed most"):
        assert title in page
    table = pl.read_csv(folder / "two" / "tables" / "comparison.csv")
    rows = tuned.table().filter(pl.col("scope") == "layer").collect()
    means = rows.group_by("id").agg(pl.col("similarity").mean())["similarity"]
    row = table.filter((pl.col("scope") == "layer") & (pl.col("quantity") == "similarity of maps")).row(0, named=True)
    assert row["value"] == pytest.approx(means.mean(), rel=1e-9)
    assert row["low"] < row["value"] < row["high"]


def test_more_than_two_models_give_curves(folder: Path) -> None:
    models = [folder / "base", folder / "tuned", folder / "base"]
    found = normscope.compare(models, folder / "data.txt", folder / "three", scopes=["attention", "layer"], limit=4)
    assert found.report is not None
    assert "From model to model" in found.report.read_text()
    same = found.table().filter(pl.col("model") == 3).collect()
    assert same["similarity"].to_list() == pytest.approx([1.0] * len(same))
    assert same["distance"].to_list() == pytest.approx([0.0] * len(same), abs=1e-6)


def test_a_changed_model_is_noticed_when_it_is_resumed(folder: Path, tmp_path: Path) -> None:
    pair = [folder / "base", folder / "tuned"]
    normscope.compare(pair, folder / "data.txt", tmp_path / "c", limit=2)
    assert normscope.compare(pair, folder / "data.txt", tmp_path / "c", limit=2).summary.computed == 0
    with pytest.raises(NormscopeError, match="different model, data or options"):
        normscope.compare([folder / "base", folder / "letters"], folder / "data.txt", tmp_path / "c", limit=2)


def test_layers_of_the_same_relative_depth() -> None:
    assert corresponding_layers(range(6), 6, 12) == ((0, 0), (1, 2), (2, 4), (3, 7), (4, 9), (5, 11))
    assert corresponding_layers(range(3), 3, 3) == ((0, 0), (1, 1), (2, 2))
    assert corresponding_layers([0], 1, 4) == ((0, 0),)


def test_what_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    data, base = folder / "data.txt", folder / "base"
    with pytest.raises(NormscopeError, match="at least two models"):
        normscope.compare([base], data, tmp_path / "x")
    with pytest.raises(NormscopeError, match=r"scope 'atention'.*Did you mean"):
        normscope.compare([base, base], data, tmp_path / "x", scopes="atention")
    tiny("marian", dtype=torch.float32).save_pretrained(tmp_path / "marian")
    with pytest.raises(NormscopeError, match=r"no model of one text|cannot be compared|tokenizer"):
        normscope.compare([base, tmp_path / "marian"], data, tmp_path / "x")
    words = tmp_path / "words.conll"
    words.write_text("the O\ncat O\n\na O\ndog O\n")
    found = normscope.compare([base, folder / "letters"], words, tmp_path / "y")
    assert found.report is None
    assert "aligned by their characters" in found.summary.reasons[0]


def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    names = [str(folder / "base"), str(folder / "tuned"), str(folder / "data.txt")]
    arguments = ["compare", *names, "-o", str(tmp_path / "c"), "--limit", "3", "-s", "layer"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "c" / "report.html").is_file()
    done = CliRunner().invoke(app, ["compare", *names[1:], "-o", str(tmp_path / "d")])
    assert done.exit_code == 1
    assert "at least two models and the data" in done.output
