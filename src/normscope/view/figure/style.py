"""Parts of figures: captions, colour bars, files, and how maps are drawn."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.figure_style import GREY, figure_style
from normscope.files import write_atomically
from normscope.view.formats import FIGURES
from normscope.view.scales import BEYOND, Scale, Values, map_values, scale_quantity_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches; the text width of a page
LABELLED = 60  # up to this many tokens, every token is labelled


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="compressed")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as .svg, .pdf or .png, without dates, so that files are reproducible."""
    target = Path(path)
    kind = target.suffix.lower().removeprefix(".")
    if f".{kind}" not in FIGURES:
        known = ", ".join(FIGURES)
        raise NormscopeError(f"Cannot write a figure to {target}: known formats are {known}.")
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with figure_style(), write_atomically(target) as temporary:
        figure.savefig(temporary, format=kind, metadata=metadata)
    return target


def write_caption(figure: Figure, text: str) -> None:
    """Write small text below a figure."""
    width = max(int(figure.get_figwidth() * 21.5), 30)
    figure.supxlabel(textwrap.fill(text, width), fontsize=6.5, color=GREY, x=0.01, ha="left", multialignment="left")


def style_colorbar_ends(scale: Scale) -> Literal["max", "neither"]:
    return "max" if scale.clipped else "neither"


def tidy_colorbar(bar: Colorbar, scale: Scale, label: str = "") -> None:
    """Style a colour bar: with a label and a few ticks, or without a label and with ticks at both ends only."""
    from matplotlib.ticker import MaxNLocator

    bar.outline.set(visible=scale.clipped, linewidth=0.3, edgecolor=GREY)  # outlines the pale arrow
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


@dataclass(frozen=True)
class Look:
    """Options of how maps are drawn."""

    cmap: Colormap | str | None = None  # default: cividis
    normalize: bool = False  # divide rows by their sums
    annotate: bool = False  # write values into the cells

    def values(self, analysis: Analysis, scope: str, layer: int) -> Values:
        """The map of a scope and layer, normalized if requested."""
        return self.shares(map_values(analysis, scope, layer))

    def shares(self, values: Values) -> Values:
        """`values`, with rows (last dimension) divided by their sums if requested."""
        if not self.normalize:
            return values
        sums = values.sum(-1, keepdims=True)
        return values / np.where(sums == 0, 1.0, sums)

    def colours(self, scale: Scale) -> Colormap:
        """The colour map, with a separate colour above the end of the scale."""
        from matplotlib import colormaps
        from matplotlib.colors import Colormap

        try:
            found = self.cmap if isinstance(self.cmap, Colormap) else colormaps[self.cmap or "cividis"]
        except (KeyError, TypeError) as error:
            raise NormscopeError(
                f"Unknown colour map {self.cmap!r}. Pass a matplotlib colour map or its name, such as 'viridis'."
            ) from error
        return found.with_extremes(over=BEYOND if scale.clipped else None)

    def quantity(self, scope: str) -> str:
        """The quantity that a scope's map shows."""
        return scale_quantity_name(scope) + (", as a share of its row" if self.normalize else "")


PLAIN = Look()


def annotate_cells(axes: Axes, values: Values, scale: Scale, look: Look, size: float) -> None:
    """Write the values into their cells, dark on light or light on dark."""
    colours = look.colours(scale)
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = colours(value / scale.end)
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        text = f"{value:.2f}" if scale.top < 10 else f"{value:.3g}"
        axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=size * 0.7, clip_on=True)
