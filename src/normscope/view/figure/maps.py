"""Maps as matplotlib figures: one map, or small multiples of layers and scopes."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.figure_style import figure_style
from normscope.labels import shorten_label, visible_label_text
from normscope.view.figure.style import (
    LABELLED,
    PLAIN,
    WIDTH,
    Look,
    annotate_cells,
    new_figure,
    style_colorbar_ends,
    tidy_colorbar,
    write_caption,
)
from normscope.view.scales import Scale, Values, colour_scale, drop_empty_side, own_token_cells
from normscope.view.tokens import Labelled, model_label, side_spans, sides_note, tokens_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from normscope.view.figure.axes import AxesGrid

SIDE = 5.4  # inches; longer side of a single map at most
VECTOR_CELLS = 20_000  # larger maps become an image, because vector files with more rectangles open slowly
OTHER = "#0b57a4"  # labels of encoder tokens among a decoder's columns


def plot(
    analysis: Analysis,
    scope: str | None = None,
    layer: int | None = None,
    *,
    ax: Axes | None = None,
    look: Look = PLAIN,
) -> Axes | AxesGrid:
    """Draw one map (scope and layer given), all layers of a scope, all scopes of a layer, or layers x scopes.

    `layer` is the model's layer index, counted from 0; titles count from 1.
    """
    if scope is not None:
        analysis = drop_empty_side(analysis, scope)
    scopes = analysis.scopes
    layers = analysis.layers if layer is None else (analysis.layers[analysis.layer_position(layer)],)
    one = scope is not None and layer is not None
    if not one and (ax is not None or look.annotate):
        what, example = "ax" if ax is not None else "annotate", f"plot('{scopes[-1]}', layer={layers[-1]})"
        raise NormscopeError(f"{what}= is for one map: give a scope and a layer too, as in {example}.")
    made: Axes | AxesGrid
    with figure_style():
        if one:
            values = look.values(analysis, scopes[0], layers[0])
            title = f"{scopes[0]}, layer {layers[0] + 1}"
            made = plot_single_figure_map(analysis, values, title, look.quantity(scopes[0]), ax=ax, look=look)
        elif scope is not None:
            titles = [f"layer {k + 1}" for k in layers]
            made = _plot_map_series(analysis, [(scopes[0], layer) for layer in layers], titles, look)
        elif layer is not None:
            made = _plot_map_series(analysis, [(scope, layers[0]) for scope in scopes], list(scopes), look)
        else:
            made = _plot_map_grid(analysis, scopes, layers, look)
        if ax is None:
            figure_of(made).draw_without_rendering()  # creates all tick labels within the style
        return made


def plot_single_figure_map(
    labelled: Labelled, values: Values, title: str, what: str, *, ax: Axes | None = None, look: Look = PLAIN
) -> Axes:
    """Draw one map (rows, columns) with its tokens, in a new figure or in `ax`."""
    rows, columns = values.shape
    cell = min(0.27, SIDE / max(rows, columns))
    width, height = max(cell * columns, 1.1), max(cell * rows, 1.1)
    size = min(max(cell * 72 * 0.85, 5.0), 7.5)
    margin = size / 72 * 0.62 * min(max(len(visible_label_text(label.token)) for label in labelled.columns), 18)
    axes = (
        new_figure(width + margin + 1.1, height + margin + 0.7).add_subplot(axes_class=figure_map_axes_class())
        if ax is None
        else ax
    )
    scale = colour_scale([values], own_token_cells(labelled))
    image = _draw_map_cells(axes, values, scale, labelled, look=look)
    if look.annotate:
        annotate_cells(axes, values, scale, look, size)
    axes.set_title(title, pad=13 if _write_side_names(axes, labelled) else 5)
    _label_map_tokens(axes, labelled, size)
    axes.set_xlabel("input token" + sides_note(labelled))
    axes.set_ylabel("output token")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03, aspect=28, extend=style_colorbar_ends(scale))
    tidy_colorbar(bar, scale, _colorbar_label(what, scale))
    return axes


def _plot_map_series(
    analysis: Analysis, maps: Sequence[tuple[str, int]], titles: Sequence[str], look: Look
) -> AxesGrid:
    """Draw maps of one scope or one layer in reading order; maps of the same scope share a colour scale."""
    count = len(maps)
    across = min(count, 3 if count in (3, 5, 6, 9) else 4)
    down = math.ceil(count / across)
    one_scope = len({scope for scope, _ in maps}) == 1
    beside = 0.12 if one_scope else 0.42  # gap, or gap and colour bar
    side = min((WIDTH - 1.1) / across - beside, 2.4)
    wide, high = _small_map_size(analysis, side)
    size = side / max(len(analysis.rows), len(analysis.columns)) * 72 * 0.85
    written = size >= 4.5
    margin = 0.45 if written else 0.0
    figure = new_figure(across * (wide + beside) + 1.1, down * (high + 0.2) + margin + 0.45)
    grid = figure.subplots(down, across, squeeze=False, subplot_kw={"axes_class": figure_map_axes_class()})
    own = own_token_cells(analysis)
    scales = {
        scope: colour_scale([look.values(analysis, *entry) for entry in maps if entry[0] == scope], own)
        for scope, _ in maps
    }
    image = None
    for axes, (scope, layer), title in zip(grid.flat, maps, titles, strict=False):
        image = _draw_map_cells(axes, look.values(analysis, scope, layer), scales[scope], analysis, count, look=look)
        axes.set_title(title, pad=3, fontsize=7)
        _label_map_tokens(axes, analysis, min(size, 6.5)) if written else _hide_ticks(axes)
        if not one_scope:
            bar = figure.colorbar(
                image, ax=axes, fraction=0.05, pad=0.03, aspect=24, extend=style_colorbar_ends(scales[scope])
            )
            tidy_colorbar(bar, scales[scope])
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
        bar = figure.colorbar(
            image, ax=grid, fraction=0.03, pad=0.02, aspect=40, extend=style_colorbar_ends(scales[scope])
        )
        tidy_colorbar(bar, scales[scope], _colorbar_label(look.quantity(scope), scales[scope]))
        figure.suptitle(scope, fontsize=8)
        _write_map_caption(figure, analysis, "All maps share the colour scale", scales.values(), listed=not written)
    else:
        figure.suptitle(f"layer {maps[0][1] + 1}", fontsize=8)
        _write_map_caption(figure, analysis, "Each map has its own colour scale", scales.values(), listed=not written)
    return to_figure_map_grid(grid)


def _plot_map_grid(analysis: Analysis, scopes: Sequence[str], layers: Sequence[int], look: Look) -> AxesGrid:
    """Draw one row per layer and one column per scope; each column has its own colour scale."""
    side = min(1.05, max(8.4 / len(scopes), 0.6))
    wide, high = _small_map_size(analysis, side)
    figure = new_figure(len(scopes) * (wide + 0.06) + 0.4, len(layers) * (high + 0.06) + 1.0)
    grid = figure.subplots(len(layers), len(scopes), squeeze=False, subplot_kw={"axes_class": figure_map_axes_class()})
    own = own_token_cells(analysis)
    scales = {scope: colour_scale([look.values(analysis, scope, layer) for layer in layers], own) for scope in scopes}
    for column, scope in zip(grid.T, scopes, strict=True):
        for axes, layer in zip(column, layers, strict=True):
            image = _draw_map_cells(
                axes, look.values(analysis, scope, layer), scales[scope], analysis, grid.size, look=look
            )
            _hide_ticks(axes)
        column[0].set_title(_break_scope_name(scope), fontsize=6.5, pad=3)
        bar = figure.colorbar(
            image,
            ax=column,
            location="bottom",
            fraction=0.03,
            pad=0.01,
            aspect=18,
            extend=style_colorbar_ends(scales[scope]),
        )
        tidy_colorbar(bar, scales[scope])
    for axes, layer in zip(grid[:, 0], layers, strict=True):
        axes.set_ylabel(f"layer {layer + 1}", fontsize=7)
    _write_map_caption(figure, analysis, "The colour scale is shared within a column", scales.values(), listed=True)
    return to_figure_map_grid(grid)


def _small_map_size(analysis: Analysis, side: float) -> tuple[float, float]:
    """Width and height in inches of a small map whose longer side is `side`."""
    rows, columns = len(analysis.rows), len(analysis.columns)
    return max(side * columns / max(rows, columns), 0.4), max(side * rows / max(rows, columns), 0.2)


def _draw_map_cells(
    axes: Axes, values: Values, scale: Scale, analysis: Labelled, maps: int = 1, *, look: Look
) -> ScalarMappable:
    rows, columns = values.shape
    edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    options: dict[str, Any] = {"cmap": look.colours(scale), "vmin": 0.0, "vmax": scale.end}
    image: ScalarMappable
    if values.size * maps <= VECTOR_CELLS:
        x, y = [j - 0.5 for j in range(columns + 1)], [i - 0.5 for i in range(rows + 1)]
        # Edges in the face colour hide the hairlines that some viewers show between rectangles.
        image = axes.pcolormesh(x, y, values, edgecolors="face", linewidth=0.15, **options)
    else:
        image = axes.imshow(values, extent=edges, **options)
    axes.set_xlim(edges[0], edges[1])
    axes.set_ylim(edges[2], edges[3])
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    for span in side_spans(analysis.columns)[1:]:
        axes.axvline(span.start - 0.5, color="white", linewidth=1.6)
    return image


def _label_map_tokens(axes: Axes, analysis: Labelled, size: float) -> None:
    """Label both axes with tokens, or with every n-th if there are too many."""
    for axis, labels in ((axes.xaxis, analysis.columns), (axes.yaxis, analysis.rows)):
        step = math.ceil(len(labels) / LABELLED)
        places = range(0, len(labels), step)
        axis.set_ticks(places, [shorten_label(visible_label_text(labels[k].token), 18) for k in places], fontsize=size)
    axes.tick_params(axis="x", rotation=90)
    step = math.ceil(len(analysis.columns) / LABELLED)
    for text, label in zip(axes.get_xticklabels(), analysis.columns[::step], strict=True):
        text.set_color(_column_colour(label.side, analysis))


def _write_side_names(axes: Axes, analysis: Labelled) -> bool:
    """Write the names of two sides above their columns; False if there is only one side."""
    spans = side_spans(analysis.columns)
    for span in spans if len(spans) > 1 else []:
        place = ((span.start + span.stop - 1) / 2, -0.5)
        style: dict[str, Any] = {
            "ha": "center",
            "fontsize": 6.5,
            "color": _column_colour(span.side, analysis),
        }
        axes.annotate(span.side, place, (0, 3), textcoords="offset points", **style)
    return len(spans) > 1


def _column_colour(side: str, analysis: Labelled) -> str:
    """The colour of a column's label: black on the side of the rows and for sources, another for the other side."""
    return "black" if side in (analysis.rows[0].side, "source") else OTHER


