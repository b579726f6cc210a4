"""`normscope explain`: the answer with its sources in the terminal and in files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normscope import Analyzer, Explanation, cli
from tests.helpers.toys import masked, speaker


def run(lens: Analyzer, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: lens)
    return CliRunner().invoke(cli.app, ["explain", *arguments], env={"COLUMNS": "100"})


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    for name, text in (("a.txt", "the cat sat on a mat\n"), ("b.txt", "the dog ran")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return ["--source", str(tmp_path / "a.txt"), "--source", str(tmp_path / "b.txt")]


def test_the_sources_beside_the_answer(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lens = speaker()
    result = run(lens, "what sat", *sources, "--generate", "4", monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    texts = {"a.txt": "the cat sat on a mat", "b.txt": "the dog ran"}
    told = lens.explain("what sat", sources=texts, generate=4)
    assert told.answer in " ".join(result.output.split())
    for name, score in told.shares.items():
        assert f"{name} {score:+.4g}" in " ".join(result.output.split()), name
    assert f"sum {told.value:+.4g}" in " ".join(result.output.split())


def test_a_chat_with_two_answers_as_json(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--chat", "--answer", "the cat", "--against", "dog", "--json")
    result = run(speaker(), "what sat", *sources, *given, monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["answer"] == "the cat"
    assert [label["side"] for label in told["columns"]].count("other") == 1
    assert sum(told["shares"].values()) == pytest.approx(sum(told["values"]), rel=1e-4)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"told{suffix}" for suffix in (".html", ".png", ".json", ".safetensors")]
    given = [one for path in paths for one in ("-o", str(path))]
    result = run(speaker(), "the cat", "--generate", "3", *given, monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    assert all(path.stat().st_size for path in paths)
    told = Explanation.load(paths[-1])
    assert json.loads(paths[2].read_text(encoding="utf-8"))["by_source"] == pytest.approx(told.by_source)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("x",), "--generate"),
        (("x", "--generate", "2", "--answer", "mat"), "--generate"),
        (("the cat", "--generate", "2", "--source", "/nowhere/a.txt"), "Cannot read the source"),
        (("the cat", "--generate", "2", "--source", __file__, "--source", __file__), "given twice"),
        (("the cat", "--generate", "2", "-o", "told.npz"), "must end in one of"),
        (("the cat", "--generate", "2", "--hops", "1"), "final"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(speaker(), *arguments, monkeypatch=monkeypatch)
    assert result.exit_code == 1
    assert part in result.stderr


def test_an_encoder_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(masked(), "the cat", "--generate", "2", monkeypatch=monkeypatch)
    assert (result.exit_code, "does not generate" in result.stderr) == (1, True)


def test_hints_name_only_options_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = Analyzer(speaker().model.base_model, speaker().tokenizer)  # without a head
    result = run(lens, "the cat", "--answer", "on a mat", monkeypatch=monkeypatch)
    assert result.exit_code == 1
    assert "Choose a --model that has one" in " ".join(result.stderr.split())
    assert "or use `normscope flow` without --target" in " ".join(result.stderr.split())
