"""How maps are drawn: colours, shares, and values written into the cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.view.labels import BEYOND, Scale, Values, quantity, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


@dataclass(frozen=True)
class Look:
    """How maps are drawn."""

    cmap: Colormap | str | None = None  # cividis by default
    normalize: bool = False  # rows are divided by their sums
    annotate: bool = False  # values are written into the cells

    def values(self, analysis: Analysis, scope: str, layer: int) -> Values:
        """The map of a scope at a layer, as it is drawn."""
        return self.shares(values_of(analysis, scope, layer))

    def shares(self, values: Values) -> Values:
        """The rows (last dimension) divided by their sums, if that was asked for."""
        if not self.normalize:
            return values
        sums = values.sum(-1, keepdims=True)
        return values / np.where(sums == 0, 1.0, sums)

    def colours(self, scale: Scale) -> Colormap:
        """The colour map, which marks what lies beyond the scale."""
        from matplotlib import colormaps
        from matplotlib.colors import Colormap

        try:
            found = self.cmap if isinstance(self.cmap, Colormap) else colormaps[self.cmap or "cividis"]
        except (KeyError, TypeError) as error:
            raise NormscopeError(f"matplotlib knows no colour map {self.cmap!r}.") from error
        return found.with_extremes(over=BEYOND if scale.clipped else None)

    def quantity(self, scope: str) -> str:
        """What the numbers of a scope's map are, as they are drawn."""
        return quantity(scope) + (", as a share of its row" if self.normalize else "")


PLAIN = Look()


def annotate(axes: Axes, values: Values, scale: Scale, look: Look, size: float) -> None:
    """The values in their cells, dark on light and light on dark."""
    colours = look.colours(scale)
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = colours(value / scale.end)
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        text = f"{value:.2f}" if scale.top < 10 else f"{value:.3g}"
        axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=size * 0.7, clip_on=True)
