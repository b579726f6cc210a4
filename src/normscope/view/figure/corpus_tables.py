"""A table of a corpus run as a figure: means over entries by layer, heat maps, or histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.corpus.store import Run
from normscope.corpus.table_summary import TableShape, distinct_values, entry_means, means_over_entries, table_shape
from normscope.errors import NormscopeError
from normscope.figure_style import figure_style
from normscope.labels import shorten_label, visible_label_text
from normscope.view.figure.maps import figure_map_axes_class, figure_of, to_figure_map_grid
from normscope.view.figure.style import WIDTH, new_figure

if TYPE_CHECKING:
    import polars
    from matplotlib.axes import Axes

    from normscope.view.figure.axes import AxesGrid

# The Okabe-Ito palette without yellow, and black: colour-blind readers can tell them apart.
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
LINE_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
PANELS = 16  # at most
ACROSS = 3
PANEL_SIZE = (2.2, 1.5)  # inches
SINGLE_SIZE = (5.2, 2.8)
BINS = 40
JOINT = " \u00b7 "  # between the keys of a panel


def plot_corpus_table(
    run: Run, name: str, by: str | None, scope: str | None, value: str | None, ax: Axes | None
) -> Axes | AxesGrid:
    """Draw a table of a run. See `Run.plot`."""
    shape = table_shape(run, name)
    means = entry_means(run, name, value, by)
    if scope is not None:
        means = _filtered_by_scope(run, name, shape, means, scope)
    frame = means.collect() if not shape.layered else means_over_entries(means)
    if by is not None:
        frame = frame.sort("group", maintain_order=True)
    panels, lines = _panel_and_line_columns(frame, shape, by)
    split = _split_panels(frame, panels)
    if ax is not None and len(split) > 1:
        raise NormscopeError(
            f"{name} has {len(split)} panels: {', '.join(split)}. Give scope= for one, or leave ax out."
        )
    if len(split) > PANELS:
        raise NormscopeError(
            f"{name} has {len(split)} panels, more than fit in a figure. Give scope= for some of them."
        )
    if by is not None and lines is not None and len(distinct_values(frame, lines)) > len(LINE_COLOURS):
        raise NormscopeError(
            f"{by} has {len(distinct_values(frame, lines))} different values, more than a figure can tell apart "
            f"({len(LINE_COLOURS)}). Group the table yourself: run.table({name!r})."
        )
    label = value or shape.values[0]
    names = [] if lines is None else distinct_values(frame, lines)  # a name has the same colour in every panel
    with figure_style():
        axes = [ax] if ax is not None else _new_panels(len(split))
        for one, (title, some) in zip(axes, split.items(), strict=False):
            _draw_panel(one, some, lines, names, shape, label)
            if title:
                one.set_title(shorten_label(visible_label_text(title), 40), fontsize=8, loc="left")
        if ax is None or by is not None:
            _add_line_legend(axes, outside=ax is None)
        if ax is None:
            figure_of(axes[0]).draw_without_rendering()
        return axes[0] if len(split) == 1 else to_figure_map_grid(axes)


def _filtered_by_scope(run: Run, name: str, shape: TableShape, means: polars.LazyFrame, scope: str) -> polars.LazyFrame:
    import polars

    if "scope" not in shape.keys:
        raise NormscopeError(f"The table {name!r} has no scopes to choose from.")
    wanted = run.resolve_scope(scope)
    known = run.scan(name).select(polars.col("scope").unique()).collect()["scope"].to_list()
    if wanted not in known:
        raise NormscopeError(f"The table {name!r} has no scope {scope!r}. It has: {', '.join(sorted(known))}.")
    return means.filter(polars.col("scope") == wanted).drop("scope")


def _panel_and_line_columns(frame: polars.DataFrame, shape: TableShape, by: str | None) -> tuple[list[str], str | None]:
    """The columns that divide a table into panels, and the one that divides a panel into lines. Columns with a single
    value divide nothing."""
    divides = [key for key in ("side", *shape.keys) if key in frame.columns and frame[key].n_unique() > 1]
    if by is not None:
        return divides, "group"
    keys = [key for key in divides if key != "side"]
    return [key for key in divides if key not in keys[-1:]], (keys[-1] if keys else None)


def _split_panels(frame: polars.DataFrame, panels: Sequence[str]) -> dict[str, polars.DataFrame]:
    if not panels:
        return {"": frame}
    parts = frame.partition_by(panels, maintain_order=True, as_dict=True)
    return {JOINT.join(map(str, key)): part for key, part in parts.items()}


def _draw_panel(
    axes: Axes, frame: polars.DataFrame, lines: str | None, names: Sequence[str], shape: TableShape, label: str
) -> None:
    groups = {"": frame}
    if lines is not None:
        groups = {
            str(key[0]): part for key, part in frame.partition_by([lines], maintain_order=True, as_dict=True).items()
        }
    axes.spines[["top", "right"]].set_visible(False)
    if not shape.layered or "layer" not in frame.columns:
        _draw_histograms(axes, groups, names, lines or "", label)
    elif len(names) > len(LINE_COLOURS):
        _draw_heat_map(axes, groups, lines or "", label)
    else:
        _draw_lines(axes, groups, names, lines or "", label)


def _draw_lines(
    axes: Axes, groups: Mapping[str, polars.DataFrame], names: Sequence[str], column: str, label: str
) -> None:
    """A line for each group, with a band for the interval."""
    from matplotlib.ticker import MaxNLocator

    for name, given in groups.items():
        n = names.index(name) if column else 0
        part = given.sort("layer")
        layers = part["layer"].to_numpy() + 1
        look: dict[str, Any] = {"color": LINE_COLOURS[n], "marker": LINE_MARKS[n], "markersize": 3, "linewidth": 1.2}
        axes.plot(layers, part["mean"].to_numpy(), label=_line_name(name, column), **look)
        axes.fill_between(
            layers, part["low"].to_numpy(), part["high"].to_numpy(), color=LINE_COLOURS[n], alpha=0.2, linewidth=0
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.5)
    axes.set_xlabel("layer")
    axes.set_ylabel(label)


def _draw_heat_map(axes: Axes, groups: Mapping[str, polars.DataFrame], rows: str, label: str) -> None:
    """The means by group and layer, for more groups than colours can tell apart."""
    layers = sorted({layer for part in groups.values() for layer in part["layer"].to_list()})
    cells = np.full((len(groups), len(layers)), math.nan)
    for n, part in enumerate(groups.values()):
        for layer, mean in part.select("layer", "mean").iter_rows():
            cells[n, layers.index(layer)] = mean
    image = axes.imshow(cells, aspect="auto", cmap="cividis")
    axes.set_xticks(range(len(layers)), [str(layer + 1) for layer in layers])
    step = math.ceil(len(groups) / 16)
    names = [shorten_label(_line_name(name, rows) or "", 16) for name in groups]
    axes.set_yticks(range(0, len(groups), step), names[::step])
    axes.set_xlabel("layer")
    axes.set_ylabel(rows)
    bar = figure_of(axes).colorbar(image, ax=axes)
    bar.set_label(label)


def _draw_histograms(
    axes: Axes, groups: Mapping[str, polars.DataFrame], names: Sequence[str], column: str, label: str
) -> None:
    """The distribution of the entries' values, as shares of each group in common bins."""
    values: dict[str, NDArray[np.float64]] = {
        name: part["value"].drop_nulls().to_numpy().astype(np.float64) for name, part in groups.items()
    }
    everything = np.concatenate(list(values.values())) if values else np.zeros(0)
    sides = np.histogram_bin_edges(everything, BINS) if len(everything) else np.linspace(0, 1, BINS + 1)
    for name, found in values.items():
        n = names.index(name) % len(LINE_COLOURS) if column else 0
        shares = np.histogram(found, sides)[0] / max(len(found), 1)
        text = _line_name(name, column)
        axes.stairs(shares, sides, fill=True, color=LINE_COLOURS[n], alpha=0.25)
        axes.stairs(shares, sides, color=LINE_COLOURS[n], linewidth=1.0, label=text)
    axes.set_xlabel(label)
    axes.set_ylabel("share of entries")


