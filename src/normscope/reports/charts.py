"""Charts in one style, with colour-blind safe colours and no text parsed as mathematics. Heat maps: `map_charts`."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normscope.errors import NormscopeError
from normscope.figure_style import GREY, figure_style
from normscope.labels import shorten_label, visible_label_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The Okabe-Ito palette without yellow, which is too pale for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 5.8  # inches, the column width of a report
HEIGHT = 2.7
PANELS = 3  # side by side
PANEL_HEIGHT = 1.45
HORIZONTAL = 3  # labels up to this length are drawn horizontally
VECTOR_POINTS = 3_000  # more points are rasterised
PUBLISHED = "published"
LINE: dict[str, Any] = {"markersize": 3.2, "linewidth": 1.3, "markeredgewidth": 0}
BAND: dict[str, Any] = {"alpha": 0.2, "linewidth": 0}
DASHED: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.0, "alpha": 0.75}

Values = NDArray[np.float64]
Line = tuple[Sequence[float], Sequence[float]]  # x and y


def line_chart(
    series: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float],
    xlabel: str = "layer",
    ylabel: str = "",
    reference: Mapping[str, Sequence[float]] | None = None,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    ylim: tuple[float, float] | None = None,
) -> Figure:
    """One line per series; published values (`reference`) are dashed, in the colour of the series with the same name.

    Layers are numbered from 1: x=range(1, layers + 1). A reference whose length differs from x starts at x[0]. `bands`:
    the lower and upper ends of a series' intervals, which are shaded.
    """
    _check_series(series, x)
    given = dict(reference or {})
    with figure_style():
        figure, axes = _chart_axes(WIDTH, HEIGHT)
        for n, (name, values) in enumerate(series.items()):
            axes.plot(list(x), to_floats(values), label=name, **_series_look(n), **LINE)
            if bands is not None and name in bands:
                low, high = map(to_floats, bands[name])
                axes.fill_between(list(x), low, high, color=_series_colour(n), **BAND)
        for n, (name, values) in enumerate(given.items()):
            at = list(x) if len(values) == len(x) else [x[0] + k for k in range(len(values))]
            place = list(series).index(name) if name in series else len(series) + n
            label = None if name in series else f"{name} ({PUBLISHED})"
            axes.plot(at, to_floats(values), label=label, color=_series_colour(place), **DASHED)
        if any(name in series for name in given):
            axes.plot([], [], color=GREY, label=PUBLISHED, **DASHED)
        if ylim is not None:
            axes.set_ylim(*ylim)
        _set_integer_ticks(axes, x, given)
        _finish_chart(figure, axes, xlabel, ylabel)
        return figure


def panel_chart(
    panels: Mapping[str, Mapping[str, Line]], *, xlabel: str = "layer", reference: Mapping[str, Line] | None = None
) -> Figure:
    """Small charts side by side, one per name, with lines of a common legend that have x values of their own.

    `reference`: the published line of a panel, dashed.
    """
    given = dict(reference or {})
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    if not names:
        raise NormscopeError("A chart needs at least one line.")
    columns = min(len(panels), PANELS)
    rows = math.ceil(len(panels) / columns)
    with figure_style():
        height = HEIGHT if columns == 1 else PANEL_HEIGHT * rows + 0.4
        figure = blank_chart(WIDTH, height, "constrained")
        for place, (title, lines) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, place)
            _set_axes_look(axes, 7.5 if columns == 1 else 6.5)
            for name, (x, y) in lines.items():
                axes.plot(list(x), to_floats(y), **_series_look(names.index(name)), **LINE)
            if title in given:
                axes.plot(list(given[title][0]), to_floats(given[title][1]), color=GREY, **DASHED)
            axes.set_title(title, fontsize=8, loc="left")
        for n, name in enumerate(names):  # for the legend
            axes.plot([], [], label=name, **_series_look(n), **LINE)
        if given:
            axes.plot([], [], color=GREY, label=PUBLISHED, **DASHED)
        figure.supxlabel(xlabel, fontsize=8)
        _add_legend(figure, axes)
        freeze_layout(figure)
        return figure


def bar_chart(
    groups: Mapping[str, Sequence[float]],
    *,
    x: Sequence[Any],
    xlabel: str = "layer",
    ylabel: str = "",
    errors: Mapping[str, Sequence[float]] | None = None,
    marks: Sequence[str] | None = None,
) -> Figure:
    """Bars of all groups side by side at each x.

    `errors`: half-length of the error bars by group. `marks`: a text above each x, such as "*" for significance.
    """
    _check_series(groups, x)
    with figure_style():
        figure, axes = _chart_axes(WIDTH, HEIGHT)
        places, width = np.arange(len(x)), 0.8 / max(len(groups), 1)
        for n, (name, values) in enumerate(groups.items()):
            at = places + (n - (len(groups) - 1) / 2) * width
            spread = None if errors is None or name not in errors else to_floats(errors[name])
            axes.bar(
                at, to_floats(values), width * 0.92, label=name, color=_series_colour(n), yerr=spread,
                error_kw={"elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7, "ecolor": "#333333"},
            )  # fmt: skip
        axes.axhline(0, color="#333333", linewidth=0.5)
        if marks is not None:
            _write_bar_marks(axes, groups, errors or {}, marks)
        set_label_ticks(axes.xaxis, x, 7.5, WIDTH - 0.6)
        axes.set_xlim(-0.6, len(x) - 0.4)
        _finish_chart(figure, axes, xlabel, ylabel)
        return figure


def histogram_chart(
    groups: Mapping[str, ArrayLike],
    *,
    xlabel: str,
    ylabel: str = "share",
    bins: int = 50,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """The distribution of each group, as shares of the group in common bins.

    `limits`: range of the bins; values outside are counted in the first and last bin.
    """
    with figure_style():
        figure, axes = _chart_axes(WIDTH, HEIGHT)
        sides, counts = _bin_counts(groups, bins, limits)
        for n, (name, found) in enumerate(counts.items()):
            shares = found / max(float(found.sum()), 1.0)
            axes.stairs(shares, sides, fill=True, color=_series_colour(n), alpha=0.28)
            axes.stairs(shares, sides, color=_series_colour(n), linewidth=1.1, label=name)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        _finish_chart(figure, axes, xlabel, ylabel)
        return figure


def scatter_chart(
    x: ArrayLike,
    y: ArrayLike,
    *,
    xlabel: str,
    ylabel: str,
    labels: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
) -> Figure:
    """One point per pair, coloured by `groups` and labelled with `labels` (which may be empty strings)."""
    across, up = to_floats(x), to_floats(y)
    if not len(across) == len(up) == len(labels or up) == len(groups or up):
        raise NormscopeError("A scatter chart needs x, y, labels and groups of equal length.")
    kinds = list(dict.fromkeys(groups or [""]))
    of = np.array([kinds.index(kind) for kind in groups]) if groups else np.zeros(len(across), int)
    look: dict[str, Any] = {"linewidths": 0, "rasterized": len(across) > VECTOR_POINTS}
    look |= {"s": 14, "alpha": 0.85} if len(across) <= 200 else {"s": 6, "alpha": 0.45}
    with figure_style():
        figure, axes = _chart_axes(WIDTH * 0.8, HEIGHT * 1.15)
        for n, kind in enumerate(kinds):
            axes.scatter(across[of == n], up[of == n], **_series_look(n), **look)
            if kind:
                axes.scatter([], [], s=16, linewidths=0, label=kind, **_series_look(n))  # for the legend
        for a, b, text in zip(across, up, labels or (), strict=False):
            if text and math.isfinite(a) and math.isfinite(b):
                axes.annotate(
                    shorten_label(visible_label_text(text), 18), (a, b), (3, 2), textcoords="offset points", fontsize=6
                )
        _finish_chart(figure, axes, xlabel, ylabel)
        return figure


def chart_to_svg(figure: Figure, salt: str) -> str:
    """The figure as reproducible SVG; ids are derived from `salt`."""
    import matplotlib

    buffer = io.BytesIO()
    with figure_style(), matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "normscope"})
    return re.sub(r"<[^<>]*>", _shorten_coordinates, buffer.getvalue().decode())


def _shorten_coordinates(tag: re.Match[str]) -> str:
    """The tag with six digits of every number: matplotlib writes six decimals, far below a pixel."""
    return re.sub(r"(?<![\w.#])-?\d+\.\d{3,}(?![\w.])", lambda number: f"{float(number[0]):.6g}", tag[0])


def chart_to_pdf(figure: Figure) -> bytes:
    """The figure as a reproducible PDF file."""
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None, "Creator": "normscope", "Producer": None})
    return buffer.getvalue()


def _series_colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]


def _series_look(n: int) -> dict[str, Any]:
    """Colour and marker; repeated colours get another marker."""
    return {"color": _series_colour(n), "marker": MARKS[(n + n // len(COLOURS)) % len(MARKS)]}


def to_floats(values: ArrayLike) -> Values:
    """An array of float64."""
    found: Values = np.asarray(values, dtype=np.float64)
    return found


def _check_series(series: Mapping[str, Sequence[float]], x: Sequence[Any]) -> None:
    if not series or not len(x):
        raise NormscopeError("A chart needs at least one series of at least one value.")
    for name, values in series.items():
        if len(values) != len(x):
            raise NormscopeError(f"The series {name!r} has {len(values)} values for {len(x)} x values.")


def blank_chart(width: float, height: float, layout: Literal["constrained", "compressed"]) -> Figure:
    """An empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def _chart_axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = blank_chart(width, height, "constrained")
    axes = figure.add_subplot()
    _set_axes_look(axes, 7.5)
    return figure, axes


