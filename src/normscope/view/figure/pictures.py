"""One output, or the scores of an answer, over the pictures of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.analysis import Analysis
from normscope.explain.result import Explanation
from normscope.figure_style import figure_style
from normscope.labels import visible_label_text
from normscope.view.figure.flow import LOWERS, RAISES
from normscope.view.figure.maps import figure_of
from normscope.view.figure.patches import VEIL
from normscope.view.figure.style import PLAIN, Look, new_figure, style_colorbar_ends, tidy_colorbar, write_caption
from normscope.view.images import image_to_greyscale, view_image_pixels
from normscope.view.pictures import (
    PictureValues,
    find_written_row,
    pictures_to_draw,
    row_on_pictures,
    scores_on_pictures,
)
from normscope.view.scales import colour_scale
from normscope.view.tokens import model_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 2.6  # inches; longer side of a picture


def plot_on_pictures(
    analysis: Analysis,
    scope: str | None = None,
    layer: int | None = None,
    *,
    token: str | int | None = None,
    image: Any = None,
    ax: Axes | None = None,
    look: Look = PLAIN,
) -> Axes:
    """Draw the row of one output over the pictures, by default the last token in the last scope and layer; into `ax`,
    the first picture only. `image` is stretched over the grid."""
    scope = analysis.scopes[-1] if scope is None else analysis.resolve(scope)
    layer = analysis.layers[-1] if layer is None else analysis.layers[analysis.layer_position(layer)]
    row = find_written_row(analysis, token)
    found, total = row_on_pictures(analysis, scope, layer, row, look)
    scale = colour_scale([one.values for one in found], np.zeros((1, 1), dtype=bool))
    images = pictures_to_draw(image, len(found))
    name = visible_label_text(analysis.rows[row].token)
    with figure_style():
        grid = [ax] if ax is not None else new_picture_axes(found)
        options = {"cmap": look.colours(scale), "vmin": 0.0, "vmax": scale.end}
        for axes, one, under in zip(grid, found, images, strict=False):
            drawn = _draw_picture(axes, one, under, options)
            axes.set_title(one.name if len(found) > 1 else f"{scope}, layer {layer + 1}, output {name}", pad=4)
        bar = grid[-1].figure.colorbar(
            drawn, ax=list(grid), fraction=0.05, pad=0.03, aspect=28, extend=style_colorbar_ends(scale)
        )
        tidy_colorbar(bar, scale, look.quantity(scope))
        if ax is None:
            parts = ", ".join(f"{one.name} {one.total:.3g}" for one in found)
            whole = figure_of(grid[0])
            write_caption(
                whole,
                f"{model_label(analysis)}: {scope}, layer {layer + 1}. Contribution of each patch to the output "
                f"{name}. All tokens together: {total:.3g}; {parts}.",
            )
            whole.draw_without_rendering()
        return grid[0]


def plot_scores_on_pictures(told: Explanation, axes: list[Axes], image: Any = None) -> None:
    """Draw the scores of the patches for the whole answer, orange where a patch raises it, blue where it lowers it."""
    from matplotlib.colors import LinearSegmentedColormap

    found = scores_on_pictures(told)
    most = max((float(np.abs(one.values).max()) for one in found), default=0.0) or 1.0
    colours = LinearSegmentedColormap.from_list("blue-white-orange", [LOWERS, "#ffffff", RAISES])
    options = {"cmap": colours, "vmin": -most, "vmax": most}
    for place, one, under in zip(axes, found, pictures_to_draw(image, len(found)), strict=True):
        drawn = _draw_picture(place, one, under, options)
        place.set_title(f"{one.name}: {one.total:+.3g}", pad=4)
    bar = axes[-1].figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.03, aspect=28)
    bar.outline.set_visible(False)


def new_picture_axes(found: list[PictureValues]) -> list[Axes]:
    """Axes for the pictures of a new figure, side by side."""
    height = SIDE * max(min(1.0, one.values.shape[0] / one.values.shape[1]) for one in found)
    return list(new_figure(len(found) * SIDE + 1.2, height + 0.9).subplots(1, len(found), squeeze=False)[0])


def _draw_picture(axes: Axes, one: PictureValues, under: Any, options: dict[str, Any]) -> Any:
    """The cells of one picture, over it if it is given; returns what a colour bar needs."""
    from matplotlib.cm import ScalarMappable

    down, across = one.values.shape
    edges = (-0.5, across - 0.5, down - 0.5, -0.5)
    if under is not None:
        pixels = view_image_pixels(under)
        axes.imshow(image_to_greyscale(pixels), extent=edges, aspect="auto", interpolation="antialiased", cmap="gray")
    drawn = axes.imshow(one.values, extent=edges, aspect="auto", alpha=None if under is None else VEIL, **options)
    axes.set_aspect(1.0 if under is None else (pixels.shape[0] / down) / (pixels.shape[1] / across))
    axes.set_axis_off()
    return ScalarMappable(drawn.norm, drawn.cmap)  # opaque, unlike cells over a picture
