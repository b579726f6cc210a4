"""Maps as matplotlib figures: one map that a paper can print, or small multiples of layers and scopes."""

from __future__ import annotations

import math
import os
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from normscope.analysis import Analysis
from normscope.engine.files import write_atomically
from normscope.errors import NormscopeError
from normscope.view.formats import FIGURES, NO_MATPLOTLIB
from normscope.view.labels import (
    Labelled,
    Scale,
    Values,
    contributing,
    model_label,
    own_cells,
    scale_of,
    shorten,
    sides_note,
    spans_of,
    tokens_of,
    visible,
)
from normscope.view.look import PLAIN, Look, annotate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

    from normscope.view.axes import AxesGrid

SANS = ("Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")
# Scripts that the text fonts lack: matplotlib takes each missing glyph from the first font that has it.
SCRIPTS = (
    *("Noto Sans CJK JP", "Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Malgun Gothic", "Noto Sans Arabic"),
    *("Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Emoji", "Segoe UI Symbol", "Apple Symbols", "DejaVu Sans"),
)
STYLE: dict[str, Any] = {
    "text.usetex": False,
    "text.parse_math": False,  # a token such as $x^2$ is text
    "svg.fonttype": "none",  # text stays text in vector files
    "svg.hashsalt": "normscope",
    "pdf.fonttype": 42,
    "axes.titlesize": 8,
    "axes.labelsize": 7,
    "axes.linewidth": 0.4,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 300,
    "image.interpolation": "nearest",
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.03,
}
WIDTH = 7.2  # inches: a page's text
SIDE = 5.4  # inches that the longer side of a single map may take
LABELLED = 60  # tokens up to which every one is written
VECTOR_CELLS = 20_000  # above, cells are drawn as an image: a vector file of that many rectangles opens slowly
GREY = "#555555"
OTHER = "#0b57a4"  # labels of the other side: the encoder's among a decoder's columns


def figure_of(axes: Axes | AxesGrid) -> Figure:
    """The figure that axes of `plot` are in."""
    return cast("Figure", axes.figure)