def _set_axes_look(axes: Axes, size: float) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=size)


def _finish_chart(figure: Figure, axes: Axes, xlabel: str, ylabel: str) -> None:
    """Label the axes, and add a legend above the chart if it has several entries."""
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    _add_legend(figure, axes)
    freeze_layout(figure)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """A legend above the charts if it has several entries."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        columns = _legend_columns(names, figure.get_figwidth())
        # Legends are filled by columns.
        by_row = [n for first in range(columns) for n in range(first, len(names), columns)]
        figure.legend(
            [handles[n] for n in by_row],
            [names[n] for n in by_row],
            loc="outside upper left",
            ncols=columns,
            fontsize=7.5,
            frameon=False,
            handlelength=2.2,
            columnspacing=1.4,
            borderaxespad=0.1,
        )


def _legend_columns(names: Sequence[str], width: float) -> int:
    """The number of columns that gives few, evenly filled rows."""
    room = width * 14.5  # characters per line at the legend's font size
    if sum(len(name) + 5 for name in names) <= room:
        return len(names)
    most = max(1, int(room // (max(map(len, names)) + 5)))
    return math.ceil(len(names) / math.ceil(len(names) / most))


def freeze_layout(figure: Figure) -> None:
    """Draw the tick labels in the current style and freeze the layout, so that saving does not recompute it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _set_integer_ticks(axes: Axes, x: Sequence[float], reference: Mapping[str, Sequence[float]]) -> None:
    """Put ticks at integers if all x are integers, as for layers."""
    if not all(float(place).is_integer() for place in x):
        return
    last = max([x[-1], *(x[0] + len(values) - 1 for values in reference.values())])
    step = max(1, math.ceil((last - x[0] + 1) / 16))
    axes.set_xticks(np.arange(x[0], last + 1, step))


