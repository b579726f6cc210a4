"""A flow in the terminal: its map, or for a target the text with tinted tokens and a bar for each score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from normscope.flow.result import Flow
from normscope.labels import Label, shorten_label, visible_label_text
from normscope.view.scales import BLUE, ORANGE, Values
from normscope.view.terminal.cells import render_terminal_cells
from normscope.view.tokens import completeness_note, flow_scores_list, side_spans, target_equation

LISTED = 40  # tokens in the table: those with the largest scores
BAR = 20  # width of the longest bar


@dataclass(frozen=True)
class FlowMap:
    """The contributions of the input tokens to the last hidden states, for a rich console."""

    flow: Flow
    values: Values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        flow = self.flow
        yield Text.assemble(("From the input to the last hidden states", "bold"), f": contribution  [{flow.method}]")
        yield from render_terminal_cells(flow, self.values, console, options)
        if note := completeness_note(flow):
            yield Text(note, style="dim")


def terminal_flow_map(flow: Flow) -> FlowMap:
    """The map of a flow, for a rich console."""
    return FlowMap(flow, flow.map.detach().cpu().double().numpy())


def terminal_flow_scores(flow: Flow) -> RenderableType:
    """The score of each input token for the target of a flow."""
    values = flow_scores_list(flow)
    most = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    lines: list[RenderableType] = [Text.assemble((target_equation(flow), "bold"), f"  [{flow.method}]"), Text("")]
    for span in side_spans(flow.columns):
        lines.append(_tint_tokens(flow.columns[span.start : span.stop], values[span.start : span.stop], most))
    lines += [Text(""), _score_table(flow, values, most)]
    if biases_dominate_terminal_flow(flow):
        what, advice = "logit", ": compare two targets\nwith --against to see the effect of the tokens."
        if flow.to is not None and flow.to.contrast:
            what, advice = "difference", "."
        lines.append(Text(f"Biases, which belong to no token, move the {what} more than all tokens together{advice}"))
    return Group(*lines)


def biases_dominate_terminal_flow(flow: Flow) -> bool:
    """True if the remainder exceeds the sum of the absolute scores."""
    assert flow.to is not None
    return abs(flow.to.remainder) > float(flow.to.scores.double().abs().sum())  # False if it is nan


def _tint_tokens(labels: Sequence[Label], values: Sequence[float], most: float) -> Text:
    line = Text()
    for label, value in zip(labels, values, strict=True):
        line.append(visible_label_text(label.token), style=score_tint(value / most))
        line.append(" ")
    return line


def score_tint(share: float) -> Style:
    """A background between white and full orange or blue."""
    if not math.isfinite(share) or abs(share) < 0.02:
        return Style.null()
    strong = ORANGE if share > 0 else BLUE
    depth = min(abs(share), 1.0)
    mixed = bytes(round(255 + (channel - 255) * depth) for channel in strong)
    return Style(color="#ffffff" if depth > 0.6 else "#000000", bgcolor=f"#{mixed.hex()}")


def _score_table(flow: Flow, values: Sequence[float], most: float) -> RenderableType:
    two_sided = len(side_spans(flow.columns)) > 1
    places = range(len(values))
    cut = len(values) > LISTED
    if cut:
        places = sorted(places, key=lambda k: -abs(values[k]))[:LISTED]  # type: ignore[assignment]
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("token\n(from 1)", justify="right", style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("\nscore", justify="right")
    table.add_column("", no_wrap=True)
    for k in places:
        label, value = flow.columns[k], values[k]
        name = shorten_label(visible_label_text(label.token), 24) + f" ({label.side})" * two_sided
        table.add_row(str(label.position + 1), Text(name), f"{value:+.4g}", _score_bar(value / most))
    if flow.to is not None and math.isfinite(flow.to.remainder):
        table.add_row("", Text("biases", style="dim"), f"{flow.to.remainder:+.4g}", "")
    if not cut:
        return table
    return Group(Text(f"The {LISTED} largest of {len(values)} scores:"), table)


def _score_bar(share: float) -> Text:
    """A bar to the left (negative) or right (positive) of the middle."""
    if not math.isfinite(share):
        return Text("")
    length = round(min(abs(share), 1.0) * BAR)
    blocks = "█" * length
    if share < 0:
        return Text(blocks.rjust(BAR) + "│", style=Style(color=f"rgb({','.join(map(str, BLUE))})"))
    return Text(" " * BAR + "│" + blocks, style=Style(color=f"rgb({','.join(map(str, ORANGE))})"))
