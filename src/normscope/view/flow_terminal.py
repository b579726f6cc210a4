"""A flow in the terminal: its map, or for a target the text with its tokens tinted, and a bar for each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from normscope.flow.result import Flow
from normscope.labels import Label
from normscope.view.labels import Values, shorten, spans_of, visible
from normscope.view.terminal import draw_cells

ORANGE, BLUE = (217, 119, 6), (37, 99, 235)  # tokens that add to the target, and that take from it
LISTED = 40  # tokens in the table; of more, those of the largest scores
BAR = 20  # characters of the longest bar


def target_of(flow: Flow) -> str:
    """What is explained; a position, which the library counts from 0, is counted from 1 as in all views."""
    assert flow.to is not None
    return re.sub(r"at position (\d+)", lambda found: f"at token {int(found[1]) + 1}", flow.to.target)


def equation(flow: Flow) -> str:
    """`logit of 'happy' = 12.3 = 9.8 of the tokens + 2.5 of biases (completeness 1e-7)`"""
    to = flow.to
    assert to is not None
    if math.isnan(to.remainder):
        return f"{target_of(flow)} = {to.value:.4g}; {flow.method} has no parts that sum to it"
    total = float(to.scores.double().sum())
    sign = "-" if to.remainder < 0 else "+"
    return (
        f"{target_of(flow)} = {to.value:.4g} = {total:.4g} of the tokens {sign} {abs(to.remainder):.4g} of biases "
        f"(completeness {to.completeness:.0e})"
    )


@dataclass(frozen=True)
class FlowMap:
    """How much of each last hidden state comes from each input token, for a rich console."""

    flow: Flow
    values: Values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        flow = self.flow
        yield Text.assemble(("From the input to the last hidden states", "bold"), f": contribution  [{flow.method}]")
        yield from draw_cells(flow, self.values, console, options)
        if told := completeness(flow):
            yield Text(told, style="dim")


def map_of(flow: Flow) -> FlowMap:
    """The map of a flow without a target."""
    return FlowMap(flow, flow.map.detach().cpu().double().numpy())


def completeness(flow: Flow) -> str:
    """`worst completeness error 2e-07`; empty for a method that does not decompose vectors."""
    return "" if flow.completeness is None else f"worst completeness error {float(flow.completeness.max()):.1e}"


def scores(flow: Flow) -> RenderableType:
    """What each input token adds to the target of a flow."""
    values = flow.scores.double().tolist()
    most = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    lines: list[RenderableType] = [Text.assemble((equation(flow), "bold"), f"  [{flow.method}]"), Text("")]
    for span in spans_of(flow.columns):
        lines.append(_sentence(flow.columns[span.start : span.stop], values[span.start : span.stop], most))
    lines += [Text(""), _table(flow, values, most)]
    if mostly_biases(flow):
        what, advice = "logit", ": compare two targets\nwith --against to see what the tokens decide."
        if flow.to is not None and flow.to.contrast:
            what, advice = "difference", "."
        lines.append(Text(f"Biases, which belong to no token, move the {what} more than all tokens together{advice}"))
    return Group(*lines)


def mostly_biases(flow: Flow) -> bool:
    """Whether biases weigh more than the scores of all tokens, those for the target and those against it."""
    return abs(flow.remainder) > float(flow.scores.double().abs().sum())  # False where there is no remainder (nan)


def _sentence(labels: Sequence[Label], values: Sequence[float], most: float) -> Text:
    line = Text()
    for label, value in zip(labels, values, strict=True):
        line.append(visible(label.token), style=_tint(value / most))
        line.append(" ")
    return line


def _tint(share: float) -> Style:
    """A background between that of the page and full orange or blue."""
    if not math.isfinite(share) or abs(share) < 0.02:
        return Style.null()
    strong = ORANGE if share > 0 else BLUE
    depth = min(abs(share), 1.0)
    mixed = bytes(round(255 + (channel - 255) * depth) for channel in strong)
    return Style(color="#ffffff" if depth > 0.6 else "#000000", bgcolor=f"#{mixed.hex()}")


def _table(flow: Flow, values: Sequence[float], most: float) -> RenderableType:
    two_sided = len(spans_of(flow.columns)) > 1
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
        name = shorten(visible(label.token), 24) + f" ({label.side})" * two_sided
        table.add_row(str(label.position + 1), Text(name), f"{value:+.4g}", _bar(value / most))
    if math.isfinite(flow.remainder):
        table.add_row("", Text("biases", style="dim"), f"{flow.remainder:+.4g}", "")
    if not cut:
        return table
    return Group(Text(f"The {LISTED} largest of {len(values)} scores:"), table)


def _bar(share: float) -> Text:
    """A bar to the left of the middle, or to the right of it."""
    if not math.isfinite(share):
        return Text("")
    length = round(min(abs(share), 1.0) * BAR)
    blocks = "█" * length
    if share < 0:
        return Text(blocks.rjust(BAR) + "│", style=Style(color=f"rgb({','.join(map(str, BLUE))})"))
    return Text(" " * BAR + "│" + blocks, style=Style(color=f"rgb({','.join(map(str, ORANGE))})"))
