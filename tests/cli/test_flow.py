"""`normscope flow`: the last hidden states or a logit by input token, in the terminal and in files."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from normscope import Analyzer, cli
from normscope.flow.result import Flow, Scores
from normscope.labels import Label
from normscope.view.terminal.flow import terminal_flow_scores
from tests.helpers.toys import SOURCE, TARGET, masked, named_classifier, speaker, toy_lens, translator

TEXT = "the cat sat on a"


def run(lens: Analyzer, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: lens)
    return CliRunner().invoke(cli.app, ["flow", *arguments])


def test_the_scores_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score, the contribution of the biases, and the sum: the same numbers as in Python."""
    lens = speaker()
    result = run(lens, TEXT, "--target", "mat", monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    flow = lens.flow(TEXT, target="mat")
    assert f"= {flow.value:.4g}" in result.output
    for token, score in zip(flow.tokens, flow.scores.tolist(), strict=True):
        assert re.search(rf"\d +{re.escape(token)} +{re.escape(f'{score:+.4g}')}", result.output), token
    assert re.search(rf"biases +{re.escape(f'{flow.remainder:+.4g}')}", result.output)
    assert "completeness" in result.output


def test_two_targets_another_method_and_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--target", "mat", "--against", "cat", "--position", "3", "--method", "decompx")
    result = run(speaker(), TEXT, *given, monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    assert "'mat' minus 'cat' at token 3" in result.output
    assert "[decompx]" in result.output
    assert (
        result.output
        == run(speaker(), TEXT, *given[:-4], "--position", "-4", *given[-2:], monkeypatch=monkeypatch).output
    )


def test_a_gate_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = speaker()
    result = run(lens, TEXT, "-t", "mat", "--gate", "tangent", monkeypatch=monkeypatch)
    first = lens.flow(TEXT, target="mat", gate="tangent").scores[0].item()
    assert f"{first:+.4g}" in result.output
    assert f"{first:+.4g}" != f"{lens.flow(TEXT, target='mat').scores[0].item():+.4g}"
    assert "Shapley" in run(lens, TEXT, "-t", "mat", "--gate", "shapley", monkeypatch=monkeypatch).output
    refused = run(lens, TEXT, "-t", "mat", "--gate", "shapley", monkeypatch=monkeypatch)
    assert (refused.exit_code, "--gate ig" in refused.stderr) == (1, True)


def shown(flow: Flow) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_flow_scores(flow))
    return console.export_text()


@pytest.mark.parametrize("contrast", [False, True])
@pytest.mark.parametrize(
    ("scores", "remainder", "remarked"),
    [
        ([3.0, -3.0], 0.5, False),  # most of the value, and little beside what the tokens do
        ([3.0, -3.0], -6.0, False),
        ([3.0, -3.0], 6.5, True),
        ([3.0, -3.0], -6.5, True),
        ([1.0, 1.0], float("nan"), False),
    ],
)
def test_the_remark_on_biases(scores: list[float], remainder: float, remarked: bool, contrast: bool) -> None:
    """If they weigh more than all scores together; the advice is left out once it has been followed."""
    labels = tuple(Label(token, "decoder", n) for n, token in enumerate(("the", "cat")))
    to = Scores("logit of 'mat'", sum(scores) + remainder, torch.tensor(scores), remainder, 0.0, contrast)
    said = shown(Flow("exact", labels, labels, (0,), to))
    assert ("Biases, which belong to no token" in said) == remarked
    assert ("--against" in said) == (remarked and not contrast)
    assert ("move the difference more" in said) == (remarked and contrast)


def test_a_flow_knows_whether_its_target_is_a_difference() -> None:
    for method in ("exact", "decompx", "alti", "gradient_x_input"):
        assert speaker().flow(TEXT, target=("mat", "cat"), method=method).to.contrast  # type: ignore[union-attr]
        assert not speaker().flow(TEXT, target="mat", method=method).to.contrast  # type: ignore[union-attr]


def test_methods_without_parts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(speaker(), TEXT, "-t", "top", "--method", "alti", monkeypatch=monkeypatch)
    assert "do not add up to it" in result.output.replace("\n", " ")


def test_classes_masks_and_translations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "logit of 'good'" in run(named_classifier(), "the cat", "-t", "good", monkeypatch=monkeypatch).output
    assert "logit of 'good'" in run(named_classifier(), "the cat", "-t", "1", monkeypatch=monkeypatch).output
    assert "at token 3" in run(masked(), "the [MASK] sat", "-t", "cat", monkeypatch=monkeypatch).output
    result = run(translator(), SOURCE, "--pair", TARGET, "-t", "top", monkeypatch=monkeypatch)
    assert "(encoder)" in result.output
    assert "(decoder)" in result.output


def test_a_long_text_lists_the_largest_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.view.terminal.flow.LISTED", 3)
    result = run(speaker(), TEXT, "-t", "mat", monkeypatch=monkeypatch)
    assert "The 3 largest of 6 scores" in result.output


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf", "json", "html", "safetensors"])
def test_files(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"scores.{suffix}"
    for lens, given in ((speaker(), (TEXT,)), (translator(), (SOURCE, "--pair", TARGET))):
        result = run(lens, *given, "-t", "top", "-o", str(path), monkeypatch=monkeypatch)
        assert result.exit_code == 0, result.output
        assert f"wrote {path}" in result.output.replace("\n", "")
        assert path.stat().st_size > 500
    if suffix == "json":
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["format"] == "normscope-flow-1"
        total = sum(content["to"]["scores"]) + content["to"]["remainder"]
        assert total == pytest.approx(content["to"]["value"], rel=1e-4)
        assert len(content["to"]["scores"]) == len(content["columns"])
    if suffix == "html":
        assert "<script" in path.read_text(encoding="utf-8")
    if suffix == "safetensors":
        saved, made = Flow.load(path), translator().flow((SOURCE, TARGET), target="top")
        assert torch.equal(saved.scores, made.scores)
        assert (saved.value, saved.rows, saved.columns) == (made.value, made.rows, made.columns)
    if suffix == "svg":
        text = path.read_text(encoding="utf-8")
        assert "biases" in text
        assert "logit of" in text


def test_invalid_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(lens: Analyzer, *arguments: str) -> str:
        result = run(lens, *arguments, monkeypatch=monkeypatch)
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("error: ")
        return result.stderr

    assert "no head" in refusal(toy_lens(), "the cat", "-t", "top")
    assert "not in the vocabulary" in refusal(speaker(), TEXT, "-t", "zzzz")
    assert "There is no class" in refusal(named_classifier(), "the cat", "-t", "great")
    assert "There is no class" in refusal(named_classifier(), "the cat", "-t", "7")
    for position in ("99", "-7"):
        said = f"error: There is no position {position}: valid are 1 to 6 (or -6 to -1).\n"
        assert refusal(speaker(), TEXT, "-t", "top", "--position", position) == said
    assert "Unknown method" in refusal(speaker(), TEXT, "-t", "top", "--method", "magic")
    for option in (("--against", "cat"), ("--position", "1")):
        assert f"{option[0]} needs a target: add --target" in refusal(speaker(), TEXT, *option)
    assert "--target top" in refusal(speaker(), TEXT, "--method", "gradient_x_input")
    assert "pass --position, or mask" in refusal(masked(), "the cat", "-t", "top")
    assert "use --truncate" in refusal(toy_lens(), "the cat " * 99)
    for suffix in ("npz", "txt"):
        assert "must end in one of .html" in refusal(speaker(), TEXT, "-t", "top", "-o", str(tmp_path / f"x.{suffix}"))
    for options in ((), ("-t", "top")):
        assert "leave --pair or --chat out" in refusal(speaker(), TEXT, "--pair", "a cat", "--chat", *options)
    assert "chat template" in refusal(translator(), TEXT, "--pair", "a cat", "--chat", "-t", "top")
    for option in (("--scope", "layer"), ("--layer", "1"), ("--row", "1"), ("--side", "decoder"), ("--heads",)):
        assert run(translator(), SOURCE, "-t", "top", *option, monkeypatch=monkeypatch).exit_code == 2
    zero = run(speaker(), TEXT, "-t", "top", "--position", "0", monkeypatch=monkeypatch)
    assert zero.exit_code == 2


def test_the_last_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a target, the map of the last layer: the same numbers as in Python."""
    lens = speaker()
    result = run(lens, TEXT, monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    assert "From the input to the last hidden states: contribution  [exact]" in result.output
    assert "worst completeness error" in result.output
    found = lens.flow(TEXT)
    lines = result.output.splitlines()[2 : 2 + len(found.rows)]
    assert [line.split()[1:] for line in lines] == [[f"{cell:.1f}" for cell in row] for row in found.map.tolist()]
    assert "completeness" not in run(lens, TEXT, "--method", "rollout", monkeypatch=monkeypatch).output
    two = run(translator(), SOURCE, "--pair", TARGET, monkeypatch=monkeypatch)
    assert "(decoder | encoder tokens)" in two.output


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf", "json", "html", "safetensors"])
def test_files_of_the_last_hidden_states(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"flow.{suffix}"
    result = run(speaker(), TEXT, "-o", str(path), monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    assert re.match(r"6 tokens, \d+ layers \[exact\], worst completeness error .*: wrote ", result.output)
    assert path.stat().st_size > 500
    if suffix == "json":
        content = json.loads(path.read_text(encoding="utf-8"))
        maps = speaker().flow(TEXT).maps
        assert torch.allclose(torch.tensor(content["maps"], dtype=maps.dtype), maps, rtol=1e-6)
    if suffix == "html":
        page = path.read_text(encoding="utf-8")
        assert "<script" not in page
        assert page.count("<td ") == speaker().flow(TEXT).map.numel()
    if suffix == "safetensors":
        assert torch.equal(Flow.load(path).maps, speaker().flow(TEXT).maps)


def test_a_narrow_terminal_lists_the_strongest_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    assert "Strongest" in run(speaker(), TEXT, monkeypatch=monkeypatch).output
