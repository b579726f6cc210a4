"""Charts: their contents, text that is not parsed as mathematics, and identical files for identical charts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from normscope import NormscopeError
from normscope.reports import charts, map_charts

TOKENS = ["[CLS]", "$x^2$", "<b>", "a&b", "␣", "\x00", "[SEP]"]


def texts(figure: Any) -> list[str]:
    root = ElementTree.fromstring(charts.chart_to_svg(figure, "test"))
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def square(scale: float = 1.0) -> Any:
    return np.arange(49.0).reshape(7, 7) * scale


ALL: dict[str, Callable[[], Any]] = {
    "lines": lambda: charts.line_chart({"a": [1, 2], "b": [2, 1]}, x=[1, 2], reference={"a": [1, 1, 1]}),
    "bars": lambda: charts.bar_chart({"a": [1, -2], "b": [2, 1]}, x=[1, 2], errors={"a": [0.1, 0.2]}),
    "histogram": lambda: charts.histogram_chart({"a": [1, 2, 2.5], "b": [0.0, 1, np.nan]}, xlabel="value"),
    "scatter": lambda: charts.scatter_chart([1, 2, 3], [3, 1, 2], xlabel="x", ylabel="y", labels=["$a$", "", "c"]),
    "many points": lambda: charts.scatter_chart(range(4000), range(4000), xlabel="x", ylabel="y"),
    "map": lambda: map_charts.heat_map_chart(square(), rows=TOKENS, columns=TOKENS, label="norm"),
    "large map": lambda: map_charts.heat_map_chart(np.eye(80), rows=range(80), columns=range(80)),
    "long map": lambda: map_charts.heat_map_chart(np.ones((3, 900)), rows=range(3), columns=range(900)),
    "maps": lambda: map_charts.heat_map_charts({"one": square(), "two": square(9)}, rows=TOKENS, columns=TOKENS),
    "own scales": lambda: map_charts.heat_map_charts(
        {"1": square(), "2": square(9)}, rows=TOKENS, columns=TOKENS, shared=False
    ),
}


@pytest.mark.parametrize("name", ["lines", "many points", "own scales"])
def test_the_same_chart_is_the_same_file(name: str) -> None:
    source = charts.chart_to_svg(ALL[name](), "a")
    assert source == charts.chart_to_svg(ALL[name](), "a")
    assert "<dc:date>" not in source


def test_the_same_chart_is_the_same_pdf() -> None:
    first, second = charts.chart_to_pdf(ALL["lines"]()), charts.chart_to_pdf(ALL["lines"]())
    assert first == second
    assert first.startswith(b"%PDF")


@pytest.mark.parametrize("name", ALL)
def test_every_chart_is_whole(name: str) -> None:
    width, height = ElementTree.fromstring(charts.chart_to_svg(ALL[name](), "a")).attrib["viewBox"].split()[2:]
    assert 100 < float(width) < 460  # points: a column of text
    assert 40 < float(height) < 600


def test_lines_are_the_series_and_the_published_are_dashed() -> None:
    figure = charts.line_chart(
        {"weights": [0.1, 0.2], "norms": [0.3, 0.4]},
        x=[1, 2],
        ylabel="share",
        reference={"norms": [0.5, 0.6, 0.7], "other": [0.1, 0.1]},
        ylim=(0, 1),
    )
    (axes,) = figure.axes
    first, second, norms, other, sign = axes.lines
    assert list(first.get_ydata()) == [0.1, 0.2]
    assert second.get_color() == norms.get_color() != first.get_color()
    assert list(norms.get_xdata()) == [1, 2, 3]
    assert norms.is_dashed()
    assert not second.is_dashed()
    assert other.get_label() == "other (published)"
    assert sign.get_label() == "published"
    assert axes.get_ylim() == (0, 1)
    assert [t for t in texts(figure) if t in ("weights", "norms", "layer", "share")] == [
        *("layer", "share", "weights", "norms")
    ]


def test_intervals_of_lines_are_shaded() -> None:
    (axes,) = charts.line_chart({"a": [1.0, 2.0], "b": [2.0, 1.0]}, x=[1, 2], bands={"b": ([1.5, 0.5], [2.5, 2])}).axes
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {(1, 1.5), (2, 0.5), (2, 2.0), (1, 2.5)}
    assert to_hex(band.get_facecolor()[0]) == axes.lines[1].get_color()


def test_a_layer_axis_has_whole_numbers() -> None:
    (axes,) = charts.line_chart({"a": [0.0] * 12}, x=range(1, 13)).axes
    assert list(axes.get_xticks()) == list(range(1, 13))
    (axes,) = charts.line_chart({"a": [0.0] * 48}, x=range(1, 49)).axes
    assert len(axes.get_xticks()) <= 16


@pytest.mark.parametrize("name", ["map", "maps", "own scales"])
def test_tokens_are_written_as_they_are(name: str) -> None:
    found = texts(ALL[name]())
    for token in ("[CLS]", "$x^2$", "<b>", "a&b", "\\x00"):
        assert token in found


def test_labels_of_points_and_marks_are_not_mathematics() -> None:
    assert "$a$" in texts(ALL["scatter"]())
    found = texts(charts.bar_chart({"$s$": [1, 2], "b": [2, 1]}, x=["$1$", "$2$"], marks=["$*$", ""]))
    assert {"$s$", "$1$", "$*$"} <= set(found)


def test_values_in_cells() -> None:
    values = np.array([[0.123, np.nan], [-1.0, 0.5]])
    figure = map_charts.heat_map_chart(values, rows="ab", columns="cd", annotate=True, diverging=True, decimals=1)
    found = texts(figure)
    assert {"0.1", "-1.0", "0.5"} <= set(found)
    assert "nan" not in found
    mappable = figure.axes[0].images[0]
    assert mappable.get_clim() == (-1.0, 1.0)  # a diverging scale is even around zero


def test_scales_are_shared_or_not() -> None:
    def ends(shared: bool) -> list[tuple[float, float]]:
        figure = map_charts.heat_map_charts({"1": square(), "2": square(9)}, rows=TOKENS, columns=TOKENS, shared=shared)
        return [axes.images[0].get_clim() for axes in figure.axes[:2]]

    assert ends(True) == [(0, 432), (0, 432)]
    assert ends(False) == [(0, 48), (0, 432)]


def test_a_map_is_a_small_image_of_its_cells() -> None:
    values = np.arange(12.0).reshape(3, 4)
    (image, *_) = map_charts.heat_map_chart(values, rows="abc", columns="defg").axes[0].images
    cells = image.get_array()
    assert image.get_interpolation() == "none"
    assert cells.shape == (300, 400)  # 100 x 100 pixels a cell: a viewer that smooths leaves the cells apart
    np.testing.assert_array_equal(cells[50::100, 50::100], values)
    assert tuple(image.get_extent()) == (-0.5, 3.5, 2.5, -0.5)
    tokens = [f"token{n}" for n in range(40)]
    values = np.random.default_rng(0).random((40, 40))
    svg = charts.chart_to_svg(
        map_charts.heat_map_charts(dict.fromkeys("abcdef", values), rows=tokens, columns=tokens), "a"
    )
    assert len(svg) < 120_000  # nearly a megabyte with a rectangle for each cell


def test_svg_has_six_digits_except_in_texts() -> None:
    chart = charts.line_chart({"0.123456789": [1 / 3, 2 / 3], "b": [1, 2]}, x=[1, 2], xlabel="x = 1.23456789")
    svg = charts.chart_to_svg(chart, "a")
    assert ">0.123456789<" in svg
    assert ">x = 1.23456789<" in svg
    assert not re.search(r"<[^<>]*\b[1-9]\d*\.\d{6}", svg)


def test_many_points_are_images() -> None:
    assert "<image" in charts.chart_to_svg(ALL["many points"](), "a")
    assert "<image" not in charts.chart_to_svg(ALL["scatter"](), "a")


def test_labels_are_thinned_for_lack_of_room() -> None:
    (axes, _) = ALL["long map"]().axes
    assert len(axes.get_xticks()) < 40
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["0", str(int(axes.get_xticks()[1]))]


def test_histograms_are_shares_in_common_bins() -> None:
    figure = charts.histogram_chart({"a": [0, 0, 1, 9], "b": [1.0]}, xlabel="x", bins=2, limits=(0, 2))
    shares = {patch.get_label(): patch.get_data() for patch in figure.axes[0].patches if not patch.get_fill()}
    assert list(shares["a"].values) == [0.5, 0.5]  # what lies outside is in the last bin
    assert list(shares["b"].values) == [0, 1]
    assert list(shares["a"].edges) == [0, 1, 2]


def test_error_bars_and_marks() -> None:
    figure = charts.bar_chart({"a": [1.0, 2.0]}, x=[1, 2], errors={"a": [0.25, 0.5]}, marks=["*", ""])
    (axes,) = figure.axes
    (bars,) = axes.collections
    assert [tuple(ends[:, 1]) for ends in bars.get_segments()] == [(0.75, 1.25), (1.5, 2.5)]
    assert [text.get_text() for text in axes.texts] == ["*", ""]
    assert axes.texts[0].xy == (0, 1.25)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: charts.line_chart({}, x=[1]), "at least one series"),
        (lambda: charts.line_chart({"a": [1.0]}, x=[1, 2]), "'a' has 1 values for 2"),
        (
            lambda: map_charts.heat_map_chart(np.ones((2, 3)), rows="ab", columns="ab"),
            r"\(2, 3\).*2 rows and 2 columns",
        ),
        (lambda: charts.scatter_chart([1, 2], [1], xlabel="", ylabel=""), "of equal length"),
    ],
)
def test_refusals(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        make()


def test_the_style_stays_within() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    charts.chart_to_svg(ALL["lines"](), "a")
    assert dict(matplotlib.rcParams) == before


def test_ids_come_from_the_salt() -> None:
    def clips(salt: str) -> set[str]:
        return set(re.findall(r'<clipPath id="([^"]+)"', charts.chart_to_svg(ALL["lines"](), salt)))

    assert clips("a").isdisjoint(clips("b"))


def test_bands_are_drawn_around_their_series() -> None:
    figure = charts.line_chart({"a": [1, 2], "b": [3, 4]}, x=[1, 2], bands={"b": ([2.5, 3.5], [3.5, 4.5])})
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (2.5, 4.5)


def test_panels_share_a_legend() -> None:
    figure = charts.panel_chart(
        {"one": {"a": ([1, 2], [1, 2])}, "two": {"a": ([1, 2], [1, 2]), "b": ([0.5, 1], [1, 2])}},
        xlabel="depth",
        reference={"two": ([1, 2], [3, 3])},
    )
    assert [axes.get_title("left") for axes in figure.axes] == ["one", "two"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "published"]
    first, second = figure.axes
    assert first.lines[0].get_color() == second.lines[0].get_color() != second.lines[1].get_color()
    with pytest.raises(NormscopeError, match="at least one line"):
        charts.panel_chart({})
