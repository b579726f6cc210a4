"""A result as one self-contained page: the viewer, the header and the arrays, with no network and no other script."""

from __future__ import annotations

import base64
import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.engine.files import check_suffix, write_atomically
from normscope.view import bundle
from normscope.view.document import Result, as_json, packed, sides_of, title_of
from normscope.view.labels import own_cells, quantity, values_of, visible, worst_completeness

if TYPE_CHECKING:
    from normscope.flow.result import Flow

ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
STRONGEST = 10  # cells that are listed where scripts are off

HEAD = """<!DOCTYPE html>
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
SERVED = '<script src="/viewer.js" defer></script>\n</body>\n</html>\n'


def write(result: Result, path: str | os.PathLike[str], *, image: Any = None, flow: Flow | None = None) -> Path:
    """Write the page with every map of the result; `image` is the picture under a vision model's patches, `flow` that
    of the same input to a target."""
    check_suffix(path, ".html", ".htm")
    made = page(result, image=image, flow=flow)
    with write_atomically(path) as temporary:
        temporary.write_text(made, encoding="utf-8")
    return Path(path)


def page(result: Result, *, image: Any = None, flow: Flow | None = None) -> str:
    """The page's source."""
    described, data = packed(result, image=image, flow=flow)
    script = bundle.inline(bundle.read("viewer.js"))
    head = _head(
        title=title_of(result),
        policy=policy(bundle.digest(script), styles="'unsafe-inline'", connect="'none'"),
        without=without_scripts(result) + (without_flow(described["flow"]) if described["flow"] else ""),
        style=f"<style>{_style()}</style>\n" if bundle.has("viewer.css") else "",
    )
    parts = (as_json(described).translate(ESCAPES), base64.b64encode(data).decode("ascii"), script)
    return head + "".join(tag + part for tag, part in zip(EMBEDDED, (*parts, ""), strict=True))


def served_page() -> str:
    """The page of the server, which has its data from there."""
    head = _head(
        title="normscope",
        policy=served_policy(),
        without="The viewer is a script: allow scripts to use it.",
        style='<link rel="stylesheet" href="/viewer.css">\n' if bundle.has("viewer.css") else "",
    )
    return head + SERVED


def policy(scripts: str, styles: str, connect: str) -> str:
    """What a page may do: run these scripts, use these styles, and talk to nobody but `connect`."""
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def served_policy() -> str:
    return policy("'self'", styles="'self' 'unsafe-inline'", connect="'self'")


def without_scripts(result: Result) -> str:
    """What a reader without scripts sees: what was analysed and its strongest cells, as HTML."""
    lines = ["<p>The maps are drawn by a script inside this page; allow scripts to see them.</p>"]
    lines.append(f"<h1>{html.escape(title_of(result))}</h1>")
    for side, one in sides_of(result).items():
        scope, layer = one.scopes[-1], one.layers[-1]
        error = worst_completeness(one)[0]
        values = values_of(one, scope, layer).copy()
        values[own_cells(one)] = -1.0
        order = values.ravel().argsort(kind="stable")[::-1][:STRONGEST]
        cells = [divmod(int(place), values.shape[1]) for place in order]
        listed = "".join(
            f"<li><bdi>{_text(one.columns[j].token)}</bdi> ({one.columns[j].side} token {one.columns[j].position + 1}) "
            f"to <bdi>{_text(one.rows[i].token)}</bdi> (token {one.rows[i].position + 1}): {values[i, j]:.4g}</li>"
            for i, j in cells
            if values[i, j] >= 0
        )
        lines.append(f"<p>{html.escape(side)}, worst completeness error {error:.1e}. Tokens:")
        lines.append(" ".join(f"<bdi>{_text(label.token)}</bdi>" for label in one.rows) + "</p>")
        lines.append(f"<p>Strongest between different tokens, {scope}, layer {layer + 1}, {quantity(scope)}:</p>")
        lines.append(f"<ol>{listed}</ol>")
    return "\n".join(lines)


def without_flow(scores: dict[str, Any]) -> str:
    """The scores of a target for a reader without scripts, as HTML."""
    pairs = zip(scores["columns"], scores["scores"], strict=True)
    listed = "".join(f"<li><bdi>{html.escape(label['token'])}</bdi>: {_number(score)}</li>" for label, score in pairs)
    return (
        f"\n<p>Scores of the tokens for the <bdi>{html.escape(scores['target'])}</bdi>, which is "
        f"{_number(scores['value'])}; remainder {_number(scores['remainder'])}:</p>\n<ol>{listed}</ol>"
    )


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _head(**parts: str) -> str:
    # What is filled in last may hold anything: nothing in it is taken for a place to fill in.
    made = HEAD
    pieces = []
    for name in ("policy", "title", "style", "without"):
        before, made = made.split("{" + name + "}")
        pieces += [before, html.escape(parts[name]) if name in ("policy", "title") else parts[name]]
    return "".join([*pieces, made])


def _style() -> str:
    return bundle.read("viewer.css").replace("</", "<\\/")


def _text(token: str) -> str:
    return html.escape(visible(token))