def _hide_ticks(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


def _colorbar_label(what: str, scale: Scale) -> str:
    return what + (f"\n(the token itself: up to {scale.top:.3g}, beyond the scale)" if scale.clipped else "")


def _write_map_caption(figure: Figure, analysis: Analysis, scale: str, scales: Any, listed: bool) -> None:
    sides = sides_note(analysis) if len(side_spans(analysis.columns)) == 1 else ""
    text = f"{model_label(analysis)}. Rows are output tokens, columns input tokens{sides}. {scale}"
    if any(entry.clipped for entry in scales):
        text += "; an arrow marks values of the token itself (the diagonal) beyond it"
    text += "."
    spans = side_spans(analysis.columns)
    if len(spans) > 1:
        text += f" Left of the white line: {spans[0].side} tokens, right of it: {spans[1].side} tokens."
    if listed:
        text += " Tokens: " + textwrap.shorten(tokens_line(analysis.columns), 300, placeholder=" …")
    write_caption(figure, text)


def _break_scope_name(scope: str) -> str:
    """A scope name with line breaks before its cross-attention and feed-forward parts."""
    return re.sub("(?<=.)(?=XATTN|FF)", "\n", scope)


def figure_of(axes: Axes | AxesGrid) -> Figure:
    """The figure that contains the axes of `plot`."""
    return cast("Figure", axes.figure)


def figure_map_axes_class() -> type[Axes]:
    """The axes class of maps, which displays itself in a notebook."""
    from normscope.view.figure.axes import MapAxes

    return MapAxes


def to_figure_map_grid(axes: Any) -> AxesGrid:
    """An array of axes that displays itself in a notebook."""
    from normscope.view.figure.axes import AxesGrid

    return np.asarray(axes, dtype=object).view(AxesGrid)
