"""A flow as a matplotlib figure: a target's scores by token and layer, or the map from input to last layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normscope.figure_style import GREY, figure_style
from normscope.flow.result import Flow
from normscope.labels import shorten_label, visible_label_text
from normscope.view.figure.maps import figure_map_axes_class, figure_of, plot_single_figure_map
from normscope.view.figure.style import LABELLED, WIDTH, new_figure, write_caption
from normscope.view.scales import Values
from normscope.view.tokens import flow_scores_list, side_spans, target_equation, target_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RAISES, LOWERS = "#d97706", "#2563eb"  # orange and blue, which colour-blind readers can tell apart
LAYER_HEIGHT = 0.16  # inches per layer


def plot_flow(flow: Flow, ax: Axes | None = None) -> Axes:
    """Draw a target's scores as bars, and below them by layer; without a target, the map of the last layer.

    With `ax`, only the bars or the map are drawn.
    """
    with figure_style():
        if flow.to is None:
            values: Values = flow.map.detach().cpu().double().numpy()
            made = plot_single_figure_map(
                flow, values, f"{flow.method}, input to layer {flow.layers[-1] + 1}", "contribution", ax=ax
            )
        elif ax is not None:
            made = ax
            _draw_score_bars(ax, flow)
            _label_flow_tokens(ax, flow)
        else:
            made = _plot_scores(flow)
        if ax is None:
            figure_of(made).draw_without_rendering()
        return made


def _plot_scores(flow: Flow) -> Axes:
    to = flow.to
    assert to is not None
    spans = side_spans(flow.columns)
    tables = [to.layers[span.side] for span in spans] if all(span.side in to.layers for span in spans) else []
    deep = max((len(table) for table in tables), default=0)
    count = len(flow.columns) + 1
    width = min(max(2.6, 0.3 * count + 0.9), WIDTH)
    figure = new_figure(width, 2.1 + LAYER_HEIGHT * deep + 0.5 * bool(deep))
    ratios = [1.3, max(LAYER_HEIGHT * deep, 0.1)] if deep else [1.0]
    kind = {"axes_class": figure_map_axes_class()}
    top, *below = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios, subplot_kw=kind)[:, 0]
    _draw_score_bars(top, flow)
    if deep:
        _draw_scores_by_layer(below[0], flow, tables, deep)
    _label_flow_tokens(below[0] if deep else top, flow)
    if deep:
        top.set_xticks([])
    write_caption(figure, _flow_caption(flow))
    made: Axes = top
    return made


def _draw_score_bars(axes: Axes, flow: Flow) -> None:
    values = [value if math.isfinite(value) else 0.0 for value in flow_scores_list(flow)]
    axes.bar(range(len(values)), values, width=0.8, color=[RAISES if value >= 0 else LOWERS for value in values])
    if flow.to is not None and math.isfinite(flow.to.remainder):
        axes.bar([len(values)], [flow.to.remainder], width=0.8, color="#9ca3af")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlim(-0.5, len(values) + 0.5)
    axes.tick_params(axis="y", length=1.5, width=0.3)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_ylabel("score")
    axes.set_title(f"{target_label(flow)} ({flow.method})")
    for span in side_spans(flow.columns)[1:]:
        axes.axvline(span.start - 0.5, color=GREY, linewidth=0.4, linestyle=":")


def _draw_scores_by_layer(axes: Axes, flow: Flow, tables: list[Any], deep: int) -> None:
    """Draw the scores of the states before each layer and after the last, from the input at the top."""
    from matplotlib.colors import LinearSegmentedColormap

    grid = [[math.nan] * (len(flow.columns) + 1) for _ in range(deep)]
    assert flow.to is not None
    for span, table in zip(side_spans(flow.columns), tables, strict=True):
        for layer, line in enumerate(table.double().tolist()):
            grid[layer][span.start : span.stop] = line
    if len(tables) == 1:  # with two sides, each has its own remainder
        for layer, value in enumerate(flow.to.remainders[flow.rows[0].side].double().tolist()):
            grid[layer][-1] = value
    most = max((abs(value) for line in grid for value in line[:-1] if math.isfinite(value)), default=0.0) or 1.0
    colours = LinearSegmentedColormap.from_list("blue-white-orange", [LOWERS, "#ffffff", RAISES]).with_extremes(
        bad="#eee"
    )
    edges = (-0.5, len(flow.columns) + 0.5, deep - 0.5, -0.5)
    image = axes.imshow(grid, cmap=colours, vmin=-most, vmax=most, aspect="auto", extent=edges)
    axes.set_yticks(range(deep), ["input", *(str(layer) for layer in range(1, deep))])
    axes.set_ylabel("after layer")
    axes.spines[:].set_visible(False)
    axes.axvline(len(flow.columns) - 0.5, color="white", linewidth=1.6)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=14)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=5.5, length=1.5, width=0.3)


def _label_flow_tokens(axes: Axes, flow: Flow) -> None:
    step = math.ceil(len(flow.columns) / LABELLED)
    places = list(range(0, len(flow.columns), step))
    names = [shorten_label(visible_label_text(flow.columns[k].token), 18) for k in places]
    axes.set_xticks([*places, len(flow.columns)], [*names, "biases"], rotation=90)


def _flow_caption(flow: Flow) -> str:
    text = f"{target_equation(flow)}. Orange raises it, blue lowers it, grey is the contribution of biases."
    if flow.to is not None and flow.to.layers:
        text += " Below: the same target by the tokens' states before each layer; the last column shows later biases."
    return text