def _write_bar_marks(
    axes: Axes, groups: Mapping[str, Sequence[float]], errors: Mapping[str, Sequence[float]], marks: Sequence[str]
) -> None:
    for n, mark in enumerate(marks):
        tops = [
            float(values[n]) + (float(errors[name][n]) if name in errors else 0.0) for name, values in groups.items()
        ]
        top = max([0.0, *(value for value in tops if math.isfinite(value))])
        axes.annotate(mark, (n, top), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(y=0.12)


def _bin_counts(
    groups: Mapping[str, ArrayLike], bins: int, limits: tuple[float, float] | None
) -> tuple[Values, dict[str, Values]]:
    found = {name: to_floats(values) for name, values in groups.items()}
    found = {name: values[np.isfinite(values)] for name, values in found.items()}
    if limits is None:
        everything = np.concatenate([values.ravel() for values in found.values()])
        limits = (float(everything.min()), float(everything.max())) if everything.size else (0.0, 1.0)
    if limits[0] == limits[1]:
        limits = (limits[0] - 0.5, limits[1] + 0.5)
    sides = np.linspace(*limits, bins + 1)
    return sides, {name: np.histogram(np.clip(values, *limits), sides)[0] * 1.0 for name, values in found.items()}


def set_label_ticks(axis: Any, labels: Sequence[Any], size: float, room: float) -> None:
    """Label each position, or every second, fifth, tenth, ... if `room` (in inches) is too small."""
    texts = [shorten_label(visible_label_text(str(label)), 20) if str(label) else "" for label in labels]
    longest = max(map(len, texts), default=0)
    across = axis.axis_name == "x"
    horizontal = not across or longest <= HORIZONTAL
    each = (longest * 0.62 + 1 if across and horizontal else 1.05) * size / 72
    step = next(step for step in _tick_steps() if step * room >= each * len(labels) or step >= max(len(labels), 1))
    places = range(0, len(labels), step)
    axis.set_ticks(places, [texts[k] for k in places], fontsize=size)
    if not horizontal:
        # Anchored at the end of the text, so that labels touch the axis in any font.
        for label in axis.get_ticklabels():
            label.set(rotation=90, rotation_mode="anchor", ha="right", va="center")


def _tick_steps() -> Iterator[int]:
    return (factor * 10**power for power in count() for factor in (1, 2, 5))