def _new_panels(count: int) -> list[Any]:
    """The axes of a new figure, row by row; those that are not needed are off."""
    kind = {"axes_class": figure_map_axes_class()}
    if count == 1:
        return [new_figure(*SINGLE_SIZE).subplots(subplot_kw=kind)]
    across = min(count, ACROSS)
    down = math.ceil(count / across)
    figure = new_figure(min(across * PANEL_SIZE[0] + 0.4, WIDTH), down * PANEL_SIZE[1] + 0.6)
    grid = list(figure.subplots(down, across, squeeze=False, subplot_kw=kind).flat)
    for unused in grid[count:]:
        unused.set_axis_off()
    return grid[:count]


def _line_name(name: str, column: str) -> str | None:
    """A line's name for people, who count heads from 1; none for the only line."""
    if not column:
        return None
    return f"head {int(name) + 1}" if column == "head" else visible_label_text(name)


def _add_line_legend(axes: Sequence[Axes], outside: bool) -> None:
    """One legend for all panels, above them or, in axes that were given, inside."""
    named: dict[str, Any] = {}
    for one in axes:
        for handle, name in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    if len(named) < 2:
        return
    look: dict[str, Any] = {"fontsize": 7, "frameon": False}
    if outside:
        columns = max(1, int(figure_of(axes[0]).get_figwidth() * 13 / (max(map(len, named)) + 5)))
        place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns}
        figure_of(axes[0]).legend(list(named.values()), list(named), **place, **look)
    else:
        axes[0].legend(list(named.values()), list(named), **look)
