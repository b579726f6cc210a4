"""Results as self-contained HTML pages, and the built viewer that they contain.

The page of an analysis holds the viewer (the files in `static/`, built from `web/`), the header and the arrays; it
loads nothing from the network. The page of a flow has no scripts: tokens coloured by their scores and a table of the
scores, or the map from the input.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from normscope.errors import NormscopeError
from normscope.files import check_suffix, write_atomically
from normscope.flow.result import Flow
from normscope.labels import Label, visible_label_text
from normscope.view.document import Result, document_header_to_json, document_title, pack_document, sides_of
from normscope.view.scales import (
    BLUE,
    ORANGE,
    Scale,
    colour_scale,
    map_values,
    own_token_cells,
    scale_quantity_name,
    worst_completeness,
)
from normscope.view.tokens import flow_scores_list, side_spans, target_equation

ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
NOSCRIPT_CELLS = 10  # cells listed for readers without scripts
PAGE_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
{style}</head>
<body>
<div id="normscope"></div>
<noscript>{without}</noscript>
"""
EMBEDDED = (
    '<script type="application/json" id="normscope-header">',
    '</script>\n<script type="text/plain" id="normscope-data">',
    "</script>\n<script>",
    "</script>\n</body>\n</html>\n",
)
SERVER_SCRIPT = '<script src="/viewer.js" defer></script>\n</body>\n</html>\n'
MAX_TABLE_CELLS = 10_000  # larger maps are not shown as a table
SCORES_PAGE = """<!DOCTYPE html>
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


def write_page(result: Result, path: str | os.PathLike[str], *, image: Any = None, flow: Flow | None = None) -> Path:
    """Write the viewer's page with every map of the result.

    `image` is the picture of a vision model, `flow` a flow of the same input to a target.
    """
    check_suffix(path, ".html", ".htm")
    made = build_page(result, image=image, flow=flow)
    with write_atomically(path) as temporary:
        temporary.write_text(made, encoding="utf-8")
    return Path(path)


def build_page(result: Result, *, image: Any = None, flow: Flow | None = None) -> str:
    """The source of the viewer's page."""
    described, data = pack_document(result, image=image, flow=flow)
    script = escape_script(read_static_file("viewer.js"))
    head = _fill_page_head(
        title=document_title(result),
        policy=security_policy(script_hash(script), styles="'unsafe-inline'", connect="'none'"),
        without=noscript_summary(result) + (noscript_scores(described["flow"]) if described["flow"] else ""),
        style=f"<style>{_viewer_styles()}</style>\n" if has_static_file("viewer.css") else "",
    )
    parts = (document_header_to_json(described).translate(ESCAPES), base64.b64encode(data).decode("ascii"), script)
    return head + "".join(tag + part for tag, part in zip(EMBEDDED, (*parts, ""), strict=True))


def server_page() -> str:
    """The page of `normscope serve`, which loads its data from the server."""
    head = _fill_page_head(
        title="normscope",
        policy=server_policy(),
        without="The viewer needs scripts. Allow them for this page.",
        style='<link rel="stylesheet" href="/viewer.css">\n' if has_static_file("viewer.css") else "",
    )
    return head + SERVER_SCRIPT


def security_policy(scripts: str, styles: str, connect: str) -> str:
    """The content security policy of a page that runs `scripts`, uses `styles` and connects to `connect` only."""
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def server_policy() -> str:
    return security_policy("'self'", styles="'self' 'unsafe-inline'", connect="'self'")


def noscript_summary(result: Result) -> str:
    """The tokens and the strongest cells as HTML, for readers without scripts."""
    lines = ["<p>This page draws its maps with a script. Allow scripts to see them.</p>"]
    lines.append(f"<h1>{html.escape(document_title(result))}</h1>")
    for side, one in sides_of(result).items():
        scope, layer = one.scopes[-1], one.layers[-1]
        error = worst_completeness(one)[0]
        values = map_values(one, scope, layer).copy()
        values[own_token_cells(one)] = -1.0
        order = values.ravel().argsort(kind="stable")[::-1][:NOSCRIPT_CELLS]
        cells = [divmod(int(place), values.shape[1]) for place in order]
        listed = "".join(
            _cell_item_html(one.columns[j], one.rows[i], values[i, j]) for i, j in cells if values[i, j] >= 0
        )
        lines.append(f"<p>{html.escape(side)}, worst completeness error {error:.1e}. Tokens:")
        lines.append(" ".join(f"<bdi>{_escape_token(label.token)}</bdi>" for label in one.rows) + "</p>")
        lines.append(
            f"<p>Strongest cells between different tokens, {scope}, layer {layer + 1}, "
            f"{scale_quantity_name(scope)}:</p>"
        )
        lines.append(f"<ol>{listed}</ol>")
    return "\n".join(lines)


def _cell_item_html(column: Label, row: Label, value: float) -> str:
    return (
        f"<li><bdi>{_escape_token(column.token)}</bdi> ({column.side} token {column.position + 1}) "
        f"to <bdi>{_escape_token(row.token)}</bdi> (token {row.position + 1}): {value:.4g}</li>"
    )


def noscript_scores(scores: dict[str, Any]) -> str:
    """The scores of a target as HTML, for readers without scripts."""
    pairs = zip(scores["columns"], scores["scores"], strict=True)
    listed = "".join(
        f"<li><bdi>{html.escape(label['token'])}</bdi>: {_format_value(score)}</li>" for label, score in pairs
    )
    return (
        f"\n<p>Scores of the tokens for the <bdi>{html.escape(scores['target'])}</bdi>, which is "
        f"{_format_value(scores['value'])}; remainder {_format_value(scores['remainder'])}:</p>\n<ol>{listed}</ol>"
    )


