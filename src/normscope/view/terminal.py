"""Maps, mixing ratios and a summary in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from normscope.analysis import Analysis
from normscope.view import patches
from normscope.view.labels import (
    BEYOND,
    CIVIDIS,
    Labelled,
    Scale,
    Span,
    Values,
    contributing,
    glyphs_of,
    model_label,
    own_cells,
    quantity,
    ranges,
    scale_of,
    shorten,
    sides_note,
    spans_of,
    values_of,
    visible,
    worst_completeness,
)

BLOCKS = " ▁▂▃▄▅▆▇█"
DIGITS = "0123456789"
LABEL = 16  # cells that a row label may take
UPRIGHT = 10  # lines that column labels may take
STRONGEST = 20  # cells in the table that stands for a map that does not fit
LISTED = 40  # tokens in the summary


@dataclass(frozen=True)
class HeatMap:
    """One map for a rich console; `layer` is the model's layer index, counted from 0."""

    analysis: Analysis
    scope: str
    layer: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scope = self.analysis.resolve(self.scope)
        analysis = contributing(self.analysis, scope)
        yield Text.assemble((f"{scope}, layer {self.layer + 1}", "bold"), f" (counted from 1): {quantity(scope)}")
        yield from draw_cells(analysis, values_of(analysis, scope, self.layer), console, options)


def draw_cells(labelled: Labelled, values: Values, console: Console, options: ConsoleOptions) -> RenderResult:
    """A map (rows, columns) as cells, or its strongest ones where the terminal is too narrow."""
    rows = [visible(label.token) for label in labelled.rows]
    columns = [visible(label.token) for label in labelled.columns]
    gutter = min(max(map(cell_len, rows)), LABEL) + 1
    spans = spans_of(labelled.columns)
    seams = [span.start for span in spans[1:]]
    frame = gutter + len(seams)
    room = (options.max_width - frame) // len(columns)
    if room < 2:
        needed = frame + 2 * len(columns)
        yield Text(
            f"The map of {len(columns)} columns needs a terminal {needed} characters wide; this one has "
            f"{options.max_width}."
        )
        yield _strongest_cells(labelled, values)
        return

    paint = _Paint(scale_of([values], own_cells(labelled)), _colours(console), options.ascii_only)
    if room >= _Paint.WRITTEN:
        width = min(room, max(_Paint.WRITTEN, min(max(map(cell_len, columns)) + 1, 10)))
        heads = [[_fit(shorten(token, width - 1), width - 1, "right") + " " for token in columns]]
    else:
        width = 2
        heads = _upright([shorten(token, UPRIGHT) for token in columns])
    if seams:
        yield _titles(spans, width, gutter)
    for head in heads:
        yield _row("", head, gutter, seams)
    for token, line in zip(rows, values, strict=True):
        yield _row(shorten(token, LABEL), [paint.cell(value, width) for value in line], gutter, seams)
    yield from paint.legend(written=width >= _Paint.WRITTEN)
    yield Text("rows: outputs, columns: inputs" + sides_note(labelled), style="dim")


@dataclass(frozen=True)
class PatchMap:
    """One output of a vision model on the grid of patches, for a rich console: [CLS], or the first row there is."""

    analysis: Analysis
    scope: str
    layer: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        row = patches.row_of(self.analysis)
        label = self.analysis.rows[row]
        values, others = patches.on_grid(self.analysis, self.scope, self.layer, row)
        name = visible(label.token)
        yield Text.assemble(
            (f"{self.scope}, layer {self.layer + 1}, output {name}", "bold"),
            f" (counted from 1): {quantity(self.scope)}",
        )
        if 2 * values.shape[1] + 1 > options.max_width:
            yield strongest(self.analysis, self.scope, self.layer)
            return
        scale = patches.scale_of(values, patches.own_patch(self.analysis, label))
        paint = _Paint(scale, _colours(console), options.ascii_only)
        for line in values:
            yield _row("", [paint.cell(value, 2) for value in line], 1, [])
        yield from paint.legend(written=False)
        rest = ", ".join(f"{visible(token)} {paint.number(value)}" for token, value in others.items())
        yield Text("each cell is a patch of the picture" + (f"; not on the grid: {rest}" if rest else ""), style="dim")


