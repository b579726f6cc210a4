"""Messages of the library in the words of the command line and of the viewer."""

import inspect
import re
from pathlib import Path

import pytest

import normscope
from normscope import Analyzer, corpus
from normscope.view.wording import COMMAND_LINE, VIEWER, Wording


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Shorten it, or ask for truncation=True.", "Shorten it, or use --truncate."),
        ("Use gate='ig'.", "Use --gate ig."),
        ("Use gate='shapley-gaussian' or 'x'.", "Use --gate shapley-gaussian or 'x'."),
        ("Request them with heads=True.", "Request them with --heads."),
        ("fewer layers=[...] or scopes=[...], rows=[...] for", "fewer --layer or --scope, --row for"),
        ("Say format=, one of a, b.", "Say --format, one of a, b."),
        ("Load the model with dtype=torch.float64, and", "Use --dtype float64, and"),
        ("its config has position=3", "its config has position=3"),
        ("its config has my_gate='x', which", "its config has my_gate='x', which"),
        (
            "There is no layer 7: valid are 0 to 5 (or -6 to -1).",
            "There is no layer 8: this model has layers 1 to 6.",
        ),
        (
            "There is no row -8: valid are 0 to 5 (or -6 to -1).",
            "There is no row -8: valid are 1 to 6 (or -6 to -1).",
        ),
        ("of something else: model.dtype: was 'a', is 'b'", "of something else: --dtype: was 'a', is 'b'"),
        (
            "options.layers: was [0, 5], is None; options.x: was 1, is 2.",
            "--layer: was [1, 6], is None; options.x: was 1, is 2.",
        ),
        ("options.unheard_of: was 1, is 2", "options.unheard_of: was 1, is 2"),
        ("nothing to reword", "nothing to reword"),
    ],
)
def test_the_command_line_speaks_of_options(said: str, told: str) -> None:
    assert COMMAND_LINE.reword(said) == told


def test_the_viewer_leaves_out_what_it_cannot_do() -> None:
    assert VIEWER.reword("Shorten it, or ask for truncation=True.") == "Shorten it."
    assert VIEWER.reword("pass position=, or mask a token") == "choose one, or mask a token"
    assert VIEWER.reword("There is no layer 7: valid are 0 to 5") == "There is no layer 7: valid are 0 to 5"


@pytest.mark.parametrize("wording", [COMMAND_LINE, VIEWER], ids=["command line", "viewer"])
def test_phrases_are_those_of_the_library(wording: Wording) -> None:
    """A changed message needs a changed wording here."""
    files = [path for path in Path(normscope.__file__).parent.rglob("*.py") if path.name != "wording.py"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r"\"\s*\n\s*f?\"", "", source)  # strings over several lines
    general = {"flow()", "analyze()"}  # how messages name the functions
    assert not [phrase for phrase in wording.phrases if phrase not in joined and phrase not in general]


def test_arguments_are_those_of_the_library() -> None:
    called = (Analyzer.analyze, Analyzer.flow, Analyzer.from_pretrained, corpus.run)
    known = {name for function in called for name in inspect.signature(function).parameters}
    assert set(COMMAND_LINE.arguments) <= known