def plot(
    analysis: Analysis,
    scope: str | None = None,
    layer: int | None = None,
    *,
    ax: Axes | None = None,
    look: Look = PLAIN,
) -> Axes | AxesGrid:
    """One map when both are given, its layers for a scope, its scopes for a layer, layers x scopes with neither.

    `layer` is the model's layer index, counted from 0; titles count from 1.
    """
    if scope is not None:
        analysis = contributing(analysis, scope)
    scopes = analysis.scopes
    layers = analysis.layers if layer is None else (analysis.layers[analysis.layer_position(layer)],)
    one = scope is not None and layer is not None
    if not one and (ax is not None or look.annotate):
        what, example = "ax" if ax is not None else "annotate", f"plot('{scopes[-1]}', layer={layers[-1]})"
        raise NormscopeError(f"{what}= is for one map: give a scope and a layer too, as in {example}.")
    made: Axes | AxesGrid
    with style():
        if one:
            values = look.values(analysis, scopes[0], layers[0])
            title = f"{scopes[0]}, layer {layers[0] + 1}"
            made = single(analysis, values, title, look.quantity(scopes[0]), ax=ax, look=look)
        elif scope is not None:
            titles = [f"layer {k + 1}" for k in layers]
            made = _wrapped(analysis, [(scopes[0], layer) for layer in layers], titles, look)
        elif layer is not None:
            made = _wrapped(analysis, [(scope, layers[0]) for scope in scopes], list(scopes), look)
        else:
            made = _grid(analysis, scopes, layers, look)
        if ax is None:
            figure_of(made).draw_without_rendering()  # makes every tick label now, in this style
        return made


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as .svg, .pdf or .png."""
    target = Path(path)
    kind = target.suffix.lower().removeprefix(".")
    if f".{kind}" not in FIGURES:
        known = ", ".join(FIGURES)
        raise NormscopeError(f"Cannot write a figure to {target}: known formats are {known}.")
    # Without dates the same figure gives the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with style(), write_atomically(target) as temporary:
        figure.savefig(temporary, format=kind, metadata=metadata)
    return target


def single(
    labelled: Labelled, values: Values, title: str, what: str, *, ax: Axes | None = None, look: Look = PLAIN
) -> Axes:
    """One map (rows, columns) with its tokens, in axes of its own or in those given."""
    rows, columns = values.shape
    cell = min(0.27, SIDE / max(rows, columns))
    width, height = max(cell * columns, 1.1), max(cell * rows, 1.1)
    size = min(max(cell * 72 * 0.85, 5.0), 7.5)
    margin = size / 72 * 0.62 * min(max(len(visible(label.token)) for label in labelled.columns), 18)
    axes = blank(width + margin + 1.1, height + margin + 0.7).add_subplot(axes_class=map_axes()) if ax is None else ax
    scale = scale_of([values], own_cells(labelled))
    image = _paint(axes, values, scale, labelled, look=look)
    if look.annotate:
        annotate(axes, values, scale, look, size)
    axes.set_title(title, pad=13 if _name_sides(axes, labelled) else 5)
    _label(axes, labelled, size)
    axes.set_xlabel("input token" + sides_note(labelled))
    axes.set_ylabel("output token")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03, aspect=28, extend=extend(scale))
    tidy(bar, scale, _bar_label(what, scale))
    return axes


def _wrapped(analysis: Analysis, maps: Sequence[tuple[str, int]], titles: Sequence[str], look: Look) -> AxesGrid:
    """Maps of one scope or one layer, in reading order. A scope's maps share a scale; each scope has its own."""
    count = len(maps)
    across = min(count, 3 if count in (3, 5, 6, 9) else 4)
    down = math.ceil(count / across)
    one_scope = len({scope for scope, _ in maps}) == 1
    beside = 0.12 if one_scope else 0.42  # gap, or gap and colour bar
    side = min((WIDTH - 1.1) / across - beside, 2.4)
    wide, high = _panel(analysis, side)
    size = side / max(len(analysis.rows), len(analysis.columns)) * 72 * 0.85
    written = size >= 4.5
    margin = 0.45 if written else 0.0
    figure = blank(across * (wide + beside) + 1.1, down * (high + 0.2) + margin + 0.45)
    grid = figure.subplots(down, across, squeeze=False, subplot_kw={"axes_class": map_axes()})
    own = own_cells(analysis)
    scales = {
        scope: scale_of([look.values(analysis, *entry) for entry in maps if entry[0] == scope], own)
        for scope, _ in maps
    }
    image = None
    for axes, (scope, layer), title in zip(grid.flat, maps, titles, strict=False):
        image = _paint(axes, look.values(analysis, scope, layer), scales[scope], analysis, count, look=look)
        axes.set_title(title, pad=3, fontsize=7)
        _label(axes, analysis, min(size, 6.5)) if written else _bare(axes)
        if not one_scope:
            bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03, aspect=24, extend=extend(scales[scope]))
            tidy(bar, scales[scope])
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    if written:
        for position, axes in enumerate(grid.flat[:count]):
            if position % across:
                axes.set_yticklabels([])
            if position + across < count:
                axes.set_xticklabels([])
    if one_scope and image is not None:
        scope = maps[0][0]
        bar = figure.colorbar(image, ax=grid, fraction=0.03, pad=0.02, aspect=40, extend=extend(scales[scope]))
        tidy(bar, scales[scope], _bar_label(look.quantity(scope), scales[scope]))
        figure.suptitle(scope, fontsize=8)
        _caption(figure, analysis, "All maps share the colour scale", scales.values(), listed=not written)
    else:
        figure.suptitle(f"layer {maps[0][1] + 1}", fontsize=8)
        _caption(figure, analysis, "Each map has its own colour scale", scales.values(), listed=not written)
    return grid_of(grid)