def _fill_page_head(**parts: str) -> str:
    # Not str.format or replace: the inserted parts may contain braces.
    made = PAGE_HEAD
    pieces = []
    for name in ("policy", "title", "style", "without"):
        before, made = made.split("{" + name + "}")
        pieces += [before, html.escape(parts[name]) if name in ("policy", "title") else parts[name]]
    return "".join([*pieces, made])


def _viewer_styles() -> str:
    return read_static_file("viewer.css").replace("</", "<\\/")


@lru_cache(maxsize=8)
def read_static_file(name: str) -> str:
    """The text of a file of the built viewer."""
    try:
        return (files("normscope.view") / "static" / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NormscopeError(f"The viewer is not built: {name} is missing. Build it with `make web`.") from error


def has_static_file(name: str) -> bool:
    return (files("normscope.view") / "static" / name).is_file()


def escape_script(script: str) -> str:
    """The script without sequences that an HTML parser takes for its end or for a comment.

    The escapes mean the same characters inside strings, templates and regular expressions, which are the only places
    where a built script contains them.
    """
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def script_hash(script: str) -> str:
    """The source expression that allows this inline script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'"


def write_scores_page(title: str, body: str, path: str | os.PathLike[str]) -> Path:
    """Write a page without scripts."""
    check_suffix(path, ".html", ".htm")
    made = SCORES_PAGE.format(title=html.escape(visible_label_text(title)), body=body)
    with write_atomically(path) as temporary:
        temporary.write_text(made, encoding="utf-8", errors="backslashreplace")  # lone surrogates in tokens
    return Path(path)


def flow_html(flow: Flow) -> str:
    """The body of a flow's page, which a notebook shows too."""
    lines = [f"<p><strong>{html.escape(visible_label_text(_flow_title(flow)))}</strong></p>"]
    lines += [f"<p>Warning: {html.escape(text)}</p>" for text in flow.warnings]
    lines += _flow_scores_html(flow) if flow.to is not None else _flow_map_html(flow)
    return '<div class="normscope-flow">\n' + "\n".join(lines) + "\n</div>"


def _flow_title(flow: Flow) -> str:
    model = f"{flow.info.get('model', '')}, {flow.method}"
    return (
        f"{model}: {target_equation(flow)}" if flow.to is not None else f"{model}: input to layer {flow.layers[-1] + 1}"
    )


def _flow_scores_html(flow: Flow) -> list[str]:
    values = flow_scores_list(flow)
    most = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    lines = []
    for span in side_spans(flow.columns):
        pairs = zip(flow.columns[span.start : span.stop], values[span.start : span.stop], strict=True)
        tokens = " ".join(flow_scored_token_html(label, value, most) for label, value in pairs)
        lines.append(f'<p style="line-height: 1.9">{html.escape(span.side)}: {tokens}</p>')
    lines.append("<p>Orange tokens raise the target, blue tokens lower it.</p>")
    rows = [
        (visible_label_text(label.token), label.side, label.position + 1, value)
        for label, value in zip(flow.columns, values, strict=True)
    ]
    body = "".join(
        f"<tr><td>{place}</td><td><bdi>{html.escape(token)}</bdi></td><td>{html.escape(side)}</td><td>{_format_score(value)}</td></tr>"
        for token, side, place, value in rows
    )
    lines.append(f"<table><tr><th>position</th><th>token</th><th>side</th><th>score</th></tr>{body}</table>")
    return lines


def _flow_map_html(flow: Flow) -> list[str]:
    """The map from the input to the last layer as a table with coloured cells."""
    values = flow.map.detach().cpu().double().numpy()
    if values.size > MAX_TABLE_CELLS:
        rows, columns = values.shape
        return [f"<p>The map of {rows} x {columns} tokens is too large for a table. Draw it as a figure instead.</p>"]
    scale = colour_scale([values], own_token_cells(flow))
    header = "".join(f"<th>{_escape_token(label.token)}</th>" for label in flow.columns)
    body = "".join(_flow_map_row_html(label, row, scale) for label, row in zip(flow.rows, values.tolist(), strict=True))
    return [
        "<p>Rows are output tokens, columns input tokens.</p>",
        f'<div style="overflow-x: auto"><table><tr><th></th>{header}</tr>{body}</table></div>',
    ]


def _flow_map_row_html(label: Label, values: Sequence[float], scale: Scale) -> str:
    shades = [css_shade(ORANGE, scale.share(value)) for value in values]
    cells = (f'<td style="background: {shade}">{value:.2g}</td>' for shade, value in zip(shades, values, strict=True))
    return f"<tr><th>{_escape_token(label.token)}</th>{''.join(cells)}</tr>"


def flow_scored_token_html(label: Label, value: float, most: float, shown: float | None = None) -> str:
    """A token coloured by its score; `shown` is the score in its tooltip, if the colour is of a clipped one."""
    share = abs(value) / most if math.isfinite(value) else 0.0
    shade = css_shade(ORANGE if value >= 0 else BLUE, share)
    style = f"background: {shade}; padding: 0.1em 0.2em"
    title = _format_score(value if shown is None else shown)
    return f'<bdi title="{title}" style="{style}">{_escape_token(label.token)}</bdi>'


def css_shade(colour: Sequence[int], share: float) -> str:
    """A colour of the page, as strong as a share of the largest score."""
    return f"rgba({', '.join(map(str, colour))}, {0.75 * share:.3f})"


def _format_score(value: float) -> str:
    return f"{value:+.4g}" if math.isfinite(value) else "undefined"


def _format_value(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"


def _escape_token(token: str) -> str:
    return html.escape(visible_label_text(token))
