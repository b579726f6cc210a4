"""Axes that display themselves in a notebook: the return values of `plot` when it makes a new figure.

Figures are made without pyplot, so none stays open; a notebook would therefore not display them by itself.
"""

from __future__ import annotations

import io
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normscope.figure_style import figure_style

DOTS = 110  # resolution (dpi) in a notebook


def render_axes_png(figure: Figure) -> bytes:
    """A figure as a PNG."""
    file = io.BytesIO()
    with figure_style():
        figure.savefig(file, format="png", dpi=DOTS)
    return file.getvalue()


class MapAxes(Axes):
    """The axes of one map, with its figure as `figure`."""

    def _repr_png_(self) -> bytes:
        return render_axes_png(cast(Figure, self.figure))


class AxesGrid(np.ndarray[Any, Any]):
    """An array of axes, row by row, with their figure as `figure`."""

    @property
    def figure(self) -> Figure:
        """The figure that contains the axes, to save or modify."""
        found: Figure = self.flat[0].figure
        return found

    def _repr_png_(self) -> bytes:
        return render_axes_png(self.figure)
