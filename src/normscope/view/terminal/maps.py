"""Maps of an analysis in the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from normscope.analysis import Analysis
from normscope.labels import visible_label_text
from normscope.view.images import (
    find_image_output_row,
    image_patch_grid,
    image_patch_scale,
    image_patch_values,
    own_image_patch,
)
from normscope.view.scales import drop_empty_side, map_values, scale_quantity_name
from normscope.view.terminal.cells import (
    CellPainter,
    render_terminal_cells,
    strongest_terminal_cells,
    terminal_cells_have_colours,
    terminal_cells_row,
)


@dataclass(frozen=True)
class HeatMap:
    """One map for a rich console; `layer` is the model's layer index, counted from 0."""

    analysis: Analysis
    scope: str
    layer: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scope = self.analysis.resolve(self.scope)
        analysis = drop_empty_side(self.analysis, scope)
        yield Text.assemble(
            (f"{scope}, layer {self.layer + 1}", "bold"), f" (counted from 1): {scale_quantity_name(scope)}"
        )
        yield from render_terminal_cells(analysis, map_values(analysis, scope, self.layer), console, options)


@dataclass(frozen=True)
class PatchMap:
    """One output of a vision model on the patch grid, for a rich console: [CLS], or the first row without one."""

    analysis: Analysis
    scope: str
    layer: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        row = find_image_output_row(self.analysis)
        label = self.analysis.rows[row]
        values, others = image_patch_values(self.analysis, self.scope, self.layer, row)
        name = visible_label_text(label.token)
        yield Text.assemble(
            (f"{self.scope}, layer {self.layer + 1}, output {name}", "bold"),
            f" (counted from 1): {scale_quantity_name(self.scope)}",
        )
        if 2 * values.shape[1] + 1 > options.max_width:
            yield strongest_in_terminal_map(self.analysis, self.scope, self.layer)
            return
        scale = image_patch_scale(values, own_image_patch(self.analysis, label))
        paint = CellPainter(scale, terminal_cells_have_colours(console), options.ascii_only)
        for line in values:
            yield terminal_cells_row("", [paint.cell(value, 2) for value in line], 1, [])
        yield from paint.legend(written=False)
        rest = ", ".join(f"{visible_label_text(token)} {paint.number(value)}" for token, value in others.items())
        yield Text("each cell is a patch of the picture" + (f"; not on the grid: {rest}" if rest else ""), style="dim")


def terminal_map(analysis: Analysis, scope: str | None = None, layer: int | None = None) -> HeatMap | PatchMap:
    """One map for a rich console, by default of the last scope and layer (the model's index, counted from 0).

    For a picture, one output on the patch grid.
    """
    scope = analysis.scopes[-1] if scope is None else analysis.resolve(scope)
    layer = analysis.layers[-1] if layer is None else layer
    analysis.layer_position(layer)
    view = HeatMap if image_patch_grid(analysis) is None else PatchMap
    return view(analysis, scope, layer)


def strongest_in_terminal_map(analysis: Analysis, scope: str, layer: int) -> Group:
    """A table of the largest cells between different tokens, for maps that do not fit."""
    scope = analysis.resolve(scope)
    analysis = drop_empty_side(analysis, scope)
    return strongest_terminal_cells(analysis, map_values(analysis, scope, layer))
