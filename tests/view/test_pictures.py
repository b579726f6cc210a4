"""Results of a text with pictures, drawn over them: rows of a decoder, scores of an answer, cells in a terminal."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from normscope import Analysis, Analyzer
from normscope.explain.result import Explanation
from normscope.view.terminal.explanation import terminal_explanation
from tests.helpers.compare import refused
from tests.helpers.pictures import picture, picture_model

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")


@cache
def results() -> tuple[Analysis, Explanation]:
    """Two pictures and a question, and the explanation of an answer."""
    model = picture_model("llava")
    lens = Analyzer(model.model, model.processor)
    given = model.ask(picture(16, seed=1), picture(16, seed=2))
    found = lens.analyze(given)
    assert isinstance(found, Analysis)
    return found, lens.explain(given, answer="a red square")


def drawn(axes: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.asarray(axes.images[-1].get_array())
    return array


def test_a_row_over_the_pictures() -> None:
    analysis, _ = results()
    made = analysis.plot("attention", 1, token="this").figure
    row = analysis.tokens.index("this")
    first, second, _ = made.axes
    values = analysis["attention"][1, row].numpy()
    np.testing.assert_allclose(drawn(first), values[3:19].reshape(4, 4))
    np.testing.assert_allclose(drawn(second), values[20:36].reshape(4, 4))
    assert (first.get_title(), second.get_title()) == ("image 1", "image 2")
    assert f"All tokens together: {values.sum():.3g}; image 1 {values[3:19].sum():.3g}" in made.get_supxlabel().replace(
        "\n", " "
    )
    over = analysis.plot(token=-1, image=[picture(16, seed=1), picture(16, seed=2)]).figure
    assert [len(one.images) for one in over.axes[:2]] == [2, 2]


def test_without_a_token_the_whole_map_is_drawn() -> None:
    analysis, _ = results()
    made: Any = analysis.plot("attention", 1)
    assert made.get_xlabel() == "input token"
    assert made.get_xlim()[1] - made.get_xlim()[0] == len(analysis.columns)


def test_outputs_and_pictures_that_are_not_there() -> None:
    analysis, told = results()
    refused(lambda: analysis.plot(token="red"), "'red' is not there")
    refused(lambda: analysis.plot(token=99), "99 is not there", "0 to")
    refused(lambda: analysis.plot(token=-1, image=picture()), "2 pictures", "in order")
    refused(lambda: told.plot(image=[picture()]), "2 pictures")
    refused(lambda: analysis.picture_sink("attention", "image 3"), "no picture 'image 3'", "image 1, image 2")


def test_an_explanation_with_the_patches_of_its_pictures(tmp_path: Path) -> None:
    _, told = results()
    figure: Any = told.plot(image=[picture(16), picture(16)]).figure
    scores = told.scores.sum(0).double().numpy()
    np.testing.assert_allclose(drawn(figure.axes[0]), scores[3:19].reshape(4, 4))
    assert figure.axes[0].get_title() == f"image 1: {scores[3:19].sum():+.3g}"
    table = next(one for one in figure.axes if one.get_ylabel() == "answer")
    names = [tick.get_text() for tick in table.get_xticklabels()]
    assert names[:3] == ["image 1", "image 2", "user"]  # the first token, "the", is apart
    assert told.plot(ax=table) is table
    saved = told.save(tmp_path / "told")
    assert drawn(Explanation.load(saved).plot().figure.axes[0]).shape == (4, 4)
    assert "image 1" in told.to_html(tmp_path / "told.html").read_text(encoding="utf-8")


def test_an_explanation_in_the_terminal() -> None:
    _, told = results()
    file = io.StringIO()
    Console(file=file, width=100, color_system=None, _environ={}, highlight=False).print(terminal_explanation(told))
    lines = file.getvalue().splitlines()
    assert "what the vision tower made of it" in " ".join(lines)
    total = float(told.scores[:, 3:19].double().sum())
    begin = next(n for n, line in enumerate(lines) if line.startswith("image 1: "))
    assert lines[begin].startswith(f"image 1: {total:+.4g}, by patch in % of ")
    cells = [int(cell) for line in lines[begin + 1 : begin + 5] for cell in line.replace("+", " ").split()]
    patches = told.scores.double().sum(0)[3:19]
    most = float(lines[begin].rsplit(" ", 1)[1].rstrip("."))
    np.testing.assert_allclose(cells, 100 * patches / most, atol=1.1)


def test_the_sink_of_a_picture() -> None:
    analysis, _ = results()
    found = analysis.picture_sink("weights", "image 2")
    own = analysis["weights"][:, :, 20:36]
    assert found.shares.shape == own.shape[:2]
    for layer in range(2):
        reading = own[layer][own[layer].sum(-1) > 0]
        best = int((reading / reading.sum(-1, keepdim=True)).mean(0).argmax())
        assert found.tokens[layer] == analysis.tokens[20 + best]
        row = own[layer, -1]
        assert float(found.shares[layer, -1]) == pytest.approx(float(row[best] / row.sum()))
        assert float(found.maps[layer, -1, best]) == 0
        assert float(found.maps[layer, -1].sum()) == pytest.approx(1)
    assert float(found.shares[0, 0]) == 0  # the first token has read no picture
