"""An explanation as a matplotlib figure: the tokens of the answer by source, or by word of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normscope.errors import NormscopeError
from normscope.explain.result import Explanation
from normscope.figure_style import figure_style
from normscope.labels import shorten_label, visible_label_text
from normscope.view.explained import explained_parts
from normscope.view.figure.flow import LOWERS, RAISES
from normscope.view.figure.maps import figure_of
from normscope.view.figure.pictures import SIDE, plot_scores_on_pictures
from normscope.view.figure.style import LABELLED, WIDTH, new_figure, write_caption
from normscope.view.pictures import PictureValues, scores_on_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL = 0.14  # inches per row


def plot_explanation(told: Explanation, ax: Axes | None = None, image: Any = None) -> Axes:
    """Draw the scores as cells, orange where an input raises a token, blue where it lowers it; above them, without
    `ax`, the scores of the patches of pictures for the whole answer, over `image`."""
    from matplotlib.colors import LinearSegmentedColormap

    seen = scores_on_pictures(told)
    if image is not None and (not seen or ax is not None):
        raise NormscopeError(
            "image= is for an explanation of a text with pictures whose patches are known, without ax=."
        )
    parts = explained_parts(told, "word")
    table = parts.scores.tolist()
    names = [shorten_label(visible_label_text(one.name), 18) for one in parts.columns]
    most = max((abs(value) for line in table for value in line), default=0.0) or 1.0
    with figure_style():
        colours = LinearSegmentedColormap.from_list("blue-white-orange", [LOWERS, "#ffffff", RAISES])
        height = min(max(1.6, CELL * len(told.tokens) + 1.2), 9.0)
        made: Axes = _new_explanation_axes(told, height, seen, image) if ax is None else ax
        image = made.imshow(table, cmap=colours, vmin=-most, vmax=most, aspect="auto")
        for axis, texts in ((made.xaxis, names), (made.yaxis, [visible_label_text(one) for one in told.tokens])):
            step = math.ceil(len(texts) / LABELLED)
            places = list(range(0, len(texts), step))
            axis.set_ticks(places, [shorten_label(texts[k], 18) for k in places])
        made.tick_params(axis="x", rotation=90)
        made.set_ylabel("answer")
        made.spines[:].set_visible(False)
        bar = made.figure.colorbar(image, ax=made, fraction=0.03, pad=0.02)
        bar.outline.set_visible(False)
        if ax is None:
            note = "Scores of the answer's tokens (rows). Orange raises a token, blue lowers it; (no input): biases."
            write_caption(figure_of(made), note)
            figure_of(made).draw_without_rendering()
    return made


def _new_explanation_axes(told: Explanation, height: float, seen: Sequence[PictureValues], image: Any) -> Axes:
    """The axes of the table in a new figure, below the pictures if there are any."""
    if not seen:
        made: Axes = new_figure(WIDTH, height).subplots()
        return made
    figure = new_figure(WIDTH, height + SIDE)
    grid = figure.add_gridspec(2, len(seen), height_ratios=(SIDE, height))
    plot_scores_on_pictures(told, [figure.add_subplot(grid[0, n]) for n in range(len(seen))], image)
    below: Axes = figure.add_subplot(grid[1, :])
    return below
