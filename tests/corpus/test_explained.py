"""The measures `explain` and `target_scores` give what `Analyzer.explain` and `Analyzer.flow` give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from normscope import Analyzer, corpus
from normscope.cli import app
from tests.helpers.tiny import tiny
from tests.helpers.toys import causal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    tiny("llama", "CausalLM", dtype=torch.float32).save_pretrained(folder)
    causal().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "questions.tsv"
    path.write_text("text\tanswer\nthe cat sat on\tthe mat\na dog ran\tand the bird saw it\n")
    return path


def test_answers_are_explained(model: Path, data: Path, tmp_path: Path) -> None:
    corpus.run(data, model, tmp_path / "run", measures=["explain"], reader={"target": "answer"})
    rows = corpus.open(tmp_path / "run").scan("explain").collect()
    whole: Any = Analyzer.from_pretrained(model).explain("the cat sat on", answer="the mat")
    mine = rows.filter(rows["id"] == "questions.tsv:2")
    for n, label in enumerate(whole.rows):
        some = mine.filter(mine["position"] == label.position)
        assert some["token"].unique().to_list() == [label.token]
        assert some["score"].sum() == pytest.approx(float(whole.values[n]), rel=1e-4, abs=1e-5)
        assert some["value"].to_list() == pytest.approx([float(whole.values[n])] * len(some), rel=1e-4)
    for source, value in whole.by_source.items():
        assert mine.filter(mine["source"] == source)["score"].sum() == pytest.approx(value, rel=1e-3, abs=1e-4)
    assert mine.filter(mine["source"] == "(no input)")["score"].sum() == pytest.approx(
        float(whole.remainder.sum()), abs=1e-4
    )


def test_answers_may_be_generated(model: Path, data: Path, tmp_path: Path) -> None:
    settings = {"explain": {"generate": 2, "against": None}}
    summary = corpus.run(data, model, tmp_path / "run", measures=["explain"], settings=settings)
    assert summary.faults == 0
    rows = corpus.open(tmp_path / "run").scan("explain").collect()
    assert rows["id"].n_unique() == 2
    whole: Any = Analyzer.from_pretrained(model).explain("a dog ran", generate=2, against=None)
    assert rows.filter(rows["id"] == "questions.tsv:3")["answer"][0] == whole.answer


def test_targets_are_explained_by_token(model: Path, data: Path, tmp_path: Path) -> None:
    settings = {"target_scores": {"target": "cat", "against": "dog"}}
    corpus.run(data, model, tmp_path / "run", measures=["target_scores"], settings=settings)
    rows = corpus.open(tmp_path / "run").scan("target_scores").collect()
    whole = Analyzer.from_pretrained(model).flow("the cat sat on", target="cat", against="dog")
    mine = rows.filter(rows["id"] == "questions.tsv:2")
    assert mine["token"].to_list() == list(whole.tokens)
    assert mine["score"].to_list() == pytest.approx(whole.scores.tolist(), rel=1e-4, abs=1e-5)
    assert sum(mine["score"]) + mine["remainder"][0] == pytest.approx(mine["value"][0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("measure", "settings", "said"),
    [
        ("explain", {}, "There is no answer to explain"),
        ("explain", {"explain": {"generates": 2}}, "no setting generates"),
        ("target_scores", {"target_scores": {"target": "unicorn"}}, "unicorn"),
        ("comparison", {}, "normscope compare"),
    ],
)
def test_entries_that_cannot_be_explained_are_faults(
    model: Path, data: Path, tmp_path: Path, measure: str, settings: Any, said: str
) -> None:
    summary = corpus.run(data, model, tmp_path / "run", measures=[measure], settings=settings)
    assert summary.faults == 2
    assert said in summary.reasons[0]


def test_settings_on_the_command_line(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["corpus", str(data), "-m", str(model), "-o", str(tmp_path / "run"), "--measures", "explain"]
    done = CliRunner().invoke(app, [*arguments, "--set", "explain.generate=2"])
    assert done.exit_code == 0, done.output
    assert corpus.open(tmp_path / "run").manifest["options"]["settings"] == {"explain": {"generate": 2}}
    done = CliRunner().invoke(app, [*arguments, "--set", "generate=2"])
    assert (done.exit_code, "MEASURE.KEY=VALUE" in done.output) == (1, True)
