"""Figures: their contents, tokens drawn literally, and no change of global state."""

import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.view.figure.maps import figure_of
from normscope.view.figure.style import save_figure
from tests.helpers.fakes import NASTY, SENTENCE, fake, fake_picture
from tests.helpers.toys import SCOPES


def draw(analysis: Analysis, scope: str | None = None, layer: int | None = None) -> Figure:
    return figure_of(analysis.plot(scope, layer))


def labels(figure: Figure, axis: str, place: int = 0) -> list[str]:
    return [text.get_text() for text in getattr(figure.axes[place], f"get_{axis}ticklabels")()]


def maps(figure: Figure) -> list[matplotlib.axes.Axes]:
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>" and axes.axison]


def svg_texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_one_map() -> None:
    analysis = fake()
    figure = draw(analysis, "attention", 2)
    axes, bar = figure.axes
    assert axes.get_title() == "ATTN-N, layer 3"
    assert labels(figure, "x") == labels(figure, "y") == list(SENTENCE)
    assert bar.get_ylabel() == "norm of the contribution"
    assert axes.get_aspect() == 1
    assert axes.yaxis_inverted()  # the first output is on top
    drawn = axes.collections[0].get_array()
    assert np.array_equal(drawn.reshape(11, 11), analysis["ATTN-N"][2].double().numpy())


def test_weights_are_named_as_such() -> None:
    assert draw(fake(), "ATTN-W", 0).axes[1].get_ylabel() == "attention weight"


def test_a_diagonal_beyond_the_scale_is_mentioned() -> None:
    figure = draw(fake(), "layer", 5)
    assert "(the token itself: up to 8.51, beyond the scale)" in figure.axes[1].get_ylabel()


def test_layers_by_scopes() -> None:
    figure = draw(fake())
    panels = maps(figure)
    assert len(panels) == 6 * len(SCOPES)
    titles = [axes.get_title().replace("\n", "") for axes in panels[: len(SCOPES)]]
    assert titles == list(SCOPES)
    assert [axes.get_ylabel() for axes in panels[:: len(SCOPES)]] == [f"layer {k}" for k in range(1, 7)]
    column = [axes.collections[0].get_clim() for axes in panels[3 :: len(SCOPES)]]
    assert len(set(column)) == 1
    caption = figure.get_supxlabel().replace("\n", " ")
    assert "The colour scale is shared within a column" in caption
    assert "[CLS] colin fleming" in caption


def test_a_scope_alone_gives_its_layers() -> None:
    panels = maps(draw(fake(layers=(1, 4, 5)), "ATTN-N"))
    assert [axes.get_title() for axes in panels] == ["layer 2", "layer 5", "layer 6"]
    assert len({axes.collections[0].get_clim() for axes in panels}) == 1


def test_a_layer_alone_gives_its_scopes() -> None:
    figure = draw(fake(), layer=3)
    assert [axes.get_title() for axes in maps(figure)] == list(SCOPES)
    assert figure.get_suptitle() == "layer 4"


@pytest.mark.parametrize(("n", "written"), [(1, 1), (60, 60), (61, 31), (70, 35), (128, 43)])
def test_labels_thin_out(n: int, written: int) -> None:
    figure = draw(fake([f"t{k}" for k in range(n)], layers=(0,)), "ATTN-N", 0)
    assert len(labels(figure, "x")) == len(labels(figure, "y")) == written
    assert max(figure.get_size_inches()) < 9


