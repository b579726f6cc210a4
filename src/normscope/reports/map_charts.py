"""Heat maps for reports: one matrix, or several side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from normscope.errors import NormscopeError
from normscope.figure_style import GREY, figure_style
from normscope.labels import visible_label_text
from normscope.reports.charts import HORIZONTAL, WIDTH, Values, blank_chart, freeze_layout, set_label_ticks, to_floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

ABSENT = "#e3e5e8"  # cells without a value
PIXELS = 400  # along the longer side of a map, at least: viewers that smooth images must not blur the cells


def heat_map_chart(values: ArrayLike, *, rows: Sequence[Any], columns: Sequence[Any], **look: Any) -> Figure:
    """Heat map of one matrix; `look` as for `heat_map_charts`."""
    return heat_map_charts({"": values}, rows=rows, columns=columns, **look)


def heat_map_charts(
    panels: Mapping[str, ArrayLike],
    *,
    rows: Sequence[Any],
    columns: Sequence[Any],
    label: str = "",
    xlabel: str = "",
    ylabel: str = "",
    diverging: bool = False,
    annotate: bool = False,
    decimals: int = 2,
    shared: bool = True,
) -> Figure:
    """Heat maps of several matrices side by side, with a common colour scale or one each (shared=False); `label` is the
    label of the colour bar."""
    maps = {title: np.atleast_2d(to_floats(values)) for title, values in panels.items()}
    for title, values in maps.items():
        if values.shape != (len(rows), len(columns)):
            raise NormscopeError(
                f"The heat map {title!r} has shape {values.shape}, but labels for {len(rows)} rows and {len(columns)} "
                "columns."
            )
    across = min(len(maps), 3 if len(maps) != 4 else 2)
    down = math.ceil(len(maps) / across)
    own = not shared and len(maps) > 1
    wide, high = _map_size(len(rows), len(columns), across, annotate)
    size = min(max(min(wide / len(columns), high / len(rows)) * 72 * 0.8, 4.5), 7.0)
    with figure_style():
        left, under = (
            _label_room(rows, size),
            _label_room(columns, size, horizontal=all(len(str(c)) <= HORIZONTAL for c in columns)),
        )
        figure = blank_chart(
            left + across * (wide + (0.55 if own else 0.12)) + (0 if own else 0.75) + 0.2,
            under + down * (high + 0.25) + 0.3,
            "compressed",  # makes colour bars as high as the maps
        )
        grid = figure.subplots(down, across, squeeze=False)
        every = _colour_limits(list(maps.values()), diverging)
        for n, (axes, (title, values)) in enumerate(zip(grid.flat, maps.items(), strict=False)):
            scale = _colour_limits([values], diverging) if own else every
            image = _paint_map(axes, values, scale, diverging, wide / len(columns) / (high / len(rows)))
            axes.set_title(title, fontsize=7.5, pad=3)
            set_label_ticks(axes.yaxis, rows if n % across == 0 else [], size, high)
            set_label_ticks(axes.xaxis, columns if n + across >= len(maps) else [], size, wide)
            if n % across == 0:
                axes.set_ylabel(ylabel)
            if n + across >= len(maps):
                axes.set_xlabel(xlabel)
            if annotate:
                _write_map_values(axes, values, image, decimals, size)
            if own:
                _add_colour_bar(figure, image, axes, "" if n % across < across - 1 else label)
        for axes in grid.flat[len(maps) :]:
            axes.set_axis_off()
        if not own:
            _add_colour_bar(figure, image, grid, label)
        freeze_layout(figure)
        return figure


def _map_size(rows: int, columns: int, across: int, annotate: bool) -> tuple[float, float]:
    """Width and height of one map in inches: square cells, unless one side is much longer."""
    wide = (WIDTH - 1.3) / across
    cell = min(0.36 if annotate else 0.24, wide / columns, 7 / rows)
    if cell < 0.1 and max(rows, columns) > 4 * min(rows, columns):
        return min(wide, columns * 0.24), min(7, rows * 0.16)
    return max(cell * columns, 0.5), max(cell * rows, 0.3)


def _label_room(labels: Sequence[Any], size: float, horizontal: bool = False) -> float:
    """The space in inches that labels need next to a map."""
    longest = 1 if horizontal else min(max((len(visible_label_text(str(label))) for label in labels), default=1), 20)
    return 0.25 + longest * size / 72 * 0.6


def _colour_limits(maps: Sequence[Values], diverging: bool) -> tuple[float, float]:
    values = np.concatenate([values[np.isfinite(values)] for values in maps])
    if not values.size:
        return (0.0, 1.0)
    if diverging:
        end = float(np.abs(values).max()) or 1.0
        return (-end, end)
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low, low + 1.0)


def _paint_map(
    axes: Axes, values: Values, scale: tuple[float, float], diverging: bool, aspect: float
) -> ScalarMappable:
    from matplotlib import colormaps

    rows, columns = values.shape
    colours = colormaps["PuOr_r" if diverging else "cividis"].with_extremes(bad=ABSENT)
    options: dict[str, Any] = {"cmap": colours, "vmin": scale[0], "vmax": scale[1]}
    copies = math.ceil(PIXELS / max(rows, columns))
    cells = np.ma.masked_invalid(values).repeat(copies, axis=0).repeat(copies, axis=1)
    # One small image, since a rectangle for each cell makes large files that load slowly.
    image = axes.imshow(cells, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), interpolation="none", **options)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_aspect(1 / aspect)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2)
    return image


def _write_map_values(axes: Axes, values: Values, image: ScalarMappable, decimals: int, size: float) -> None:
    for (i, j), value in np.ndenumerate(values):
        if not math.isfinite(value):
            continue
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        axes.text(j, i, f"{value:.{decimals}f}", ha="center", va="center", color=ink, fontsize=min(size * 0.9, 6.5))


def _add_colour_bar(figure: Figure, image: ScalarMappable, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=26)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6, length=1.5, width=0.3, pad=1.5, color=GREY)
    bar.set_label(label, fontsize=7)