def _grid(analysis: Analysis, scopes: Sequence[str], layers: Sequence[int], look: Look) -> AxesGrid:
    """One row per layer, one column per scope with a colour scale of its own."""
    side = min(1.05, max(8.4 / len(scopes), 0.6))
    wide, high = _panel(analysis, side)
    figure = blank(len(scopes) * (wide + 0.06) + 0.4, len(layers) * (high + 0.06) + 1.0)
    grid = figure.subplots(len(layers), len(scopes), squeeze=False, subplot_kw={"axes_class": map_axes()})
    own = own_cells(analysis)
    scales = {scope: scale_of([look.values(analysis, scope, layer) for layer in layers], own) for scope in scopes}
    for column, scope in zip(grid.T, scopes, strict=True):
        for axes, layer in zip(column, layers, strict=True):
            image = _paint(axes, look.values(analysis, scope, layer), scales[scope], analysis, grid.size, look=look)
            _bare(axes)
        column[0].set_title(_broken(scope), fontsize=6.5, pad=3)
        bar = figure.colorbar(
            image, ax=column, location="bottom", fraction=0.03, pad=0.01, aspect=18, extend=extend(scales[scope])
        )
        tidy(bar, scales[scope])
    for axes, layer in zip(grid[:, 0], layers, strict=True):
        axes.set_ylabel(f"layer {layer + 1}", fontsize=7)
    _caption(figure, analysis, "The colour scale is shared within a column", scales.values(), listed=True)
    return grid_of(grid)


def _panel(analysis: Analysis, side: float) -> tuple[float, float]:
    """Width and height in inches of a small map whose longer side is `side`."""
    rows, columns = len(analysis.rows), len(analysis.columns)
    return max(side * columns / max(rows, columns), 0.4), max(side * rows / max(rows, columns), 0.2)


def _paint(
    axes: Axes, values: Values, scale: Scale, analysis: Labelled, maps: int = 1, *, look: Look
) -> ScalarMappable:
    rows, columns = values.shape
    edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    options: dict[str, Any] = {"cmap": look.colours(scale), "vmin": 0.0, "vmax": scale.end}
    image: ScalarMappable
    if values.size * maps <= VECTOR_CELLS:
        x, y = [j - 0.5 for j in range(columns + 1)], [i - 0.5 for i in range(rows + 1)]
        # Edges in the colour of the face close the hairlines that viewers draw between rectangles.
        image = axes.pcolormesh(x, y, values, edgecolors="face", linewidth=0.15, **options)
    else:
        image = axes.imshow(values, extent=edges, **options)
    axes.set_xlim(edges[0], edges[1])
    axes.set_ylim(edges[2], edges[3])
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    for span in spans_of(analysis.columns)[1:]:
        axes.axvline(span.start - 0.5, color="white", linewidth=1.6)
    return image


def _label(axes: Axes, analysis: Labelled, size: float) -> None:
    """Tokens on both axes, thinned out where there are too many."""
    for axis, labels in ((axes.xaxis, analysis.columns), (axes.yaxis, analysis.rows)):
        step = math.ceil(len(labels) / LABELLED)
        places = range(0, len(labels), step)
        axis.set_ticks(places, [shorten(visible(labels[k].token), 18) for k in places], fontsize=size)
    axes.tick_params(axis="x", rotation=90)
    step = math.ceil(len(analysis.columns) / LABELLED)
    for text, label in zip(axes.get_xticklabels(), analysis.columns[::step], strict=True):
        text.set_color(_ink(label.side, analysis))


