"""A map as cells of a terminal: coloured, or with blocks or digits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from normscope.labels import label_glyphs, shorten_label, visible_label_text
from normscope.view.scales import BEYOND, CIVIDIS, Scale, Values, colour_scale, own_token_cells
from normscope.view.tokens import Labelled, Span, side_spans, sides_note

BLOCKS = " ▁▂▃▄▅▆▇█"
DIGITS = "0123456789"
LABEL = 16  # maximum width of a row label
UPRIGHT = 10  # maximum height of column labels
STRONGEST = 20  # cells listed instead of a map that does not fit


def render_terminal_cells(
    labelled: Labelled, values: Values, console: Console, options: ConsoleOptions
) -> RenderResult:
    """Render a map (rows, columns) as cells, or list its strongest ones if the terminal is too narrow."""
    rows = [visible_label_text(label.token) for label in labelled.rows]
    columns = [visible_label_text(label.token) for label in labelled.columns]
    gutter = min(max(map(cell_len, rows)), LABEL) + 1
    spans = side_spans(labelled.columns)
    seams = [span.start for span in spans[1:]]
    frame = gutter + len(seams)
    room = (options.max_width - frame) // len(columns)
    if room < 2:
        needed = frame + 2 * len(columns)
        yield Text(
            f"The map of {len(columns)} columns needs a terminal {needed} characters wide; this one has "
            f"{options.max_width}."
        )
        yield strongest_terminal_cells(labelled, values)
        return

    paint = CellPainter(
        colour_scale([values], own_token_cells(labelled)), terminal_cells_have_colours(console), options.ascii_only
    )
    if room >= CellPainter.WRITTEN:
        width = min(room, max(CellPainter.WRITTEN, min(max(map(cell_len, columns)) + 1, 10)))
        heads = [[_pad_cell(shorten_label(token, width - 1), width - 1, "right") + " " for token in columns]]
    else:
        width = 2
        heads = _vertical_labels([shorten_label(token, UPRIGHT) for token in columns])
    if seams:
        yield _side_titles(spans, width, gutter)
    for head in heads:
        yield terminal_cells_row("", head, gutter, seams)
    for token, line in zip(rows, values, strict=True):
        yield terminal_cells_row(
            shorten_label(token, LABEL), [paint.cell(value, width) for value in line], gutter, seams
        )
    yield from paint.legend(written=width >= CellPainter.WRITTEN)
    yield Text("rows: outputs, columns: inputs" + sides_note(labelled), style="dim")


def strongest_terminal_cells(labelled: Labelled, values: Values) -> Group:
    two_sided = len(side_spans(labelled.columns)) > 1
    between = np.where(own_token_cells(labelled) | ~np.isfinite(values), -np.inf, values)
    order = np.argsort(-between, axis=None, kind="stable")[:STRONGEST]
    table = borderless_terminal_cells()
    for title in ("output", "input"):
        table.add_column(title, justify="right", style="dim")
        table.add_column("", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("of its row", justify="right")
    for place in order:
        i, j = np.unravel_index(place, values.shape)
        if np.isneginf(between[i, j]):
            break
        row, column = labelled.rows[i], labelled.columns[j]
        total = float(np.nansum(values[i]))
        table.add_row(
            str(row.position + 1),
            Text(shorten_label(visible_label_text(row.token), 24)),
            str(column.position + 1),
            Text(shorten_label(visible_label_text(column.token), 24) + f" ({column.side})" * two_sided),
            f"{values[i, j]:.4g}",
            f"{100 * values[i, j] / total:.1f} %" if total > 0 else "",
        )
    return Group(Text("Strongest cells between different tokens (counted from 1):"), table)


class CellPainter:
    """Paints the cells of one map: with colours, or with blocks or digits if there are none."""

    WRITTEN = 6  # minimum width of cells that show their value

    def __init__(self, scale: Scale, colours: bool, ascii_only: bool) -> None:
        self.scale = scale
        self.colours = colours
        self.ramp = DIGITS if ascii_only else BLOCKS
        exponent = math.floor(math.log10(scale.end))
        self.unit = 0 if -1 <= exponent <= 2 else exponent  # values are shown in units of 10 ** unit
        self.decimals = 2 - max(exponent - self.unit, 0)

    def cell(self, value: float, width: int) -> Text:
        share = self.scale.share(value)
        if width >= self.WRITTEN:
            content = self.number(value).rjust(width - 1) + " "
        elif self.colours:
            content = " " * width
        else:
            content = self.ramp[round(share * (len(self.ramp) - 1))] * width
        beyond = self.scale.clipped and value > self.scale.end
        return Text(content, style=_cividis_style(share, beyond) if self.colours else Style.null())

    def number(self, value: float) -> str:
        """The value in at most `WRITTEN - 1` characters."""
        if not math.isfinite(value):
            return "-"
        forms = (f"{value / 10**self.unit:{form}}" for form in (f".{self.decimals}f", ".0f", ".0e"))
        return next((text for text in forms if len(text) < self.WRITTEN), "…")

    def legend(self, written: bool) -> Iterator[Text]:
        end = self.number(self.scale.end)
        unit = f", in units of 1e{self.unit}" if self.unit else ""
        if self.colours:
            bar = Text(f"{self.number(0.0)} ")
            for step in range(24):
                bar.append(" ", style=_cividis_style(step / 23))
            if self.scale.clipped:
                bar.append("  ", style=_cividis_style(1.0, beyond=True))
            yield bar.append(f" {end}{unit}")
        elif not written:
            yield Text(f"{self.number(0.0)} {self.ramp} {end}{unit}")
        elif unit:
            yield Text(f"values{unit}")
        if self.scale.clipped and (self.colours or not written):
            yield Text(f"own tokens reach {self.number(self.scale.top)}, beyond the scale", style="dim")


def _cividis_style(share: float, beyond: bool = False) -> Style:
    """Cividis at `share` as the background, with a readable foreground."""
    if beyond:
        return Style(color="#000000", bgcolor=BEYOND)
    position = share * (len(CIVIDIS) - 1)
    below = min(int(position), len(CIVIDIS) - 2)
    low, high = (bytes.fromhex(CIVIDIS[k][1:]) for k in (below, below + 1))
    mixed = [round(a + (b - a) * (position - below)) for a, b in zip(low, high, strict=True)]
    ink = "#000000" if share > 0.45 else "#ffffff"
    return Style(color=ink, bgcolor=f"#{bytes(mixed).hex()}")


def terminal_cells_have_colours(console: Console) -> bool:
    """True if the console has enough colours for a colour scale."""
    return not console.no_color and console.color_system in ("256", "truecolor")


def _vertical_labels(labels: Sequence[str]) -> list[list[str]]:
    """Lines of column labels written top to bottom, two cells wide, aligned at the map."""
    stacks = [label_glyphs(label) for label in labels]
    height = max(map(len, stacks))
    padded = [[" "] * (height - len(stack)) + stack for stack in stacks]
    return [[_pad_cell(stack[k], 2, "left") for stack in padded] for k in range(height)]


def terminal_cells_row(label: str, cells: Sequence[str | Text], gutter: int, seams: Sequence[int]) -> Text:
    line = Text(no_wrap=True, overflow="ignore")
    line.append(_pad_cell(label, gutter - 1, "right") + " ")
    for j, cell in enumerate(cells):
        if j in seams:
            line.append("|", style="dim")
        line.append(cell)
    return line


def _pad_cell(text: str, width: int, align: str) -> str:
    space = " " * (width - cell_len(text))
    return space + text if align == "right" else text + space


def _side_titles(spans: Sequence[Span], width: int, gutter: int) -> Text:
    """The names of the sides, above their columns."""
    line = Text(" " * gutter, no_wrap=True, overflow="ignore", style="dim")
    for span in spans:
        room = (span.stop - span.start) * width
        line.append("|" if span.start else "")
        line.append(_pad_cell(shorten_label(span.side, room - 1) if room > 1 else "", room, "left"))
    return line


def borderless_terminal_cells() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")
