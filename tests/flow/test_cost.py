"""Estimates of flows and explanations: what they count, what they refuse, and when the command line prints them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from normscope import cli
from normscope.flow.cost import EACH_TARGET, FROZEN
from tests.helpers.compare import refused
from tests.helpers.toys import masked, speaker, translator


def test_an_explanation_is_estimated_without_running_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = speaker()
    told = lens.explain("the cat sat", generate=4)
    monkeypatch.setattr("normscope.flow.cost.matmul_rate", lambda *_: 1e9)  # the same at every call
    monkeypatch.setattr(type(lens.model), "forward", None)
    found = lens.estimate_explanation("the cat sat", generate=4)
    assert found.tokens == len(told.columns)
    assert found.memory > 0
    longer = lens.estimate_explanation("the cat sat", generate=8)
    assert longer.seconds > found.seconds
    given = lens.estimate_explanation("the cat sat", answer="on a mat dog")
    assert (given.tokens, given.memory) == (found.tokens, found.memory)
    assert given.seconds < found.seconds  # nothing is written
    one = lens.estimate_explanation("the cat sat on a mat", answer="dog")
    assert given.seconds / one.seconds == pytest.approx((FROZEN + 3 * EACH_TARGET) / FROZEN)


def test_both_sides_of_a_translation_are_estimated() -> None:
    lens = translator()
    written = lens.estimate_explanation("the cat", generate=30)
    assert written.tokens == 31  # with the start token
    assert lens.estimate_explanation("the cat", answer="le chat").seconds < written.seconds


def test_refusals() -> None:
    refused(lambda: speaker().estimate_explanation("the cat"), "generate=", "answer=")
    refused(lambda: speaker().estimate_explanation("the cat", generate=0), "at least 1")
    refused(lambda: masked().estimate_explanation("the cat", answer="sat"), "a model that writes")
    refused(lambda: masked().estimate_explanation("the cat", generate=3), "encoder", "does not generate")


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "the cat", "--generate", "3"],
        ["explain", "the cat", "--chat", "--answer", "a mat"],
        ["flow", "the cat", "--target", "top"],
        ["flow", "the cat", "--generate", "3"],
        ["flow", "the cat", "--chat"],
    ],
)
def test_the_command_line_prints_the_estimate_of_a_long_run(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: speaker())
    assert "estimate" not in CliRunner().invoke(cli.app, command).output
    monkeypatch.setattr("normscope.cli.texts.LONG", 0)
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "estimate: " in result.output