@pytest.mark.parametrize("suffix", ["png", "svg", pytest.param("pdf", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "choice", [("ATTN-N", 2), ("layer", None), (None, 2), (None, None)], ids=["map", "layers", "scopes", "all"]
)
@pytest.mark.parametrize("tokens", [NASTY, ("one",)], ids=["nasty", "one"])
def test_every_figure_in_every_format(
    tokens: Sequence[str], choice: tuple[str | None, int | None], suffix: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_figure(draw(fake(tokens, layers=(0, 2)), *choice), tmp_path / f"figure.{suffix}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"figure.{suffix}"]


def test_text_of_an_svg_is_literal_text(tmp_path: Path) -> None:
    with matplotlib.rc_context({"text.usetex": False, "text.parse_math": True}):
        texts = svg_texts(save_figure(draw(fake(NASTY), "ATTN-N", 2), tmp_path / "x.svg"))
    for token in ("$x^2$", "[bold]x[/bold]", "&amp;<b>", "</script>…lert(1)>", "\\u202eoverride"):
        assert texts.count(token) == 2
    assert "ATTN-N, layer 3" in texts


def test_vector_files_of_small_maps_hold_no_image(tmp_path: Path) -> None:
    assert "<image" not in save_figure(draw(fake(), "ATTN-N", 2), tmp_path / "x.svg").read_text().split("axes_2")[0]


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    for suffix in ("svg", "pdf", "png"):
        first, second = (save_figure(draw(fake(), "ATTN-N", 2), tmp_path / f"{k}.{suffix}") for k in "ab")
        assert first.read_bytes() == second.read_bytes()


def test_sides_are_separated_and_rows_may_be_few() -> None:
    figure = draw(fake(("le", "chat", "dort"), source=("the", "cat"), rows=[2]), "ATTN-N", 0)
    assert labels(figure, "y") == ["dort"]
    assert labels(figure, "x") == ["le", "chat", "dort", "the", "cat"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [2.5]


def test_nothing_global_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    settings = [name for name in matplotlib.rcParams if name != "backend"]  # reading that one imports pyplot
    before = {name: matplotlib.rcParams[name] for name in settings}
    save_figure(draw(fake()), tmp_path / "x.png")
    assert {name: matplotlib.rcParams[name] for name in settings} == before


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NormscopeError, match=r"pip install 'normscope\[plot\]'"):
        draw(fake())


def test_unknown_choices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="No scope"):
        draw(fake(), "nothing")
    with pytest.raises(NormscopeError, match="Layer 7"):
        draw(fake(), layer=7)
    with pytest.raises(NormscopeError, match=r"known formats are \.svg, \.pdf, \.png"):
        save_figure(draw(fake(), "ATTN-N", 0), tmp_path / "x.gif")


def test_sides_are_named_above_the_map_and_their_labels_coloured() -> None:
    figure = draw(fake(("le", "chat", "dort"), source=("the", "cat")), "ATTN-N", 0)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["decoder", "encoder"]
    assert axes.get_xlabel() == "input token (decoder | encoder tokens)"
    colours = [text.get_color() for text in axes.get_xticklabels()]
    assert len(set(colours[:3])) == len(set(colours[3:])) == 1
    assert colours[0] != colours[3]
    caption = draw(fake(("le", "chat"), source=("the", "cat"))).get_supxlabel().replace("\n", " ")
    assert "Left of the white line: decoder tokens, right of it: encoder tokens." in caption
    assert "decoder: le chat | encoder: the cat" in caption


def test_columns_of_a_side_that_gives_nothing_are_left_out() -> None:
    analysis = fake(("le", "chat", "dort"), source=("the", "cat"))
    analysis["ATTN-N"][..., :3] = 0
    figure = draw(analysis, "ATTN-N", 0)
    assert labels(figure, "x") == ["the", "cat"]
    assert figure.axes[0].get_xlabel() == "input token (encoder tokens)"
    assert "columns input tokens (encoder tokens)" in draw(analysis, "ATTN-N").get_supxlabel().replace("\n", " ")
    analysis["ATTN-N"].zero_()
    assert len(labels(draw(analysis, "ATTN-N", 0), "x")) == 5


def test_long_decoder_names_are_broken() -> None:
    scopes = ("XATTN-N", "ATTNRESLNXATTNRESLNFFRES-N")
    panels = maps(draw(fake(("le", "chat"), source=("the", "cat"), scopes=scopes)))
    assert [axes.get_title() for axes in panels[:2]] == ["XATTN-N", "ATTNRESLN\nXATTNRESLN\nFFRES-N"]


def test_the_axes_of_one_map_are_returned() -> None:
    axes: Any = fake().plot("ATTN-N", 2)
    assert axes.get_title() == "ATTN-N, layer 3"
    assert axes in axes.figure.axes
    assert axes._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("choice", "shape"), [({}, (6, 8)), ({"scope": "ATTN-N"}, (2, 3)), ({"layer": 3}, (2, 4))], ids=str
)
def test_the_array_of_axes_of_several(choice: dict[str, Any], shape: tuple[int, int]) -> None:
    grid: Any = fake().plot(**choice)
    assert grid.shape == shape
    assert all(axes.figure is grid.figure for axes in grid.flat)
    assert grid._repr_png_().startswith(b"\x89PNG")


def test_given_axes() -> None:
    left, right = Figure().subplots(1, 2)
    assert fake().plot("ATTN-N", 2, ax=right) is right
    assert right.get_title() == "ATTN-N, layer 3"
    assert not left.get_title()
    assert fake_picture().plot("ATTN-N", 0, ax=left) is left
    assert left.get_title() == "ATTN-N, layer 1, output [CLS]"


def test_other_colours_shares_and_numbers() -> None:
    analysis = fake()
    axes: Any = analysis.plot("ATTN-N", 2, cmap="magma", normalize=True, annotate=True)
    (mesh,) = axes.collections
    assert mesh.get_cmap().name == "magma"
    shares = analysis["ATTN-N"][2].double() / analysis["ATTN-N"][2].double().sum(-1, keepdim=True)
    np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(shares.shape), shares)
    assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for value in shares.flatten().tolist()]
    assert "as a share of its row" in axes.figure.axes[1].get_ylabel()
    picture: Any = fake_picture().plot("ATTN-N", 0, normalize=True, annotate=True, cmap="viridis")
    assert len(picture.texts) == 6


@pytest.mark.parametrize("options", [{}, {"scope": "ATTN-N"}, {"layer": 1}], ids=str)
def test_several_maps_take_no_axes_and_no_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(NormscopeError, match=r"^ax= is for one map: give a scope and a layer"):
        fake().plot(**options, ax=Figure().subplots())
    with pytest.raises(NormscopeError, match=r"^annotate= is for one map"):
        fake().plot(**options, annotate=True)


@pytest.mark.parametrize("cmap", ["nothing", 5])
def test_unknown_colours(cmap: Any) -> None:
    with pytest.raises(NormscopeError, match="Unknown colour map"):
        fake().plot("ATTN-N", 0, cmap=cmap)