def heat_map(analysis: Analysis, scope: str | None = None, layer: int | None = None) -> HeatMap | PatchMap:
    """One map, by default of the last scope and layer; `layer` is the model's layer index, counted from 0. Of a picture
    the patches' share in one output."""
    scope = analysis.scopes[-1] if scope is None else analysis.resolve(scope)
    layer = analysis.layers[-1] if layer is None else layer
    analysis.layer_position(layer)
    view = HeatMap if patches.grid_of(analysis) is None else PatchMap
    return view(analysis, scope, layer)


def strongest(analysis: Analysis, scope: str, layer: int) -> Group:
    """The largest cells of a map between different tokens, for maps that do not fit."""
    scope = analysis.resolve(scope)
    analysis = contributing(analysis, scope)
    return _strongest_cells(analysis, values_of(analysis, scope, layer))


def _strongest_cells(labelled: Labelled, values: Values) -> Group:
    two_sided = len(spans_of(labelled.columns)) > 1
    between = np.where(own_cells(labelled) | ~np.isfinite(values), -np.inf, values)
    order = np.argsort(-between, axis=None, kind="stable")[:STRONGEST]
    table = _table()
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
            Text(shorten(visible(row.token), 24)),
            str(column.position + 1),
            Text(shorten(visible(column.token), 24) + f" ({column.side})" * two_sided),
            f"{values[i, j]:.4g}",
            f"{100 * values[i, j] / total:.1f} %" if total > 0 else "",
        )
    return Group(Text("Strongest cells between different tokens (counted from 1):"), table)


def mixing_table(analysis: Analysis) -> RenderableType:
    """Layers x scopes: the mixing ratio, mean over the output tokens, in percent; of the scopes that have one."""
    if not analysis.mixing_scopes:
        return Text("Cross-attention reads only the encoder's tokens: it has no mixing ratio.", style="dim")
    table = _table()
    table.add_column("layer\n(from 1)", justify="right", style="dim")
    for scope in analysis.mixing_scopes:
        table.add_column(Text(_stacked(scope), justify="right"), justify="right", min_width=5)
    means = [analysis.mixing_ratio(scope).double().mean(-1).tolist() for scope in analysis.mixing_scopes]
    for layer, shares in zip(analysis.layers, zip(*means, strict=True), strict=True):
        table.add_row(str(layer + 1), *(f"{100 * share:.1f}" if math.isfinite(share) else "-" for share in shares))
    title = Text.assemble(("Mixing ratio", "bold"), ": share of other tokens in an output, mean over outputs, in %")
    return Group(title, table)


def is_causal(analysis: Analysis) -> bool:
    """Whether the rows are those of a causal language model."""
    return all(label.side == "decoder" for label in analysis.columns)


def sink_table(analysis: Analysis) -> Group:
    """Layers x scopes: the first token's share in the other outputs, by weight and by norm, mean, in percent."""
    wanted = [analysis.aliases.get(alias) for alias in ("weights", "attention", "layer")]
    scopes = [scope for scope in analysis.scopes if scope in wanted] or list(analysis.scopes)
    others = [i for i, label in enumerate(analysis.rows) if label != analysis.columns[0]]
    table = _table()
    table.add_column("layer\n(from 1)", justify="right", style="dim")
    for scope in scopes:
        table.add_column(Text(_stacked(scope), justify="right"), justify="right", min_width=5)
    means = [analysis.first_token_share(scope)[:, others].double().mean(-1).tolist() for scope in scopes]
    for layer, shares in zip(analysis.layers, zip(*means, strict=True), strict=True):
        table.add_row(str(layer + 1), *(f"{100 * share:.1f}" if math.isfinite(share) else "-" for share in shares))
    name = shorten(visible(analysis.columns[0].token), LABEL)
    title = Text.assemble(("First token", "bold"), f" {name}: its share in the other outputs by weight or norm, in %")
    return Group(title, table)


def layer_tables(analysis: Analysis) -> RenderableType:
    """The mixing ratios; of a causal model also the first token's share, beside them where there is room."""
    mixing = mixing_table(analysis)
    if not is_causal(analysis):
        return mixing
    return Columns([mixing, sink_table(analysis)], padding=(1, 4))


