"""From a model and a corpus to a report, in Python and from the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from normscope import Analyzer, NormscopeError
from normscope.cli.faithfulness import faithfulness_command
from normscope.corpus import shards
from normscope.papers.faithfulness.comparison import compare_methods
from normscope.papers.faithfulness.settings import Settings
from tests.helpers.files import labelled_file
from tests.helpers.tiny import tiny
from tests.helpers.toys import causal, classifier, save_model, toy_tokenizer

READER = {"text": "text", "label": "label"}


def numbers(folder: Path) -> dict[str, float]:
    with (folder / "numbers.csv").open() as file:
        return {row["key"]: float(row["ours"]) for row in csv.DictReader(file)}


def test_a_classifier(tmp_path: Path) -> None:
    report, path = compare_methods(classifier(), labelled_file(tmp_path), tmp_path / "out", reader=READER)
    assert path == tmp_path / "out" / "report.html"
    assert [section.name for section in report.sections] == ["aopc", "accuracy", "curves", "agreement"]
    assert {name for name, _ in report.skipped} >= {"alti+", "alti_logit"}
    found = numbers(tmp_path / "out")
    for erasure in ("mask", "delete"):
        for method in ("exact", "decompx", "rollout", "rollout:ATTNRESLN-N", "alti", "leave_one_out", "random"):
            assert f"comprehensiveness.{erasure}.{method}" in found
            assert f"accuracy.{erasure}.{method}" in found
    # What each token is worth alone is close to what tokens are worth together, and random scores are not.
    assert found["comprehensiveness.mask.leave_one_out"] > found["comprehensiveness.mask.random"]
    assert found["sufficiency.mask.leave_one_out"] < found["sufficiency.mask.random"]
    page = path.read_text()
    assert "Comprehensiveness and sufficiency" in page
    assert "[MASK]" in page
    facts = dict(report.facts)
    assert facts["prediction"] == "the class of a text"
    assert "6 in 6 entries" in facts["contexts"]


def test_a_causal_model(tmp_path: Path) -> None:
    settings = Settings(methods=("exact", "alti_logit", "leave_one_out"), positions=2, target="given")
    report, _ = compare_methods(causal(), labelled_file(tmp_path), tmp_path / "out", reader=READER, settings=settings)
    facts = dict(report.facts)
    assert "2 random positions" in facts["prediction"]
    assert "the actual token" in facts["target"]
    assert facts["masking"].startswith("tokens are replaced by '[UNK]'")
    assert not report.skipped
    found = numbers(tmp_path / "out")
    assert found["accuracy.mask.exact"] != found["kept.mask.exact"]
    assert "--positions 2" in report.command
    assert "--target given" in report.command


def test_one_erasure_only(tmp_path: Path) -> None:
    settings = Settings(methods=("exact",), erasures=("delete",))
    compare_methods(classifier(), labelled_file(tmp_path), tmp_path / "out", reader=READER, settings=settings)
    assert not any(".mask." in key for key in numbers(tmp_path / "out"))


def test_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, settings = labelled_file(tmp_path), Settings(methods=("exact",))
    compare_methods(classifier(), data, tmp_path / "out", reader=READER, settings=settings)
    before = numbers(tmp_path / "out")

    def fail(*given: Any, **options: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(shards, "run_batch", fail)
    compare_methods(classifier(), data, tmp_path / "out", reader=READER, settings=settings)
    assert numbers(tmp_path / "out") == before
    with pytest.raises(NormscopeError, match="contains a run with a different"):
        compare_methods(classifier(), data, tmp_path / "out", reader=READER, settings=Settings(methods=("alti",)))
    other = Analyzer(tiny("bert", "SequenceClassification", num_labels=3), toy_tokenizer())
    other.model.classifier.bias.data += 1  # type: ignore[union-attr, operator]
    with pytest.raises(NormscopeError, match="with a different"):
        compare_methods(other, data, tmp_path / "out", reader=READER, settings=settings)


def test_what_is_refused(tmp_path: Path) -> None:
    data = labelled_file(tmp_path)
    for settings, reason in (
        (Settings(methods=("alti_logit",)), "alti_logit.*is not for BERT"),
        (Settings(methods=("nope",)), "Unknown method 'nope'"),
        (Settings(replacement="zebra"), "'zebra'"),
    ):
        with pytest.raises(NormscopeError, match=reason):
            compare_methods(classifier(), data, tmp_path / "out", reader=READER, settings=settings)
    assert not (tmp_path / "out").exists()
    with pytest.raises(NormscopeError, match="no head"):
        compare_methods(Analyzer(tiny("bert"), toy_tokenizer()), data, tmp_path / "out")
    with pytest.raises(NormscopeError, match="pass its name or path"):
        compare_methods(classifier(), data, tmp_path / "out", engine="ray")
    short = tmp_path / "short.txt"
    short.write_text("the cat\n")
    with pytest.raises(NormscopeError, match=r"No entry could be analysed.*too short"):
        compare_methods(classifier(), short, tmp_path / "out")


def test_the_command(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "SequenceClassification", num_labels=3)
    app = typer.Typer()
    app.command()(faithfulness_command)
    given = [str(labelled_file(tmp_path)), "--model", str(folder), "--reader", "text=text"]
    given += ["--reader", "label=label", "--method", "exact", "--method", "alti", "--by", "mask", "--limit", "4"]
    result = CliRunner().invoke(app, [*given, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "exact" in result.output
    assert "report.html: 3 sections." in result.output
    assert (tmp_path / "out" / "tables" / "aopc-mask.csv").is_file()
    again = CliRunner().invoke(app, [*given, "-o", str(tmp_path / "out")])
    assert again.exit_code == 0
    wrong = CliRunner().invoke(app, [*given, "-o", str(tmp_path / "out"), "--target", "nope"])
    assert wrong.exit_code == 2
