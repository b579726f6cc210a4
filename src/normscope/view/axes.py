"""Axes that a notebook shows: what `plot` returns for a figure of its own.

Figures are made without pyplot, so that nothing stays open behind them; a notebook would show no picture of their axes.
"""

from __future__ import annotations

import io
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOTS = 110  # per inch, of the picture in a notebook


def picture(figure: Figure) -> bytes:
    """A figure as a PNG."""
    from normscope.view.figure import style

    file = io.BytesIO()
    with style():
        figure.savefig(file, format="png", dpi=DOTS)
    return file.getvalue()


class MapAxes(Axes):
    """The axes of one map. `figure` is the figure, to be saved or changed."""

    def _repr_png_(self) -> bytes:
        return picture(cast(Figure, self.figure))


class AxesGrid(np.ndarray[Any, Any]):
    """An array of axes, row by row, with the figure that they are in as `figure`."""

    @property
    def figure(self) -> Figure:
        """The figure, to be saved or changed."""
        found: Figure = self.flat[0].figure
        return found

    def _repr_png_(self) -> bytes:
        return picture(self.figure)