def summary(analysis: Analysis) -> Table:
    """What was analysed, and how exactly it adds up."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    family = analysis.info.get("family")
    table.add_row("model", Text(model_label(analysis) + (f" ({family})" if family else "")))
    shown = " ".join(shorten(visible(token), 24) for token in analysis.tokens[:LISTED])
    table.add_row("tokens", Text(f"{len(analysis.rows)}: {shown}" + " …" * (len(analysis.rows) > LISTED)))
    table.add_row("layers", Text(f"{ranges(layer + 1 for layer in analysis.layers)} (counted from 1)"))
    table.add_row("scopes", Text(" ".join(analysis.scopes)))
    error, scope, layer = worst_completeness(analysis)
    table.add_row("completeness", Text(f"worst error {error:.1e} ({scope}, layer {layer + 1})"))
    return table


class _Paint:
    """Cells of one map: coloured, or with blocks or digits where there is no colour."""

    WRITTEN = 6  # cells from this width on show their value

    def __init__(self, scale: Scale, colours: bool, ascii_only: bool) -> None:
        self.scale = scale
        self.colours = colours
        self.ramp = DIGITS if ascii_only else BLOCKS
        exponent = math.floor(math.log10(scale.end))
        self.unit = 0 if -1 <= exponent <= 2 else exponent  # values are written in units of 10 ** unit
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
        return Text(content, style=_shade(share, beyond) if self.colours else Style.null())

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
                bar.append(" ", style=_shade(step / 23))
            if self.scale.clipped:
                bar.append("  ", style=_shade(1.0, beyond=True))
            yield bar.append(f" {end}{unit}")
        elif not written:
            yield Text(f"{self.number(0.0)} {self.ramp} {end}{unit}")
        elif unit:
            yield Text(f"values{unit}")
        if self.scale.clipped and (self.colours or not written):
            yield Text(f"own tokens reach {self.number(self.scale.top)}, beyond the scale", style="dim")


def _shade(share: float, beyond: bool = False) -> Style:
    """Cividis at `share` as the background, and black or white to write on it."""
    if beyond:
        return Style(color="#000000", bgcolor=BEYOND)
    position = share * (len(CIVIDIS) - 1)
    below = min(int(position), len(CIVIDIS) - 2)
    low, high = (bytes.fromhex(CIVIDIS[k][1:]) for k in (below, below + 1))
    mixed = [round(a + (b - a) * (position - below)) for a, b in zip(low, high, strict=True)]
    ink = "#000000" if share > 0.45 else "#ffffff"
    return Style(color=ink, bgcolor=f"#{bytes(mixed).hex()}")


def _colours(console: Console) -> bool:
    """Whether the console has enough colours for an even scale."""
    return not console.no_color and console.color_system in ("256", "truecolor")


def _upright(labels: Sequence[str]) -> list[list[str]]:
    """Column labels written downwards, two cells wide, ending at the map."""
    stacks = [glyphs_of(label) for label in labels]
    height = max(map(len, stacks))
    padded = [[" "] * (height - len(stack)) + stack for stack in stacks]
    return [[_fit(stack[k], 2, "left") for stack in padded] for k in range(height)]


def _row(label: str, cells: Sequence[str | Text], gutter: int, seams: Sequence[int]) -> Text:
    line = Text(no_wrap=True, overflow="ignore")
    line.append(_fit(label, gutter - 1, "right") + " ")
    for j, cell in enumerate(cells):
        if j in seams:
            line.append("|", style="dim")
        line.append(cell)
    return line


def _fit(text: str, width: int, align: str) -> str:
    space = " " * (width - cell_len(text))
    return space + text if align == "right" else text + space


def _titles(spans: Sequence[Span], width: int, gutter: int) -> Text:
    """The sides' names above their columns."""
    line = Text(" " * gutter, no_wrap=True, overflow="ignore", style="dim")
    for span in spans:
        room = (span.stop - span.start) * width
        line.append("|" if span.start else "")
        line.append(_fit(shorten(span.side, room - 1) if room > 1 else "", room, "left"))
    return line


def _stacked(scope: str) -> str:
    """A scope name on several short lines, one component each: `ATTN RES -N`."""
    path, _, kind = scope.rpartition("-")
    parts: list[str] = []
    while path:
        part = next((p for p in ("XATTN", "ATTN", "RES", "LN", "FF") if path.startswith(p)), path)
        parts.append(part)
        path = path[len(part) :]
    return "\n".join([*parts, f"-{kind}"])


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")