def _name_sides(axes: Axes, analysis: Labelled) -> bool:
    """The names of two sides above their columns; False where there is one."""
    spans = spans_of(analysis.columns)
    for span in spans if len(spans) > 1 else []:
        place = ((span.start + span.stop - 1) / 2, -0.5)
        style: dict[str, Any] = {"ha": "center", "fontsize": 6.5, "color": _ink(span.side, analysis)}
        axes.annotate(span.side, place, (0, 3), textcoords="offset points", **style)
    return len(spans) > 1


def _ink(side: str, analysis: Labelled) -> str:
    """The colour of a column's label: another one for the tokens of the other side."""
    return "black" if side == analysis.rows[0].side else OTHER


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


def extend(scale: Scale) -> Literal["max", "neither"]:
    return "max" if scale.clipped else "neither"


def _bar_label(what: str, scale: Scale) -> str:
    return what + (f"\n(the token itself: up to {scale.top:.3g}, beyond the scale)" if scale.clipped else "")


def tidy(bar: Colorbar, scale: Scale, label: str = "") -> None:
    """A quiet colour bar: with its label, or so small that only the ends of the scale are written."""
    from matplotlib.ticker import MaxNLocator

    bar.outline.set(visible=scale.clipped, linewidth=0.3, edgecolor=GREY)  # the arrow is pale
    if label:
        bar.locator = MaxNLocator(4)
        bar.update_ticks()
        bar.set_label(label, fontsize=6.5)
    else:
        bar.set_ticks([0.0, scale.end], labels=["0", f"{scale.end:.2g}"])
        if bar.orientation == "horizontal":
            low, high = bar.ax.get_xticklabels()
            low.set_horizontalalignment("left")
            high.set_horizontalalignment("right")
    bar.ax.tick_params(labelsize=6 if label else 5.5, length=1.5, width=0.3, pad=1.5, color=GREY)


def _caption(figure: Figure, analysis: Analysis, scale: str, scales: Any, listed: bool) -> None:
    sides = sides_note(analysis) if len(spans_of(analysis.columns)) == 1 else ""
    text = f"{model_label(analysis)}. Rows are output tokens, columns input tokens{sides}. {scale}"
    if any(entry.clipped for entry in scales):
        text += "; where it ends in an arrow, the token itself (the diagonal) lies beyond it"
    text += "."
    spans = spans_of(analysis.columns)
    if len(spans) > 1:
        text += f" Left of the white line: {spans[0].side} tokens, right of it: {spans[1].side} tokens."
    if listed:
        text += " Tokens: " + textwrap.shorten(tokens_of(analysis.columns), 300, placeholder=" …")
    caption(figure, text)


def caption(figure: Figure, text: str) -> None:
    """Small text below a figure."""
    width = max(int(figure.get_figwidth() * 21.5), 30)
    figure.supxlabel(textwrap.fill(text, width), fontsize=6.5, color=GREY, x=0.01, ha="left", multialignment="left")


def _broken(scope: str) -> str:
    """A long scope name on lines of their own for its cross-attention and feed-forward parts."""
    return re.sub("(?<=.)(?=XATTN|FF)", "\n", scope)


def map_axes() -> type[Axes]:
    """The class of the axes of maps, which a notebook shows."""
    from normscope.view.axes import MapAxes

    return MapAxes


def grid_of(axes: Any) -> AxesGrid:
    """An array of axes, which a notebook shows."""
    from normscope.view.axes import AxesGrid

    return np.asarray(axes, dtype=object).view(AxesGrid)


def blank(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="compressed")


@contextmanager
def style() -> Iterator[None]:
    """The figures' style, for as long as they are made; nothing of it stays behind."""
    try:
        import matplotlib
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise NormscopeError(NO_MATPLOTLIB) from error
    installed = set(fontManager.get_font_names())
    text = next((name for name in SANS if name in installed), "DejaVu Sans")
    family = list(dict.fromkeys([text, *(name for name in SCRIPTS if name in installed)]))
    settings: Any = STYLE | {"font.family": family}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A glyph that no installed font has is drawn as a box; the text of vector files is right all the same.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
