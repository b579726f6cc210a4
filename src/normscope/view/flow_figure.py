"""A flow as a matplotlib figure: the scores of a target by token and by layer, or the map from the input to the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normscope.flow.result import Flow
from normscope.view.figure import GREY, LABELLED, WIDTH, blank, caption, figure_of, map_axes, single, style
from normscope.view.flow_terminal import equation, target_of
from normscope.view.labels import Values, shorten, spans_of, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ADDS, TAKES = "#d97706", "#2563eb"  # orange and blue: told apart with colour-blindness too
ROW = 0.16  # inches of a layer


def draw(flow: Flow, ax: Axes | None = None) -> Axes:
    """Bars of a target's scores over the tokens' scores at every layer; without a target, the map of the last layer. In
    axes that are given, the bars or the map alone."""
    with style():
        if flow.to is None:
            values: Values = flow.map.detach().cpu().double().numpy()
            made = single(flow, values, f"{flow.method}, input to layer {flow.layers[-1] + 1}", "contribution", ax=ax)
        elif ax is not None:
            made = ax
            _bars(ax, flow)
            _tokens(ax, flow)
        else:
            made = _scores(flow)
        if ax is None:
            figure_of(made).draw_without_rendering()
        return made


def _scores(flow: Flow) -> Axes:
    to = flow.to
    assert to is not None
    spans = spans_of(flow.columns)
    tables = [to.layers[span.side] for span in spans] if all(span.side in to.layers for span in spans) else []
    deep = max((len(table) for table in tables), default=0)
    count = len(flow.columns) + 1
    width = min(max(2.6, 0.3 * count + 0.9), WIDTH)
    figure = blank(width, 2.1 + ROW * deep + 0.5 * bool(deep))
    ratios = [1.3, max(ROW * deep, 0.1)] if deep else [1.0]
    kind = {"axes_class": map_axes()}
    top, *below = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios, subplot_kw=kind)[:, 0]
    _bars(top, flow)
    if deep:
        _layers(below[0], flow, tables, deep)
    _tokens(below[0] if deep else top, flow)
    if deep:
        top.set_xticks([])
    caption(figure, _told(flow))
    made: Axes = top
    return made


def _bars(axes: Axes, flow: Flow) -> None:
    values = [value if math.isfinite(value) else 0.0 for value in flow.scores.double().tolist()]
    axes.bar(range(len(values)), values, width=0.8, color=[ADDS if value >= 0 else TAKES for value in values])
    if math.isfinite(flow.remainder):
        axes.bar([len(values)], [flow.remainder], width=0.8, color="#9ca3af")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlim(-0.5, len(values) + 0.5)
    axes.tick_params(axis="y", length=1.5, width=0.3)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_ylabel("score")
    axes.set_title(f"{target_of(flow)} ({flow.method})")
    for span in spans_of(flow.columns)[1:]:
        axes.axvline(span.start - 0.5, color=GREY, linewidth=0.4, linestyle=":")


def _layers(axes: Axes, flow: Flow, tables: list[Any], deep: int) -> None:
    """The scores by token of the states before each layer and after the last, from the input at the top."""
    from matplotlib.colors import LinearSegmentedColormap

    grid = [[math.nan] * (len(flow.columns) + 1) for _ in range(deep)]
    assert flow.to is not None
    for span, table in zip(spans_of(flow.columns), tables, strict=True):
        for layer, line in enumerate(table.double().tolist()):
            grid[layer][span.start : span.stop] = line
    if len(tables) == 1:  # each of two sides has a remainder of its own, for all that is behind its states
        for layer, value in enumerate(flow.to.remainders[flow.rows[0].side].double().tolist()):
            grid[layer][-1] = value
    most = max((abs(value) for line in grid for value in line[:-1] if math.isfinite(value)), default=0.0) or 1.0
    colours = LinearSegmentedColormap.from_list("blue-white-orange", [TAKES, "#ffffff", ADDS]).with_extremes(bad="#eee")
    edges = (-0.5, len(flow.columns) + 0.5, deep - 0.5, -0.5)
    image = axes.imshow(grid, cmap=colours, vmin=-most, vmax=most, aspect="auto", extent=edges)
    axes.set_yticks(range(deep), ["input", *(str(layer) for layer in range(1, deep))])
    axes.set_ylabel("after layer")
    axes.spines[:].set_visible(False)
    axes.axvline(len(flow.columns) - 0.5, color="white", linewidth=1.6)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=14)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=5.5, length=1.5, width=0.3)


def _tokens(axes: Axes, flow: Flow) -> None:
    step = math.ceil(len(flow.columns) / LABELLED)
    places = list(range(0, len(flow.columns), step))
    names = [shorten(visible(flow.columns[k].token), 18) for k in places]
    axes.set_xticks([*places, len(flow.columns)], [*names, "biases"], rotation=90)


def _told(flow: Flow) -> str:
    said = f"{equation(flow)}. Orange adds to it, blue takes from it, grey is what biases add."
    if flow.to is not None and flow.to.layers:
        said += (
            " Below: the same logit by the tokens' states before each layer; the last column is what biases add behind."
        )
    return said
