"""A flow as HTML, without scripts: tokens coloured by their scores and a table of them, or the map from the input."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path

from normscope.engine.files import check_suffix, write_atomically
from normscope.flow.result import Flow
from normscope.labels import Label
from normscope.view.flow_terminal import BLUE, ORANGE, equation
from normscope.view.labels import own_cells, scale_of, spans_of, visible

CELLS = 10_000  # cells of a map up to which it is drawn
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }}</style>
</head>
<body>
{body}
</body>
</html>
"""


def write(flow: Flow, path: str | os.PathLike[str]) -> Path:
    """Write the page."""
    check_suffix(path, ".html", ".htm")
    made = PAGE.format(title=html.escape(visible(repr(flow))), body=fragment(flow))
    with write_atomically(path) as temporary:
        temporary.write_text(made, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair in a token
    return Path(path)


def fragment(flow: Flow) -> str:
    """The part of the page that a notebook shows too."""
    lines = [f"<p><strong>{html.escape(visible(_title(flow)))}</strong></p>"]
    lines += [f"<p>Warning: {html.escape(text)}</p>" for text in flow.warnings]
    lines += _scores(flow) if flow.to is not None else _map(flow)
    return '<div class="normscope-flow">\n' + "\n".join(lines) + "\n</div>"


def _title(flow: Flow) -> str:
    model = f"{flow.info.get('model', '')}, {flow.method}"
    return f"{model}: {equation(flow)}" if flow.to is not None else f"{model}: input to layer {flow.layers[-1] + 1}"


def _scores(flow: Flow) -> list[str]:
    values = [float(value) for value in flow.scores.double().tolist()]
    most = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    lines = []
    for span in spans_of(flow.columns):
        pairs = zip(flow.columns[span.start : span.stop], values[span.start : span.stop], strict=True)
        tokens = " ".join(_token(label, value, most) for label, value in pairs)
        lines.append(f'<p style="line-height: 1.9">{html.escape(span.side)}: {tokens}</p>')
    lines.append("<p>Orange adds to the target, blue takes from it.</p>")
    rows = [
        (visible(label.token), label.side, label.position + 1, value)
        for label, value in zip(flow.columns, values, strict=True)
    ]
    body = "".join(
        f"<tr><td>{place}</td><td><bdi>{html.escape(token)}</bdi></td><td>{html.escape(side)}</td><td>{_number(value)}</td></tr>"
        for token, side, place, value in rows
    )
    lines.append(f"<table><tr><th>position</th><th>token</th><th>side</th><th>score</th></tr>{body}</table>")
    return lines


def _map(flow: Flow) -> list[str]:
    """The map from the input to the last layer, as a table of coloured cells."""
    values = flow.map.detach().cpu().double().numpy()
    if values.size > CELLS:
        return [f"<p>A map of {values.shape[0]} x {values.shape[1]} tokens: draw it with plot().</p>"]
    scale = scale_of([values], own_cells(flow))
    header = "".join(f"<th>{_text(label)}</th>" for label in flow.columns)
    body = "".join(
        f"<tr><th>{_text(label)}</th>{''.join(_cell(value, scale.share(value)) for value in row)}</tr>"
        for label, row in zip(flow.rows, values.tolist(), strict=True)
    )
    return [
        "<p>Rows are output tokens, columns input tokens.</p>",
        f'<div style="overflow-x: auto"><table><tr><th></th>{header}</tr>{body}</table></div>',
    ]


def _cell(value: float, share: float) -> str:
    return f'<td style="background: {_shade(ORANGE, share)}">{value:.2g}</td>'


def _token(label: Label, value: float, most: float) -> str:
    share = abs(value) / most if math.isfinite(value) else 0.0
    shade = _shade(ORANGE if value >= 0 else BLUE, share)
    return f'<bdi title="{_number(value)}" style="background: {shade}; padding: 0.1em 0.2em">{_text(label)}</bdi>'


def _shade(colour: Sequence[int], share: float) -> str:
    return f"rgba({', '.join(map(str, colour))}, {0.75 * share:.3f})"


def _number(value: float) -> str:
    return f"{value:+.4g}" if math.isfinite(value) else "not known"


def _text(label: Label) -> str:
    return html.escape(visible(label.token))
